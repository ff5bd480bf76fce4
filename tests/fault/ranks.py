"""Rank processes that a test drives step by step and kills; unlike `hvd_core.run`, nobody supervises."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hvd_core import Config, Group, Listener

TOKEN = b"the secret of this test"
_ROOT = Path(__file__).parents[2]


class Rank:
    """One process; `call(fn, *args)` runs `fn(group, *args)` in it. `fn` is one of calls.py. `prefix` goes
    before its command, for example to run it in a network namespace."""

    def __init__(self, config: Config, prefix: Sequence[str] = ()):
        self.pipe, there = Pipe()
        command = [*prefix, sys.executable, "-m", __name__, str(there.fileno())]
        self.process = subprocess.Popen(command, cwd=_ROOT, pass_fds=[there.fileno()])
        self.pid = self.process.pid
        there.close()
        self.pipe.send(config)
        self.endpoint = ""

    def start(self, fn: Callable[..., Any], *args: Any) -> None:
        self.pipe.send((fn, args))

    def result(self, timeout_s: float = 20) -> Any:
        """What the call returned, or the exception it raised."""
        assert self.pipe.poll(timeout_s), f"process {self.pid} gives no answer for {timeout_s} s"
        return self.pipe.recv()

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        self.start(fn, *args)
        return self.result()

    def kill(self, signum: int = signal.SIGKILL) -> float:
        """When the signal was sent (time.monotonic, the same for all processes). Stopped, no thread of it
        runs any more when this returns."""
        at = time.monotonic()
        os.kill(self.pid, signum)
        if signum == signal.SIGSTOP:
            os.waitid(os.P_PID, self.pid, os.WSTOPPED)
        return at


def main(pipe: Connection) -> None:
    from . import calls  # noqa: F401 - so that a call begins at once

    config = pipe.recv()
    listener = Listener.bind(config)
    pipe.send(listener.endpoint)
    rank, endpoints, token = pipe.recv()
    try:
        group = Group.connect(listener, endpoints, rank=rank, token=token, config=config)
    except Exception as error:  # noqa: BLE001 - the test looks at it
        pipe.send(error)
        return
    pipe.send(listener.dropped)
    while True:
        try:
            fn, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = fn(group, *args)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            answer = error
        pipe.send(answer)


@contextlib.contextmanager
def bound_ranks(
    size: int, configs: list[Config], prefixes: Sequence[Sequence[str]] | None = None
) -> Iterator[list[Rank]]:
    """Processes that have bound their listeners and wait to be told the others'."""
    ranks: list[Rank] = []
    try:
        ranks.extend(Rank(configs[index], prefixes[index] if prefixes else ()) for index in range(size))
        for rank in ranks:
            rank.endpoint = rank.result()
        yield ranks
    finally:
        for rank in ranks:
            rank.process.kill()
            rank.process.wait()
            rank.pipe.close()


def connect(ranks: list[Rank], tokens: list[bytes] | None = None) -> list[Any]:
    """Lets all ranks connect; what each of them says: connections dropped, or an exception."""
    endpoints = [rank.endpoint for rank in ranks]
    for number, rank in enumerate(ranks):
        rank.pipe.send((number, endpoints, tokens[number] if tokens else TOKEN))
    return [rank.result() for rank in ranks]


@contextlib.contextmanager
def connected_ranks(size: int, **settings: Any) -> Iterator[list[Rank]]:
    """Processes whose Groups are connected."""
    with bound_ranks(size, [replace(Config(), **settings)] * size) as ranks:
        assert not any(isinstance(answer, Exception) for answer in connect(ranks))
        yield ranks


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
