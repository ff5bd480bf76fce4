"""Functions and their arguments to bytes, and which variable is in the way when that fails."""

from __future__ import annotations

import functools
import inspect
import sys
import sysconfig
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import InvalidArgument, NotPicklable

#: Captures above this are named in a warning.
LARGE_NBYTES = 50 << 20
_MAX_DEPTH = 8
#: What a rank unpickles before its job, and before it imports anything of the job's; by who wants it.
BEFORE_JOBS: dict[str, Any] = {}

_Job = tuple[Any, tuple[Any, ...], dict[str, Any]]


def dumps(
    fn: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *, names: Sequence[str] = ()
) -> bytes:
    """The payload of a rank: `(fn, args, kwargs)`. The receiver needs `pickle.loads` only.

    Functions and classes of `__main__`, and local ones, travel by value with what they use; others by name.
    Raises NotPicklable with the path of the first variable that does not pickle ("global 'lock' used by
    train"); warns (UserWarning) with the names and sizes of variables above 50 MB. names: what to call the
    arguments, where the user did not write the call. InvalidArgument for what is no function or no arguments.
    """
    if not callable(fn):
        raise InvalidArgument(f"expected a function to run on the ranks, not {type(fn).__name__}")
    if isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
        raise InvalidArgument(f"args must be a tuple or a list, not {type(args).__name__}: args=(x,) for one")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise InvalidArgument(f"kwargs must be a dict, not {type(kwargs).__name__}")
    from . import pickler

    job = (fn, tuple(args), dict(kwargs or {}))
    try:
        payload = pickler.dumps(_Preceded(job) if BEFORE_JOBS else job)
    except Exception as error:
        path, value, why = _first_unpicklable(fn, job, names, error)
        what = "" if names else f"{function_name(fn)} cannot be sent to the ranks: "
        advice = "Leave it out, or make it on the ranks." if names else "Create it inside the function."
        raise NotPicklable(
            f"{what}{path} is a {type_name(type(value))}, which does not pickle "
            f"({type(why).__name__}: {_one_line(why)}). {advice}"
        ) from error
    if len(payload) > LARGE_NBYTES:
        _warn_of_large(fn, job, names, len(payload))
    return payload


class _Preceded:
    """Unpickles as `job`, after what has to come before it."""

    def __init__(self, job: _Job):
        self._job = job

    def __reduce__(self) -> tuple[Any, ...]:
        return _last, (*BEFORE_JOBS.values(), self._job)


def _last(*values: Any) -> Any:
    return values[-1]


def dumps_result(fn: Any, result: Any) -> bytes:
    """What `fn` returned, on its way back. Raises NotPicklable with the path of the part that does not
    pickle."""
    from . import pickler

    try:
        return pickler.dumps(result)
    except Exception as error:
        path, value, why = _descend(_Path("its result"), result, error, 0, set())
        raise NotPicklable(
            f"{function_name(fn)} returned, but {path} is a {type_name(type(value))}, which does not pickle "
            f"({type(why).__name__}: {_one_line(why)})"
        ) from error


def function_name(fn: Any) -> str:
    return str(getattr(fn, "__qualname__", None) or type(fn).__qualname__).replace("<locals>.", "")


def type_name(cls: type) -> str:
    return (
        cls.__qualname__
        if cls.__module__ in ("builtins", "__main__")
        else f"{cls.__module__}.{cls.__qualname__}"
    )


def _one_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:300]


class _Path(NamedTuple):
    """How a user would find a variable: "global 'state'" + "['lock']" + " used by train"."""

    variable: str
    place: str = ""

    def part(self, step: str) -> _Path:
        return _Path(self.variable + step, self.place)

    def __str__(self) -> str:
        return self.variable + self.place


_Found = tuple[_Path, Any, BaseException]


def _roots(fn: Any, job: _Job, names: Sequence[str]) -> Iterator[tuple[_Path, Any]]:
    _, args, kwargs = job
    for i, value in enumerate(args):
        yield _Path(names[i] if i < len(names) else f"args[{i}]"), value
    for key, value in kwargs.items():
        yield _Path(f"kwargs[{key!r}]"), value
    yield _Path(f"function {function_name(fn)!r}"), fn


def _first_unpicklable(fn: Any, job: _Job, names: Sequence[str], error: Exception) -> _Found:
    for path, value in _roots(fn, job, names):
        why = _why_not(value)
        if why is not None:
            return _descend(path, value, why, 0, set())
    return _Path("the function with its arguments"), job, error


