"""Sums of sparse tensors: everybody gets everybody's entries, and adds them up. `ops.py` has the rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import basics
from ..basics import global_process_set as _G
from ..errors import InvalidArgument
from ..group import Group, ReduceOp
from .handles import Joined
from .ops import resolve_op
from .transfers import gather


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None = None, op: int = ReduceOp.Average, process_set: Any = _G
) -> Callable[[], torch.Tensor]:
    """Starts the sum or average of sparse COO tensors of one shape. As in Horovod the result is no handle but
    a function, which waits and returns a sparse tensor, coalesced and with the same bits on all ranks.
    Numbers of entries may differ, none included.

    Raises `InvalidArgument` for another op, for which a missing entry is not zero, and another layout; the
    function raises `MismatchError` on all ranks if the shapes differ.
    """
    name = name or basics.next_name("sparse_allreduce", process_set)
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.sparse_coo:
        raise InvalidArgument(f"{name}: expected a sparse COO tensor; pass tensor.to_sparse()")
    finish = start(basics.group_of(process_set), [tensor.detach()], [name], resolve_op(op, None))
    return lambda: finish()[0]


def sparse_allreduce(
    tensor: torch.Tensor, name: str | None = None, op: int = ReduceOp.Average, process_set: Any = _G
) -> torch.Tensor:
    """Returns the result of `sparse_allreduce_async`. Not differentiable."""
    return sparse_allreduce_async(tensor, name, op, process_set)()


def start(
    group: Group, tensors: Sequence[torch.Tensor], names: Sequence[str], op: ReduceOp
) -> Callable[[], list[torch.Tensor]]:
    """Of several tensors; the function waits for all of them."""
    if op not in (ReduceOp.Average, ReduceOp.Sum):
        raise InvalidArgument(
            f"{names[0]}: sparse tensors are reduced with Average or Sum, not {op.name}; a dense one can be "
            "(sparse_as_dense=True of DistributedOptimizer)"
        )
    own = [tensor.coalesce() for tensor in tensors]
    parts, labels = [], []
    for tensor, name in zip(own, names, strict=True):
        # No rows of the whole shape: that is how the core compares it.
        parts += [tensor.indices().t(), tensor.values(), torch.empty((0, *tensor.shape))]
        labels += [f"{name}.{part}" for part in ("indices", "values", "shape")]
    pending = Joined(*gather(group, parts, labels))

    def finish() -> list[torch.Tensor]:
        gathered = pending.wait()
        divisor = group.size if op is ReduceOp.Average else 1
        return [
            _total(tensor, indices, values, divisor)
            for tensor, indices, values in zip(own, gathered[::3], gathered[1::3], strict=True)
        ]

    return finish


def _total(like: torch.Tensor, indices: torch.Tensor, values: torch.Tensor, divisor: int) -> torch.Tensor:
    """16-bit floats are added in fp32, and averages of integers truncated, as in dense reductions."""
    if values.dtype in (torch.float16, torch.bfloat16):
        values = values.float()
    total = torch.sparse_coo_tensor(indices.t(), values, like.shape, check_invariants=False).coalesce()
    sums = total.values()
    if divisor > 1:
        sums = sums / divisor if sums.dtype.is_floating_point else sums.div(divisor, rounding_mode="trunc")
    return torch.sparse_coo_tensor(
        total.indices(), sums.to(like.dtype), like.shape, is_coalesced=True, check_invariants=False
    )
