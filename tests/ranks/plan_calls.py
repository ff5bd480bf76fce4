"""What the rank processes of test_plan.py run. Imports no torch, which takes seconds."""

from __future__ import annotations

import gc
import os
import select
import time
from typing import Any

import numpy as np

from hvd_core import Average, Group, Sum
from hvd_core.errors import HorovodInternalError, InvalidArgument, MismatchError

COUNTS = [3, 70_000, 1, 500_000, 4096, 1_200_000, 17]


def make_plan(group: Group, name: str = "plan", counts: list[int] = COUNTS) -> Any:
    tensors = [(f"t{i}", "float32", (count,)) for i, count in enumerate(counts)]
    plan = group.plan(tensors, name=name, op=Sum, first_bytes=1 << 16, batch_bytes=1 << 20)
    assert plan is not None
    return plan


def run_steps(group: Group, steps: int) -> int:
    """Sums in random orders with missing members; returns how many were checked."""
    plan = make_plan(group)
    checked = 0
    mine, common = np.random.default_rng(group.rank), np.random.default_rng(99)
    for step in range(steps):
        has = common.random((group.size, len(COUNTS))) < (0.7 if step % 2 else 1.0)
        plan.begin()
        arrays: dict[int, Any] = {}
        for i in mine.permutation(np.flatnonzero(has[group.rank])).tolist():
            arrays[i] = np.full(COUNTS[i], group.rank + 1 + i + step, np.float32)
            plan.ready(i, arrays[i].ctypes.data)
        while needs := plan.end(0):
            for i in needs:
                assert not has[group.rank, i]
                assert has[:, i].any()
                arrays[i] = np.zeros(COUNTS[i], np.float32)
                plan.supply(i, arrays[i].ctypes.data)
        for i in range(len(COUNTS)):
            assert (i in arrays) == has[:, i].any()
            expected = sum(rank + 1 + i + step for rank in range(group.size) if has[rank, i])
            assert i not in arrays or (arrays[i] == expected).all()
            checked += i in arrays
    return checked


def step_until_it_fails(group: Group) -> tuple[str, str, float]:
    plan = make_plan(group)
    arrays = [np.empty(count, np.float32) for count in COUNTS]
    try:
        while True:
            for array in arrays:
                array.fill(1)
            plan.begin()
            for i, array in enumerate(arrays):
                plan.ready(i, array.ctypes.data)
            assert plan.end(0) == []
            assert all((array == group.size).all() for array in arrays)
    except HorovodInternalError as error:
        at = time.monotonic()
        try:
            plan.begin()
        except type(error):
            return type(error).__name__, str(error), at
        raise


def disagree(group: Group) -> str:
    try:
        group.plan([("fc.weight", "float32", (10 + group.rank,))], name="p")
    except MismatchError as error:
        make_plan(group, "another")  # the Group lives on
        return str(error)
    return ""


def end_without_peers(group: Group) -> tuple[str, str]:
    plan = make_plan(group)
    if group.rank == 0:
        group.close()
        return "", ""
    try:
        plan.begin()
        plan.end(0)
    except HorovodInternalError as error:
        return type(error).__name__, str(error)
    return "none", ""


_plans: list[Any] = []


def make_plan_only(group: Group) -> None:
    _plans.append(make_plan(group))


def end_a_step(group: Group) -> tuple[str, str, float]:
    try:
        _plans[-1].begin()
        _plans[-1].end(0)
    except HorovodInternalError as error:
        return type(error).__name__, str(error), time.monotonic()
    return "none", "", time.monotonic()


def end_a_step_after_a_long_phase(group: Group, seconds: float) -> tuple[str, str, float]:
    """Lets the others wait in their step while it is in a declared phase."""
    with group.long_phase("checkpoint", timeout_s=30.0):
        select.select([group.fileno()], [], [], seconds)
    return end_a_step(group)


def use_in_a_child(group: Group) -> tuple[list[str], int]:
    """What a forked child says that begins a step and aborts, and its exit status after it has let go of the
    plan."""
    plan = make_plan(group)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        for use in (plan.begin, lambda: group.abort("from the child")):
            try:
                use()
            except InvalidArgument as error:
                os.write(write, f"{error}\n".encode())
        del plan, use
        gc.collect()
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    os.close(write)
    with os.fdopen(read) as said:
        lines = said.read().splitlines()
    plan.begin()
    plan.end(0)  # the parent's goes on
    return lines, status


def stay_away(group: Group) -> tuple[str, str]:
    """Rank 1 makes no step; the error that each rank gets when the others have waited too long."""
    plan = make_plan(group)
    array = np.ones(COUNTS[0], np.float32)
    if group.rank == 1:
        select.select([group.fileno()], [], [], 20)
    try:
        plan.begin()
        plan.ready(0, array.ctypes.data)
        plan.end(0)
    except HorovodInternalError as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def same_bits_as_eager(group: Group) -> bool:
    """Average of values whose sum depends on the order of addition."""
    plan = group.plan([("t", "float32", (300_001,)), ("u", "float32", (5,))], name="bits", op=Average)
    if plan is None:  # the links are still another plan's
        return False
    values = np.random.default_rng(group.rank).standard_normal(300_006, np.float32) * np.float32(1e3)
    expected = group.allreduce(values, name="eager", op=Average)
    plan.begin()
    plan.ready(0, values.ctypes.data)
    plan.ready(1, values[300_001:].ctypes.data)
    assert plan.end(0) == []
    return bool((values == expected).all())


def one_plan_at_a_time(group: Group) -> list[bool]:
    tensors = [("t", "float32", (1000,))]
    first = group.plan(tensors, name="first")
    second = group.plan(tensors, name="second")
    answers = [first is not None, second is not None]
    del first
    return [*answers, group.plan(tensors, name="third") is not None]
