"""`join` of real processes on two hosts: the ranks have 2, 5 and 3 batches in an epoch."""

from __future__ import annotations

import pytest
import torch

import hvd_core
import hvd_core.torch as hvd

pytestmark = pytest.mark.timeout(90)

_BATCHES = [2, 5, 3]


def _train() -> list[float]:
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    model = torch.nn.Linear(300, 200, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    expected = 0.0
    for _ in range(3):
        for step in range(_BATCHES[rank]):
            optimizer.zero_grad()
            (model.weight * (rank + 1)).sum().backward()
            optimizer.step()
            there = sum(r + 1 for r in range(size) if step < _BATCHES[r])
            total = hvd.allreduce(torch.ones(50_000), op=hvd.Sum)
            assert total.unique().tolist() == [sum(step < n for n in _BATCHES)]
            assert hvd.allgather(torch.tensor([rank])).tolist() == [
                r for r in range(size) if step < _BATCHES[r]
            ]
            expected -= there / size
            assert torch.allclose(model.weight, torch.tensor(expected))
        assert hvd.join() == 1
        hvd.broadcast_parameters(model.state_dict(), root_rank=1)
        expected = model.weight[0, 0].item()
    hvd.shutdown()
    return [round(expected, 3)]


@pytest.mark.parametrize("hosts", [1, 2])
def test_an_epoch_ends_when_the_last_rank_has_no_more_data(hosts: int) -> None:
    def env(rank: int) -> dict[str, str]:
        return {"HVD_HOST_ID": f"host{rank * hosts // 3}"}

    results = hvd_core.run(_train, num_proc=3, env=env, timeout_s=60)
    # Steps with 1 + 2 + 3, 1 + 2 + 3, 2 + 3, 2 and 2.
    assert results == [[round(-3 * 21 / 3, 3)]] * 3
