"""hvd_core.torch's alltoall, reducescatter and sparse sums over ranks that are threads. Oracles: torch on the
inputs of all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hvd_core.torch as hvd
from hvd_core.errors import InvalidArgument, MismatchError
from tests.unit.test_torch_ops import rank_tensor
from tests.unit.thread_ranks import calls, run_ranks

pytestmark = pytest.mark.timeout(60)

DTYPES = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64]


def _splits(size: int) -> list[list[int]]:
    """By sender; rank 1 sends nothing, and rank 0 gets nothing from the last."""
    return [[0 if r == 1 else (r + to) % 3 for to in range(size)] for r in range(size)]


def _parts(rank: int, size: int, whole: list[Any]) -> list[Any]:
    """What of the senders' tensors is for `rank`."""
    return [whole[s].split(_splits(size)[s])[rank] for s in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_alltoall(size: int) -> None:
    def body(rank: int) -> None:
        mine = _splits(size)[rank]
        for dtype in DTYPES:
            whole = [rank_tensor(s, (sum(_splits(size)[s]), 2), dtype) for s in range(size)]
            kept = whole[rank].clone()
            expected = torch.cat(_parts(rank, size, whole))
            for splits in (mine, torch.tensor(mine, dtype=torch.int32), torch.tensor(mine)):
                came, rows = hvd.alltoall(whole[rank], splits)
                assert torch.equal(came, expected)
                assert came.dtype == dtype
                assert rows.dtype == torch.int32
                assert rows.tolist() == [_splits(size)[s][rank] for s in range(size)]
            assert torch.equal(whole[rank], kept)
            wide = [rank_tensor(s, (2, sum(_splits(size)[s])), dtype).t() for s in range(size)]
            handle = hvd.alltoall_async(wide[rank], mine, name=f"wide.{dtype}")
            assert torch.equal(hvd.synchronize(handle)[0], torch.cat(_parts(rank, size, wide)))
            equal = [rank_tensor(s, (2 * size,), dtype) for s in range(size)]
            came = hvd.alltoall(equal[rank])
            assert torch.equal(came, torch.cat([part[2 * rank : 2 * rank + 2] for part in equal]))
            assert torch.equal(hvd.synchronize(hvd.alltoall_async(equal[rank])), came)

    run_ranks(size, body)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_gradients_of_an_alltoall_go_back_where_the_rows_came_from(size: int) -> None:
    def body(rank: int) -> None:
        mine = torch.ones(sum(_splits(size)[rank]), 2, requires_grad=True)
        came, rows = hvd.alltoall(mine, _splits(size)[rank])
        assert not rows.requires_grad
        came.backward(torch.full_like(came, float(rank + 1)))
        expected = torch.repeat_interleave(torch.arange(1.0, size + 1), torch.tensor(_splits(size)[rank]))
        assert mine.grad is not None
        assert torch.equal(mine.grad, expected[:, None].expand(-1, 2))
        again = torch.arange(float(size), requires_grad=True)
        hvd.alltoall(again, name="equal").sum().mul(rank + 1.0).backward()
        assert again.grad is not None
        assert again.grad.tolist() == [to + 1.0 for to in range(size)]
        twice = torch.arange(float(size), requires_grad=True)
        (grad,) = torch.autograd.grad(hvd.alltoall(twice).pow(3).sum(), twice, create_graph=True)
        grad.sum().backward()
        assert torch.equal(twice.grad, 6 * twice.detach())

    run_ranks(size, body)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product])
