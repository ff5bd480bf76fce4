"""`join` over ranks that are threads: what the others' collectives give meanwhile."""

from __future__ import annotations

import pytest
import torch

import hvd_core.torch as hvd
from hvd_core.errors import MismatchError
from tests.unit.thread_ranks import run_ranks

pytestmark = pytest.mark.timeout(60)


def test_ranks_with_less_data_join_and_the_others_go_on() -> None:
    """Rank r makes 3 + 2 r steps; names that all ranks know, and others."""
    size = 4
    steps = [3 + 2 * rank for rank in range(size)]

    def body(rank: int) -> None:
        for epoch in range(2):
            for step in range(steps[rank]):
                there = [r for r in range(size) if step < steps[r]]
                ones = torch.full((5,), rank + 1.0)
                total = float(sum(r + 1 for r in there))
                assert hvd.allreduce(ones, op=hvd.Sum, name="known").tolist() == [total] * 5
                assert hvd.allreduce(ones, name=f"step {epoch} {step}").tolist() == [total / size] * 5
                inplace = ones.clone()
                pair = hvd.grouped_allreduce_([inplace, torch.ones(2)], op=hvd.Sum, name="group")
                assert [out[0].item() for out in pair] == [total, len(there)]
                gathered = hvd.allgather(torch.full((rank + 1, 2), rank), name="rows")
                assert gathered[:, 1].tolist() == [r for r in there for _ in range(r + 1)]
                sent = hvd.broadcast(torch.tensor([rank, step]), size - 1, name="last")
                assert sent.tolist() == [size - 1, step]
                rows = hvd.reducescatter(torch.ones(size, 3), op=hvd.Sum, name="mine")
                assert rows.tolist() == [[len(there)] * 3]
                came = hvd.alltoall(torch.full((size,), rank), name="each")
                assert came.tolist() == there
                assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [len(there)] * 3
                hvd.barrier()
            if rank == size - 1:
                with pytest.raises(MismatchError, match="b: its root, rank 1, has joined"):
                    hvd.broadcast(torch.ones(1), 1, name="b")
            assert hvd.join() == size - 1
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="known").item() == size

    run_ranks(size, body)


def test_what_was_pending_when_the_last_one_joins_completes() -> None:
    def body(rank: int) -> int:
        if rank == 2:
            return hvd.join(-1)
        handle = hvd.allreduce_async(torch.ones(3), op=hvd.Sum, name=f"of {rank}")
        last = hvd.join(hvd.local_rank())
        assert hvd.synchronize(handle).tolist() == [1.0] * 3
        return last

    assert run_ranks(3, body) in ([rank] * 3 for rank in range(3))


def test_one_rank_joins_itself() -> None:
    def body(rank: int) -> None:
        assert hvd.join() == rank == 0

    run_ranks(1, body)


def test_optimizers_of_ranks_with_less_data() -> None:
    """Two optimizers with a plan each, and an epoch in which a rank has nothing to do."""
    size = 3
    epochs = [[3, 3, 3], [1, 4, 6], [5, 0, 2]]

    def body(rank: int) -> None:
        weights = [torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.zeros(2))]
        optimizers = [hvd.DistributedOptimizer(torch.optim.SGD([w], lr=1.0)) for w in weights]
        for steps in epochs:
            expected = [w.detach().clone() for w in weights]
            for step in range(steps[rank]):
                there = [r for r in range(size) if step < steps[r]]
                for i in (0, 1):
                    optimizers[i].zero_grad()
                    (weights[i] * (rank + 1) * (i + 1)).sum().backward()
                    optimizers[i].step()
                for i, value in enumerate(expected):
                    value -= (i + 1) * sum(r + 1 for r in there) / size
                    assert torch.allclose(weights[i], value)
            last = hvd.join()
            assert last == hvd.broadcast_object(last, 0)
            hvd.broadcast_parameters(enumerate(weights), root_rank=steps.index(max(steps)))

    run_ranks(size, body)
