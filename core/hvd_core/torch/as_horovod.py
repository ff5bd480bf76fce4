"""What `horovod.torch` does otherwise than `hvd_core.torch`: see `hvd_core.as_horovod`.

A rank that has joined is an error for the collectives that Horovod cannot do without it, `step()` warns after
`synchronize()`, and `broadcast_optimizer_state` leaves gradients of zero.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from .. import basics
from ..errors import MismatchError
from ..group import Group
from . import optimizer as _optimizer
from . import optimizer_state, scatters, transfers
from .handles import poll, register, synchronize


def _of_all_ranks(collective: Callable[..., Any]) -> Callable[..., Any]:
    """`collective`, but where a rank has joined it raises `MismatchError` on the others.

    They learn of it by a sum of ones, to which a joined rank adds nothing: it has made all its calls before
    it joined, so every rank that takes part sees the same sum.
    """
    kind, signature = collective.__name__, inspect.signature(collective)
    is_async = "_async" in kind

    @functools.wraps(collective)
    def checked(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        group = basics.group_of(given.get("process_set"))
        if group.size == 1 or group is not basics.default_group():  # joining is among all ranks
            return collective(*args, **kwargs)
        name = given["name"] = given.get("name") or basics.next_name(kind)
        if is_async:
            return register(_Checked(collective(**given), group, name))
        result = collective(**given)  # first, since a bad argument is one of this rank alone
        _check(group.allreduce(_one(), name=_count_name(name)), group, name)
        return result

    checked.__module__ = __name__
    return checked


def _one() -> np.ndarray[Any, Any]:
    return np.ones(1, np.int32)


def _count_name(name: str) -> str:
    return f"{name}.ranks"


def _check(count: Any, group: Group, name: str) -> None:
    there = int(count[0])
    if there < group.size:
        raise MismatchError(
            f"{name}: {group.size - there} of {group.size} ranks have joined. Horovod has this for allreduce "
            "only; hvd_core.torch does without them here too"
        )


class _Checked:
    """Behind a handle: the collective's own one, and the count of ranks."""

    def __init__(self, handle: int, group: Group, name: str):
        self._handle, self._group, self._name = handle, group, name
        self._count = group.allreduce_async(_one(), name=_count_name(name))

    def done(self) -> bool:
        return self._count.done() and poll(self._handle)

    def wait(self) -> Any:
        count = self._count.wait()
        result = synchronize(self._handle)
        _check(count, self._group, self._name)
        return result


allgather = _of_all_ranks(transfers.allgather)
allgather_async = _of_all_ranks(transfers.allgather_async)
grouped_allgather = _of_all_ranks(transfers.grouped_allgather)
grouped_allgather_async = _of_all_ranks(transfers.grouped_allgather_async)
broadcast = _of_all_ranks(transfers.broadcast)
broadcast_ = _of_all_ranks(transfers.broadcast_)
broadcast_async = _of_all_ranks(transfers.broadcast_async)
broadcast_async_ = _of_all_ranks(transfers.broadcast_async_)
alltoall = _of_all_ranks(scatters.alltoall)
alltoall_async = _of_all_ranks(scatters.alltoall_async)
reducescatter = _of_all_ranks(scatters.reducescatter)
reducescatter_async = _of_all_ranks(scatters.reducescatter_async)
grouped_reducescatter = _of_all_ranks(scatters.grouped_reducescatter)
grouped_reducescatter_async = _of_all_ranks(scatters.grouped_reducescatter_async)


@functools.wraps(_optimizer.DistributedOptimizer)
def DistributedOptimizer(*args: Any, **kwargs: Any) -> torch.optim.Optimizer:
    optimizer = _optimizer.DistributedOptimizer(*args, **kwargs)
    distributor = vars(optimizer)["_hvd"]
    asked = False

    def synchronize() -> None:
        nonlocal asked
        distributor.synchronize()
        asked = True

    def before_step(*_: Any) -> None:
        nonlocal asked
        if asked and not distributor.takes_gradients_as_they_are:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after "
                "optimizer.synchronize(). Horovod would reduce the gradients again; here they are global "
                "once backward() has returned, and neither call is needed",
                stacklevel=3,  # the user's step(), one frame of torch up
            )
        asked = False

    optimizer.register_step_pre_hook(before_step)
    vars(optimizer)["synchronize"] = synchronize
    return optimizer


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """As in `hvd_core.torch`. Horovod makes a step with gradients of zero when there is no state yet, and
    scripts see these afterwards; here there is no step, but the gradients."""
    is_new = not optimizer.state
    optimizer_state.broadcast_optimizer_state(optimizer, root_rank, model)
    for group in optimizer.param_groups if is_new else ():
        for p in group["params"]:
            if p.requires_grad and p.grad is None:
                p.grad = torch.zeros_like(p)


DistributedOptimizer.__module__ = __name__

__all__ = [
    "DistributedOptimizer",
    "allgather",
    "allgather_async",
    "alltoall",
    "alltoall_async",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_optimizer_state",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "reducescatter",
    "reducescatter_async",
]
