"""The reduction of an optimizer's gradients: two collectives, whatever the number of dense parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..group import Group, ReduceOp
from . import buffers, sparse
from .compression import Compression, Compressor

# What a rank says about one gradient. Larger marks win, so that all ranks go on with the same.
_NONE, _DENSE = 0, 1  # a sparse gradient with d sparse dimensions is _DENSE + d


@dataclass(frozen=True)
class Reduction:
    """How gradients are combined. The same on all ranks."""

    op: ReduceOp
    prescale: float
    postscale: float
    compression: Compressor
    sparse_as_dense: bool


@torch.no_grad()
def reduce_gradients(
    how: Reduction, group: Group, label: str, params: Sequence[torch.Tensor], names: Sequence[str]
) -> None:
    """Replaces every `p.grad` by its reduction over all ranks, in place; returns when that is done.

    Every rank must call it with the same `label` and the same parameters in the same order. A gradient that
    exists on some ranks only counts as zero on the others, and exists on all afterwards; one that exists
    nowhere stays None. Errors name parameters by `names`.
    """
    grads = [p.grad for p in params]
    marks = np.array([_mark(grad) for grad in grads], dtype=np.uint8)
    marks = group.allreduce(marks, name=f"{label}.has_gradient", op=ReduceOp.Max)
    present = np.flatnonzero(marks).tolist()
    are_sparse = np.flatnonzero(marks > _DENSE).tolist()
    apart: list[int] = [] if how.sparse_as_dense else are_sparse
    if apart:
        dims = [int(marks[i]) - _DENSE for i in apart]
        _reduce_sparse(how, group, label, [params[i] for i in apart], dims, [names[i] for i in apart])
        present = [i for i in present if marks[i] == _DENSE]
    if not present:
        return
    dense = [_dense_gradient(params[i], grads[i]) for i in present]
    _reduce_dense(how, group, label, dense, [f"gradient of {names[i]}" for i in present])
    for i, grad in zip(present, dense, strict=True) if are_sparse else ():
        if marks[i] > _DENSE:
            params[i].grad = grad.to_sparse(int(marks[i]) - _DENSE)


def _mark(grad: torch.Tensor | None) -> int:
    if grad is None:
        return _NONE
    return _DENSE + grad.sparse_dim() if grad.layout is torch.sparse_coo else _DENSE


def _dense_gradient(param: torch.Tensor, grad: torch.Tensor | None) -> torch.Tensor:
    if grad is None:
        grad = param.grad = torch.zeros_like(param.detach())
    elif grad.layout is not torch.strided:
        grad = grad.to_dense()
    return grad.detach() if grad.requires_grad else grad


def _sparse_gradient(param: torch.Tensor, grad: torch.Tensor | None, sparse_dim: int) -> torch.Tensor:
    if grad is None:
        shape = param.shape
        indices = torch.empty(sparse_dim, 0, dtype=torch.int64, device=param.device)
        values = param.detach().new_empty(0, *shape[sparse_dim:])
        return torch.sparse_coo_tensor(indices, values, shape, check_invariants=False)
    if grad.layout is torch.sparse_coo and grad.sparse_dim() == sparse_dim:
        return grad.detach()
    return grad.detach().to_dense().to_sparse(sparse_dim)


def _reduce_sparse(
    how: Reduction,
    group: Group,
    label: str,
    params: Sequence[torch.Tensor],
    dims: Sequence[int],
    names: Sequence[str],
) -> None:
    """They travel as they are, whatever the compression."""
    grads = [_sparse_gradient(p, p.grad, dim) for p, dim in zip(params, dims, strict=True)]
    if how.prescale != 1.0:
        grads = [grad * how.prescale for grad in grads]
    finish = sparse.start(group, grads, [f"{label}.gradient of {name}" for name in names], how.op)
    for param, grad in zip(params, finish(), strict=True):
        param.grad = grad if how.postscale == 1.0 else grad * how.postscale


def _reduce_dense(
    how: Reduction, group: Group, label: str, grads: list[torch.Tensor], names: list[str]
) -> None:
    plain = how.compression is Compression.none
    compressed = [] if plain else [how.compression.compress(grad) for grad in grads]
    wires = grads if plain else [wire for wire, _ in compressed]
    hosts = wires
    elsewhere = [i for i, wire in enumerate(wires) if not buffers.is_buffer(wire)]
    if elsewhere:
        hosts = list(wires)
        for i, host in zip(elsewhere, buffers.host_copies([wires[i] for i in elsewhere]), strict=True):
            hosts[i] = host
    group.grouped_allreduce_async(
        [buffers.for_core(host) for host in hosts],
        name=label,
        names=names,
        op=how.op,
        prescale=how.prescale,
        postscale=how.postscale,
    ).wait()
    for i in elsewhere:
        wires[i].copy_(hosts[i], non_blocking=True)
    for grad, wire, (_, ctx) in zip(grads, wires, compressed, strict=True) if not plain else ():
        if wire is not grad:
            grad.copy_(how.compression.decompress(wire, ctx))
