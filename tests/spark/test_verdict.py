"""What the driver makes of failures, of waiting and of GPUs: decisions, without a cluster."""

from __future__ import annotations

import pickle
import threading
import time
from typing import Any

import pytest

pytest.importorskip("pyspark")

from hvd_core.errors import JobCancelled, PreflightError, RankFailed, RankFailure, StorageFull
from hvd_spark import gpus, session, waiting
from hvd_spark.guard import MISSING
from hvd_spark.parts import PartsReader, unpickled
from hvd_spark.rows import Failure
from hvd_spark.verdict import translated, typed

LOST = """Job aborted due to stage failure: Could not recover from a failed barrier ResultStage.
Most recent failure reason: Stage failed because barrier task ResultTask(4, 1) finished unsuccessfully.
ExecutorLostFailure (executor 1 exited caused by one of the running tasks) Reason: Container killed by YARN
    for exceeding memory limits
\tat org.apache.spark.scheduler.DAGScheduler.abortStage(DAGScheduler.scala:2844)"""


def failure(rank: int, **about: Any) -> Failure:
    return Failure(RankFailure(rank, **{"kind": "exception", **about}), about.pop("stage", "rank"))


def test_a_lost_executor_is_a_lost_rank_that_may_be_tried_again() -> None:
    echo = failure(0, kind="ended", echo=True)
    error = translated(RuntimeError(LOST), [echo], True)
    assert isinstance(error, RankFailed) and error.retryable
    lines = str(error).splitlines()
    assert lines[0] == "rank 1 is lost"
    assert "exceeding memory limits" in str(error) and "DAGScheduler.scala" not in str(error)


def test_what_a_rank_said_counts_more_than_what_spark_says() -> None:
    said = failure(0, exc_type="ValueError", message="mine")
    error = translated(RuntimeError(LOST), [failure(1, kind="ended", echo=True), said], True)
    assert str(error) == "rank 0 raised ValueError: mine" and not error.retryable


@pytest.mark.parametrize(
    "text",
    [
        "Job 3 cancelled part of cancelled job group mine",
        "Job aborted due to stage failure: Stage 4 cancelled because killed via the Web UI",
    ],
)
def test_a_cancelled_job(text: str) -> None:
    error = translated(RuntimeError(text), [], False)
    assert isinstance(error, JobCancelled) and text in str(error) and not error.retryable


def test_missing_modules_by_host() -> None:
    def missing(rank: int, host: str) -> Failure:
        what = RankFailure(
            rank, "exception", "ModuleNotFoundError", "No module named 'torch' (/usr/bin/python3)", host=host
        )
        return Failure(what, MISSING)

    error, _ = typed([missing(0, "b"), missing(1, "a")], False)
    assert isinstance(error, PreflightError)
    assert "No module named 'torch' (/usr/bin/python3) on a, b:" in str(error)
    text = "Lost task 0.0 in stage 1.0 (TID 7) (host-a executor 1):\n"
    text += "ModuleNotFoundError: No module named 'pyarrow'"
    error = translated(RuntimeError(text), [], False)
    assert isinstance(error, PreflightError) and "No module named 'pyarrow' on host-a:" in str(error)


def test_a_full_disk_names_rank_and_host() -> None:
    what = RankFailure(
        1, "exception", "StorageFull", "5 bytes do not fit into /x", host="host-a", retryable=False
    )
    error, _ = typed([Failure(what, "rows")], True)
    assert isinstance(error, StorageFull)
    assert str(error) == "rank 1 on host-a: 5 bytes do not fit into /x"


def test_errors_travel() -> None:
    error = RankFailed(RankFailure(1, "lost"), 3)
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and again.attempts == 3


@pytest.mark.parametrize("nbytes", [1, 7, 1000, 100_000])
def test_values_in_parts(nbytes: int) -> None:
    value = {"a": [b"x" * 3000, bytearray(b"y" * 5000)], "b": 1.5, "c": tuple(range(100))}
    data = pickle.dumps(value, protocol=5)
    parts = [data[at : at + nbytes] for at in range(0, len(data), nbytes)]
    assert unpickled(parts) == value
    reader = PartsReader(parts)
    assert reader.read(5) == data[:5] and reader.read(len(data)) == data[5:] and reader.read(1) == b""


@pytest.mark.parametrize(
    ("wanted", "per_task", "whole", "configured", "own"),
    [
        (2, None, 2, 4, True),
        (4, None, 2, 4, True),  # too few: NotEnoughSlots says so
        (2, 0.5, 2, 4, True),  # there is one for each
        (4, 0.5, 2, 4, False),  # they have to share, as they may
        (5, 0.5, 2, 4, True),
        (None, 0.5, 2, 4, True),
        (2, 1.0, 2, 2, False),  # Spark does it already
        (2, 2.0, 1, 1, False),
        (2, None, None, 4, False),  # no profiles here
    ],
)
def test_a_gpu_of_its_own(
    wanted: int | None, per_task: float | None, whole: int | None, configured: int, own: bool
) -> None:
    assert gpus.choose(wanted, per_task, whole, configured) is own


def test_a_connect_server_that_tells_of_changes_only(monkeypatch: Any) -> None:
    """It says once that two tasks run, and nothing more for as long as they do."""
    monkeypatch.setattr(session, "context_of", lambda spark: None)

    class Client:
        def registerProgressHandler(self, handler: Any) -> None:
            self.tell = handler

        def removeProgressHandler(self, handler: Any) -> None:
            pass

    def passed(seconds: float) -> None:
        monkeypatch.setattr(time, "monotonic", lambda: real() + seconds)

    real, client = time.monotonic, Client()
    with waiting.Watch(client, "tag", threading.current_thread()) as watch:
        client.tell([], 0, "operation", False)
        passed(100)
        assert watch.waited_s() > 99, "no task ran so far"
        client.tell([], 2, "operation", False)
        passed(5000)
        assert watch.waited_s() == 0
        client.tell([], 0, "operation", False)
        passed(5100)
        assert watch.waited_s() > 99
