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
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from .. import basics
from ..basics import global_process_set as _G
from ..errors import InvalidArgument
from ..group import ALLREDUCE, BROADCAST, ReduceOp
from . import buffers
from .buffers import for_core
from .compression import Compression, Compressor
from .handles import Joined, register, synchronize

_Tensors = Sequence[torch.Tensor]

_PLAIN = Compression.none
_empty_like = torch.empty_like
#: What all ranks say to a broadcast, which reduces nothing.
_BITS = ReduceOp.Sum


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


# From a tensor to the core. The native `*_tensor` calls do it all for a plain tensor: on the host,
# contiguous, without the negative bit, of a torch that tells where its memory is. For anything else they
# answer NotImplemented, and the long way follows, which knows what is wrong or makes the copies. `output` is
# the tensor itself, for in place, or what makes a tensor like it. A blocking call goes to the core as one,
# which then need not wake another thread.

_DEFAULT_NAMES = {ALLREDUCE: "allreduce", BROADCAST: "broadcast"}


def _run(
    kind: int,
    tensor: torch.Tensor,
    output: Any,
    name: str | None,
    op: int | None,
    prescale_factor: float,
    postscale_factor: float,
    process_set: Any,
    root: int = 0,
) -> Any:
    name = name or basics.next_name(_DEFAULT_NAMES[kind])
    group = basics.group_of(process_set)
    native = group._native
    result = native.run_tensor(kind, name, tensor, output, op, prescale_factor, postscale_factor, root)
    if result is not NotImplemented:
        return result
    op = resolve_op(op, None)
    (source,), (target,), finish = _long_way([tensor], output is tensor, name)
    _check_root(root, group.size, name)
    native.run(kind, name, source, target, op, prescale_factor, postscale_factor, root, None)
    return finish()[0]


def _start(
    kind: int,
    tensor: torch.Tensor,
    output: Any,
    name: str | None,
    op: int | None,
    prescale_factor: float,
    postscale_factor: float,
    process_set: Any,
    root: int = 0,
) -> int:
    name = name or basics.next_name(_DEFAULT_NAMES[kind])
    group = basics.group_of(process_set)
    native = group._native
    started = native.start_tensor(
        group, kind, name, tensor, output, op, prescale_factor, postscale_factor, root
    )
    if started is not NotImplemented:
        return register(started)
    op = resolve_op(op, None)
    (source,), (target,), finish = _long_way([tensor], output is tensor, name)
    _check_root(root, group.size, name)
    started = native.start(group, kind, name, source, target, op, prescale_factor, postscale_factor, root)
    return register(Joined([started], lambda _: finish()[0]))


def _start_grouped(
    tensors: _Tensors,
    output: Any,
    name: str | None,
    op: int | None,
    prescale_factor: float,
    postscale_factor: float,
    process_set: Any,
) -> int:
    tensors = list(tensors)
    if not tensors:
        resolve_op(op, None)
        return register(Joined([], lambda _: []))
    name = name or basics.next_name("grouped_allreduce")
    group = basics.group_of(process_set)
    started = group._native.start_tensors(
        group, ALLREDUCE, name, tensors, output, op, prescale_factor, postscale_factor, 0
    )
    if started is not NotImplemented:
        return register(started)
    op = resolve_op(op, None)
    sources, targets, finish = _long_way(tensors, output is None, name)
    started = group.grouped_allreduce_async(
        sources, name=name, outs=targets, op=op, prescale=prescale_factor, postscale=postscale_factor
    )
    return register(Joined([started], lambda _: finish()))


def _long_way(
    tensors: _Tensors, in_place: bool, name: str
) -> tuple[list[Any], list[Any], Callable[[], list[torch.Tensor]]]:
    """What the core reads and writes for these tensors, and what makes the caller's results of it. Raises
    `InvalidArgument` for what no collective can carry."""
    for tensor in tensors:
        buffers.check_tensor(tensor, name)
        if in_place and not tensor.is_contiguous():
            raise InvalidArgument(
                f"{name}: an in-place collective needs a contiguous tensor; use the out-of-place form"
            )
    hosts = buffers.as_buffers(tensors)
    sources = [for_core(host) for host in hosts]
    if in_place:

        def write_back() -> list[torch.Tensor]:
            for tensor, host in zip(tensors, hosts, strict=True):
                if host is not tensor:
                    tensor.detach().copy_(host)
            return list(tensors)

        return sources, sources, write_back
    outs = [_empty_like(host) for host in hosts]
    devices = [tensor.device for tensor in tensors]
    return (
        sources,
        [for_core(out) for out in outs],
        lambda: [buffers.to_device(out, device) for out, device in zip(outs, devices, strict=True)],
    )


