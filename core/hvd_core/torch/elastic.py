"""`hvd.elastic`: models and optimizers in a state that outlives lost ranks; see `hvd_core.elastic`."""

from __future__ import annotations

import copy
from typing import Any

import torch

from ..elastic import ObjectState, State, run
from ..errors import InvalidArgument
from ..objects import broadcast_object
from .distributor import Distributor
from .functions import broadcast_parameters
from .sampler import ElasticSampler
from .sharded import ShardedOptimizer

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]


class TorchState(ObjectState):
    """A state of a model, an optimizer and values, or of several, by name:
    `TorchState(model=net, optimizer=adam, scheduler=scheduler, epoch=0)`.

    What has `state_dict` and `load_state_dict` is kept by them, in host memory; it must be the same object as
    long as the state lives. Going back also drops gradients. Everything else is a value: see `ObjectState`.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **values: Any):
        values = {"model": model, "optimizer": optimizer, **values}
        stateful = {name: value for name, value in values.items() if _is_stateful(value)}
        parts = {name: _Stateful(name, value) for name, value in stateful.items()}
        super().__init__(parts=parts, **{name: v for name, v in values.items() if name not in stateful})
        vars(self).update(stateful)


def _is_stateful(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


class _Stateful:
    def __init__(self, name: str, value: Any):
        if isinstance(value, ShardedOptimizer):
            raise InvalidArgument(
                f"TorchState({name}=): the state of a ShardedOptimizer is divided among the ranks, and what "
                "a lost one had is gone; use DistributedOptimizer"
            )
        self._name, self._value = name, value

    def save(self) -> None:
        self._kept = on_host(self._value.state_dict())

    def restore(self) -> None:
        self._value.load_state_dict(copy.deepcopy(self._kept))
        if isinstance(self._value, torch.optim.Optimizer):
            self._value.zero_grad()
        if (distributor := self._distributor()) is not None:
            distributor.forget()

    def _distributor(self) -> Distributor | None:
        found: Distributor | None = getattr(self._value, "__dict__", {}).get("_hvd")
        return found

    def sync(self, root: int) -> None:
        state = self._value.state_dict()
        if isinstance(self._value, torch.nn.Module) and all(map(torch.is_tensor, state.values())):
            broadcast_parameters(state, root)
        else:
            self._value.load_state_dict(broadcast_object(on_host(state), root))
        if (distributor := self._distributor()) is not None:
            distributor.call_itself(f"elastic.{self._name}")


def on_host(value: Any) -> Any:
    """A deep copy with all tensors in host memory."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        made = copy.copy(value)  # of its class, with its attributes: torch keeps versions there
        made.update({key: on_host(inner) for key, inner in value.items()})
        return made
    if type(value) in (list, tuple):
        return type(value)(map(on_host, value))
    return copy.deepcopy(value)
