"""Reductions: allreduce of one tensor or of several together. `ops.py` has the rules."""

from __future__ import annotations

from typing import Any

import torch

from ..basics import global_process_set as _G
from ..group import ALLREDUCE
from .compression import Compression, Compressor
from .handles import synchronize
from .ops import Tensors, apply, empty_like, grad_name, needs_grad, resolve_op, run, start, start_grouped

_PLAIN = Compression.none


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
    return start(ALLREDUCE, tensor, empty_like, name, op, prescale_factor, postscale_factor, process_set)


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
    return start(ALLREDUCE, tensor, tensor, name, op, prescale_factor, postscale_factor, process_set)


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
    return run(ALLREDUCE, tensor, tensor, name, op, prescale_factor, postscale_factor, process_set)


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
    if needs_grad(wire):
        out = apply(_Allreduce, wire, name, op, prescale_factor, postscale_factor, process_set)
    else:
        out = run(ALLREDUCE, wire, empty_like, name, op, prescale_factor, postscale_factor, process_set)
    return out if plain else compression.decompress(out, ctx)


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, *rest: Any) -> torch.Tensor:
        ctx.name, ctx.rest = name, rest
        return run(ALLREDUCE, tensor, empty_like, name, *rest)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return apply(_Allreduce, grad, grad_name(ctx.name), *ctx.rest), None, None, None, None, None


def grouped_allreduce_async(
    tensors: Tensors,
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
    return start_grouped(
        ALLREDUCE, tensors, empty_like, name, op, prescale_factor, postscale_factor, process_set
    )


def grouped_allreduce_async_(
    tensors: Tensors,
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
    return start_grouped(ALLREDUCE, tensors, None, name, op, prescale_factor, postscale_factor, process_set)


def grouped_allreduce_(
    tensors: Tensors,
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
        start_grouped(ALLREDUCE, tensors, None, name, op, prescale_factor, postscale_factor, process_set)
    )


def grouped_allreduce(
    tensors: Tensors,
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
    outs = apply(_GroupedAllreduce, name, op, prescale_factor, postscale_factor, process_set, *wires)
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
        reduced = iter(apply(_GroupedAllreduce, grad_name(ctx.name), *ctx.scaling, *floating))
        return (None,) * 5 + tuple(next(reduced) if is_floating else None for is_floating in ctx.floating)
