"""Copies of a DistributedOptimizer have lost its hooks; they refuse to step until they are wrapped again."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

from ..errors import InvalidArgument

_REFUSAL = -1  # torch numbers its hooks from 0


def state_of_copy(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """For copies and pickles: what torch keeps, and a hook that refuses to step."""
    state = type(optimizer).__getstate__(optimizer)
    return {**state, "_optimizer_step_pre_hooks": OrderedDict({_REFUSAL: refuse_step})}


def refuse_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The only hook of a copied optimizer (public for pickle's sake)."""
    raise InvalidArgument(
        f"this {type(optimizer).__name__} is a copy of a DistributedOptimizer (made by copy.deepcopy or "
        "pickle) and would step with the gradients of its own rank only. Wrap it: "
        "hvd.DistributedOptimizer(copy, ...)"
    )


def drop_refusal(optimizer: torch.optim.Optimizer) -> None:
    optimizer._optimizer_step_pre_hooks.pop(_REFUSAL, None)
