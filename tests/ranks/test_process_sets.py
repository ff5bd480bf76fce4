"""Process sets of real processes, on one host and on two."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import hvd_core
import hvd_core.torch as hvd
from hvd_core.errors import InvalidArgument, RankFailed

pytestmark = pytest.mark.timeout(90)


def _sums(rank: int, sets: list[Any]) -> list[float]:
    return [
        hvd.allreduce(torch.full((50_000,), rank + 1.0), op=hvd.Sum, process_set=s).unique().item()
        for s in sets
        if rank in s.ranks
    ]


def _static_and_dynamic() -> list[float]:
    static = [hvd.ProcessSet([0, 3]), hvd.ProcessSet([1, 2, 3])]
    hvd.init(process_sets=static)
    rank = hvd.rank()
    sums = _sums(rank, static)
    evens = hvd.add_process_set(range(0, hvd.size(), 2))
    sums += _sums(rank, [evens, hvd.global_process_set])
    # Two sets without a common rank need not wait for each other.
    left, right = hvd.add_process_set([0, 1]), hvd.add_process_set([2, 3])
    if rank < 2:
        for _ in range(50):
            hvd.allreduce(torch.ones(10), process_set=left)
    hvd.barrier()
    if rank >= 2:
        for _ in range(50):
            hvd.allreduce(torch.ones(10), process_set=right)
    hvd.shutdown()
    assert static[0].process_set_id is None
    hvd.init(process_sets=[[0, 3]])
    group = np.array([hvd.rank()])
    hvd.shutdown()
    return [*sums, float(group[0])]


@pytest.mark.parametrize("hosts", [1, 2])
def test_sets_given_to_init_and_added_later(hosts: int) -> None:
    def env(rank: int) -> dict[str, str]:
        return {"HVD_HOST_ID": f"host{rank * hosts // 4}"}

    results = hvd_core.run(_static_and_dynamic, num_proc=4, env=env, timeout_s=60)
    assert results == [
        [5.0, 4.0, 10.0, 0.0],
        [9.0, 10.0, 1.0],
        [9.0, 4.0, 10.0, 2.0],
        [5.0, 9.0, 10.0, 3.0],
    ]


def _twice() -> None:
    hvd.init(process_sets=[[0], [0]])


def test_a_set_given_twice_to_init_is_refused() -> None:
    with pytest.raises(RankFailed, match="there is a process set of these ranks already") as raised:
        hvd_core.run(_twice, num_proc=2)
    assert isinstance(raised.value.__cause__, InvalidArgument)
