"""The hooks on parameters by which a DistributedOptimizer hears of gradients."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch


class Owner(Protocol):
    def on_gradient(self, param: torch.Tensor) -> None: ...

    def lose(self, param: torch.Tensor) -> None:
        """Another owner takes the parameter: remove the hook from it."""


class GradientHook:
    """Tells its owner, and does not keep it alive."""

    def __init__(self, owner: Owner):
        self._owner = weakref.ref(owner)

    def owner(self) -> Owner | None:
        return self._owner()

    def __call__(self, param: torch.Tensor) -> None:
        if (owner := self._owner()) is not None:
            owner.on_gradient(param)


def take_over(owner: Owner, params: Sequence[torch.Tensor]) -> None:
    """Before `owner` gets hooks on these parameters: whoever else has some is told of the loss. Two would
    reduce a gradient twice, the second what the first has reduced."""
    for p in params:
        for hook in list((p._post_accumulate_grad_hooks or {}).values()):
            if isinstance(hook, GradientHook) and (other := hook.owner()) not in (None, owner):
                assert other is not None
                other.lose(p)


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
