"""Collectives that give each rank something else: alltoall and reducescatter. `ops.py` has the rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import basics
from ..basics import global_process_set as _G
from ..errors import InvalidArgument, NotReducible
from ..group import REDUCESCATTER, ReduceOp, rows_of
from . import buffers
from .compression import Compression, Compressor
from .handles import Joined, register, synchronize
from .ops import Tensors, apply, grad_name, needs_grad, run, start, start_grouped
from .transfers import allgather, grouped_allgather

Splits = torch.Tensor | Sequence[int] | None


def alltoall_async(
    tensor: torch.Tensor, splits: Splits = None, name: str | None = None, process_set: Any = _G
) -> int:
    """Starts sending each rank its part of the rows of `tensor`: the first `splits[0]` go to rank 0, the next
    `splits[1]` to rank 1, and so on; without `splits` each gets as many. Ranks may have different numbers of
    rows; the other dimensions must agree.

    The result is the rows that came, in rank order; with `splits` also how many came from each rank, an int32
    tensor. Raises `InvalidArgument` unless there is a split for each rank, and they add up to all rows.
    """
    pending = _start_alltoall(tensor, splits, name, process_set)
    return register(pending if splits is not None else Joined([pending], lambda results: results[0][0]))


def alltoall(
    tensor: torch.Tensor, splits: Splits = None, name: str | None = None, process_set: Any = _G
) -> Any:
    """Returns the result of `alltoall_async`. Differentiable: gradients go back where the rows came from."""
    if needs_grad(tensor):
        received, rows = apply(_Alltoall, tensor, splits, name, process_set)
    else:
        received, rows = _start_alltoall(tensor, splits, name, process_set).wait()
    return received if splits is None else (received, rows)


def _start_alltoall(tensor: torch.Tensor, splits: Splits, name: str | None, process_set: Any) -> Joined:
    """Its result is what came, and the rows by rank."""
    name = name or basics.next_name("alltoall", process_set)
    buffers.check_tensor(tensor, name)
    if tensor.dim() == 0:
        raise InvalidArgument(f"{name}: a 0-d tensor has no rows to send; pass tensor.reshape(1)")
    group = basics.group_of(process_set)
    (host,) = buffers.as_buffers([tensor])
    rows = None if splits is None else _as_ints(splits, name)
    pending = group.alltoall_async(buffers.for_core(buffers.as_bits(host)), splits=rows, name=name)
    device = splits.device if isinstance(splits, torch.Tensor) else torch.device("cpu")

    def finish(results: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        ((array, received),) = results
        mine = buffers.to_device(buffers.from_numpy(array, tensor.dtype), tensor.device)
        return mine, torch.tensor(received, dtype=torch.int32, device=device)

    return Joined([pending], finish)


def _as_ints(splits: torch.Tensor | Sequence[int], name: str) -> list[int]:
    tensor = splits if isinstance(splits, torch.Tensor) else torch.tensor(list(splits))
    if tensor.dim() != 1 or (tensor.numel() > 0 and tensor.dtype not in (torch.int32, torch.int64)):
        raise InvalidArgument(
            f"{name}: splits is a {tensor.dim()}-d tensor of {tensor.dtype}; pass a 1-d one of torch.int32, "
            "with the number of rows for each rank"
        )
    return [int(rows) for rows in tensor.tolist()]


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, splits: Splits, name: str | None, process_set: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        received, rows = _start_alltoall(tensor, splits, name, process_set).wait()
        ctx.name, ctx.process_set, ctx.rows = name, process_set, rows
        ctx.mark_non_differentiable(rows)
        return received, rows

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[Any, ...]:
        back, _ = apply(_Alltoall, grad, ctx.rows, grad_name(ctx.name), ctx.process_set)
        return back, None, None, None


# -- reducescatter ----------------------------------------------------------------------------------------


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = ReduceOp.Average,
    process_set: Any = _G,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Starts an allreduce of which each rank gets its rows only, as many as the others; the first ranks get
    one more where that does not come out even. The bits are those of `allreduce`."""
    _check([tensor], op, name)
    output = _share(process_set)
    return start(REDUCESCATTER, tensor, output, name, op, prescale_factor, postscale_factor, process_set)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int = ReduceOp.Average,
    process_set: Any = _G,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Returns this rank's rows of the reduction of `tensor`; see `reducescatter_async`.

    Differentiable for Average and Sum. The gradient is, as in Horovod, the joined gradients of all ranks'
    rows, times the scale factors, and for Sum times the number of ranks. `compression` applies on the wire.
    """
    _check([tensor], op, name)
    wire, ctx = compression.compress(tensor)
    rest = op, process_set, prescale_factor, postscale_factor
    out = apply(_Reducescatter, wire, name, *rest) if needs_grad(wire) else _run(wire, name, *rest)
    return compression.decompress(out, ctx)


def _run(
    tensor: torch.Tensor, name: str | None, op: int, process_set: Any, prescale: float, postscale: float
) -> torch.Tensor:
    output = _share(process_set)
    out: torch.Tensor = run(REDUCESCATTER, tensor, output, name, op, prescale, postscale, process_set)
    return out


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, *rest: Any) -> torch.Tensor:
        ctx.name, ctx.process_set, ctx.factor = name, rest[1], _grad_factor(*rest)
        return _run(tensor, name, *rest)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        joined = allgather(grad * ctx.factor, grad_name(ctx.name), ctx.process_set)
        return joined, None, None, None, None, None


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: int = ReduceOp.Average,
    process_set: Any = _G,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Like `reducescatter_async` for several tensors that complete together. One handle; its result is a
    list."""
    tensors = list(tensors)
    _check(tensors, op, name)
    output = _share(process_set)
    return start_grouped(
        REDUCESCATTER, tensors, output, name, op, prescale_factor, postscale_factor, process_set
    )


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int = ReduceOp.Average,
    process_set: Any = _G,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Returns the `reducescatter` of each tensor, made together. Differentiable like it."""
    tensors = list(tensors)
    _check(tensors, op, name)
    compressed = [compression.compress(tensor) for tensor in tensors]
    wires = [wire for wire, _ in compressed]
    rest = op, process_set, prescale_factor, postscale_factor
    if any(map(needs_grad, wires)):
        outs = apply(_GroupedReducescatter, name, *rest, *wires)
    else:
        outs = synchronize(grouped_reducescatter_async(wires, name, *rest))
    return [compression.decompress(out, ctx) for out, (_, ctx) in zip(outs, compressed, strict=True)]


class _GroupedReducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, *rest: Any) -> tuple[torch.Tensor, ...]:
        ctx.name, ctx.process_set, ctx.factor = name, rest[1], _grad_factor(*rest[:4])
        outs = tuple(synchronize(grouped_reducescatter_async(rest[4:], name, *rest[:4])))
        ctx.mark_non_differentiable(*(out for out in outs if not out.dtype.is_floating_point))
        ctx.floating = [out.dtype.is_floating_point for out in outs]
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        scaled = [grad * ctx.factor for grad, floats in zip(grads, ctx.floating, strict=True) if floats]
        joined = iter(grouped_allgather(scaled, grad_name(ctx.name), ctx.process_set))
        return (None,) * 5 + tuple(next(joined) if floats else None for floats in ctx.floating)


def _grad_factor(op: int, process_set: Any, prescale: float, postscale: float) -> float:
    if op not in (ReduceOp.Average, ReduceOp.Sum):
        raise NotReducible(
            f"reducescatter with op={ReduceOp(op).name} has no gradient; pass tensor.detach(), or use "
            "Average or Sum"
        )
    ranks = basics.group_of(process_set).size if op == ReduceOp.Sum else 1
    return prescale * postscale * ranks


def _check(tensors: Tensors, op: int, name: str | None) -> None:
    if op == ReduceOp.Adasum:
        raise NotReducible(
            "reducescatter with op=Adasum is not supported; use Average, Sum, Min, Max or Product"
        )
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.dim() == 0:
            raise NotReducible(
                f"{name or 'reducescatter'}: a 0-d tensor has no rows to scatter; pass tensor.reshape(1)"
            )


def _share(process_set: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """What makes the tensor for this rank's rows of another one."""
    group = basics.group_of(process_set)

    def share(tensor: torch.Tensor) -> torch.Tensor:
        rows = len(rows_of(tensor.shape[0], group.rank, group.size))
        return torch.empty((rows, *tensor.shape[1:]), dtype=tensor.dtype)

    return share