def test_reducescatter_gives_rows_of_the_allreduce(size: int, op: Any) -> None:
    def body(rank: int) -> None:
        for dtype in (torch.uint8, torch.int32, torch.float16, torch.bfloat16, torch.float32, torch.float64):
            for rows in (0, 1, 2 * size, 2 * size + size // 2, 5001):
                tensor = rank_tensor(rank, (rows, 3), dtype)
                kept = tensor.clone()
                each = [len(part) for part in torch.arange(rows).tensor_split(size)]
                expected = hvd.allreduce(tensor, op=op).split(each)[rank]
                for form in (tensor, tensor.t().contiguous().t()):
                    assert torch.equal(hvd.reducescatter(form, op=op), expected)
                    assert torch.equal(hvd.synchronize(hvd.reducescatter_async(form, op=op)), expected)
                assert torch.equal(tensor, kept)
        one, two = rank_tensor(rank, (size, 2)), rank_tensor(rank, (2 * size + 1,), torch.int64)
        grouped = hvd.grouped_reducescatter([one, two], op=op)
        assert torch.equal(grouped[0], hvd.reducescatter(one, op=op))
        assert torch.equal(grouped[1], hvd.reducescatter(two, op=op))
        later = hvd.synchronize(hvd.grouped_reducescatter_async([one.t(), two], name="g", op=op))
        assert torch.equal(later[0], hvd.reducescatter(one.t(), op=op))
        assert hvd.grouped_reducescatter([], op=op) == []

    run_ranks(size, body)


def test_reducescatter_scales_compresses_and_averages_by_default() -> None:
    def body(rank: int) -> None:
        ones = torch.ones(4) * (rank + 1)
        assert hvd.reducescatter(ones).tolist() == [1.5, 1.5]
        scaled = hvd.reducescatter(ones, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5)
        assert scaled.tolist() == [3.0, 3.0]
        out = hvd.reducescatter(ones, compression=hvd.Compression.bf16, op=hvd.Sum)
        assert (out.dtype, out.tolist()) == (torch.float32, [3.0, 3.0])
        (out,) = hvd.grouped_reducescatter([ones], compression=hvd.Compression.fp16, op=hvd.Sum)
        assert (out.dtype, out.tolist()) == (torch.float32, [3.0, 3.0])
        assert calls()[0] == "reducescatter.noname.0"

    run_ranks(2, body)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_gradients_of_a_reducescatter_are_joined(size: int, op: Any) -> None:
    factor = 6.0 * (size if op is hvd.Sum else 1)

    def body(rank: int) -> None:
        rows = 2 * size + size - 1
        owner = torch.arange(rows).tensor_split(size)
        expected = torch.cat([torch.full((len(part), 2), factor * (r + 1)) for r, part in enumerate(owner)])
        scales = {"prescale_factor": 2.0, "postscale_factor": 3.0}
        tensor = torch.ones(rows, 2, requires_grad=True)
        out = hvd.reducescatter(tensor, op=op, **scales)
        grad = torch.full_like(out, rank + 1.0)
        out.backward(grad)
        assert torch.equal(tensor.grad, expected)
        assert (grad == rank + 1.0).all(), "Horovod scales it in place"
        pair = [torch.ones(rows, 2, requires_grad=True), torch.ones(rows, 2, requires_grad=True)]
        outs = hvd.grouped_reducescatter(pair, op=op, **scales)
        ((rank + 1.0) * (outs[0].sum() + 2 * outs[1].sum())).backward()
        assert torch.equal(pair[0].grad, expected)
        assert torch.equal(pair[1].grad, 2 * expected)

    run_ranks(size, body)


def _sparse(rank: int, dtype: Any = torch.float32) -> torch.Tensor:
    """Rank r has r entries, some twice."""
    at = torch.tensor([[3, 1, 3][:rank], [0, 2, 0][:rank]], dtype=torch.int64)
    values = torch.arange(5, 5 + 2 * rank, 2).to(dtype)
    return torch.sparse_coo_tensor(at, values, (4, 3), check_invariants=True)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_sparse_allreduce(size: int) -> None:
    def body(rank: int) -> None:
        for dtype in (torch.float32, torch.float64, torch.int64):
            total = sum(_sparse(r, dtype).to_dense() for r in range(size))
            later = hvd.sparse_allreduce_async(_sparse(rank, dtype), name=f"s.{dtype}", op=hvd.Sum)
            assert torch.equal(later().to_dense(), total)
            mean = hvd.sparse_allreduce(_sparse(rank, dtype))
            assert mean.layout is torch.sparse_coo
            assert mean.dtype == dtype
            rounding = None if dtype.is_floating_point else "trunc"
            assert torch.allclose(mean.to_dense(), torch.div(total, size, rounding_mode=rounding))
        rows = torch.sparse_coo_tensor([[rank]], torch.full((1, 2), 3.0), (size, 2), check_invariants=True)
        assert hvd.sparse_allreduce(rows, op=hvd.Sum).to_dense().tolist() == [[3.0, 3.0]] * size

    run_ranks(size, body)


def test_bad_arguments_are_value_errors_before_anything_is_sent() -> None:
    rows = torch.ones(3, 2)
    bad: list[tuple[Any, str]] = [
        (lambda: hvd.alltoall(rows, name="r"), "r: 3 rows cannot be split equally among 2 ranks"),
        (lambda: hvd.alltoall(rows, [1, 1, 1], name="r"), "r: there are 3 splits for 2 ranks"),
        (lambda: hvd.alltoall(rows, []), "there are no splits"),
        (lambda: hvd.alltoall(rows, [2, 2], name="r"), "r: the splits add up to more than its 3 rows"),
        (lambda: hvd.alltoall(rows, [1, 1]), "leave 1 of its 3 rows"),
        (lambda: hvd.alltoall(rows, [4, -1]), "more than its 3 rows"),
        (lambda: hvd.alltoall(rows, [-1, 4]), "is -1"),
        (lambda: hvd.alltoall(rows, torch.tensor([1.0, 2.0])), "torch.float32"),
        (lambda: hvd.alltoall(rows, torch.ones(1, 2, dtype=torch.int32)), "2-d"),
        (lambda: hvd.alltoall(torch.tensor(1.0)), "0-d"),
        (lambda: hvd.alltoall([1.0]), "got list"),
        (lambda: hvd.reducescatter(torch.tensor(1.0), name="r"), "r: a 0-d tensor"),
        (lambda: hvd.grouped_reducescatter([rows, torch.tensor(1.0)]), "0-d"),
        (lambda: hvd.reducescatter(rows, op=hvd.Adasum), "Adasum"),
        (lambda: hvd.reducescatter(rows.requires_grad_(), op=hvd.Max), "Max has no gradient"),
        (lambda: hvd.reducescatter(torch.ones(2, dtype=torch.complex64)), "complex64"),
        (lambda: hvd.reducescatter([1.0]), "got list"),
        (lambda: hvd.sparse_allreduce(rows), "to_sparse"),
        (lambda: hvd.sparse_allreduce(rows.detach().to_sparse(), op=hvd.Max), "not Max"),
    ]

    def body(rank: int) -> None:
        if rank == 0:
            for call, text in bad:
                with pytest.raises(ValueError, match=text):
                    call()
            # What Horovod finds between the ranks.
            for call in (
                lambda: hvd.reducescatter(torch.tensor(1.0)),
                lambda: hvd.reducescatter(rows, op=hvd.Adasum),
            ):
                with pytest.raises(hvd.HorovodInternalError) as raised:
                    call()
                assert isinstance(raised.value, InvalidArgument)
        hvd.barrier()
        with pytest.raises(MismatchError, match=r"a: rank 1 has shape \(2, 3\), rank 0 has \(2, 2\)"):
            hvd.alltoall(torch.ones(2, 2 + rank), name="a")
        with pytest.raises(MismatchError, match=r"r: rank 1 has shape \(3,\), rank 0 has \(2,\)"):
            hvd.reducescatter(torch.ones(2 + rank), name="r")
        with pytest.raises(MismatchError, match="r: rank 1 has reduction sum, rank 0 has average"):
            hvd.reducescatter(torch.ones(2), name="r", op=hvd.Sum if rank else hvd.Average)
        with pytest.raises(MismatchError, match=r"rank 1 has shape \(0, 5\), rank 0 has \(0, 4\)"):
            hvd.sparse_allreduce(torch.ones(4 + rank).to_sparse(), name="s")
        assert hvd.reducescatter(torch.ones(2), name="r").tolist() == [1.0]

    run_ranks(2, body)
