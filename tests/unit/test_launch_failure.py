"""An exception in a rank as a record: whose frames, how many lines, an echo or not; and which record is
shown."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hvd_core import errors
from hvd_core.errors import RankFailed, RankFailure, first_cause
from hvd_core.launch.failure import MAX_TRACEBACK_LINES, describe, exit_failure, without_our_frames
from hvd_core.launch.pickling import dumps

pytestmark = pytest.mark.timeout(60)


def _line_of(text: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def _caught(fn: Any) -> BaseException:
    try:
        fn()
    except BaseException as error:  # noqa: BLE001
        return error
    raise AssertionError("raised nothing")


def _boom() -> None:
    raise ValueError("boom-42")  # here


def test_frames_of_hvd_are_left_out() -> None:
    def calls_us() -> None:
        dumps(3)  # raises in hvd_core, is the user's line

    failure = describe(_caught(calls_us), 1)
    assert failure.where == f"{__file__}:{_line_of('dumps(3)  # raises')}"
    assert "hvd_core/" not in failure.traceback
    assert failure.exc_type == "InvalidArgument"


def test_where_is_the_users_line_below_a_library() -> None:
    failure = describe(_caught(lambda: __import__("json").loads("{")), 0)
    assert failure.where.startswith(f"{__file__}:")
    assert "json/decoder.py" in failure.traceback
    assert failure.exc_type == "json.decoder.JSONDecodeError"


def test_headline_and_text() -> None:
    failure = describe(_caught(_boom), 1)
    error = RankFailed(failure)
    first, *rest = str(error).splitlines()
    assert first == f"rank 1 raised ValueError: boom-42 ({__file__}:{_line_of('# here')})"
    assert rest[-1] == "ValueError: boom-42"
    assert 'raise ValueError("boom-42")  # here' in str(error)
    assert RankFailure.from_json(failure.to_json()) == failure


def test_few_lines_also_of_a_long_chain() -> None:
    def deep(n: int) -> None:
        try:
            if n:
                deep(n - 1)
            else:
                _boom()
        except Exception as error:
            raise RuntimeError(f"level {n}\n" * 5) from error

    failure = describe(_caught(lambda: deep(30)), 0)
    lines = failure.traceback.splitlines()
    assert len(lines) == MAX_TRACEBACK_LINES
    assert any("lines left out" in line for line in lines)
    assert len(str(RankFailed(failure)).splitlines()) <= 60


def test_a_broken_str_is_no_obstacle() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise KeyError

    def fails() -> None:
        raise Broken

    assert "str()" in describe(_caught(fails), 0).message


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups came with 3.11")
def test_exception_groups() -> None:
    def fails() -> None:
        raise ExceptionGroup("two", [_caught(_boom), _caught(lambda: dumps(3))])  # noqa: F821

    failure = describe(_caught(fails), 0)
    assert "boom-42" in failure.traceback
    assert "hvd_core/" not in failure.traceback


@pytest.mark.parametrize(
    ("cls", "echo", "retryable"),
    [
        (errors.PeerLost, True, True),
        (errors.Aborted, True, False),
        (errors.MismatchError, False, False),
        (ValueError, False, False),
    ],
)
def test_echoes(cls: type[Exception], echo: bool, retryable: bool) -> None:
    def plain() -> None:
        raise cls("x")

    def wrapped() -> None:
        try:
            plain()
        except Exception as error:
            raise RuntimeError("step failed") from error

    for fn in (plain, wrapped):
        failure = describe(_caught(fn), 0)
        assert (failure.echo, failure.retryable) == (echo, retryable)


def test_sys_exit() -> None:
    assert exit_failure(SystemExit(3), 1).headline() == "rank 1 exited with status 3"
    told = exit_failure(SystemExit("no data"), 0)
    assert told.exit_status == 1
    assert "no data" in told.traceback


def test_crash_text_without_our_frames() -> None:
    text = [
        "Fatal Python error: Segmentation fault",
        '  File "/home/u/train.py", line 3 in step',
        '  File "/x/site-packages/hvd_core/launch/child.py", line 86 in main',
        '  File "<frozen runpy>", line 88 in _run_code',
    ]
    assert without_our_frames(text) == text[:2]


def _failure(rank: int, kind: str, at: float, *, echo: bool = False) -> RankFailure:
    return RankFailure(rank, kind, at=at, echo=echo)


@pytest.mark.parametrize(
    ("failures", "rank"),
    [
        ([_failure(0, "exception", 1, echo=True), _failure(1, "exit", 2)], 1),
        ([_failure(0, "exception", 1, echo=True), _failure(1, "signal", 2)], 1),
        ([_failure(0, "ended", 1), _failure(1, "exception", 2)], 1),
        ([_failure(0, "lost", 1), _failure(1, "exception", 2)], 1),
        ([_failure(0, "exception", 2), _failure(1, "exception", 1)], 1),
        ([_failure(1, "exception", 1), _failure(0, "exception", 1)], 0),
        ([_failure(0, "exception", 1, echo=True), _failure(1, "ended", 0)], 1),
    ],
)
def test_first_cause(failures: list[RankFailure], rank: int) -> None:
    assert first_cause(failures).rank == rank
