"""One hash of sums, whatever is fused, cached, staged or planned, in which order ranks submit, and where
they are.

The sizes are small so that the whole matrix takes seconds; the arithmetic on large ones is tested elsewhere.
"""

from __future__ import annotations

import functools
import hashlib
import random
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import hvd_core
from hvd_core import Average, Config, Group, Sum
from hvd_core.world import current
from tests.ranks.rounding import to_bfloat16, widen

pytestmark = pytest.mark.timeout(120)

LAYOUTS = [(4,), (2, 2), (3, 1), (1, 1, 1, 1)]
# numpy has no bfloat16: such values stand in uint16.
DTYPES: list[Any] = [np.float32, np.float16, np.float64, np.uint16]
# Inline, one-shot, several chunks of 16 KiB with a tail.
COUNTS = [1, 11, 1_000, 5_001, 20_003]
CONFIGS: list[dict[str, Any]] = [
    {},
    {"fusion_bytes": 0, "chunk_bytes": 16 << 10},
    {"fusion_bytes": 30_000, "kernels": "baseline"},
    {"chunk_bytes": 16 << 10, "kernels": "avx2"},
]


def _values(rank: int, index: int, dtype: Any, count: int) -> np.ndarray:
    """Of many magnitudes, so that another order of additions gives other bits."""
    rng = np.random.default_rng([rank, index, count])
    values = rng.standard_normal(count) * 2.0 ** rng.integers(-4, 5, count)
    return to_bfloat16(values.astype(np.float32)) if dtype is np.uint16 else values.astype(dtype)


def _tensors(group: Group, lap: int) -> list[np.ndarray]:
    """Every other one in the arena, in another way in every lap, also on some ranks only."""
    tensors = []
    for index, (dtype, count) in enumerate((d, c) for d in DTYPES for c in COUNTS):
        values = _values(group.rank, index, dtype, count)
        in_arena = (index + lap + (group.rank if index % 5 == 0 else 0)) % 2 == 0
        place = group.empty(values.nbytes).view(dtype) if in_arena else np.empty_like(values)
        place[:] = values
        tensors.append(place)
    return tensors


def _op(index: int) -> Any:
    return Average if index % 2 else Sum


def _buffer(tensor: np.ndarray) -> Any:
    """What the core is to take it for."""
    return (
        torch.from_numpy(tensor.view(np.int16)).view(torch.bfloat16) if tensor.dtype == np.uint16 else tensor
    )


def _hash(tensors: list[np.ndarray]) -> str:
    return hashlib.sha256(b"".join(tensor.tobytes() for tensor in tensors)).hexdigest()


def _plan_lap(group: Group, lap: int, order: random.Random) -> str:
    """By a plan for each operation, one after the other; its fused batches join tensors and cut them."""
    tensors = _tensors(group, lap)
    for op in (Sum, Average):
        members = [index for index in range(len(tensors)) if _op(index) == op]
        dtypes = {i: "bfloat16" if tensors[i].dtype == np.uint16 else tensors[i].dtype.name for i in members}
        described = [(f"t{i}", dtypes[i], tensors[i].shape) for i in members]
        plan = group.plan(described, name=f"plan{op}", op=op, first_bytes=5_000, batch_bytes=30_000)
        assert plan is not None
        plan.begin()
        for place in order.sample(range(len(members)), len(members)):
            plan.ready(place, tensors[members[place]].ctypes.data)
        assert plan.end(0) == []
        plan.leave()
        del plan
    return _hash(tensors)


def _lap(group: Group, lap: int, order: random.Random) -> str:
    tensors = _tensors(group, lap)
    handles: dict[int, Any] = {}
    for index in order.sample(range(len(tensors)), len(tensors)):
        if lap == 3 and index % 3 == 0:  # the blocking ones run on this thread; in one order for all
            continue
        handles[index] = group.allreduce_async(_buffer(tensors[index]), name=f"t{index}", op=_op(index))
        if order.random() < 0.2:
            time.sleep(order.random() * 2e-3)
    for index, tensor in enumerate(tensors):
        if index not in handles:
            group.allreduce(_buffer(tensor), name=f"t{index}", op=_op(index))
    for handle in handles.values():
        handle.wait()
    return _hash(tensors)


def _hashes() -> set[str]:
    seen = set()
    for number, settings in enumerate(CONFIGS):
        with current().connect(replace(Config.from_env(), **settings)) as group:
            order = random.Random(100 * number + group.rank)
            # Again and again: what was agreed on comes by its number, unless its place changed.
            seen.update(_lap(group, lap, order) for lap in (0, 0, 1, 1, 3))
            seen.update(_plan_lap(group, lap, order) for lap in (0, 1))
    return seen


@functools.cache
def _expected() -> str:
    """By numpy, left to right in rank order, 16-bit floats in float32, divided once at the end."""
    digest = hashlib.sha256()
    for index, (dtype, count) in enumerate((d, c) for d in DTYPES for c in COUNTS):
        total = functools.reduce(np.add, [widen(_values(rank, index, dtype, count)) for rank in range(4)])
        if index % 2:
            total = total / total.dtype.type(4)
        digest.update((to_bfloat16(total) if dtype is np.uint16 else total.astype(dtype)).tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_way_of_doing_it_changes_a_bit(layout: tuple[int, ...]) -> None:
    hosts = [f"host{host}" for host, ranks in enumerate(layout) for _ in range(ranks)]

    def env(rank: int) -> dict[str, str]:
        return {"HVD_HOST_ID": hosts[rank]}

    assert hvd_core.run(_hashes, num_proc=4, env=env, timeout_s=100) == [{_expected()}] * 4
