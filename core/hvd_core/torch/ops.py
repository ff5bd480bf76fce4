"""Collectives on tensors: thin functions from a tensor to the core and back.

Every rank calls the same function with a tensor of the same shape and dtype (`allgather`: rows may differ)
and the same `name`; named calls may come in different orders on different ranks. Calls without a name are
numbered, so their order must be the same. What differs between ranks raises `MismatchError` on all of them; a
bad argument found here raises `InvalidArgument`, a `ValueError`, before anything is sent. CUDA tensors go
through pinned host memory.

`op` is Average (the default), Sum, Min, Max or Product. Each tensor is multiplied by `prescale_factor` before
the reduction and by `postscale_factor` after it. Averages of integers are truncated toward zero.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .. import basics
from ..basics import global_process_set as _G
from ..errors import InvalidArgument
from ..group import ReduceOp
from . import buffers
from .buffers import for_core
from .compression import Compression, Compressor
from .handles import register, synchronize

_Tensors = Sequence[torch.Tensor]


def resolve_op(op: int | None, average: bool | None) -> ReduceOp:
    """The operation that `op` and Horovod's older `average` ask for; Average when neither is given."""
    if average is not None:
        if op is not None:
            raise InvalidArgument("give op or average, not both")
        warnings.warn("average= is deprecated: use op=Average or op=Sum", DeprecationWarning, stacklevel=3)
        return ReduceOp.Average if average else ReduceOp.Sum
    if op is None:
        return ReduceOp.Average
    resolved = op if type(op) is ReduceOp else ReduceOp(op)
    if resolved is ReduceOp.Adasum:
        raise InvalidArgument("op=Adasum is not available yet; use Average, Sum, Min, Max or Product")
    return resolved


def _apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    return function.apply(*args)


def _check_root(root_rank: int, size: int, name: str) -> None:
    if not 0 <= root_rank < size:
        raise InvalidArgument(f"{name}: root_rank={root_rank} is not a rank, there are {size}")


def _write_back(tensor: torch.Tensor, host: torch.Tensor) -> torch.Tensor:
    """After a collective in `host`, the buffer of `tensor`."""
    if not tensor.is_cpu:
        tensor.detach().copy_(host)
    return tensor


def _in_place_buffer(tensor: torch.Tensor, name: str) -> torch.Tensor:
    buffers.check_tensor(tensor, name)
    if not tensor.is_contiguous():
        raise InvalidArgument(
            f"{name}: an in-place collective needs a contiguous tensor; use the out-of-place form"
        )
    return buffers.as_buffer(tensor)


# Reductions. The public forms differ in whether they take one tensor or several, in what is written, and in
# who waits: a blocking call goes to the core as one, which then need not wake another thread.


def _scaling(op: ReduceOp, prescale_factor: float, postscale_factor: float) -> dict[str, Any]:
    return {"op": op, "prescale": prescale_factor, "postscale": postscale_factor}


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = _G,
) -> int:
    """Starts a reduction over all ranks into a new tensor; `synchronize(handle)` returns it. `tensor` must
    not change until then."""
    op = resolve_op(op, average)
    name = name or basics.next_name("allreduce")
    buffers.check_tensor(tensor, name)
    group = basics.group_of(process_set)
    host = buffers.as_buffer(tensor)
    out = torch.empty_like(host)
    handle = group.allreduce_async(
        for_core(host),
        name=name,
        op=op,
        prescale=prescale_factor,
        postscale=postscale_factor,
        out=for_core(out),
    )
    return register([handle], lambda _: buffers.to_device(out, tensor.device))


def _allreduce(
    tensor: torch.Tensor,
    name: str | None,
    op: ReduceOp,
    prescale_factor: float,
    postscale_factor: float,
    process_set: Any,
) -> torch.Tensor:
    """`synchronize(allreduce_async(...))`."""
    name = name or basics.next_name("allreduce")
    buffers.check_tensor(tensor, name)
    group = basics.group_of(process_set)
    host = buffers.as_buffer(tensor)
    out = torch.empty_like(host)
    group.allreduce(
        for_core(host),
        name=name,
        op=op,
        prescale=prescale_factor,
        postscale=postscale_factor,
        out=for_core(out),
    )
    return buffers.to_device(out, tensor.device)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = _G,
) -> int:
    """Starts a reduction in place; `synchronize(handle)` returns `tensor`, which nobody may touch until
    then."""
    op = resolve_op(op, average)
    name = name or basics.next_name("allreduce")
    host = _in_place_buffer(tensor, name)
    group = basics.group_of(process_set)
    handle = group.allreduce_async(
        for_core(host), name=name, op=op, prescale=prescale_factor, postscale=postscale_factor
    )
    return register([handle], lambda _: _write_back(tensor, host))


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = _G,
) -> torch.Tensor:
    """Reduces `tensor` over all ranks in place and returns it. Not differentiable."""
    op = resolve_op(op, average)
    name = name or basics.next_name("allreduce")
    host = _in_place_buffer(tensor, name)
    group = basics.group_of(process_set)
    group.allreduce(for_core(host), name=name, op=op, prescale=prescale_factor, postscale=postscale_factor)
    return _write_back(tensor, host)


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = _G,
) -> torch.Tensor:
    """Returns the reduction of `tensor` over all ranks. Differentiable: the gradient is reduced the same way.

    `compression` applies on the wire; the result has the dtype of `tensor`.
    """
    op = resolve_op(op, average)
    wire, ctx = compression.compress(tensor)
    # What nobody will differentiate need not pass through autograd, which costs more than a small reduction.
    differentiable = isinstance(wire, torch.Tensor) and wire.requires_grad and torch.is_grad_enabled()
    reduce = _Allreduce.apply if differentiable else _allreduce
    out = reduce(wire, name, op, prescale_factor, postscale_factor, process_set)
    return compression.decompress(out, ctx)


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, *rest: Any) -> torch.Tensor:
        ctx.name, ctx.rest = name, rest
        return _allreduce(tensor, name, *rest)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return _apply(_Allreduce, grad, _grad_name(ctx.name), *ctx.rest), None, None, None, None, None


