"""Process sets over ranks that are threads: who takes part, how ranks and names count, and how sets end."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hvd_core.torch as hvd
from hvd_core import basics
from hvd_core.errors import GroupClosed, InvalidArgument, MismatchError
from tests.unit.thread_ranks import run_ranks

pytestmark = pytest.mark.timeout(60)


def _all_collectives(ranks: list[int], process_set: Any, mine: int) -> None:
    """Among the ranks of a set, without names; rank r has r + 1."""
    values = [torch.full((len(ranks) * 2,), r + 1.0) for r in ranks]
    own, place = values[ranks.index(mine)], ranks.index(mine)
    total = torch.stack(values).sum(0)
    assert torch.equal(hvd.allreduce(own, op=hvd.Sum, process_set=process_set), total)
    assert torch.equal(hvd.allreduce(own, process_set=process_set), total / len(ranks))
    grouped = hvd.grouped_allreduce([own, own], op=hvd.Sum, process_set=process_set)
    assert all(torch.equal(out, total) for out in grouped)
    assert torch.equal(hvd.allgather(own, process_set=process_set), torch.cat(values))
    assert torch.equal(
        hvd.alltoall(own, process_set=process_set), torch.tensor(ranks).repeat_interleave(2) + 1
    )
    rows = hvd.reducescatter(own, op=hvd.Sum, process_set=process_set)
    assert torch.equal(rows, total[2 * place : 2 * place + 2])
    for root in ranks:  # a rank of the whole job
        assert torch.equal(
            hvd.broadcast(own, root, process_set=process_set), torch.full_like(own, root + 1.0)
        )
        assert hvd.broadcast_object(f"of {mine}", root, process_set=process_set) == f"of {root}"
    assert hvd.allgather_object(mine, process_set=process_set) == ranks
    entry = torch.sparse_coo_tensor([[0]], [mine + 1.0], (2,), check_invariants=True)
    summed = hvd.sparse_allreduce(entry, op=hvd.Sum, process_set=process_set)
    assert summed.to_dense().tolist() == [sum(ranks) + len(ranks), 0]
    weight = own.clone().requires_grad_()
    hvd.allreduce(weight, op=hvd.Sum, process_set=process_set).sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full_like(own, len(ranks)))
    hvd.barrier(process_set=process_set)


def test_collectives_among_some_of_the_ranks() -> None:
    def body(rank: int) -> None:
        sets = [hvd.add_process_set(ranks) for ranks in ([3, 0], hvd.ProcessSet([1, 2, 3]), [2])]
        assert [s.process_set_id for s in sets] == [1, 2, 3]
        for process_set in sets:
            ranks = process_set.ranks
            assert process_set.size() == len(ranks)
            assert process_set.included() == (rank in ranks)
            assert process_set.rank() == (ranks.index(rank) if rank in ranks else None)
            if rank in ranks:
                _all_collectives(ranks, process_set, rank)
            else:
                with pytest.raises(InvalidArgument, match=rf"not in ProcessSet\(\[{ranks[0]}"):
                    hvd.allreduce(torch.ones(2), process_set=process_set)
            # Who made more calls in the set has the same numbers for calls of all ranks.
            _all_collectives([0, 1, 2, 3], hvd.global_process_set, rank)
        for process_set in sets:
            assert hvd.remove_process_set(process_set)
            assert process_set.process_set_id is process_set.included() is process_set.size() is None
            assert not hvd.remove_process_set(process_set)
            with pytest.raises(InvalidArgument, match="add_process_set"):
                hvd.allreduce(torch.ones(2), process_set=process_set)
        again = hvd.add_process_set(sets[0])
        assert again is sets[0]
        assert again.process_set_id == 4
        if rank in again.ranks:
            _all_collectives(again.ranks, again, rank)
        assert not hvd.remove_process_set(hvd.global_process_set)

    run_ranks(4, body)


def test_an_optimizer_reduces_among_the_ranks_of_its_set() -> None:
    def body(rank: int) -> None:
        process_set = hvd.add_process_set([0, 2])
        weight = torch.nn.Parameter(torch.zeros(3))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), process_set=process_set)
        for step in (1, 2):
            optimizer.zero_grad()
            (weight * (rank + 1) ** 2).sum().backward()
            optimizer.step()
            assert weight.tolist() == [-step * (4.0 if rank == 1 else 5.0)] * 3

    run_ranks(3, body)


def test_a_mismatch_in_a_set_says_whose_ranks_are_meant() -> None:
    def body(rank: int) -> None:
        process_set = hvd.add_process_set([1, 2])
        if rank == 0:
            return
        text = r"x: rank 1 has shape \(4,\), rank 0 has \(3,\) .*counted from 0: they are 1, 2 of all"
        with pytest.raises(MismatchError, match=text):
            hvd.allreduce(torch.ones(2 + rank), name="x", process_set=process_set)
        with pytest.raises(InvalidArgument, match="root_rank=0 is not in ProcessSet"):
            hvd.broadcast(torch.ones(2), 0, process_set=process_set)

    run_ranks(3, body)


def test_sets_that_cannot_be_are_refused_and_nothing_else_happens() -> None:
    def body(rank: int) -> None:
        for ranks, text in (
            ([], "one rank or more"),
            ([1, 1], "each once"),
            ([0.5], "list of ranks"),
            (7, "list of ranks"),
            ([0, 9], "9 is not a rank, there are 3"),
            ([0, 1, 2], "use global_process_set"),
        ):
            with pytest.raises(ValueError, match=text):
                hvd.add_process_set(ranks)  # type: ignore[arg-type]
        kept = hvd.add_process_set([0, 1])
        with pytest.raises(ValueError, match="use that one"):
            hvd.add_process_set([1, 0])
        with pytest.raises(MismatchError, match=r"rank 2 has the ranks \[1, 2\], rank 0 has \[0, 2\]"):
            hvd.add_process_set([1, 2] if rank == 2 else [0, 2])
        assert hvd.add_process_set([0, 2]).process_set_id == 2
        assert kept.process_set_id == 1

    run_ranks(3, body)


def test_what_is_pending_in_a_set_ends_with_it() -> None:
    def body(rank: int) -> None:
        process_set = hvd.add_process_set([0, 1])
        handle = hvd.allreduce_async(torch.ones(2), process_set=process_set) if rank == 0 else None
        assert hvd.remove_process_set(process_set)
        if handle is not None:
            with pytest.raises(GroupClosed):
                hvd.synchronize(handle)
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 3

    run_ranks(3, body)


def test_one_rank_has_sets_of_itself_only() -> None:
    hvd.init(process_sets="dynamic")
    try:
        with pytest.raises(ValueError, match="use global_process_set"):
            hvd.add_process_set([0])
        with pytest.raises(ValueError, match="process_sets='static'"):
            basics.init(process_sets="static")
    finally:
        hvd.shutdown()
