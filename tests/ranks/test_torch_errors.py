"""What ranks are told when they differ, what they can ask; on two hosts, of two ranks and one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hvd_core
import hvd_core.torch as hvd
from hvd_core import basics
from hvd_core.errors import HvdError, InvalidArgument
from hvd_core.world import World, current

pytestmark = pytest.mark.timeout(90)

HOSTS = ["a", "a", "b"]
ODD = 2  # the rank that differs


def ones(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch.ones(*shape, dtype=dtype)


#: What each rank calls, given whether it is the odd one; and what all are told.
MISMATCHES: list[tuple[Callable[[bool], Any], str]] = [
    (lambda odd: hvd.allreduce(ones(2 + odd), name="x"), r"x: rank 2 has shape \(3,\), rank 0 has \(2,\)"),
    (
        lambda odd: hvd.allreduce(ones(2, dtype=torch.bfloat16 if odd else torch.float32), name="x"),
        "x: rank 2 has dtype bfloat16, rank 0 has float32",
    ),
    (
        lambda odd: hvd.allreduce(ones(2), op=hvd.Max if odd else hvd.Sum, name="x"),
        "x: rank 2 has reduction max, rank 0 has sum",
    ),
    (
        lambda odd: hvd.allreduce(ones(2), prescale_factor=2.0 if odd else 1.0, name="x"),
        "x: rank 2 has prescale 2, rank 0 has 1",
    ),
    (
        lambda odd: hvd.allreduce(ones(2), postscale_factor=0.5 if odd else 1.0, name="x"),
        "x: rank 2 has postscale 0.5, rank 0 has 1",
    ),
    (lambda odd: hvd.broadcast(ones(2), 1 if odd else 0, name="x"), "x: rank 2 has root 1, rank 0 has 0"),
    (
        lambda odd: hvd.broadcast(ones(2), 0, name="x") if odd else hvd.allreduce(ones(2), name="x"),
        "x: rank 2 has operation broadcast, rank 0 has allreduce",
    ),
    (
        lambda odd: hvd.allgather(ones(2, 3 + odd), name="x"),
        r"x: rank 2 has shape \(2, 4\), rank 0 has \(2, 3\)",
    ),
    (
        lambda odd: hvd.grouped_allreduce([ones(2)] * (2 + odd), name="x"),
        "x: rank 2 has a number of tensors of 3, rank 0 has 2",
    ),
]


def mismatches() -> None:
    for call, text in MISMATCHES:
        with pytest.raises(RuntimeError, match=text) as caught:
            call(hvd.rank() == ODD)
        assert type(caught.value) is hvd.MismatchError
        assert isinstance(caught.value, hvd.HorovodInternalError)
        assert not caught.value.retryable
        assert hvd.allreduce(ones(2), op=hvd.Sum, name="x").tolist() == [3.0, 3.0]  # all live on


def names_in_flight() -> None:
    """One name twice is this rank's error; what others call meanwhile goes on."""
    rank = hvd.rank()
    if rank == 0:
        for start, again in [
            (
                lambda: hvd.allreduce_async(ones(2), name="twice"),
                lambda: hvd.allreduce(ones(2), name="twice"),
            ),
            (lambda: hvd.allgather_async(ones(2), name="rows"), lambda: hvd.allgather(ones(2), name="rows")),
            (lambda: hvd.broadcast_async(ones(2), 0, name="b"), lambda: hvd.broadcast(ones(2), 0, name="b")),
        ]:
            start()
            with pytest.raises(ValueError, match="a name can be pending once"):
                again()
    hvd.barrier()  # completes although rank 0 still waits for the three
    assert hvd.allreduce(ones(1) * rank, op=hvd.Max, name="other").item() == 2
    if rank > 0:
        handles = [
            hvd.allreduce_async(ones(2), name="twice"),
            hvd.allgather_async(ones(2), name="rows"),
            hvd.broadcast_async(ones(2), 0, name="b"),
        ]
        assert [hvd.synchronize(handle).tolist() for handle in handles] == [[1.0] * 2, [1.0] * 6, [1.0] * 2]


