"""What the rank processes of the fault tests run."""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import time
from typing import Any

import numpy as np

from hvd_core import Group, Handle, Sum
from hvd_core.errors import Aborted, CollectiveTimeout, GroupClosed, MismatchError, PeerLost


def add(group: Group, name: str = "x", count: int = 1000) -> float:
    array = np.ones(count)
    group.allreduce(array, name=name, op=Sum)
    return float(array[-1])


def add_and_say_where(group: Group) -> tuple[float, int, int, int]:
    """A sum of ones over the ranks, the index of this rank's host, of how many, and its number of ranks."""
    return add(group), group.cross_rank, group.cross_size, group.local_size


def add_until_it_fails(group: Group, count: int) -> tuple[str, str, float]:
    """The error of the first allreduce that fails, when it came, and proof that no sum before was wrong."""
    array = np.empty(count, np.float32)
    try:
        while True:
            array.fill(1)
            group.allreduce(array, name="x")
            assert (array == group.size).all()
    except (PeerLost, Aborted, GroupClosed, CollectiveTimeout) as error:
        return type(error).__name__, str(error), time.monotonic()


def repeat_until_it_fails(group: Group, form: str, rows: int) -> tuple[str, str, float]:
    """The same for an alltoall or a reducescatter of `rows` rows for each rank."""
    array = np.full((rows * group.size, 2), group.rank, np.float32)
    try:
        while True:
            if form == "alltoall":
                came, _ = group.alltoall(array, name="x")
                assert (came == np.repeat(np.arange(group.size), rows)[:, None]).all()
            else:
                assert (group.reducescatter(array, name="x") == sum(range(group.size))).all()
    except (PeerLost, Aborted, GroupClosed, CollectiveTimeout) as error:
        return type(error).__name__, str(error), time.monotonic()


_parts: list[Group | None] = []


def split(group: Group, ranks: list[int]) -> bool:
    _parts.append(group.split(ranks))
    return _parts[-1] is not None


def add_in_the_part_until_it_fails(group: Group, count: int) -> tuple[str, str, float]:
    part = _parts[-1]
    assert part is not None
    return add_until_it_fails(part, count)


_pending: dict[str, Handle] = {}


def start_adding(group: Group, name: str, count: int) -> None:
    _pending[name] = group.allreduce_async(np.ones(count, np.float32), name=name)


def is_done_within(group: Group, name: str, timeout_s: float) -> bool:
    try:
        return bool((_pending[name].wait(timeout_s) == group.size).all())
    except CollectiveTimeout:
        return False


def wait_in_vain(group: Group, name: str, timeout_s: float | None = None) -> tuple[str, str, float]:
    try:
        group.allreduce(np.ones(1000), name=name, timeout_s=timeout_s)
    except (PeerLost, Aborted, GroupClosed, CollectiveTimeout) as error:
        return type(error).__name__, str(error), time.monotonic()
    return "", "", time.monotonic()


def wait_for_death(group: Group) -> tuple[str | None, float]:
    select.select([group], [], [], 20)
    return group.reason, time.monotonic()


def fork_a_child(group: Group) -> int:
    """It has all of this rank's descriptors and lives on."""
    pid = os.fork()
    while pid == 0:
        signal.pause()
    return pid


def add_after_a_long_phase(group: Group, name: str, seconds: float, timeout_s: float) -> tuple[str, str]:
    """Lets the others wait in `name` while it is in a declared phase."""
    with group.long_phase("checkpoint", timeout_s):
        end = time.monotonic() + seconds
        while time.monotonic() < end and group.reason is None:
            select.select([group], [], [], end - time.monotonic())
    try:
        add(group, name)
    except (CollectiveTimeout, Aborted) as error:
        return type(error).__name__, str(error)
    return "", ""


def fork_a_child_that_stays(group: Group) -> int:
    """The child keeps copies of all descriptors of this rank; the pid is the test's to kill."""
    pid = os.fork()
    if pid == 0:
        while True:
            signal.pause()
    return pid


def abort(group: Group, reason: str) -> float:
    at = time.monotonic()
    group.abort(reason)
    return at


def close(group: Group) -> None:
    group.close()


def add_again_after_death(group: Group) -> None:
    add(group, "later")


def disagree(group: Group) -> str:
    array = np.ones((10 + 2 * group.rank,), np.float32)
    try:
        group.allreduce(array, name="grad/fc1.weight")
    except MismatchError as error:
        return str(error)
    return ""


def gather_more_than_memory(group: Group) -> str:
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    try:
        group.allgather(np.zeros(3 << 29, np.uint8), name="rows")
    except Aborted as error:
        return str(error)
    return ""


def hold_the_gil_then_add(group: Group, seconds: float) -> float:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(10_000))
    return add(group)


def wait_for_ctrl_c(group: Group) -> float:
    try:
        add(group, "never")
    except KeyboardInterrupt:
        return time.monotonic()
    raise AssertionError("no KeyboardInterrupt")


# -- memory that is given back ---------------------------------------------------------------------------

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_READ_WRITE, _PRIVATE_ANONYMOUS, _EXACTLY_THERE = 3, 0x22, 0x100000

#: What this rank keeps where its tensor was.
_reused: list[np.ndarray] = []


def _map(nbytes: int, address: int | None = None) -> np.ndarray:
    """New pages; at `address`, which must be free."""
    flags = _PRIVATE_ANONYMOUS | (_EXACTLY_THERE if address else 0)
    at = _libc.mmap(address, nbytes, _READ_WRITE, flags, -1, 0)
    assert at != ctypes.c_void_p(-1).value, os.strerror(ctypes.get_errno())
    assert address in (None, at)
    return np.frombuffer((ctypes.c_char * nbytes).from_address(at), np.float32)


def _add_once(group: Group, array: np.ndarray, plan: Any) -> None:
    if plan is None:
        group.allreduce(array, name="x")
        return
    plan.begin()
    plan.ready(0, array.ctypes.data)
    assert plan.end(0) == []


def add_until_it_fails_then_reuse(group: Group, way: str, count: int) -> str:
    """The first error's type. By then the tensor's memory is unmapped, and something else stands there."""
    nbytes = 4 * count
    array = _map(nbytes)
    plan = group.plan([("x", "float32", (count,))], name="p", op=Sum) if way == "plan" else None
    assert (plan is not None) == (way == "plan")
    try:
        while True:
            array.fill(1)
            _add_once(group, array, plan)
            assert (array == group.size).all()
    except (PeerLost, Aborted, GroupClosed, CollectiveTimeout) as error:
        kind = type(error).__name__
    address = array.ctypes.data
    assert _libc.munmap(address, nbytes) == 0
    _reused.append(_map(nbytes, address))
    _reused[-1].fill(-7)
    return kind


def is_as_reused(group: Group) -> bool:
    return bool((_reused[-1] == -7).all())