def _grad_name(name: str | None) -> str | None:
    return f"{name}.grad" if name else None


def grouped_allreduce_async(
    tensors: _Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = _G,
) -> int:
    """Like `allreduce_async` for several tensors, of any shapes and dtypes, that complete together.

    One handle; its result is a list.
    """
    scaling = _scaling(resolve_op(op, average), prescale_factor, postscale_factor)
    tensors = list(tensors)
    if not tensors:
        return register([], lambda _: [])
    name = name or basics.next_name("grouped_allreduce")
    for tensor in tensors:
        buffers.check_tensor(tensor, name)
    group = basics.group_of(process_set)
    hosts = [buffers.as_buffer(tensor) for tensor in tensors]
    outs = [torch.empty_like(host) for host in hosts]
    handle = group.grouped_allreduce_async(
        [for_core(host) for host in hosts], name=name, outs=[for_core(out) for out in outs], **scaling
    )
    return register(
        [handle], lambda _: [buffers.to_device(o, t.device) for o, t in zip(outs, tensors, strict=True)]
    )


def grouped_allreduce_async_(
    tensors: _Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = _G,
) -> int:
    """Like `allreduce_async_` for several tensors that complete together; the result is the list
    `tensors`."""
    scaling = _scaling(resolve_op(op, average), prescale_factor, postscale_factor)
    tensors = list(tensors)
    if not tensors:
        return register([], lambda _: [])
    name = name or basics.next_name("grouped_allreduce")
    hosts = [_in_place_buffer(tensor, name) for tensor in tensors]
    group = basics.group_of(process_set)
    handle = group.grouped_allreduce_async([for_core(host) for host in hosts], name=name, **scaling)
    return register([handle], lambda _: [_write_back(t, h) for t, h in zip(tensors, hosts, strict=True)])


def grouped_allreduce_(
    tensors: _Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = _G,
) -> list[torch.Tensor]:
    """Reduces `tensors` in place, together, and returns them. Not differentiable."""
    op = resolve_op(op, average)
    rest = (prescale_factor, postscale_factor, process_set)
    return synchronize(grouped_allreduce_async_(tensors, None, name, op, *rest))


def grouped_allreduce(
    tensors: _Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = _G,
) -> list[torch.Tensor]:
    """Returns the reductions of `tensors`, made together. Differentiable: so are their gradients."""
    op = resolve_op(op, average)
    compressed = [compression.compress(tensor) for tensor in tensors]
    wires = [wire for wire, _ in compressed]
    outs = _apply(_GroupedAllreduce, name, op, prescale_factor, postscale_factor, process_set, *wires)
    return [compression.decompress(out, ctx) for out, (_, ctx) in zip(outs, compressed, strict=True)]


class _GroupedAllreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, *rest: Any) -> tuple[torch.Tensor, ...]:
        ctx.name, ctx.scaling = name, rest[:4]
        outs = tuple(synchronize(grouped_allreduce_async(rest[4:], None, name, *rest[:4])))
        ctx.mark_non_differentiable(*(out for out in outs if not out.dtype.is_floating_point))
        ctx.floating = [out.dtype.is_floating_point for out in outs]
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        floating = [grad for grad, is_floating in zip(grads, ctx.floating, strict=True) if is_floating]
        reduced = iter(_apply(_GroupedAllreduce, _grad_name(ctx.name), *ctx.scaling, *floating))
        return (None,) * 5 + tuple(next(reduced) if is_floating else None for is_floating in ctx.floating)


# Allgather


