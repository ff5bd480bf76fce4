"""One rank, seen from its supervisor. Linux only.

Nothing here starts a thread or blocks without a deadline. A `RankProcess` belongs to one thread at a time;
ranks of one `Template` may belong to different threads.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from multiprocessing.connection import wait
from typing import Any

from ..errors import LaunchFailed, LaunchTimeout, RankFailed, RankFailure
from . import wire
from .events import Assignment, Event, Failed, Output, Report, Result
from .failure import without_our_frames
from .lines import LineSplitter
from .stacks import Question

#: A rank that has said how it ended (or closed its channel) must be gone after this long, or it is killed.
EXIT_GRACE_S = 10.0
FAILED_EXIT_GRACE_S = 2.0
#: Between SIGTERM and SIGKILL when a rank is ended from outside.
KILL_GRACE_S = 0.1
#: What a killed process may take to be gone; longer means that it hangs in the kernel.
_GONE_S = 5.0
#: What it may take a rank to write down where it is; most do in a millisecond.
STACKS_WAIT_S = 0.5
#: The last lines on stderr of a rank that died without a word are part of its failure.
_STDERR_LINES = 20
#: Read from a stream in one `poll()`; more than a pipe or socket holds, so one read empties a dead rank's.
_READ_NBYTES = 1 << 20
#: Sent from outside to a process that did nothing wrong; another attempt can help.
_RETRYABLE_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


class RankProcess:
    """One rank. Wait for it with `multiprocessing.connection.wait([rank, ...], timeout)`, then `poll()` it.
    What the other methods heard while they waited is kept for `poll()`: call it before the first wait.

    Call `poll()` at least about once a second also when nothing is ready: it enforces the deadlines (a rank
    that has reported its end and does not exit is killed). `rank` is -1 until `assign`.
    """

    def __init__(
        self,
        control: socket.socket,
        stdout: int,
        stderr: int,
        status: int,
        stacks: int,
        why_lost: Callable[[], str],
    ):
        self.rank = -1
        self._control = wire.Channel(control)
        control_fd = control.fileno()
        self._open: dict[int, str] = {
            control_fd: "control",
            stdout: "stdout",
            stderr: "stderr",
            status: "status",
            stacks: "stacks",
        }
        self._epoll = select.epoll()
        for fd in self._open:
            os.set_blocking(fd, fd == control_fd)
            if fd != stacks:
                self._epoll.register(fd, select.EPOLLIN)
        self._frames = wire.FrameReader()
        self._splitters = {"stdout": LineSplitter(), "stderr": LineSplitter()}
        self._status_text = b""
        self._stderr_tail: collections.deque[str] = collections.deque(maxlen=_STDERR_LINES)
        self._why_lost = why_lost
        self._pid: int | None = None
        self._endpoint: str | None = None
        self._ending: Result | Failed | None = None  # what the rank said about its end
        self._exception = b""
        self._kill_at: float | None = None
        self._overdue = False
        self._ended_by_us = False
        self._question: Question | None = None
        self._exit: dict[str, Any] | None = None  # what the template said about its end
        self._finished = False
        self._waiting: list[Event] = []

    def fileno(self) -> int:
        """Readable when `poll()` has something to do."""
        return self._epoll.fileno()

    @property
    def pid(self) -> int:
        """Process id, and id of the process group. Waits until the template has forked (it may still
        import)."""
        self._wait_until(lambda: self._pid is not None, 60.0, "the rank to be forked")
        assert self._pid is not None
        return self._pid

    @property
    def finished(self) -> bool:
        """The process is gone and `poll()` has returned its last event."""
        return self._finished and not self._waiting

    def endpoint_or_none(self) -> str | None:
        """Where the rank listens, once `poll()` has heard it; never blocks."""
        return self._endpoint

    def endpoint(self, timeout_s: float) -> str:
        """Waits until the rank has unpickled its function and bound its Listener, and says where.

        Raises RankFailed when it ended before, LaunchTimeout.
        """
        self._wait_until(
            lambda: self._endpoint is not None, timeout_s, "the rank to unpickle its function and listen"
        )
        assert self._endpoint is not None
        return self._endpoint

    def assign(self, world: Assignment) -> None:
        """Tells the rank its place; it sets `hvd_core.world` and runs its function. A dead rank is no error
        here."""
        self.rank = world.rank
        with contextlib.suppress(OSError):
            self._control.send(wire.ASSIGN, world.to_json().encode())

    def poll(self) -> list[Event]:
        """What happened since the last call; never blocks. Exactly one `Result` or `Failed` comes, last, when
        the process is gone and its output was read."""
        events, self._waiting = self._waiting + self._read(), []
        return events

    def kill(self, grace_s: float = KILL_GRACE_S) -> None:
        """Ends the rank and its process group: SIGTERM, after `grace_s` SIGKILL. Idempotent. `poll()` then
        gives what was left, and `Failed(kind="ended")` unless it had ended by itself."""
        end_ranks([self], grace_s)

    def close(self) -> None:
        """Releases the descriptors. Does not end the rank: `kill()` or `Template.close()` do."""
        for name in list(self._open.values()):
            self._shut(name)
        if not self._epoll.closed:
            self._epoll.close()

    # -- what follows is internal --------------------------------------------------------------------------

    def _signal(self, number: int) -> None:
        """To the whole process group. Only while the template has not reaped the rank, so the id is still
        its."""
        if self._pid is not None and self._exit is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._pid, number)

    def _ask(self) -> Question | None:
        """Where it is, if it still runs."""
        self._waiting += self._read()
        stacks = self._fd("stacks")
        if self._pid is None or self._exit is not None or self._ending is not None or stacks is None:
            return None
        self._ended_by_us = True
        self._question = Question(self._pid, stacks)
        return self._question

    def _wait_until(self, done: Callable[[], bool], timeout_s: float, what: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not done():
            self._waiting += self._read()
            if done():
                return
            ending = self._waiting[-1] if self._waiting else None
            if isinstance(ending, Failed):
                lost = ending.failure.kind == "lost"
                raise LaunchFailed(ending.failure.message) if lost else RankFailed(ending.failure)
            if self._finished or self._epoll.closed:
                raise LaunchFailed(f"waited for {what}, but it has ended")
            left = deadline - time.monotonic()
            if left <= 0:
                raise LaunchTimeout(f"waited {timeout_s:g} s for {what}")
            wait([self.fileno()], min(left, 1.0))

    def _read(self) -> list[Event]:
        events: list[Event] = []
        if self._finished or self._epoll.closed:
            return events
        # The status first: what the rank wrote before it died is then complete in what is read after it.
        self._read_status()
        gone = self._exit is not None
        for name in ("control", "stdout", "stderr"):
            events += self._read_stream(name)
        if gone:
            events += self._finish()
        elif self._kill_at is not None and time.monotonic() >= self._kill_at and not self._overdue:
            self._overdue = True
            self._signal(signal.SIGKILL)
        return events

    def _read_status(self) -> None:
        fd = self._fd("status")
        if fd is None:
            return
        data, eof = wire.drain(partial(os.read, fd), _READ_NBYTES)
        *lines, self._status_text = (self._status_text + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "pid" in message:
                self._pid = message["pid"]
                if self._ended_by_us:
                    self._signal(signal.SIGKILL)
            else:
                self._exit = message
        if eof:
            self._shut("status")
            if self._exit is None:
                self._exit = {"lost": self._why_lost()}

    def _read_stream(self, name: str) -> list[Event]:
        fd = self._fd(name)
        if fd is None:
            return []
        if name == "control":
            data, eof = self._control.receive_available(_READ_NBYTES)
            events = [e for frame in self._frames.feed(data) if (e := self._take(*frame)) is not None]
        else:
            data, eof = wire.drain(partial(os.read, fd), _READ_NBYTES)
            events = self._lines(name, self._splitters[name].feed(data, time.monotonic()))
        if eof:
            self._shut(name)
            if name == "control" and self._kill_at is None:
                self._kill_at = time.monotonic() + FAILED_EXIT_GRACE_S
        return events

    def _take(self, kind: bytes, data: bytes) -> Event | None:
        grace_s = FAILED_EXIT_GRACE_S
        if kind == wire.REPORT:
            report = json.loads(data)
            return Report(report["kind"], report["data"])
        if kind == wire.ENDPOINT:
            self._endpoint = data.decode()
            return None
        if kind == wire.EXCEPTION:
            self._exception = data
            return None
        if kind == wire.VALUE:
            self._ending = Result(data)
            grace_s = EXIT_GRACE_S
        elif kind == wire.FAILURE:
            self._ending = Failed(RankFailure.from_json(data.decode()), self._exception)
        self._kill_at = time.monotonic() + grace_s
        return None

    def _lines(self, name: str, lines: Iterable[str]) -> list[Event]:
        events: list[Event] = [Output(line, name) for line in lines]
        if name == "stderr":
            self._stderr_tail.extend(e.line for e in events if isinstance(e, Output))
        return events

    def _finish(self) -> list[Event]:
        events: list[Event] = []
        for name, splitter in self._splitters.items():
            events += self._lines(name, splitter.finish())
        if self._overdue and isinstance(self._ending, Result):
            text = f"hvd: this rank did not exit within {EXIT_GRACE_S:g} s of its return; killed"
            events.append(Output(text, "stderr"))
        events.append(self._ending if self._ending is not None else Failed(self._death()))
        self._finished = True
        for name in list(self._open.values()):
            self._shut(name)
        return events

    def _death(self) -> RankFailure:
        """How it ended, when it said nothing itself."""
        assert self._exit is not None
        record = partial(
            RankFailure, self.rank, host=socket.gethostname(), at=self._exit.get("at", time.time())
        )
        if self._ended_by_us:
            return record("ended", traceback="" if self._question is None else self._question.answer)
        if "status" not in self._exit:
            why = self._exit["lost"]
            return record("lost", message=why, traceback=why)
        status = self._exit["status"]
        notes = []
        if status == 0:
            notes.append("before its function returned")
        if self._overdue:
            notes.append("it closed its channel without a result and did not exit")
        if -status == signal.SIGKILL and not self._overdue:
            peak = self._exit.get("peak_nbytes", 0) / 1e6
            notes.append(
                "was it out of memory? nobody here sent the signal, as the system does when a host or a "
                f"container has no memory left; this rank had up to {peak:,.0f} MB"
            )
        if said := without_our_frames(self._stderr_tail):
            notes += ["its last lines on stderr:", *(f"  {line}" for line in said)]
        if status >= 0:
            return record("exit", exit_status=status, traceback="\n".join(notes))
        retryable = -status in _RETRYABLE_SIGNALS and not self._overdue
        return record("signal", signal=-status, retryable=retryable, traceback="\n".join(notes))

    def _fd(self, name: str) -> int | None:
        return next((fd for fd, n in self._open.items() if n == name), None)

    def _shut(self, name: str) -> None:
        fd = self._fd(name)
        if fd is None:
            return
        del self._open[fd]
        with contextlib.suppress(OSError, ValueError):
            self._epoll.unregister(fd)
        if name == "control":
            self._control.close()
        else:
            os.close(fd)


def note_stacks(ranks: Sequence[RankProcess], timeout_s: float = STACKS_WAIT_S) -> None:
    """To be called before `end_ranks` when others have waited for these: their `Failed(kind="ended")` says
    then, in its `traceback`, where they were. A rank needs no GIL for that, and a stopped one goes on for a
    moment. Takes `timeout_s` at most."""
    asked = [question for rank in ranks if (question := rank._ask()) is not None]
    deadline = time.monotonic() + timeout_s
    while asked and (left := deadline - time.monotonic()) > 0:
        wait([question.fileno() for question in asked], left)
        for question in asked:
            question.poll()
        asked = [question for question in asked if not question.answered]


def end_ranks(ranks: Sequence[RankProcess], grace_s: float = KILL_GRACE_S) -> None:
    """Ends several ranks together: SIGTERM to all, SIGKILL after `grace_s` to what is left, then waits until
    they are gone. What they still said is kept for `poll()`. A rank that is not forked yet is killed by the
    `poll()` that hears of it."""
    for rank in ranks:
        rank._waiting += rank._read()
        rank._ended_by_us = rank._ended_by_us or rank._exit is None
        rank._signal(signal.SIGTERM)
    for number, patience_s in ((None, grace_s), (signal.SIGKILL, _GONE_S)):
        living = [rank for rank in ranks if not rank._finished and rank._pid is not None]
        if number is not None:
            for rank in living:
                rank._signal(number)
        deadline = time.monotonic() + patience_s
        while living and (left := deadline - time.monotonic()) > 0:
            wait([rank.fileno() for rank in living], left)
            for rank in living:
                rank._waiting += rank._read()
            living = [rank for rank in living if not rank._finished]
