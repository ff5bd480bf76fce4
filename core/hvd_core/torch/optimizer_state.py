"""Starting alike: an optimizer's state from one rank to all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .. import basics
from ..errors import InvalidArgument
from ..objects import broadcast_object
from .functions import check_names
from .handles import synchronize
from .sharded import ShardedOptimizer
from .transfers import broadcast_async, broadcast_async_


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Makes the state of `optimizer` and the options of its parameter groups (`lr`, `betas`, ...) those of
    rank `root_rank`; nothing changes there. No rank makes a step: what root has no state for has none
    afterwards.

    Every rank calls it with an optimizer of the same class over parameters of the same shapes in the same
    groups; a difference raises `MismatchError` on all, naming the first. The other ranks unpickle what root
    sent, except for the tensors of the state. `model` is taken for Horovod's sake and not needed. Raises
    `InvalidArgument` for LBFGS, whose state is the history of one rank's own search, and `ShardedOptimizer`.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidArgument(f"expected a torch.optim.Optimizer, got {type(optimizer).__qualname__}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidArgument(
            "broadcast_optimizer_state does not support torch.optim.LBFGS: make it anew on all ranks, "
            "after broadcast_parameters"
        )
    if isinstance(optimizer, ShardedOptimizer):
        raise InvalidArgument(
            "each rank of a ShardedOptimizer has a state of its own: broadcast that of the optimizer which "
            "it is made from, or give load_state_dict the same on all ranks"
        )
    check_names("broadcast_optimizer_state", list(_outline(optimizer)), root_rank)
    group = basics.default_group()
    if group.size == 1:
        return
    is_root = group.rank == root_rank
    label = basics.next_name("broadcast_optimizer_state")
    sent = broadcast_object(_Sent.of(optimizer) if is_root else None, root_rank, name=f"{label}.options")
    pending = []
    for i, (param, values) in enumerate(zip(_params(optimizer), sent.state, strict=True)):
        for key, value in values.items():
            if isinstance(value, _Form):
                tensor = optimizer.state[param][key].detach() if is_root else value.empty(param)
                start = broadcast_async_ if tensor.is_contiguous() else broadcast_async
                pending.append((values, key, start(tensor, root_rank, f"{label}.{i}.{key}")))
    for values, key, handle in pending:
        values[key] = synchronize(handle)
    if not is_root:
        _take_over(optimizer, sent)


def _params(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _outline(optimizer: torch.optim.Optimizer) -> Iterator[str]:
    """What must be the same on all ranks, in words."""
    yield f"class {type(optimizer).__qualname__}"
    for i, group in enumerate(optimizer.param_groups):
        for j, p in enumerate(group["params"]):
            yield f"parameter {j} of group {i}, {p.dtype} of shape {tuple(p.shape)}"


@dataclass(frozen=True)
class _Form:
    """In the place of a tensor of the state, which travels by itself."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    #: Whether it lies where its parameter does; else on the cpu, as the step counts of torch's optimizers.
    beside_parameter: bool

    def empty(self, param: torch.Tensor) -> torch.Tensor:
        device = param.device if self.beside_parameter else torch.device("cpu")
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class _Sent:
    """What root says about its optimizer."""

    options: list[dict[str, Any]]  # by group
    state: list[dict[str, Any]]  # by parameter; empty for one that has none
    others: dict[Any, Any]  # state that belongs to no parameter

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> _Sent:
        def described(value: Any, param: torch.Tensor) -> Any:
            if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
                return value
            return _Form(tuple(value.shape), value.dtype, value.device == param.device)

        state = optimizer.state
        return cls(
            [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
            [{k: described(v, p) for k, v in state.get(p, {}).items()} for p in _params(optimizer)],
            {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)},
        )


def _take_over(optimizer: torch.optim.Optimizer, sent: _Sent) -> None:
    for group, options in zip(optimizer.param_groups, sent.options, strict=True):
        for key, value in options.items():
            group[key] = _overwritten(group.get(key), value)
    optimizer.state.clear()
    optimizer.state.update(sent.others)
    for param, values in zip(_params(optimizer), sent.state, strict=True):
        if values:
            optimizer.state[param] = values


def _overwritten(mine: Any, root: Any) -> Any:
    """An option that is a tensor (`lr` of a captured step) stays the one that others hold."""
    if isinstance(mine, torch.Tensor) and isinstance(root, torch.Tensor) and mine.shape == root.shape:
        with torch.no_grad():
            return mine.copy_(root)
    return root
