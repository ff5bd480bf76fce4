"""hvd_core.torch collectives, objects and parameters over ranks that are threads. Oracles: torch on the
stacked inputs."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch

import hvd_core.torch as hvd
from hvd_core import basics, objects
from hvd_core.errors import InvalidArgument, MismatchError, NotInitialized, NotPicklable
from tests.unit.thread_ranks import calls, run_ranks

pytestmark = pytest.mark.timeout(60)


def rank_tensor(rank: int, shape: tuple[int, ...] = (3, 4), dtype: Any = torch.float64) -> Any:
    return (torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape) * (rank + 1) - 5).to(dtype)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product])
def test_allreduce_forms_agree_with_torch(size: int, op: Any) -> None:
    stacked = torch.stack([rank_tensor(r) for r in range(size)])
    expected = {
        hvd.Average: stacked.mean(0),
        hvd.Sum: stacked.sum(0),
        hvd.Min: stacked.amin(0),
        hvd.Max: stacked.amax(0),
        hvd.Product: stacked.prod(0),
    }[op]

    def body(rank: int) -> None:
        mine = rank_tensor(rank)
        kept = mine.clone()
        assert torch.allclose(hvd.allreduce(mine, op=op), expected)
        assert torch.allclose(hvd.synchronize(hvd.allreduce_async(mine, op=op)), expected)
        assert torch.allclose(hvd.allreduce(mine.t(), op=op), expected.t())
        assert torch.equal(mine, kept)
        a, b = hvd.grouped_allreduce([mine, mine.float()], op=op)
        assert torch.allclose(a, expected)
        assert torch.allclose(b, expected.float())
        assert b.dtype == torch.float32
        assert hvd.allreduce_(mine, op=op) is mine
        assert torch.allclose(mine, expected)
        pair = [rank_tensor(rank), rank_tensor(rank)]
        assert hvd.grouped_allreduce_(pair, op=op)[1] is pair[1]
        assert torch.allclose(pair[1], expected)

    run_ranks(size, body)


def test_shapes_names_scales_and_compression() -> None:
    def body(rank: int) -> None:
        assert hvd.allreduce(torch.tensor(float(rank)), op=hvd.Sum).shape == ()
        assert hvd.allreduce(torch.zeros(0, 3)).shape == (0, 3)
        assert hvd.grouped_allreduce([]) == []
        assert hvd.grouped_allreduce_([]) == []
        assert hvd.allreduce(
            torch.ones(2), op=hvd.Sum, prescale_factor=3.0, postscale_factor=0.5
        ).tolist() == [3.0, 3.0]
        assert hvd.allreduce(torch.tensor([3 + rank])).tolist() == [3]  # 7 / 2, truncated
        for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
            out = hvd.allreduce(torch.full((2,), 1.0 + rank), compression=compression)
            assert out.dtype == torch.float32
            assert out.tolist() == [1.5, 1.5]
            assert hvd.allreduce(torch.tensor([7]), compression=compression).tolist() == [7]
        first = hvd.allreduce_async(torch.ones(1), name="a" if rank else "b", op=hvd.Sum)
        second = hvd.allreduce_async(torch.ones(1) * 2, name="b" if rank else "a", op=hvd.Sum)
        assert hvd.synchronize(second).tolist() == hvd.synchronize(first).tolist() == [3.0]
        assert calls()[0] == "allreduce.noname.0"

    run_ranks(2, body)


def test_torchs_negative_bit_is_part_of_the_value() -> None:
    """Contiguous, and yet not what stands in its memory."""

    def negative() -> torch.Tensor:
        tensor = torch.tensor([1 + 2j]).conj().imag
        assert tensor.is_neg()
        assert tensor.is_contiguous()
        return tensor

    def rank_main(rank: int) -> list[torch.Tensor]:
        in_place = negative()
        hvd.allreduce_(in_place, op=hvd.Max, name="in place")
        group, tensor = basics.default_group(), negative()
        with pytest.raises(InvalidArgument, match="straight: the array has torch's negative bit"):
            group.allreduce(tensor, name="straight")
        return [in_place.resolve_neg(), hvd.allreduce(negative(), op=hvd.Sum, name="copy")]

    for in_place, summed in run_ranks(2, rank_main):
        assert in_place.tolist() == [-2.0]
        assert summed.tolist() == [-4.0]


def test_average_is_deprecated() -> None:
    def body(rank: int) -> None:
        for call, expected in [
            (lambda: hvd.allreduce(torch.tensor([3.0]), average=False), [3.0]),
            (lambda: hvd.synchronize(hvd.allreduce_async(torch.tensor([3.0]), average=True)), [3.0]),
            (lambda: hvd.grouped_allreduce([torch.tensor([3.0])], average=True)[0], [3.0]),
        ]:
            with pytest.warns(DeprecationWarning, match="average=") as caught:
                assert call().tolist() == expected
            assert caught[0].filename == __file__

    run_ranks(1, body)  # warning filters belong to the process


INTS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", [torch.bool, *INTS, *FLOATS], ids=str)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_dtype_and_op(dtype: torch.dtype, size: int) -> None:
    """Oracle: sums in fp64, rounded once; exact in any order, as the values are small integers."""
    count = 1000
    generator = torch.Generator().manual_seed(7)
    inputs = [torch.randint(0, 4, (count,), generator=generator).to(dtype) for _ in range(size)]
    stacked = torch.stack(inputs).double()
    if dtype == torch.bool:
        expected = {hvd.Sum: stacked.amax(0), hvd.Max: stacked.amax(0)}
        expected |= {hvd.Min: stacked.amin(0), hvd.Product: stacked.amin(0)}
    else:
        expected = {hvd.Sum: stacked.sum(0), hvd.Max: stacked.amax(0), hvd.Min: stacked.amin(0)}
        expected |= {hvd.Product: stacked.prod(0), hvd.Average: stacked.sum(0) / size}
        if not dtype.is_floating_point:
            expected[hvd.Average] = expected[hvd.Average].trunc()

    def body(rank: int) -> None:
        for op, values in expected.items():
            out = hvd.allreduce(inputs[rank], op=op)
            assert out.dtype == dtype
            assert torch.equal(out, values.to(dtype)), op
            again = inputs[rank].clone()
            hvd.grouped_allreduce_([again, torch.zeros(2)], op=hvd.Sum if dtype == torch.bool else op)
        if dtype != torch.bool:
            out = hvd.allreduce(inputs[rank], op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
            scaled = [(t.double() * 0.5).trunc() if dtype in INTS else t.double() * 0.5 for t in inputs]
            total = torch.stack(scaled).sum(0) * 3.0
            assert torch.equal(out, total.to(dtype))

    run_ranks(size, body)


def test_gradients_are_those_of_horovod() -> None:
    def body(rank: int) -> None:
        x = torch.full((2, 3), 1.0, requires_grad=True)
        hvd.allreduce(x, op=hvd.Sum).sum().backward()
        assert x.grad.tolist() == [[2.0] * 3] * 2
        y = torch.full((2,), 1.0, requires_grad=True)
        (hvd.allreduce(y, postscale_factor=4.0) * (rank + 1)).sum().backward()
        assert y.grad.tolist() == [6.0, 6.0]  # 4 * (1 + 2) / 2
        a, b = (torch.ones(2, requires_grad=True) for _ in range(2))
        out_a, out_b, count = hvd.grouped_allreduce([a, b, torch.tensor([1])], op=hvd.Sum, name="group")
        (out_a * 2 + out_b * 3).sum().backward()
        assert (a.grad.tolist(), b.grad.tolist(), count.tolist()) == ([4.0, 4.0], [6.0, 6.0], [2])
        rows = torch.ones(rank + 1, 2, requires_grad=True)
        gathered = hvd.allgather(rows)
        assert gathered.shape == (3, 2)
        (gathered * torch.tensor([[0.0], [1.0], [2.0]]) * (rank + 1)).sum().backward()
        assert rows.grad.tolist() == (
            [[0.0] * 2] if rank == 0 else [[1.5] * 2, [3.0] * 2]
        )  # mean of (1, 2) times row
        root = torch.full((2,), float(rank), requires_grad=True)
        sent = hvd.broadcast(root, root_rank=1, name="params")
        assert sent.tolist() == [1.0, 1.0]
        (sent * (rank + 1)).sum().backward()
        assert root.grad.tolist() == ([0.0, 0.0] if rank == 0 else [1.5, 1.5])
        twice = torch.tensor([3.0], requires_grad=True)  # d²/dx² of (Σx)³ with 2 ranks: 6 (Σx) 2 · 2
        (first,) = torch.autograd.grad(
            hvd.allreduce(twice, op=hvd.Sum).pow(3).sum(), twice, create_graph=True
        )
        (second,) = torch.autograd.grad(first.sum(), twice)
        assert first.item() == 2 * 3 * 36
        assert second.item() == 2 * 6 * 6 * 2

    run_ranks(2, body)


def test_allgather_and_broadcast() -> None:
    dtypes = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
    dtypes += [torch.float16, torch.bfloat16, torch.float32, torch.float64]

    def body(rank: int) -> None:
        for dtype in dtypes:
            mine = rank_tensor(rank, (2 * rank, 3), dtype)  # rank 0 has no rows
            expected = torch.cat([rank_tensor(r, (2 * r, 3), dtype) for r in range(3)])
            got = hvd.allgather(mine)
            assert got.dtype == dtype
            assert torch.equal(got, expected)
            one, two = hvd.grouped_allgather([mine, mine[:, :1]])
            assert torch.equal(one, expected)
            assert torch.equal(two, expected[:, :1])
            values = rank_tensor(rank, (3, 2), dtype)
            assert torch.equal(hvd.broadcast(values, 2), rank_tensor(2, (3, 2), dtype))
            assert torch.equal(values, rank_tensor(rank, (3, 2), dtype))
            assert hvd.broadcast_(values, 1) is values
            assert torch.equal(values, rank_tensor(1, (3, 2), dtype))
        assert hvd.broadcast(torch.tensor(rank), 1).item() == 1

    run_ranks(3, body)


def test_handles() -> None:
    def body(rank: int) -> None:
        if rank == 0:
            handle = hvd.allreduce_async(torch.ones(2), name="x", op=hvd.Sum)
            assert isinstance(handle, int)
            assert not hvd.poll(handle)
            with pytest.raises(ValueError, match=r"x.* was submitted before"):
                hvd.allreduce_async(torch.ones(2), name="x")
        hvd.barrier()  # completes although x is pending
        if rank == 1:
            handle = hvd.allreduce_async(torch.ones(2), name="x", op=hvd.Sum)
        hvd.barrier()  # x may end after it
        while not hvd.poll(handle):
            os.sched_yield()
        assert hvd.synchronize(handle).tolist() == [2.0, 2.0]
        for use in (hvd.poll, hvd.synchronize):
            for bad in (handle, -1, "x"):
                with pytest.raises(ValueError, match="was never given out"):
                    use(bad)

    run_ranks(2, body)


def test_bad_arguments_are_value_errors_before_anything_is_sent() -> None:
    matrix = torch.ones(2, 3)
    bad: list[tuple[Any, str]] = [
        (lambda: hvd.allreduce_(matrix.t()), "contiguous"),
        (lambda: hvd.broadcast_(matrix.t(), 0), "contiguous"),
        (
            lambda: hvd.allreduce(torch.ones(2, dtype=torch.complex64), name="z"),
            "z: tensors of torch.complex64",
        ),
        (lambda: hvd.allreduce([1.0]), "expected a torch.Tensor, got list"),
        (lambda: hvd.allreduce(matrix.to_sparse()), "sparse"),
        (lambda: hvd.allreduce(matrix, average=True, op=hvd.Sum), "not both"),
        (lambda: hvd.allreduce(matrix, op=hvd.Adasum), "Adasum"),
        (lambda: hvd.allreduce(matrix, op=17), "17"),
        (lambda: hvd.allreduce(matrix, process_set="first two"), "process_set='first two' is no process set"),
        (lambda: hvd.allgather(torch.tensor(1.0)), "0-d"),
        (lambda: hvd.broadcast(matrix, 2), "root_rank=2 is not a rank"),
        (lambda: hvd.broadcast_object(1, -1), "root_rank=-1"),
        (lambda: hvd.broadcast_parameters(7, 0), "int"),
        (lambda: hvd.broadcast_parameters([("a", 1.0)], 0), "a is a float"),
        (lambda: hvd.broadcast_parameters([("a", matrix), ("a", matrix)], 0), "found twice: a"),
        (lambda: hvd.broadcast_parameters([3], 0), "pairs"),
        (lambda: hvd.broadcast_parameters({}, 9), "root_rank=9"),
    ]

    def body(rank: int) -> None:
        if rank == 0:
            for call, text in bad:
                with pytest.raises(ValueError, match=text):
                    call()
        assert calls() == []

    run_ranks(2, body)


def test_mismatch_reaches_all_ranks_and_the_group_lives_on() -> None:
    def body(rank: int) -> None:
        with pytest.raises(MismatchError, match="fc1"):
            hvd.allreduce(torch.ones(2 + rank), name="fc1")
        with pytest.raises(RuntimeError, match="fc2"):
            hvd.grouped_allgather([torch.ones(2), torch.ones(2, 2 + rank)], name="fc2")
        assert hvd.allreduce(torch.ones(2), name="fc1").tolist() == [1.0, 1.0]

    run_ranks(2, body)


seed_lock = threading.Lock()  # torch's seed is per process, our ranks are threads


def make_net(seed: int) -> Any:
    with seed_lock:
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3))


def test_broadcast_parameters() -> None:
    def body(rank: int) -> None:
        model, root = make_net(rank), make_net(1)
        model[0].to(memory_format=torch.channels_last)
        forms = [
            model.state_dict(),
            model.named_parameters(),
            list(model.named_parameters()),
            list(model.parameters()),
        ]
        for form in forms:
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(rank - 1)
            hvd.broadcast_parameters(form, root_rank=1)
            for (name, mine), theirs in zip(
                model.state_dict().items(), root.state_dict().values(), strict=True
            ):
                assert torch.equal(mine, theirs), name
        different = {"a": torch.ones(1), "b": torch.ones(1)} if rank == 1 else {"a": torch.ones(1)}
        with pytest.raises(MismatchError, match="rank 0 has no 'b', rank 1 has"):
            hvd.broadcast_parameters(different, root_rank=1)
        with pytest.raises(MismatchError, match="rank 1 has 'b', rank 0 has not"):
            hvd.broadcast_parameters(different, root_rank=0)

    run_ranks(2, body)


def test_objects() -> None:
    def body(rank: int) -> None:
        mine = {"rank": rank, "f": lambda x: x + rank}
        got = hvd.broadcast_object(mine if rank == 1 else None, root_rank=1)
        assert got["rank"] == 1
        assert got["f"](1) == 2
        assert (got is mine) == (rank == 1)
        assert [o["f"](0) for o in hvd.allgather_object(mine)] == [0, 1]
        lock = threading.Lock()
        with pytest.raises(NotPicklable, match="object of rank 1"):
            objects.allgather_object(lock if rank == 1 else 1)
        with pytest.raises(NotPicklable, match=r"object of rank 0 does not pickle: .*lock"):
            objects.broadcast_object(lock if rank == 0 else None)
        assert hvd.allgather_object(None) == [None, None]

    run_ranks(2, body)


def test_without_init() -> None:
    assert not basics.is_initialized()
    for call in (
        hvd.rank,
        hvd.size,
        hvd.local_rank,
        hvd.cross_size,
        hvd.barrier,
        lambda: hvd.allreduce(torch.ones(1)),
    ):
        with pytest.raises(NotInitialized, match=r"call hvd\.init\(\) first"):
            call()
    hvd.shutdown()
    with pytest.raises(InvalidArgument, match="comm"):
        hvd.init(comm=[0, 1])
    with pytest.raises(InvalidArgument, match="process_sets"):
        hvd.init(process_sets="some")
