"""Every kind of tensor through every public form, with and without torch's own table of C functions. Oracle:
torch.maximum of the ranks' values, in float64."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import hvd_core.torch as hvd
from hvd_core import Group, basics
from hvd_core.errors import InvalidArgument
from hvd_core.torch import buffers
from tests.unit.connected import connected
from tests.unit.thread_ranks import calls, run_ranks

pytestmark = pytest.mark.timeout(60)


class OldTensor(torch.Tensor):
    """As torch's own was before 2.10."""

    __dlpack_c_exchange_api__ = None


@pytest.fixture(params=["table", "no table"])
def made(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    """What a tensor of a test is made with."""
    if request.param == "table":
        return lambda tensor: tensor
    monkeypatch.setattr(buffers, "_TELLS_ITS_MEMORY", False)
    return lambda tensor: tensor.as_subclass(OldTensor)


def reduces(start: Callable[..., Any]) -> Callable[[Any, str], Any]:
    return lambda tensor, name: start(tensor, op=hvd.Max, name=name)


def sends(start: Callable[..., Any]) -> Callable[[Any, str], Any]:
    return lambda tensor, name: start(tensor, root_rank=hvd.size() - 1, name=name)


def waits(form: Callable[[Any, str], int]) -> Callable[[Any, str], Any]:
    return lambda tensor, name: hvd.synchronize(form(tensor, name))


def grouped(start: Callable[..., Any]) -> Callable[[Any, str], Any]:
    return lambda tensor, name: start([torch.ones(2), tensor], op=hvd.Max, name=name)[1]


def grouped_async(start: Callable[..., Any]) -> Callable[[Any, str], Any]:
    return lambda tensor, name: hvd.synchronize(start([torch.ones(2), tensor], op=hvd.Max, name=name))[1]


Form = Callable[[Any, str], Any]
REDUCE: dict[str, Form] = {
    "allreduce": reduces(hvd.allreduce),
    "allreduce_async": waits(reduces(hvd.allreduce_async)),
    "grouped_allreduce": grouped(hvd.grouped_allreduce),
    "grouped_allreduce_async": grouped_async(hvd.grouped_allreduce_async),
}
REDUCE_IN_PLACE: dict[str, Form] = {
    "allreduce_": reduces(hvd.allreduce_),
    "allreduce_async_": waits(reduces(hvd.allreduce_async_)),
    "grouped_allreduce_": grouped(hvd.grouped_allreduce_),
    "grouped_allreduce_async_": grouped_async(hvd.grouped_allreduce_async_),
}
SEND: dict[str, Form] = {
    "broadcast": sends(hvd.broadcast),
    "broadcast_async": waits(sends(hvd.broadcast_async)),
}
SEND_IN_PLACE: dict[str, Form] = {
    "broadcast_": sends(hvd.broadcast_),
    "broadcast_async_": waits(sends(hvd.broadcast_async_)),
}
GATHER: dict[str, Form] = {
    "allgather": lambda tensor, name: hvd.allgather(tensor, name),
    "allgather_async": lambda tensor, name: hvd.synchronize(hvd.allgather_async(tensor, name)),
    "grouped_allgather": lambda tensor, name: hvd.grouped_allgather([torch.ones(2), tensor], name)[1],
    "grouped_allgather_async": lambda tensor, name: hvd.synchronize(
        hvd.grouped_allgather_async([torch.ones(2), tensor], name)
    )[1],
}
IN_PLACE = REDUCE_IN_PLACE | SEND_IN_PLACE
ALL = REDUCE | SEND | IN_PLACE | GATHER


def values(rank: int, shape: tuple[int, ...] = (2, 3)) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float64) * (2 * rank - 1) + 30).reshape(shape)


def negative(rank: int) -> torch.Tensor:
    tensor = torch._neg_view(values(rank))
    assert tensor.is_neg() and tensor.is_contiguous()
    return tensor


def in_inference(rank: int) -> torch.Tensor:
    with torch.inference_mode():
        return values(rank) * 1


DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16]
DTYPES += [torch.uint32, torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64]
CONTIGUOUS: dict[str, Callable[[int], torch.Tensor]] = {
    **{str(dtype): (lambda rank, dtype=dtype: values(rank).to(dtype)) for dtype in DTYPES},
    "0-d": lambda rank: torch.tensor(float(rank)),
    "no elements": lambda rank: torch.ones(0, 3),
    "no elements, odd strides": lambda rank: torch.ones(3, 0).t(),
    "one column, odd strides": lambda rank: torch.arange(3.0).reshape(1, 3).t() + rank,
    "part of another": lambda rank: torch.cat([torch.zeros(1, 3), values(rank)])[1:],
    "leaf that requires grad": lambda rank: values(rank).requires_grad_(),
    "result that requires grad": lambda rank: values(rank).requires_grad_() * 1,
    "Parameter": lambda rank: torch.nn.Parameter(values(rank)),
    "negative": negative,
    "in inference mode": in_inference,
    "7 dimensions": lambda rank: values(rank).reshape(1, 1, 2, 1, 3, 1, 1),
}
STRIDED: dict[str, Callable[[int], torch.Tensor]] = {
    "transposed": lambda rank: values(rank).t(),
    "every second": lambda rank: values(rank, (2, 6))[:, ::2],
    "expanded": lambda rank: torch.tensor([[float(rank)]]).expand(2, 3),
    "channels last": lambda rank: values(rank, (2, 3, 2, 2)).to(memory_format=torch.channels_last),
    "negative, strided": lambda rank: torch.complex(values(rank), values(rank)).conj().imag,
}


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().as_subclass(torch.Tensor).resolve_neg().double().contiguous()


@pytest.mark.parametrize("kind", [*CONTIGUOUS, *STRIDED])
def test_every_kind_through_every_form(kind: str, made: Callable[[Any], Any]) -> None:
    make = (CONTIGUOUS | STRIDED)[kind]
    ranks = [plain(make(rank)) for rank in range(2)]
    largest, root = torch.maximum(*ranks), ranks[1]

    def body(rank: int) -> None:
        for name, form in (REDUCE | SEND).items():
            tensor = made(make(rank))
            out = form(tensor, name)
            assert out is not tensor
            assert (out.dtype, out.shape) == (tensor.dtype, tensor.shape), name
            assert torch.equal(plain(out), largest if name in REDUCE else root), name
            assert torch.equal(plain(tensor), ranks[rank]), name
        for name, form in IN_PLACE.items():
            tensor = made(make(rank))
            if kind in STRIDED:
                with pytest.raises(InvalidArgument, match="an in-place collective needs a contiguous tensor"):
                    form(tensor, name)
            else:
                assert form(tensor, name) is tensor
                assert torch.equal(plain(tensor), largest if name in REDUCE_IN_PLACE else root), name
        for name, form in GATHER.items():
            tensor = made(make(rank))
            if tensor.dim() == 0:
                with pytest.raises(InvalidArgument, match=rf"{name}.*: a 0-d tensor has no rows"):
                    form(tensor, name)
            else:
                gathered = form(tensor, name)
                assert gathered.dtype == tensor.dtype
                assert torch.equal(plain(gathered), torch.cat(ranks)), name

    run_ranks(2, body)


class Wrapper(torch.Tensor):
    """Has a size and no memory, as tensors of torch's compiler and of tensor parallel layers."""

    @staticmethod
    def __new__(cls, tensor: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, tensor.shape, dtype=tensor.dtype)  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(function)


