"""What a rank does, from the fork to its exit."""

from __future__ import annotations

import contextlib
import faulthandler
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
from dataclasses import dataclass
from typing import Any

from ..errors import NotPicklable, RankFailure
from . import wire
from .cpus import thread_env
from .events import Assignment
from .failure import describe, exit_failure
from .pickling import dumps_result

_MAX_EXCEPTION_NBYTES = 1 << 20


@dataclass(frozen=True)
class Job:
    """What the template hands to the process it forked. The descriptors are this process's own."""

    payload: int
    control: int
    stdout: int
    stderr: int
    fds: Sequence[int]
    env: dict[str, str]
    threads: int


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


def _plain(value: Any) -> Any:
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be reported; plain numbers, strings, lists and dicts can")
