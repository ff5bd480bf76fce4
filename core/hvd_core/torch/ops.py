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

import torch

from .. import basics
from ..errors import InvalidArgument
from ..group import ALLREDUCE, BROADCAST, REDUCESCATTER, ReduceOp
from . import buffers
from .buffers import for_core
from .handles import Joined, register

Tensors = Sequence[torch.Tensor]
empty_like = torch.empty_like


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


# From a tensor to the core. The native `*_tensor` calls do it all for a plain tensor: on the host,
# contiguous, without the negative bit, of a torch that tells where its memory is. For anything else they
# answer NotImplemented, and the long way follows, which knows what is wrong or makes the copies. `output` is
# the tensor itself, for in place, or what makes the tensor for the result of it. A blocking call goes to the
# core as one, which then need not wake another thread.

_DEFAULT_NAMES = {ALLREDUCE: "allreduce", BROADCAST: "broadcast", REDUCESCATTER: "reducescatter"}


def run(
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
    name = name or basics.next_name(_DEFAULT_NAMES[kind], process_set)
    group = basics.group_of(process_set)
    native = group._native
    result = native.run_tensor(kind, name, tensor, output, op, prescale_factor, postscale_factor, root)
    if result is not NotImplemented:
        return result
    op = resolve_op(op, None)
    (source,), (target,), finish = _long_way([tensor], None if output is tensor else output, name)
    _check_root(root, group.size, name)
    native.run(kind, name, source, target, op, prescale_factor, postscale_factor, root, None)
    return finish()[0]


def start(
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
    name = name or basics.next_name(_DEFAULT_NAMES[kind], process_set)
    group = basics.group_of(process_set)
    native = group._native
    started = native.start_tensor(
        group, kind, name, tensor, output, op, prescale_factor, postscale_factor, root
    )
    if started is not NotImplemented:
        return register(started)
    op = resolve_op(op, None)
    (source,), (target,), finish = _long_way([tensor], None if output is tensor else output, name)
    _check_root(root, group.size, name)
    started = native.start(group, kind, name, source, target, op, prescale_factor, postscale_factor, root)
    return register(Joined([started], lambda _: finish()[0]))


def start_grouped(
    kind: int,
    tensors: Tensors,
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
    name = name or basics.next_name(f"grouped_{_DEFAULT_NAMES[kind]}", process_set)
    group = basics.group_of(process_set)
    native = group._native
    started = native.start_tensors(
        group, kind, name, tensors, output, op, prescale_factor, postscale_factor, 0
    )
    if started is not NotImplemented:
        return register(started)
    op = resolve_op(op, None)
    sources, targets, finish = _long_way(tensors, output, name)
    started = native.start_group(
        group, kind, name, None, sources, targets, op, prescale_factor, postscale_factor, 0
    )
    return register(Joined([started], lambda _: finish()))


def _long_way(
    tensors: Tensors, output: Callable[[torch.Tensor], torch.Tensor] | None, name: str
) -> tuple[list[Any], list[Any], Callable[[], list[torch.Tensor]]]:
    """What the core reads and writes for these tensors, and what makes the caller's results of it. `output`
    is None for in place. Raises `InvalidArgument` for what no collective can carry."""
    for tensor in tensors:
        buffers.check_tensor(tensor, name)
        if output is None and not tensor.is_contiguous():
            raise InvalidArgument(
                f"{name}: an in-place collective needs a contiguous tensor; use the out-of-place form"
            )
    hosts = buffers.as_buffers(tensors)
    sources = [for_core(host) for host in hosts]
    if output is None:

        def write_back() -> list[torch.Tensor]:
            for tensor, host in zip(tensors, hosts, strict=True):
                if host is not tensor:
                    tensor.detach().copy_(host)
            return list(tensors)

        return sources, sources, write_back
    outs = [output(host) for host in hosts]
    devices = [tensor.device for tensor in tensors]
    return (
        sources,
        [for_core(out) for out in outs],
        lambda: [buffers.to_device(out, device) for out, device in zip(outs, devices, strict=True)],
    )


def _check_root(root_rank: int, size: int, name: str) -> None:
    if not 0 <= root_rank < size:
        raise InvalidArgument(f"{name}: root_rank={root_rank} is not a rank, there are {size}")


def needs_grad(tensor: Any) -> bool:
    """What nobody will differentiate need not pass through autograd, which costs more than a small
    collective."""
    return isinstance(tensor, torch.Tensor) and tensor.requires_grad and torch.is_grad_enabled()


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    return function.apply(*args)


def grad_name(name: str | None) -> str | None:
    return f"{name}.grad" if name else None
