"""The process ranks are forked from: `python -m hvd_core.launch.template FD PARENT_PID`.

It imports, never computes (a fork after a thread pool has run hangs in the child), and has one thread, the
main one, which forks: a rank's parent-death signal fires when the *thread* that forked it ends. It leaves
when its command socket FD ends or its parent is another than PARENT_PID, and kills its ranks first; should it
be killed itself, the kernel kills the ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Mapping
from multiprocessing.connection import wait
from typing import Any, NoReturn

from hvd_core.launch import child, wire

_PR_SET_PDEATHSIG = 1


class _Server:
    def __init__(self, channel: wire.Channel, parent: int):
        self._channel = channel
        self._parent = parent
        self._status_pipes: dict[int, int] = {}  # by the pid of a living rank
        self._prctl = ctypes.CDLL(None).prctl
        self._child_ended, self._wakeup = socket.socketpair()

    def serve(self) -> child.Job:
        """Returns in the processes it forks; never in the template itself."""
        self._watch()
        self._set_up(self._next_frame(wire.SETUP)[0])
        while True:
            wait([self._channel.fileno(), self._child_ended])
            with contextlib.suppress(BlockingIOError):
                self._child_ended.recv(4096)
            self._reap()
            if wait([self._channel.fileno()], 0):
                job = self._fork(*self._next_frame(wire.FORK))
                if job is not None:
                    return job

    def _watch(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for end in (self._child_ended, self._wakeup):
            end.setblocking(False)
        signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # Also sent when only the thread that started us has ended, hence not SIGKILL. End of file on the
        # command socket says the same, but not while we import, nor while a fork of our parent holds the
        # other end.
        signal.signal(signal.SIGHUP, lambda *_: self._leave_if_orphan())
        self._prctl(_PR_SET_PDEATHSIG, signal.SIGHUP)
        self._leave_if_orphan()

    def _leave_if_orphan(self) -> None:
        if os.getppid() != self._parent:
            self._leave()

    def _leave(self) -> NoReturn:
        for pid in self._status_pipes:
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
        os._exit(0)

    def _next_frame(self, kind: bytes) -> tuple[Any, list[int]]:
        frame = self._channel.receive()
        if frame is None or frame[0] != kind:
            self._leave()
        return json.loads(frame[1]), frame[2]

    def _set_up(self, setup: Mapping[str, Any]) -> None:
        os.environ.clear()
        os.environ.update(setup["env"])
        with contextlib.suppress(OSError):
            os.chdir(setup["cwd"])
        sys.path[:] = setup["sys_path"]
        sys.argv[:] = setup["argv"]
        importlib.invalidate_caches()
        for name in setup["preload"]:
            with contextlib.suppress(Exception):  # the rank that needs it will say so
                importlib.import_module(name)
        gc.collect()
        gc.freeze()  # else the first collection in a rank copies every page it shares with us

    def _fork(self, settings: Mapping[str, Any], fds: list[int]) -> child.Job | None:
        payload, control, stdout, stderr, status, stacks, *given = fds
        template = os.getpid()
        try:
            # From 3.12 on Python warns when there are threads, such as an idle pool of OpenBLAS, which
            # handles forks.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                pid = os.fork()
        except OSError as error:
            _tell(status, {"lost": f"the rank could not be forked: {error}"})
            pid = -1
        if pid == 0:
            os.setpgid(0, 0)
            self._prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != template:
                os._exit(1)
            signal.set_wakeup_fd(-1)
            self._child_ended.close()
            self._wakeup.close()
            self._channel.close()
            for fd in (status, *self._status_pipes.values()):
                os.close(fd)
            own = given[: settings["fds"]]  # the rest is only held
            chosen = {name: settings[name] for name in ("env", "threads", "env_follows")}
            return child.Job(payload, control, stdout, stderr, stacks, own, **chosen)
        for fd in fds:
            if fd != status or pid < 0:
                os.close(fd)
        if pid > 0:
            with contextlib.suppress(OSError):  # the child may have done it, and may be gone
                os.setpgid(pid, pid)
            self._status_pipes[pid] = status
            _tell(status, {"pid": pid})
        return None

    def _reap(self) -> None:
        for pid, status in list(self._status_pipes.items()):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            # What the rank left running goes before the rank is reaped: until then its id cannot be reused.
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
            _, code, used = os.wait4(pid, 0)
            del self._status_pipes[pid]
            peak_nbytes = used.ru_maxrss << 10
            _tell(
                status,
                {"status": os.waitstatus_to_exitcode(code), "at": time.time(), "peak_nbytes": peak_nbytes},
            )
            os.close(status)


def _tell(status: int, message: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):
        os.write(status, json.dumps(message).encode() + b"\n")


def main() -> NoReturn:
    fd, parent = int(sys.argv[1]), int(sys.argv[2])
    child.leave(child.main(_Server(wire.Channel(socket.socket(fileno=fd)), parent).serve()))


if __name__ == "__main__":
    main()
