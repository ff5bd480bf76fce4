"""Collectives that move tensors: allgather and broadcast; and the barrier. `ops.py` has the rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .. import basics
from ..basics import global_process_set as _G
from ..errors import InvalidArgument
from ..group import BROADCAST, Group, ReduceOp
from . import buffers
from .buffers import for_core
from .handles import Joined, register, synchronize
from .ops import Tensors, apply, empty_like, grad_name, needs_grad, run, start
from .reductions import allreduce

#: What all ranks say to a broadcast, which reduces nothing.
_BITS = ReduceOp.Sum


def gather(group: Group, tensors: Tensors, names: Sequence[str]) -> tuple[list[Any], Any]:
    """Submits. Returns the native handles and what makes tensors of their results."""
    for tensor, name in zip(tensors, names, strict=True):
        buffers.check_tensor(tensor, name)
        if tensor.dim() == 0:
            raise InvalidArgument(f"{name}: a 0-d tensor has no rows to gather; pass tensor.reshape(1)")
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
    name = name or basics.next_name("allgather", process_set)
    handles, finish = gather(basics.group_of(process_set), [tensor], [name])
    return register(Joined(handles, lambda results: finish(results)[0]))


def allgather(tensor: torch.Tensor, name: str | None = None, process_set: Any = _G) -> torch.Tensor:
    """Returns all ranks' tensors, concatenated along dimension 0 in rank order.

    Differentiable. The gradient is, as in Horovod, the **average** over ranks of the gradients of this rank's
    rows, not their sum: with the same loss on every rank it is the gradient of that loss.
    """
    if needs_grad(tensor):
        return apply(_Allgather, tensor, name, process_set)
    return synchronize(allgather_async(tensor, name, process_set))


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, process_set: Any) -> torch.Tensor:
        ctx.name, ctx.process_set, ctx.rows = name, process_set, tensor.shape[0] if tensor.dim() else 0
        return synchronize(allgather_async(tensor, name, process_set))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        name = grad_name(ctx.name)
        averaged = allreduce(grad, name=name, op=ReduceOp.Average, process_set=ctx.process_set)
        group = basics.group_of(ctx.process_set)
        label = name or basics.next_name("allgather", ctx.process_set)
        rows = group.allgather(np.array([ctx.rows]), name=f"{label}.rows")
        start = int(rows[: group.rank].sum())
        return averaged[start : start + ctx.rows], None, None


def grouped_allgather_async(tensors: Tensors, name: str | None = None, process_set: Any = _G) -> int:
    """Like `allgather_async` for several tensors; one handle, whose result is a list."""
    base = name or basics.next_name("grouped_allgather", process_set)
    tensors = list(tensors)
    names = [f"{base}_{i}of{len(tensors)}" for i in range(len(tensors))]
    return register(Joined(*gather(basics.group_of(process_set), tensors, names)))


def grouped_allgather(tensors: Tensors, name: str | None = None, process_set: Any = _G) -> list[torch.Tensor]:
    """Returns the `allgather` of each tensor. Differentiable like it."""
    if any(map(needs_grad, tensors)):
        names = [f"{name}_{i}of{len(tensors)}" if name else None for i in range(len(tensors))]
        return [allgather(tensor, n, process_set) for tensor, n in zip(tensors, names, strict=True)]
    return synchronize(grouped_allgather_async(tensors, name, process_set))


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = _G
) -> int:
    """Starts overwriting `tensor` with root's; `synchronize(handle)` returns it. Nobody may touch it until
    then. `root_rank` is a rank of the whole job, also with a process set."""
    root = basics.root_in(process_set, root_rank)
    return start(BROADCAST, tensor, tensor, name, _BITS, 1.0, 1.0, process_set, root)


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = _G
) -> int:
    """Starts a broadcast into a new tensor; `synchronize(handle)` returns it. `tensor` gives the shape and
    dtype, and on root the values; it must not change until then."""
    root = basics.root_in(process_set, root_rank)
    return start(BROADCAST, tensor, empty_like, name, _BITS, 1.0, 1.0, process_set, root)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = _G
) -> torch.Tensor:
    """Overwrites `tensor` with root's and returns it. Not differentiable."""
    root = basics.root_in(process_set, root_rank)
    return run(BROADCAST, tensor, tensor, name, _BITS, 1.0, 1.0, process_set, root)


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = _G
) -> torch.Tensor:
    """Returns root's tensor. Differentiable: as in Horovod, root's gradient is the **average** over ranks,
    the others' is zero."""
    root = basics.root_in(process_set, root_rank)
    if needs_grad(tensor):
        return apply(_Broadcast, tensor, root, name, process_set)
    return run(BROADCAST, tensor, empty_like, name, _BITS, 1.0, 1.0, process_set, root)


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root: int, name: str | None, process_set: Any
    ) -> torch.Tensor:
        ctx.root, ctx.name, ctx.process_set = root, name, process_set
        return run(BROADCAST, tensor, empty_like, name, _BITS, 1.0, 1.0, process_set, root)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        averaged = allreduce(grad, name=grad_name(ctx.name), op=ReduceOp.Average, process_set=ctx.process_set)
        if basics.group_of(ctx.process_set).rank != ctx.root:
            averaged = torch.zeros_like(averaged)
        return averaged, None, None, None


def barrier(process_set: Any = _G) -> None:
    """Returns when every rank has called it. Other collectives may be in flight."""
    basics.group_of(process_set).barrier()
