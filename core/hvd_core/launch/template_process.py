"""The process ranks are forked from, seen from the supervisor that starts it. Linux only."""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import LaunchFailed
from . import wire
from .rank_process import RankProcess


class Template:
    """A process that has imported what the ranks need, never computes, and forks a rank in about 0.1 s.

    It ends, and its ranks with it, when it is closed, when this process ends in any way, or when the last
    reference goes. Methods are thread-safe.
    """

    def __init__(self, process: subprocess.Popen[bytes], channel: wire.Channel, stderr: int):
        self._process = process
        self._channel = channel
        self._stderr = stderr
        self._lock = threading.Lock()
        self._payload: tuple[bytes, int] | None = None
        self._closed = False

    @classmethod
    def start(
        cls,
        preload: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        sys_path: Sequence[str] | None = None,
    ) -> Template:
        """Starts the process and returns at once; it imports in the background, forks wait for that.

        preload: modules to import before the first fork; one that does not import is left to the ranks.
        env: changes to this process's environment, for the template and all its ranks. Thread pools of
        preloaded libraries are sized here: pass `thread_env(n)`.
        sys_path: instead of this process's `sys.path`.
        Raises LaunchFailed when no process can be started.
        """
        environ = dict(os.environ) | dict(env or {})
        ours, theirs = _pair()
        stderr = os.memfd_create("hvd-template-stderr", os.MFD_CLOEXEC)
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "hvd_core.launch.template", str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                pass_fds=[theirs.fileno()],
                cwd=Path(__file__).parents[2],  # where `-m` finds hvd_core; the real one is in SETUP
                env=exec_env(environ),
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            os.close(stderr)
            raise LaunchFailed(f"cannot start {sys.executable!r} to fork ranks from: {error}") from error
        finally:
            theirs.close()
        self = cls(process, wire.Channel(ours), stderr)
        setup = {
            "env": environ,
            # Who puts a Path there finds that Python ignores it; we need not fail.
            "sys_path": [os.fsdecode(entry) for entry in (sys.path if sys_path is None else sys_path)],
            "cwd": _working_directory(),
            "argv": [str(word) for word in sys.argv],
            "preload": list(preload),
        }
        try:
            self._channel.send(wire.SETUP, json.dumps(setup).encode())
        except OSError:
            failure = self._why_dead()
            self.close()
            raise LaunchFailed(failure) from None
        return self

    def fork(
        self,
        payload: bytes,
        *,
        fds: Sequence[int] = (),
        held: Sequence[int] = (),
        env: Mapping[str, str] | None = None,
        threads: int = 1,
        env_follows: bool = False,
    ) -> RankProcess:
        """Forks a rank and returns at once; the rank unpickles `payload` and waits for its `Assignment`.

        payload: from `dumps(fn, args, kwargs)`. The rank calls `fn(*args, **kwargs)`, or, with `fds`,
        `fn(*args, fds=[...], **kwargs)` with its own duplicates of these descriptors (yours stay yours).
        held: it keeps duplicates of these until it ends, so whoever has the other end of one sees that.
        env: changes to the template's environment. threads: compute threads of the rank. env_follows: its
        `Assignment` brings more of them, so the rank waits for that before it unpickles.
        Raises LaunchFailed when the template is gone.
        """
        control, rank_control = socket.socketpair()
        pipes = [os.pipe() for _ in range(4)]  # stdout, stderr, status, stacks
        settings = {"env": dict(env or {}), "threads": threads, "fds": len(fds), "env_follows": env_follows}
        message = json.dumps(settings).encode()
        try:
            with self._lock:
                given = [
                    self._payload_fd(payload),
                    rank_control.fileno(),
                    *(write for _, write in pipes),
                    *fds,
                    *held,
                ]
                self._channel.send(wire.FORK, message, given)
        except BaseException as error:
            control.close()
            for read, _ in pipes:
                os.close(read)
            if isinstance(error, OSError):
                raise LaunchFailed(self._why_dead()) from error
            raise
        finally:
            rank_control.close()
            for _, write in pipes:
                os.close(write)
        stdout, stderr, status, stacks = (read for read, _ in pipes)
        return RankProcess(control, stdout, stderr, status, stacks, self._why_dead)

    def alive(self) -> bool:
        return not self._closed and self._process.poll() is None

    def close(self) -> None:
        """Ends the template and every rank forked from it. Idempotent; takes at most a second or two."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._channel.close()
            try:
                self._process.wait(0.5)
            except subprocess.TimeoutExpired:  # busy in an import, or stopped; its ranks die with it
                self._process.kill()
                self._process.wait()
            os.close(self._stderr)
            if self._payload is not None:
                os.close(self._payload[1])
                self._payload = None

    def __enter__(self) -> Template:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _payload_fd(self, payload: bytes) -> int:
        """A memfd with `payload`; ranks that get the same object share it."""
        if self._payload is None or self._payload[0] is not payload:
            if self._payload is not None:
                os.close(self._payload[1])
                self._payload = None
            fd = os.memfd_create("hvd-payload", os.MFD_CLOEXEC)
            self._payload = (payload, fd)
            os.truncate(fd, len(payload))
            with mmap.mmap(fd, len(payload)) as pages:
                pages[:] = payload
        return self._payload[1]

    def _why_dead(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        status = self._process.poll()
        said = (
            os.pread(self._stderr, 1 << 20, 0)[-2000:].decode(errors="backslashreplace")
            if not self._closed
            else ""
        )
        how = "was closed" if self._closed else f"ended with status {status}"
        return f"the process that ranks are forked from {how}" + (
            f":\n{said.strip()}" if said.strip() else ""
        )


def _pair() -> tuple[socket.socket, socket.socket]:
    """Connected sockets; the second can be passed on also when our standard streams are closed, and a new
    descriptor gets one of their numbers."""
    ours, theirs = socket.socketpair()
    with theirs:
        high = fcntl.fcntl(theirs.fileno(), fcntl.F_DUPFD_CLOEXEC, 3)
    return ours, socket.socket(fileno=high)


def exec_env(environ: Mapping[str, str]) -> dict[str, str]:
    """What of an environment of any size fits through exec: first what the loader and the interpreter read,
    then the small ones. The rest follows in SETUP."""

    def first(name: str) -> bool:
        return name.startswith(("LD_", "PYTHON", "MALLOC_", "GLIBC_")) or name in ("PATH", "HOME")

    room = 96 << 10
    chosen = {}
    for name, value in sorted(environ.items(), key=lambda item: (not first(item[0]), len(item[1]))):
        nbytes = len(os.fsencode(name)) + len(os.fsencode(value)) + 2
        if nbytes <= room:
            room -= nbytes
            chosen[name] = value
    return chosen


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed; there is nothing to import from it either
        return "/"
