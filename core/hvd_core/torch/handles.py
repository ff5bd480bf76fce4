"""The int handles that `*_async` functions return, and what hides behind them.

A table, because Horovod's handles are ints. It keeps the tensors of a collective alive until `synchronize`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import InvalidArgument

if TYPE_CHECKING:
    from ..group import Handle


#: The collectives behind a handle, and what makes the caller's result from theirs.
_Pending = tuple[Sequence["Handle"], Callable[[list[Any]], Any]]

_numbers = itertools.count()
_pending: dict[int, _Pending] = {}


def register(handles: Sequence[Handle], finish: Callable[[list[Any]], Any]) -> int:
    """A new handle for collectives that were submitted."""
    number = next(_numbers)
    _pending[number] = handles, finish
    return number


def _find(handle: int) -> _Pending:
    try:
        return _pending[handle]
    except (KeyError, TypeError):
        raise InvalidArgument(
            f"handle {handle!r} was never given out, or has been synchronized already"
        ) from None


def synchronize(handle: int) -> Any:
    """Waits for an asynchronous collective and returns its result; the handle is used up.

    Raises `MismatchError` when ranks submitted different things under one name, another
    `HorovodInternalError` when a rank is lost, `InvalidArgument` (a `ValueError`) for an unknown handle.
    Ctrl-C interrupts the wait and leaves the handle valid.
    """
    handles, finish = _find(handle)
    results = []
    failure: Exception | None = None
    for native in handles:
        try:
            results.append(native.wait())
        except Exception as error:  # noqa: BLE001 (the first is raised, after all have ended)
            failure = failure or error
    del _pending[handle]
    if failure is not None:
        raise failure
    return finish(results)


def poll(handle: int) -> bool:
    """Whether `synchronize(handle)` would return at once. Raises `InvalidArgument` for an unknown handle."""
    return all(native.done() for native in _find(handle)[0])
