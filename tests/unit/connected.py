"""Groups whose ranks are threads of this process: connected once, used by many examples."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import TypeVar

from hvd_core import Config, Group, Listener

T = TypeVar("T")

_CONFIG = Config(connect_timeout_s=20.0, stall_warn_s=10.0, stall_shutdown_s=20.0)


class Ranks:
    """`on_every(fn)` calls `fn(group)` for every rank at the same time; results by rank."""

    def __init__(self, groups: list[Group], threads: ThreadPoolExecutor):
        self.groups = groups
        self._threads = threads

    def on_every(self, fn: Callable[[Group], T]) -> list[T]:
        return list(self._threads.map(fn, self.groups))


@contextmanager
def connected(size: int, config: Config = _CONFIG) -> Iterator[Ranks]:
    token = secrets.token_bytes(16)
    listeners = [Listener.bind(config) for _ in range(size)]
    endpoints = [listener.endpoint for listener in listeners]

    def connect(rank: int) -> Group:
        return Group.connect(listeners[rank], endpoints, rank=rank, token=token, config=config)

    with ExitStack() as stack:
        for listener in listeners:
            stack.callback(listener.close)
        threads = stack.enter_context(ThreadPoolExecutor(size))
        groups = [stack.enter_context(group) for group in threads.map(connect, range(size))]
        yield Ranks(groups, threads)