def _gather(tensors: _Tensors, names: Sequence[str], process_set: Any) -> tuple[list[Any], Any]:
    """Submits. Returns the native handles and what makes tensors of their results."""
    for tensor, name in zip(tensors, names, strict=True):
        buffers.check_tensor(tensor, name)
        if tensor.dim() == 0:
            raise InvalidArgument(f"{name}: a 0-d tensor has no rows to gather; pass tensor.reshape(1)")
    group = basics.group_of(process_set)
    hosts = [for_core(buffers.as_bits(buffers.as_buffer(tensor))) for tensor in tensors]
    handles = [group.allgather_async(host, name=name) for host, name in zip(hosts, names, strict=True)]

    def finish(results: list[Any]) -> list[torch.Tensor]:
        return [
            buffers.to_device(buffers.from_numpy(result, tensor.dtype), tensor.device)
            for result, tensor in zip(results, tensors, strict=True)
        ]

    return handles, finish


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: Any = _G) -> int:
    """Starts the concatenation of all ranks' tensors along dimension 0, in rank order. Ranks may have
    different numbers of rows, none included; the other dimensions must agree."""
    handles, finish = _gather([tensor], [name or basics.next_name("allgather")], process_set)
    return register(handles, lambda results: finish(results)[0])


def allgather(tensor: torch.Tensor, name: str | None = None, process_set: Any = _G) -> torch.Tensor:
    """Returns all ranks' tensors, concatenated along dimension 0 in rank order.

    Differentiable. The gradient is, as in Horovod, the **average** over ranks of the gradients of this rank's
    rows, not their sum: with the same loss on every rank it is the gradient of that loss.
    """
    return _apply(_Allgather, tensor, name, process_set)


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, process_set: Any) -> torch.Tensor:
        ctx.name, ctx.process_set, ctx.rows = name, process_set, tensor.shape[0] if tensor.dim() else 0
        return synchronize(allgather_async(tensor, name, process_set))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        name = _grad_name(ctx.name)
        averaged = _apply(_Allreduce, grad, name, ReduceOp.Average, 1.0, 1.0, ctx.process_set)
        group = basics.group_of(ctx.process_set)
        rows = group.allgather(np.array([ctx.rows]), name=f"{name or basics.next_name('allgather')}.rows")
        start = int(rows[: group.rank].sum())
        return averaged[start : start + ctx.rows], None, None


def grouped_allgather_async(tensors: _Tensors, name: str | None = None, process_set: Any = _G) -> int:
    """Like `allgather_async` for several tensors; one handle, whose result is a list."""
    base = name or basics.next_name("grouped_allgather")
    tensors = list(tensors)
    names = [f"{base}_{i}of{len(tensors)}" for i in range(len(tensors))]
    return register(*_gather(tensors, names, process_set))


def grouped_allgather(
    tensors: _Tensors, name: str | None = None, process_set: Any = _G
) -> list[torch.Tensor]:
    """Returns the `allgather` of each tensor. Differentiable like it."""
    if any(tensor.requires_grad for tensor in tensors) and torch.is_grad_enabled():
        names = [f"{name}_{i}of{len(tensors)}" if name else None for i in range(len(tensors))]
        return [allgather(tensor, n, process_set) for tensor, n in zip(tensors, names, strict=True)]
    return synchronize(grouped_allgather_async(tensors, name, process_set))


# Broadcast


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = _G
) -> int:
    """Starts overwriting `tensor` with root's; `synchronize(handle)` returns it. Nobody may touch it until
    then."""
    name = name or basics.next_name("broadcast")
    host = _in_place_buffer(tensor, name)
    group = basics.group_of(process_set)
    _check_root(root_rank, group.size, name)
    handle = group.broadcast_async(for_core(buffers.as_bits(host)), root=root_rank, name=name)
    return register([handle], lambda _: _write_back(tensor, host))


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = _G
) -> int:
    """Starts a broadcast into a new tensor; `synchronize(handle)` returns it. `tensor` gives the shape and
    dtype, and on root the values."""
    name = name or basics.next_name("broadcast")
    buffers.check_tensor(tensor, name)
    return broadcast_async_(
        tensor.detach().clone(memory_format=torch.contiguous_format), root_rank, name, process_set
    )


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = _G
) -> torch.Tensor:
    """Overwrites `tensor` with root's and returns it. Not differentiable."""
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = _G
) -> torch.Tensor:
    """Returns root's tensor. Differentiable: as in Horovod, root's gradient is the **average** over ranks,
    the others' is zero."""
    return _apply(_Broadcast, tensor, root_rank, name, process_set)


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: Any
    ) -> torch.Tensor:
        ctx.root_rank, ctx.name, ctx.process_set = root_rank, name, process_set
        return synchronize(broadcast_async(tensor, root_rank, name, process_set))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        averaged = _apply(_Allreduce, grad, _grad_name(ctx.name), ReduceOp.Average, 1.0, 1.0, ctx.process_set)
        if basics.group_of(ctx.process_set).rank != ctx.root_rank:
            averaged = torch.zeros_like(averaged)
        return averaged, None, None, None


def barrier(process_set: Any = _G) -> None:
    """Returns when every rank has called it. Other collectives may be in flight."""
    basics.group_of(process_set).barrier()
