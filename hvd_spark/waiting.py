"""For how long a job has had no task that runs: how the driver knows that other jobs hold the slots."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any, ClassVar

from . import session

_POLL_S = 0.5
#: A job whose tasks come and go is not waiting.
_GAP_S = 2.0


class Watch:
    """Watches the job with tag `tag` while it is open. Where the platform says nothing it never waits.

    Classic mode asks the status tracker, in a thread of its own: a Ctrl-C must not meet the caller's
    connection to Spark in mid-answer. Spark Connect tells of tasks on the thread that runs the job, `runner`.
    """

    _open: ClassVar[set[Watch]] = set()
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, spark: Any, tag: str, runner: threading.Thread):
        self._spark, self._tag, self._runner = spark, tag, runner
        self._ran_at: float | None = None  # when a task of this job was last seen, or first looked for
        self._told_to_run = False
        self._turn_at = 0.0  # when another job of this process last had its turn
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Watch:
        with self._lock:
            self._open.add(self)
        context = session.context_of(self._spark)
        if context is not None:
            self._thread = session.thread(self._spark, lambda: self._poll(context))
            self._thread.start()
        elif hasattr(self._spark, "registerProgressHandler"):
            self._spark.registerProgressHandler(self._told)
        return self

    def __exit__(self, *_: Any) -> None:
        self._done.set()
        with self._lock:
            self._open.discard(self)
        if self._thread is not None:
            self._thread.join()
        elif hasattr(self._spark, "removeProgressHandler"):
            with contextlib.suppress(ValueError):
                self._spark.removeProgressHandler(self._told)

    def waited_s(self) -> float:
        """0 while a task runs, or a task of another job of this process: its turn comes after that one."""
        with self._lock:
            others = [watch for watch in self._open if watch is not self]
        if any(watch._runs() for watch in others):
            self._turn_at = time.monotonic()
        if self._ran_at is None or self._told_to_run or self._done.is_set():
            return 0.0
        return time.monotonic() - max(self._ran_at, self._turn_at)

    def stop(self) -> None:
        """The job is under way: it needs no more watching."""
        self._done.set()

    def _runs(self) -> bool:
        """Of its own: two jobs that wait for a third do not take each other for running."""
        ran_at = self._ran_at
        if self._done.is_set() or self._told_to_run:
            return True
        return ran_at is not None and time.monotonic() - ran_at < _GAP_S

    def _poll(self, context: Any) -> None:
        tracker = context._jsc.sc().statusTracker()
        try:
            while not self._done.wait(_POLL_S):
                jobs = tracker.getJobIdsForTag(self._tag)
                stages = {stage for job in jobs for stage in _stages(tracker, job)}
                running = [_active(tracker.getStageInfo(stage)) for stage in stages]
                if self._ran_at is None or any(running):
                    self._ran_at = time.monotonic()
        except Exception:  # noqa: BLE001  Sparks before 4.0 do not know jobs by tag; a session may stop
            self._ran_at = None

    def _told(self, stages: Any, inflight_tasks: int, operation_id: Any, done: bool) -> None:
        """Called for every operation of the session, on its own thread."""
        if threading.current_thread() is self._runner:
            # What was said holds until something else is said: some servers tell of changes only.
            self._told_to_run = bool(inflight_tasks)
            if inflight_tasks or self._ran_at is None:
                self._ran_at = time.monotonic()


def _stages(tracker: Any, job: int) -> list[int]:
    info = tracker.getJobInfo(job)
    return list(info.get().stageIds()) if info.isDefined() else []


def _active(stage: Any) -> int:
    return int(stage.get().numActiveTasks()) if stage.isDefined() else 0