def _check_root(root_rank: int, size: int, name: str) -> None:
    if not 0 <= root_rank < size:
        raise InvalidArgument(f"{name}: root_rank={root_rank} is not a rank, there are {size}")


def _needs_grad(tensor: Any) -> bool:
    """What nobody will differentiate need not pass through autograd, which costs more than a small
    collective."""
    return isinstance(tensor, torch.Tensor) and tensor.requires_grad and torch.is_grad_enabled()


# Allreduce


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
    if average is not None:
        op = resolve_op(op, average)
    return _start(ALLREDUCE, tensor, _empty_like, name, op, prescale_factor, postscale_factor, process_set)


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
    if average is not None:
        op = resolve_op(op, average)
    return _start(ALLREDUCE, tensor, tensor, name, op, prescale_factor, postscale_factor, process_set)


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
    if average is not None:
        op = resolve_op(op, average)
    return _run(ALLREDUCE, tensor, tensor, name, op, prescale_factor, postscale_factor, process_set)


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
    if average is not None:
        op = resolve_op(op, average)
    plain = compression is _PLAIN
    wire, ctx = (tensor, None) if plain else compression.compress(tensor)
    if _needs_grad(wire):
        out = _apply(_Allreduce, wire, name, op, prescale_factor, postscale_factor, process_set)
    else:
        out = _run(ALLREDUCE, wire, _empty_like, name, op, prescale_factor, postscale_factor, process_set)
    return out if plain else compression.decompress(out, ctx)


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, *rest: Any) -> torch.Tensor:
        ctx.name, ctx.rest = name, rest
        return _run(ALLREDUCE, tensor, _empty_like, name, *rest)

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
    if average is not None:
        op = resolve_op(op, average)
    return _start_grouped(tensors, _empty_like, name, op, prescale_factor, postscale_factor, process_set)


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
    if average is not None:
        op = resolve_op(op, average)
    return _start_grouped(tensors, None, name, op, prescale_factor, postscale_factor, process_set)


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
    if average is not None:
        op = resolve_op(op, average)
    return synchronize(
        _start_grouped(tensors, None, name, op, prescale_factor, postscale_factor, process_set)
    )


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
    if average is not None:
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
    hosts = [for_core(buffers.as_bits(host)) for host in buffers.as_buffers(tensors)]
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
    return register(Joined(handles, lambda results: finish(results)[0]))


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
    return register(Joined(*_gather(tensors, names, process_set)))


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
    return _start(BROADCAST, tensor, tensor, name, _BITS, 1.0, 1.0, process_set, root_rank)


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = _G
) -> int:
    """Starts a broadcast into a new tensor; `synchronize(handle)` returns it. `tensor` gives the shape and
    dtype, and on root the values; it must not change until then."""
    return _start(BROADCAST, tensor, _empty_like, name, _BITS, 1.0, 1.0, process_set, root_rank)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = _G
) -> torch.Tensor:
    """Overwrites `tensor` with root's and returns it. Not differentiable."""
    return _run(BROADCAST, tensor, tensor, name, _BITS, 1.0, 1.0, process_set, root_rank)


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = _G
) -> torch.Tensor:
    """Returns root's tensor. Differentiable: as in Horovod, root's gradient is the **average** over ranks,
    the others' is zero."""
    if _needs_grad(tensor):
        return _apply(_Broadcast, tensor, root_rank, name, process_set)
    return _run(BROADCAST, tensor, _empty_like, name, _BITS, 1.0, 1.0, process_set, root_rank)


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: Any
    ) -> torch.Tensor:
        ctx.root_rank, ctx.name, ctx.process_set = root_rank, name, process_set
        return _run(BROADCAST, tensor, _empty_like, name, _BITS, 1.0, 1.0, process_set, root_rank)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        averaged = _apply(_Allreduce, grad, _grad_name(ctx.name), ReduceOp.Average, 1.0, 1.0, ctx.process_set)
        if basics.group_of(ctx.process_set).rank != ctx.root_rank:
            averaged = torch.zeros_like(averaged)
        return averaged, None, None, None


def barrier(process_set: Any = _G) -> None:
    """Returns when every rank has called it. Other collectives may be in flight."""
    basics.group_of(process_set).barrier()
