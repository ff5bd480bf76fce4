"""Which variable does not pickle, and which is too large; and that file names survive."""

from __future__ import annotations

import functools
import pickle
import subprocess
import sys
import textwrap
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hvd_core.errors import InvalidArgument, NotPicklable
from hvd_core.launch.pickling import dumps, dumps_result

pytestmark = pytest.mark.timeout(60)


def _in_main(code: str, tmp_path: Any) -> str:
    """Runs a script, where functions are those of __main__, and returns what it prints."""
    script = tmp_path / "job.py"
    script.write_text("from hvd_core.launch.pickling import dumps\n" + textwrap.dedent(code))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("setup", "job", "path"),
    [
        ("lock = threading.Lock()", "lambda: lock", "global 'lock' used by <lambda>"),
        ("def helper(): return log.name", "lambda: helper()", "global 'log' used by helper"),
        ("state = {'files': [1, log]}", "lambda: state", "global 'state'['files'][1] used by <lambda>"),
        (
            "class Writer:\n    def write(self): return log",
            "lambda: Writer()",
            "global 'log' used by Writer.write",
        ),
        (
            "def outer():\n    f = log\n    def inner(): return f\n    return inner",
            "outer()",
            "closure variable 'f' of outer.inner",
        ),
        ("def train(file=log): pass", "train", "default of parameter 'file' of train"),
        ("def train(): return [log for _ in range(2)]", "train", "global 'log' used by train"),
    ],
)
def test_names_the_variable(setup: str, job: str, path: str, tmp_path: Any) -> None:
    said = _in_main(
        f"import threading\nlog = open(__file__, 'a')\n{setup}\n"
        f"try: dumps({job})\nexcept TypeError as error: print(error)",
        tmp_path,
    )
    assert path in said
    assert "which does not pickle" in said


class _Trainer:
    def __init__(self) -> None:
        self.lock = threading.Lock()

    def train(self) -> None: ...


@pytest.mark.parametrize(
    ("args", "kwargs", "path"),
    [
        ((1, threading.Lock()), {}, "args[1] is a _thread.lock"),
        (({"a": [0, threading.Lock()]},), {}, "args[0]['a'][1] is a _thread.lock"),
        ((), {"model": SimpleNamespace(inner=threading.Lock())}, "kwargs['model'].inner is a _thread.lock"),
        ((), {"it": (i for i in range(3))}, "kwargs['it'] is a generator"),
    ],
)
def test_names_the_argument(args: tuple[Any, ...], kwargs: dict[str, Any], path: str) -> None:
    with pytest.raises(NotPicklable) as raised:
        dumps(len, args, kwargs)
    assert path in str(raised.value)
    assert raised.value.__cause__ is not None


def test_names_what_the_user_calls_it() -> None:
    with pytest.raises(NotPicklable, match=r"^Estimator.model is a _thread.lock, .* Leave it out"):
        dumps(len, [SimpleNamespace(model=threading.Lock())], names=["Estimator"])


@pytest.mark.parametrize(("args", "kwargs"), [("ab", {}), (5, {}), ((), [1])])
def test_arguments_that_are_none_are_refused(args: Any, kwargs: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"args must be|kwargs must be"):
        dumps(len, args, kwargs)


@pytest.mark.parametrize(
    ("fn", "path"),
    [
        (_Trainer().train, "'self'.lock of method _Trainer.train"),
        (functools.partial(len, threading.Lock()), "argument 0 bound to len"),
        (functools.partial(sorted, key=threading.Lock()), "argument 'key' bound to sorted"),
    ],
)
def test_names_what_is_bound(fn: Any, path: str) -> None:
    with pytest.raises(NotPicklable) as raised:
        dumps(fn)
    assert path in str(raised.value)


def test_a_cycle_ends() -> None:
    loop: list[Any] = [threading.Lock()]
    loop.append(loop)
    with pytest.raises(NotPicklable, match=r"args\[0\]\[0\]"):
        dumps(len, (loop,))


def test_names_the_part_of_a_result() -> None:
    with pytest.raises(NotPicklable, match=r"len returned, but its result\['a'\]\[1\] is a _thread.lock"):
        dumps_result(len, {"a": [1, threading.Lock()]})


def test_not_a_function() -> None:
    with pytest.raises(InvalidArgument, match="not int"):
        dumps(3)


def test_what_must_pickle() -> None:
    offset = 5

    class Local:
        def __init__(self, x: int):
            self.x = x

    def job(table: dict[int, str], *, loss: Any) -> Any:
        return Local(loss(table[1]) + offset).x

    fn, args, kwargs = pickle.loads(dumps(job, ({1: "ab"},), {"loss": lambda text: len(text)}))
    assert fn(*args, **kwargs) == 7
    assert fn.__code__.co_filename == __file__


def test_large_captures_are_named() -> None:
    table = np.zeros(60_000_000, np.uint8)

    def job(small: Any, big: Any) -> int:
        return len(table)

    with pytest.warns(UserWarning, match="when pickled") as caught:
        dumps(job, (b"", bytes(70_000_000)))
    text = str(caught[0].message)
    assert "args[1] (70 MB)" in text
    assert "closure variable 'table'" in text
    assert "(60 MB)" in text
    assert "args[0]" not in text