def _descend(path: _Path, value: Any, why: BaseException, depth: int, seen: set[int]) -> _Found:
    """Follows the first part that does not pickle, down to one whose parts all do."""
    seen.add(id(value))
    if depth < _MAX_DEPTH:
        for part_path, part in _parts(path, value):
            if id(part) in seen:
                continue
            part_why = _why_not(part)
            if part_why is not None:
                return _descend(part_path, part, part_why, depth + 1, seen)
    return path, value, why


def _parts(path: _Path, value: Any) -> Iterator[tuple[_Path, Any]]:
    """The variables that are pickled because `value` is, each with a path a user recognizes."""
    if isinstance(value, types.MethodType):
        yield _Path("'self'", f" of method {function_name(value)}"), value.__self__
        yield path, value.__func__
    elif isinstance(value, types.FunctionType):
        name = function_name(value)
        for variable, part in _globals_used(value):
            yield _Path(f"global {variable!r}", f" used by {name}"), part
        for variable, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=False):
            with_content = _cell_content(cell)
            if with_content:
                yield _Path(f"closure variable {variable!r}", f" of {name}"), with_content[0]
        for parameter in inspect.signature(value).parameters.values():
            if parameter.default is not parameter.empty:
                yield _Path(f"default of parameter {parameter.name!r}", f" of {name}"), parameter.default
    elif isinstance(value, functools.partial):
        yield _Path(f"function {function_name(value.func)!r}"), value.func
        for i, part in enumerate(value.args):
            yield _Path(f"argument {i}", f" bound to {function_name(value.func)}"), part
        for key, part in value.keywords.items():
            yield _Path(f"argument {key!r}", f" bound to {function_name(value.func)}"), part
    elif isinstance(value, dict):
        for key, part in value.items():
            yield path.part(f"[{key!r}]"), part
    elif isinstance(value, (list, tuple)):
        for i, part in enumerate(value):
            yield path.part(f"[{i}]"), part
    elif isinstance(value, (set, frozenset)):
        for part in value:
            yield path.part(" (an element of this set)"), part
    elif isinstance(value, type):
        for key, part in vars(value).items():
            part = part.__func__ if isinstance(part, (staticmethod, classmethod)) else part
            if not key.startswith("__") or isinstance(part, types.FunctionType):
                yield _Path(f"{type_name(value)}.{key}"), part
    elif not _of_a_library(type(value)):
        for key, part in getattr(value, "__dict__", {}).items():
            yield path.part(f".{key}"), part
        if type(value).__module__ == "__main__" or "<locals>" in type(value).__qualname__:
            yield _Path(f"class {type_name(type(value))}"), type(value)


def _of_a_library(cls: type) -> bool:
    """Whether the inside of such an object says nothing to its user."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None) or ""
    return file.startswith((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))


def _cell_content(cell: types.CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # not assigned yet
        return ()


def _globals_used(fn: types.FunctionType) -> Iterator[tuple[str, Any]]:
    names: dict[str, None] = {}
    codes = [fn.__code__]
    while codes:
        code = codes.pop()
        names.update(dict.fromkeys(code.co_names))
        codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
    for name in names:
        if name in fn.__globals__:
            yield name, fn.__globals__[name]


def _why_not(value: Any) -> BaseException | None:
    from .pickler import pickled_nbytes

    try:
        pickled_nbytes(value)
    except Exception as error:  # noqa: BLE001  any exception says that it does not pickle
        return error
    return None


def _warn_of_large(fn: Any, job: _Job, names: Sequence[str], nbytes: int) -> None:
    from .pickler import pickled_nbytes

    found: list[tuple[int, str]] = []

    def look(path: _Path, value: Any, depth: int) -> None:
        if (
            isinstance(value, types.FunctionType | types.MethodType | functools.partial)
            and depth < _MAX_DEPTH
        ):
            for part_path, part in _parts(path, value):
                look(part_path, part, depth + 1)
        elif not isinstance(value, type | types.ModuleType):
            size = pickled_nbytes(value)
            if size > LARGE_NBYTES // 10:
                found.append((size, str(path)))

    for path, value in _roots(fn, job, names):
        look(path, value, 0)
    names = ", ".join(f"{path} ({_megabytes(size)})" for size, path in sorted(found, reverse=True)[:5])
    warnings.warn(
        f"{function_name(fn)} and its arguments are {_megabytes(nbytes)} when pickled, and every rank gets a "
        f"copy: {names or 'many variables'}. Load large data inside the function.",
        stacklevel=4,
    )


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.0f} MB"