def freed() -> torch.Tensor:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "complex": (lambda: torch.ones(2, dtype=torch.complex64), "tensors of torch.complex64 are not supported"),
    "conjugate": (
        lambda: torch.ones(2, dtype=torch.complex64).conj(),
        "tensors of torch.complex64 are not supported",
    ),
    "float8": (lambda: torch.ones(2).to(torch.float8_e5m2), "tensors of torch.float8_e5m2 are not supported"),
    "sparse": (lambda: torch.ones(2).to_sparse(), "a torch.sparse_coo tensor; pass tensor.to_dense()"),
    "meta": (
        lambda: torch.ones(2, device="meta"),
        "tensors on meta are not supported; move it to cpu or cuda",
    ),
    "list": (lambda: [1.0], "expected a torch.Tensor, got list"),
    "numpy": (lambda: np.ones(2), "expected a torch.Tensor, got ndarray"),
    "none": (lambda: None, "expected a torch.Tensor, got NoneType"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_no_form_carries(kind: str) -> None:
    make, text = REFUSED[kind]

    def body(rank: int) -> None:
        for name, form in ALL.items():
            with pytest.raises(InvalidArgument) as caught:
                form(make(), name)
            assert str(caught.value).startswith(name)
            assert str(caught.value).endswith(text)

    run_ranks(1, body)


@pytest.mark.parametrize("make", [lambda: Wrapper(torch.ones(3)), freed], ids=["wrapper", "freed"])
def test_a_tensor_without_memory_is_refused(make: Callable[[], Any]) -> None:
    def body(rank: int) -> None:
        for name in ("allreduce_", "allreduce_async_", "broadcast_", "grouped_allreduce_"):
            with pytest.raises(InvalidArgument, match=rf"{name}.*: the array must be a contiguous writable"):
                ALL[name](make(), name)

    run_ranks(1, body)


GROUP_FORMS: dict[str, Callable[[Group, Any], Any]] = {
    "allreduce": lambda g, t: g.allreduce(t, name="t", op=hvd.Max),
    "allreduce_async": lambda g, t: g.allreduce_async(t, name="t", op=hvd.Max).wait(),
    "grouped": lambda g, t: g.grouped_allreduce_async([t], name="t", op=hvd.Max).wait()[0],
    "broadcast": lambda g, t: g.broadcast(t, root=0, name="t"),
    "broadcast_async": lambda g, t: g.broadcast_async(t, root=0, name="t").wait(),
}


@pytest.mark.parametrize("kind", CONTIGUOUS)
def test_a_group_works_in_the_memory_of_a_tensor(kind: str, made: Callable[[Any], Any]) -> None:
    with Group.solo() as group:
        for name, form in GROUP_FORMS.items():
            tensor = made(CONTIGUOUS[kind](1))
            if kind == "negative":
                with pytest.raises(InvalidArgument, match="has torch's negative bit; pass"):
                    form(group, tensor)
                continue
            before = plain(tensor)
            assert form(group, tensor) is tensor, name
            assert torch.equal(plain(tensor), before)
            out = made(CONTIGUOUS[kind](0))
            assert group.allreduce(tensor, name="o", op=hvd.Max, out=out) is out
            assert torch.equal(plain(out), before)


@pytest.mark.parametrize("kind", [*STRIDED, *REFUSED])
def test_a_group_refuses_what_is_not_what_its_memory_says(kind: str) -> None:
    make = (lambda: STRIDED[kind](0)) if kind in STRIDED else REFUSED[kind][0]
    tensor = make()
    if kind == "numpy":
        tensor.flags.writeable = False
    with Group.solo() as group:
        for form in GROUP_FORMS.values():
            with pytest.raises(InvalidArgument, match=r"^t(_0of1)?: (the array|this dtype)"):
                form(group, tensor)
        if kind != "none":
            with pytest.raises(InvalidArgument, match=r"^t: (the output|this dtype)"):
                group.allreduce(torch.ones(2, 3), name="t", out=tensor)


def test_outputs_must_be_like_inputs() -> None:
    with Group.solo() as group:
        for out in (torch.ones(3), torch.ones(2, dtype=torch.float64), np.ones(3, np.float32)):
            with pytest.raises(InvalidArgument, match="t: input and output differ in dtype or size"):
                group.allreduce(torch.ones(2), name="t", out=out)
        with pytest.raises(ValueError, match="as many"):
            group.grouped_allreduce_async([torch.ones(2)], name="t", outs=[])


def test_no_call_keeps_or_loses_a_reference(made: Callable[[Any], Any]) -> None:
    def body(rank: int) -> None:
        good, bad = made(torch.ones(3)), made(torch.ones(2, 3).t())
        array, name, group = np.ones(3, np.float32), "".join(["a ", "name"]), basics.default_group()
        forms = [*ALL.values(), lambda t, n: [form(group, t) for form in GROUP_FORMS.values()]]
        objects = (good, bad, array, name, None, NotImplemented, group, group._native, hvd.Max)

        def all_forms() -> None:
            for form in forms:
                form(good, name)
                for wrong in (bad, array):
                    try:
                        form(wrong, name)
                    except InvalidArgument:
                        pass

        all_forms()
        calls().clear()
        gc.collect()
        counts = [sys.getrefcount(one) for one in objects]
        for _ in range(20):
            all_forms()
        calls().clear()
        gc.collect()
        for before, one in zip(counts, objects, strict=True):
            assert abs(sys.getrefcount(one) - before) < 10, one

    run_ranks(1, body)


@pytest.mark.parametrize("drop", [False, True], ids=["handle kept", "handle dropped"])
def test_memory_lives_while_it_is_worked_in(drop: bool) -> None:
    with connected(2) as ranks:
        first, second = ranks.groups
        made = torch.ones(1000), torch.zeros(1000)
        alive = [weakref.ref(tensor) for tensor in made]
        handles = [first.allreduce_async(made[0], name="t", out=made[1])]
        del made
        if drop:
            handles.clear()
        gc.collect()
        assert all(tensor() is not None for tensor in alive)
        second.allreduce(torch.ones(1000), name="t")
        if not drop:
            assert handles[0].wait().sum() == 2000
        handles.clear()
        ranks.on_every(lambda group: group.barrier())
        ranks.on_every(lambda group: group.close())
        gc.collect()
        assert all(tensor() is None for tensor in alive)


def test_garbage_is_left_whole_while_it_is_worked_in() -> None:
    """A handle in a circle with its own tensors: the collector would clear their list, and their memory."""

    class Circle:
        pass

    def forget(group: Any) -> weakref.ref[Any]:
        circle: Any = Circle()
        circle.me = circle
        tensors = [torch.ones(1000), torch.ones(1000)]
        circle.handle = group.grouped_allreduce_async(tensors, name="circle")
        return weakref.ref(tensors[0])

    with connected(2) as ranks:
        first, second = ranks.groups
        alive = forget(first)
        gc.collect()
        assert alive() is not None
        mine = [torch.ones(1000), torch.ones(1000)]
        second.grouped_allreduce_async(mine, name="circle").wait(timeout_s=20)
        assert mine[1].sum() == 2000


def test_a_native_handle() -> None:
    with connected(2) as ranks:
        first, second = ranks.groups
        handle = first.allreduce_async(torch.ones(2), name="t")
        assert not handle.done()
        with pytest.raises(TypeError):
            type(handle)()
        for wrong in (
            lambda: handle.wait(1, 2),
            lambda: handle.wait(1.0, timeout_s=2),
            lambda: handle.wait(t=1),
        ):
            with pytest.raises(TypeError, match="timeout_s"):
                wrong()
        for not_seconds in (lambda: handle.wait("1"), lambda: first.barrier(timeout_s="1")):
            with pytest.raises(TypeError):
                not_seconds()
        with pytest.raises(ValueError, match="timeout_s"):
            first.barrier(timeout_s=float("nan"))
        for timeout in (lambda: handle.wait(0.01), lambda: handle.wait(timeout_s=0.01)):
            with pytest.raises(TimeoutError, match=r"'t' is not done after 0\.01 s"):
                timeout()
        second.allreduce(torch.ones(2), name="t")
        assert handle.wait().tolist() == handle.wait(timeout_s=None).tolist() == [2.0, 2.0]
        assert handle.wait(float("inf")).tolist() == [2.0, 2.0]
        assert handle.done()
        ranks.on_every(lambda group: group.barrier())  # none of the refused ones was submitted


def test_a_cycle_through_a_handle_is_collected() -> None:
    class Seen(list[Any]):
        pass

    with Group.solo() as group:
        out = np.ones(2)
        seen = Seen([group.allreduce_async(out, name="t")])
        seen.append(seen)
        gone = weakref.ref(seen)
        del seen
        gc.collect()
        assert gone() is None


@pytest.mark.parametrize(
    "wrong", [("name", 7), ("prescale_factor", "2"), ("op", "Sum"), ("root_rank", 5)], ids=str
)
def test_other_wrong_arguments(wrong: tuple[str, Any]) -> None:
    def body(rank: int) -> None:
        key, value = wrong
        form = hvd.broadcast_ if key == "root_rank" else hvd.allreduce_
        with pytest.raises((InvalidArgument, TypeError, ValueError)):
            form(torch.ones(2), **{"name": "t", key: value})

    run_ranks(1, body)
