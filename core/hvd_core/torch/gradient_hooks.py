"""The hooks on parameters by which a DistributedOptimizer hears of gradients."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from ..errors import InvalidArgument


class Owner(Protocol):
    def on_gradient(self, param: torch.Tensor) -> None: ...


class GradientHook:
    """Tells its owner, and does not keep it alive."""

    def __init__(self, owner: Owner):
        self._owner = weakref.ref(owner)

    def owner(self) -> Owner | None:
        return self._owner()

    def __call__(self, param: torch.Tensor) -> None:
        if (owner := self._owner()) is not None:
            owner.on_gradient(param)


def refuse_shared(owner: Owner, params: Sequence[torch.Tensor], names: Mapping[torch.Tensor, str]) -> None:
    """Raises `InvalidArgument` if another optimizer that is alive has one of the parameters: each would
    reduce the gradient, the second one what the first has reduced."""
    if _first_shared(owner, params) is None:
        return
    gc.collect()  # perhaps it is dropped, and in a circle of the program's
    if (shared := _first_shared(owner, params)) is not None:
        raise InvalidArgument(
            f"parameter {names.get(shared, '?')} of shape {tuple(shared.shape)} belongs to another "
            "DistributedOptimizer already, and its gradient can be reduced only once. Give each parameter to "
            "one optimizer, or drop the other optimizer first (del)"
        )


def _first_shared(owner: Owner, params: Sequence[torch.Tensor]) -> torch.Tensor | None:
    for p in params:
        for hook in (p._post_accumulate_grad_hooks or {}).values():
            if isinstance(hook, GradientHook) and hook.owner() not in (None, owner):
                return p
    return None


def register(param: torch.Tensor, hook: GradientHook) -> Any:
    """Registers also on a frozen parameter: it may be unfrozen later, and torch keeps the hook."""
    frozen = not param.requires_grad
    if frozen:
        param.requires_grad_(True)
    try:
        return param.register_post_accumulate_grad_hook(hook)
    finally:
        if frozen:
            param.requires_grad_(False)


def remove_all(handles: dict[int, Any]) -> None:
    for handle in handles.values():
        handle.remove()