def sparse_sums() -> None:
    """Of ranks with many, one and no entries."""
    rank = hvd.rank()
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int64):
        dense = torch.zeros(5, 2, dtype=dtype)
        entries = [(4, [8.0, 1.0]), (0, [2.0, 4.0]), (4, [1.0, 6.0])]
        if rank < 2:
            index = torch.tensor([[row for row, _ in entries[rank:]]])
            values = torch.tensor([v for _, v in entries[rank:]], dtype=dtype)
            mine = torch.sparse_coo_tensor(index, values, dense.shape)
        else:
            mine = torch.sparse_coo_tensor(torch.empty(1, 0, dtype=torch.int64), dense[:0], dense.shape)
        for op, divisor in ((hvd.Sum, 1), (hvd.Average, 3)):
            total = hvd.sparse_allreduce_async(mine, name="sparse", op=op)()
            assert total.is_coalesced() and total.indices().tolist() == [[0, 4]]
            sums = torch.tensor([[4.0, 8.0], [10.0, 13.0]], dtype=torch.float64)
            assert torch.equal(total.values(), (sums / divisor).to(dtype)), (dtype, op)  # int64: truncated
    with pytest.raises(hvd.MismatchError, match=r"rank 2 has shape \(0, 5, 3\), rank 0 has \(0, 5, 2\)"):
        hvd.sparse_allreduce(torch.zeros(5, 3 if rank == ODD else 2).to_sparse(), name="other")
    with pytest.raises(InvalidArgument, match="Average or Sum, not Max"):
        hvd.sparse_allreduce_async(mine, name="sparse", op=hvd.Max)
    with pytest.raises(InvalidArgument, match="expected a sparse COO tensor"):
        hvd.sparse_allreduce_async(ones(2), name="sparse", op=hvd.Sum)


def questions() -> str:
    assert not hvd.is_homogeneous()
    assert not any((hvd.mpi_built(), hvd.mpi_enabled(), hvd.mpi_threads_supported(), hvd.gloo_built()))
    assert not any((hvd.gloo_enabled(), hvd.nccl_built(), hvd.ccl_built(), hvd.ddl_built(), hvd.cuda_built()))
    assert not hvd.rocm_built()
    return hvd.summary()


def on_rank() -> str:
    with pytest.raises(HvdError, match=r"hvd\.init"):
        hvd.is_homogeneous()
    torch.set_num_threads(1 + current().rank)
    hvd.init()
    mismatches()
    names_in_flight()
    sparse_sums()
    return questions()


def test_ranks_that_differ_are_told_and_ranks_know_where_all_are() -> None:
    texts = hvd_core.run(on_rank, num_proc=3, env=lambda rank: {"HVD_HOST_ID": HOSTS[rank]})
    assert texts[0] == texts[1] == texts[2]
    first, *ranks, within, between = texts[0].splitlines()
    assert first == "3 ranks on 2 hosts: 2 + 1"
    for rank, line in enumerate(ranks):
        assert line.startswith(f"rank {rank}: host {rank // 2} (")
        assert f"local rank {rank % 2}, pid " in line
        assert line.endswith(f"threads {rank + 1}")
    assert "shared memory" in within and "TCP, ring_streams=" in between and "fp32" in between


def h9_bytes() -> int:
    """What an embedding sends whose batch has each of 500 words a hundred times."""
    hvd.init()
    table = torch.nn.Embedding(100_000, 16, sparse=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=0.1))
    words = torch.arange(500).repeat(100) * 7 + hvd.rank()
    for _ in range(2):
        before = basics.default_group().stats()["nbytes"]
        optimizer.zero_grad()
        table(words).sum().backward()
        optimizer.step()
    return int(basics.default_group().stats()["nbytes"] - before)


def test_a_sparse_gradient_sends_each_row_once() -> None:
    for nbytes in hvd_core.run(h9_bytes, num_proc=2):
        assert 500 * 16 * 4 < nbytes <= 500 * 16 * 4 * 1.2


def test_alone() -> None:
    hvd.init()
    try:
        assert hvd.is_homogeneous()
        assert hvd.summary().splitlines()[-1] == "one rank: nothing to send"
    finally:
        hvd.shutdown()
    with pytest.raises(HvdError, match=r"hvd\.init"):
        hvd.summary()


def test_hosts_are_counted_by_their_ranks() -> None:
    endpoints = tuple(f"hvd1;host={h};unix={i}" for i, h in enumerate("xxyz"))
    assert World(size=4, endpoints=endpoints).ranks_by_host() == [2, 1, 1]
    assert World().ranks_by_host() == [1]
