"""`join` over ranks that are threads: what the others' collectives give meanwhile."""

from __future__ import annotations

import resource

import pytest
import torch

import hvd_core.torch as hvd
from hvd_core import basics
from hvd_core.errors import InvalidArgument, MismatchError
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


@pytest.mark.parametrize("late", [0, 2])
def test_a_rank_joins_before_its_first_step(late: int) -> None:
    """The others make no plan without it, and all make one in the second epoch."""
    size = 3

    def body(rank: int) -> None:
        weight = torch.nn.Parameter(torch.zeros(4))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
        for epoch in range(2):
            there = [r for r in range(size) if epoch or r != late]
            for _ in range(3 if rank in there else 0):
                before = weight.detach().clone()
                optimizer.zero_grad()
                (weight * (rank + 1)).sum().backward()
                optimizer.step()
                assert torch.allclose(before - weight, torch.tensor(sum(r + 1.0 for r in there) / size))
                assert (optimizer._hvd.plan_in(basics.default_group()) is not None) == (epoch == 1)
            hvd.join()
            hvd.broadcast_parameters([("weight", weight)], root_rank=1)

    run_ranks(size, body)


def test_parameters_change_while_a_rank_has_joined() -> None:
    size = 3

    def body(rank: int) -> None:
        weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weights[:1], lr=1.0))

        def step(used: list[torch.nn.Parameter], there: list[int]) -> None:
            optimizer.zero_grad()
            sum((w * (rank + 1)).sum() for w in used).backward()
            optimizer.step()
            for w in used:
                assert torch.allclose(w.grad, torch.tensor(sum(r + 1.0 for r in there) / size))

        for _ in range(2):
            step(weights[:1], [0, 1, 2])
        if rank:
            optimizer.add_param_group({"params": weights[1:]})
            for _ in range(3):
                step(weights, [1, 2])
        hvd.join()
        if not rank:
            optimizer.add_param_group({"params": weights[1:]})
        for _ in range(3):
            step(weights, [0, 1, 2])

    run_ranks(size, body)


def test_a_sharded_optimizer_refuses_to_step_without_a_rank() -> None:
    def body(rank: int) -> None:
        weight = torch.nn.Parameter(torch.zeros(64))
        optimizer = hvd.ShardedOptimizer(torch.optim.SGD([weight], lr=1.0))
        if rank:
            weight.sum().backward()
            with pytest.raises(InvalidArgument, match="and one has joined"):
                optimizer.step()
        hvd.join()

    run_ranks(2, body)


def test_a_rank_joins_before_it_has_used_a_layer_of_the_others() -> None:
    def body(rank: int) -> None:
        torch.manual_seed(rank)
        norm = hvd.SyncBatchNorm(3)
        for epoch in range(2):
            if rank or epoch:
                norm(torch.randn(4, 3)).sum().backward()
            hvd.join()

    run_ranks(2, body)


def test_a_group_of_a_large_tensor_and_many_small_ones_takes_no_more_of_a_rank_that_has_joined() -> None:
    """2 x 16 MiB there, and not for each member."""
    names, before = [f"small {i}" for i in range(200)], _most_memory_mib()

    def body(rank: int) -> None:
        if rank:
            tensors = [torch.ones(4 << 20), *(torch.ones(3, dtype=torch.float64) for _ in names)]
            for out in hvd.grouped_allreduce(tensors, op=hvd.Sum, name="group"):
                assert out.unique().tolist() == [1.0]
        hvd.join()

    run_ranks(2, body)
    assert _most_memory_mib() - before < 500


def _most_memory_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
