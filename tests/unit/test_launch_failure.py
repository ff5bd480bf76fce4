"""An exception in a rank as a record: whose frames, how many lines, an echo or not; and which record is
shown."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from hvd_core import errors
from hvd_core.errors import RankFailed, RankFailure, first_cause
from hvd_core.launch.failure import (
    MAX_TRACEBACK_LINES,
    describe,
    exit_failure,
    with_the_others,
    without_our_frames,
)
from hvd_core.launch.pickling import dumps
from hvd_core.launch.stacks import shown

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


def test_stacks_begin_with_the_main_thread_and_leave_out_ours() -> None:
    text = """
Thread 0x00007f01 (most recent call first):
  File "/home/u/load.py", line 9 in fetch
  File "{stdlib}/threading.py", line 982 in run

Thread 0x00007f02 (most recent call first):
  File "{stdlib}/threading.py", line 324 in wait
  File "/x/site-packages/hvd_core/train/batches.py", line 5 in next

Current thread 0x00007f03 (most recent call first):
  File "/x/site-packages/torch/nn/modules/module.py", line 7 in forward
  File "/home/u/train.py", line 3 in step
  File "/x/site-packages/hvd_core/launch/child.py", line 86 in main
  File "{stdlib}/runpy.py", line 196 in _run_module_as_main
"""
    assert shown(text.format(stdlib=sysconfig.get_path("stdlib"))) == [
        '  File "/x/site-packages/torch/nn/modules/module.py", line 7 in forward',
        '  File "/home/u/train.py", line 3 in step',
        "  another thread:",
        '  File "/home/u/load.py", line 9 in fetch',
    ]
    only_ours = (
        'Thread 0x1 (most recent call first):\n  File "/x/hvd_core/launch/child.py", line 8 in _join\n'
    )
    assert shown(only_ours) == only_ours.splitlines()[1:]
    assert shown("") == []


def test_who_has_waited_tells_where_the_others_were() -> None:
    waited = RankFailure(
        0, "exception", exc_type="CollectiveTimeout", message="'x' not submitted by rank 5", traceback="tb"
    )
    ended = [RankFailure(rank, "ended", traceback=f"  at {rank}") for rank in (1, 2, 3, 4, 5)]
    too = RankFailure(6, "exception", exc_type="CollectiveTimeout", where="/u/train.py:4")
    told = with_the_others(waited, [waited, *ended, too]).traceback.splitlines()
    assert told[0] == "tb"
    assert told[1:7:2] == [f"rank {r}, when it was ended (most recent call first):" for r in (5, 1, 2)]
    assert told[2:7:2] == ["  at 5", "  at 1", "  at 2"]
    assert told[7:] == ["(3 more ranks are not shown)"]
    assert with_the_others(waited, [waited, too]).traceback == "tb\nrank 6 waited too, at /u/train.py:4"
    of_itself = RankFailure(0, "exception", exc_type="ValueError", traceback="tb")
    assert with_the_others(of_itself, ended) == of_itself


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
