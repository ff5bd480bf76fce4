"""What the ranks of test_within_a_batch.py run: signals, the GIL and aborts in the middle of a batch."""

from __future__ import annotations

import ctypes
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from hvd_core import Group
from hvd_core.errors import HvdError


def _outcome(work: Callable[[], Any]) -> tuple[str, str]:
    try:
        work()
    except HvdError as error:
        return type(error).__name__, str(error)
    return "", ""


def add_with_handler(group: Group, name: str, count: int, does: str) -> tuple[str, str, str]:
    """A sum, and what the SIGTERM handler that comes meanwhile raises: it closes the Group or wants a sum."""
    raised = []

    def handler(*_: object) -> None:
        work = group.close if does == "close" else lambda: group.allreduce(np.ones(3), name="in the handler")
        raised.append(_outcome(work)[1])

    signal.signal(signal.SIGTERM, handler)
    outcome = _outcome(lambda: group.allreduce(np.ones(count, np.float32), name=name))
    return *outcome, "".join(raised)


def add_while_a_thread_holds_the_gil(group: Group, name: str, count: int, seconds: float) -> tuple[str, str]:
    """The thread begins when the sum is on its way for a while."""
    sleep_with_gil = ctypes.PyDLL(None).usleep
    thread = threading.Timer(0.3, sleep_with_gil, [int(seconds * 1e6)])
    thread.start()
    outcome = _outcome(lambda: group.allreduce(np.ones(count, np.float32), name=name))
    thread.join()
    return outcome


def abort_while_it_moves(group: Group, form: str, nbytes: int) -> tuple[str, float]:
    """How a collective of `nbytes` ends that rank 1 aborts, and how long after that (on rank 1)."""
    array = np.zeros(nbytes, np.uint8)
    aborted_at = [0.0]

    def abort() -> None:
        aborted_at[0] = time.monotonic()
        group.abort("enough")

    group.barrier("go")
    if group.rank == 1:
        threading.Timer(0.03, abort).start()
    if form == "broadcast":
        kind, _ = _outcome(lambda: group.broadcast(array, root=0, name="large"))
    else:
        kind, _ = _outcome(lambda: group.allgather(array, name="large"))
    return kind, time.monotonic() - aborted_at[0]
