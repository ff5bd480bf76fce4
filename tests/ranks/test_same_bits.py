"""One hash of sums, whatever is fused, cached, staged or read, in which order ranks submit, and where they
are.

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

import hvd_core
from hvd_core import Average, Config, Group, Sum
from hvd_core.world import current

pytestmark = pytest.mark.timeout(120)

LAYOUTS = [(4,), (2, 2), (3, 1), (1, 1, 1, 1)]
DTYPES = [np.float32, np.float16, np.float64]
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
    return (rng.standard_normal(count) * 2.0 ** rng.integers(-4, 5, count)).astype(dtype)


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


def _lap(group: Group, lap: int, order: random.Random) -> str:
    tensors = _tensors(group, lap)
    handles: dict[int, Any] = {}
    for index in order.sample(range(len(tensors)), len(tensors)):
        op = Average if index % 2 else Sum
        if lap == 3 and index % 3 == 0:  # the blocking ones run on this thread; in one order for all
            continue
        handles[index] = group.allreduce_async(tensors[index], name=f"t{index}", op=op)
        if order.random() < 0.2:
            time.sleep(order.random() * 2e-3)
    for index, tensor in enumerate(tensors):
        if index not in handles:
            group.allreduce(tensor, name=f"t{index}", op=Average if index % 2 else Sum)
    for handle in handles.values():
        handle.wait()
    return hashlib.sha256(b"".join(tensor.tobytes() for tensor in tensors)).hexdigest()


def _hashes() -> set[str]:
    seen = set()
    for number, settings in enumerate(CONFIGS):
        with current().connect(replace(Config.from_env(), **settings)) as group:
            order = random.Random(100 * number + group.rank)
            # Again and again: what was agreed on comes by its number, unless its place changed.
            seen.update(_lap(group, lap, order) for lap in (0, 0, 1, 1, 3))
    return seen


@functools.cache
def _expected() -> str:
    """By numpy, left to right in rank order, 16-bit floats in float32, divided once at the end."""
    digest = hashlib.sha256()
    for index, (dtype, count) in enumerate((d, c) for d in DTYPES for c in COUNTS):
        wide = np.float32 if dtype == np.float16 else dtype
        total = functools.reduce(
            np.add, [_values(rank, index, dtype, count).astype(wide) for rank in range(4)]
        )
        digest.update((total / wide(4) if index % 2 else total).astype(dtype).tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_way_of_doing_it_changes_a_bit(layout: tuple[int, ...]) -> None:
    hosts = [f"host{host}" for host, ranks in enumerate(layout) for _ in range(ranks)]

    def env(rank: int) -> dict[str, str]:
        return {"HVD_HOST_ID": hosts[rank]}

    assert hvd_core.run(_hashes, num_proc=4, env=env, timeout_s=100) == [{_expected()}] * 4
