"""What a rank does, from the fork to its exit."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import io
import json
import mmap
import os
import pickle
import random
import signal
import socket
import sys
import threading
import types
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from ..errors import NotPicklable, RankFailure
from ..group import Listener
from ..world import World, set_current
from . import wire
from .cpus import thread_env, threads_per_rank
from .events import Assignment
from .failure import describe, exit_failure
from .pickling import dumps_result
from .stacks import write_when_asked

_MAX_EXCEPTION_NBYTES = 1 << 20


@dataclass(frozen=True)
class Job:
    """What the template hands to the process it forked. The descriptors are this process's own."""

    payload: int
    control: int
    stdout: int
    stderr: int
    stacks: int
    fds: Sequence[int]
    env: dict[str, str]
    threads: int
    env_follows: bool = False


class _Supervisor:
    """The way to the supervisor; lost in processes the rank forks."""

    def __init__(self) -> None:
        self.pid = -1
        self.channel: wire.Channel | None = None

    def say(self, kind: bytes, data: bytes) -> None:
        if self.channel is not None and self.pid == os.getpid():
            with contextlib.suppress(OSError):  # the supervisor is gone, we soon are
                self.channel.send(kind, data)


_supervisor = _Supervisor()


def report(kind: str, data: dict[str, Any]) -> None:
    """Inside a rank: `data` (what JSON can hold; numbers of numpy too) to its supervisor. Elsewhere: nothing.

    Thread-safe. Waits when the supervisor does not read.
    """
    text = json.dumps({"kind": kind, "data": data}, default=_plain)
    _supervisor.say(wire.REPORT, text.encode())


def log_to_driver(message: str) -> None:
    """Inside a rank: shows `message` where `run` was called, as "[rank] message", also where what ranks print
    is not shown. Elsewhere: prints it."""
    if _supervisor.pid != os.getpid():
        print(message, flush=True)
        return
    for line in str(message).splitlines() or [""]:
        report("log", {"line": line})


def _plain(value: Any) -> Any:
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be reported; plain numbers, strings, lists and dicts can")


def main(job: Job) -> int:
    """Runs the job; returns the exit status, with which the caller is to `leave`."""
    _set_up_process(job)
    channel = wire.Channel(socket.socket(fileno=job.control))
    _supervisor.pid, _supervisor.channel = os.getpid(), channel
    rank = -1
    fn: Any = None
    try:
        call = None if job.env_follows else _payload(job.payload)
        rank = _join(channel, job)
        fn, args, kwargs = call or _payload(job.payload)
        if job.fds:
            kwargs = {"fds": list(job.fds), **kwargs}
        result = fn(*args, **kwargs)
        if os.getpid() != _supervisor.pid:  # a process the function forked came back from it
            os._exit(0)
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            return _fail(exit_failure(leaving, rank), None)
        result = None
    except BaseException as error:  # noqa: BLE001  whatever it was, the launcher must hear of it
        return _fail(describe(error, rank), error)
    try:
        value = dumps_result(fn, result)
    except NotPicklable as error:
        return _fail(replace(describe(error, rank), where=_where(fn), traceback=""), None)
    _flush()
    _supervisor.say(wire.VALUE, value)
    return 0


def leave(status: int) -> NoReturn:
    """Ends this process as the interpreter does (threads that are not daemons end, atexit functions run,
    files left open are written), but destroys no object: that takes a quarter of a second, and copies what
    memory is shared with the template."""
    threading._shutdown()  # type: ignore[attr-defined]  # as multiprocessing does in its children
    atexit._run_exitfuncs()
    for thing in gc.get_objects():  # none of the template's, which are frozen
        if issubclass(type(thing), (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)):
            with contextlib.suppress(Exception):
                thing.flush()
    ctypes.CDLL(None).fflush(None)
    os._exit(status)


def _set_up_process(job: Job) -> None:
    for fd, target in ((job.stdout, 1), (job.stderr, 2)):
        os.dup2(fd, target)
        os.close(fd)
    sys.stdout = sys.__stdout__ = _line_buffered(1)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _line_buffered(2)  # type: ignore[misc]
    faulthandler.enable(all_threads=True)
    os.set_blocking(job.stacks, False)  # nobody has to read what was asked for
    write_when_asked(job.stacks)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's to handle
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    # The function must not see the template's __main__, and classes of the user's are pickled from
    # "__main__".
    sys.modules["__main__"] = types.ModuleType("__main__")
    _set_environment(job.env, job.threads)
    # Ranks of one template start with the same generators.
    random.seed()
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()


def _set_environment(env: dict[str, str], threads: int) -> None:
    threads = threads_per_rank(None, 1, env, threads)
    os.environ.update(thread_env(threads) | env)
    if (torch := sys.modules.get("torch")) is not None:  # read its environment when it was imported
        torch.set_num_threads(threads)
        with contextlib.suppress(RuntimeError):
            torch.set_num_interop_threads(threads)


def _line_buffered(fd: int) -> io.TextIOWrapper:
    raw = io.FileIO(fd, "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", "backslashreplace", line_buffering=True)


def _payload(fd: int) -> Any:
    size = os.fstat(fd).st_size
    with mmap.mmap(fd, size, prot=mmap.PROT_READ) as pages:
        os.close(fd)
        with memoryview(pages) as view:
            return pickle.loads(view)


def _join(channel: wire.Channel, job: Job) -> int:
    """Says where this rank listens, waits for its place and makes it `hvd_core.world.current()`."""
    listener = Listener.bind()
    channel.send(wire.ENDPOINT, listener.endpoint.encode())
    frame = channel.receive()
    if frame is None or frame[0] != wire.ASSIGN:
        os._exit(1)  # the supervisor is gone
    place = Assignment.from_json(frame[1].decode())
    if place.env:
        _set_environment({**job.env, **place.env}, job.threads)
    set_current(World(place.rank, place.size, place.endpoints, place.token, listener))
    return place.rank


def _fail(failure: RankFailure, error: BaseException | None) -> int:
    _abort_default_group(failure)
    _flush()
    if error is not None and (pickled := _pickled_exception(error)):
        _supervisor.say(wire.EXCEPTION, pickled)
    _supervisor.say(wire.FAILURE, failure.to_json().encode())
    return failure.exit_status or 1


def _abort_default_group(failure: RankFailure) -> None:
    """Peers leave their collectives at once. `basics` is asked only when the user's code has loaded it."""
    basics = sys.modules.get("hvd_core.basics")
    if basics is None or failure.echo:
        return
    with contextlib.suppress(Exception):
        if basics.is_initialized():
            basics.default_group().abort(failure.headline())


def _pickled_exception(error: BaseException) -> bytes:
    from . import pickler

    try:
        pickled = pickler.dumps(error)
    except Exception:  # noqa: BLE001  its record says enough
        return b""
    return pickled if len(pickled) <= _MAX_EXCEPTION_NBYTES else b""


def _where(fn: Any) -> str:
    code = getattr(fn, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
