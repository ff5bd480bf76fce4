"""Gradients that are reduced while the backward goes on, by a plan (`Group.plan`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..errors import InvalidArgument, MismatchError
from ..group import Group
from . import buffers
from .compression import Compression
from .gradients import Reduction

# What a rank shows the others at the end of a step.
_ABANDONED = 1  # the backward that began this step has failed
_CHANGED = 2  # the optimizer has other parameters than the plan
_JOINED = 4  # this rank has no more data, and steps only for the others

_DTYPES = {
    dtype: str(dtype).removeprefix("torch.")
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
}


@dataclass(frozen=True)
class Left:
    """What a step of a plan has not done, the same on all ranks."""

    #: Positions in the optimizer's parameters; some rank has their gradients in a form that no plan takes.
    declined: list[int]
    #: Some rank's optimizer has other parameters now: all gradients are to be reduced, and the plan is void.
    changed: bool


class RankHasJoined(Exception):
    """There is no plan without a rank that goes on later."""


class PlannedGradients:
    """The gradients of a fixed list of parameters in one Group. Step by step, on all ranks: `begin`, any
    `hand_over`, `finish`.

    Gradients stay where autograd put them and are reduced there. From `hand_over` to `finish` the core works
    on them; they are kept alive here for that time.
    """

    def __init__(self, native: Any, params: Sequence[torch.Tensor], order: Sequence[int]):
        self._native = native
        self._ready = native.ready
        self._form = [(p, p.dtype, p.shape) for p in params]
        self._order = list(order)  # member of the plan -> position in params
        self._members = [params[i] for i in self._order]
        self._member_of = {id(p): m for m, p in enumerate(self._members)}
        self._given: list[torch.Tensor | None] = [None] * len(self._members)
        self._versions = [0] * len(self._members)
        #: The others have dropped it while this rank stood in.
        self.is_void = False

    @classmethod
    def make(
        cls,
        how: Reduction,
        group: Group,
        label: str,
        params: Sequence[torch.Tensor],
        names: Sequence[str],
        arrived: Sequence[int],
    ) -> PlannedGradients | None:
        """All ranks call it together; the order is that in which rank 0's gradients `arrived` (positions).
        None, on all ranks, if a plan is not possible. Raises `RankHasJoined`, on all that have not."""
        if how.compression is not Compression.none or not params:
            return None
        if any(p.dtype not in _DTYPES or p.device.type != "cpu" for p in params):
            return None
        # Of those that have not arrived, the last are likely to be the first.
        first = dict.fromkeys(i for i in arrived if i < len(params))
        positions = np.array([*dict.fromkeys([*first, *reversed(range(len(params)))])], np.int64)
        orders = group.allgather(positions, name=f"{label}.order")
        if len(orders) < group.size * len(positions):
            raise RankHasJoined
        order = orders[: len(positions)].tolist()
        tensors = [
            (f"gradient of {names[i]}", _DTYPES[params[i].dtype], list(params[i].shape)) for i in order
        ]
        native = group.plan(
            tensors, name=f"{label}.plan", op=how.op, prescale=how.prescale, postscale=how.postscale
        )
        return None if native is None else cls(native, params, order)

    def is_for(self, params: Sequence[torch.Tensor]) -> bool:
        """Whether the plan was made for these, as they are."""
        return len(params) == len(self._form) and all(
            p is q and p.dtype is dtype and p.shape == shape
            for p, (q, dtype, shape) in zip(params, self._form, strict=True)
        )

    @property
    def is_open(self) -> bool:
        return bool(self._native.is_open)

    def begin(self) -> None:
        """Begins a step. One that a failed backward has left open is ended first, together with all ranks."""
        if self._native.is_open:
            self._abandon()
        self._native.begin()

    def hand_over(self, param: torch.Tensor) -> None:
        """To be called when the gradient of `param` is there and nobody will change it before `finish`. Does
        nothing if it is not certain to stay; `finish` looks again."""
        member = self._member_of.get(id(param))
        grad = param.grad
        if member is None or grad is None or not _fits(param, grad):
            return
        hooks = param._post_accumulate_grad_hooks
        if hooks is not None and len(hooks) > 1:  # somebody else's, which may change the gradient
            return
        try:
            self._ready(member, grad.data_ptr())
        except InvalidArgument as error:
            raise InvalidArgument(
                f"{error}: a parameter that gets several gradients in one backward (reentrant activation "
                "checkpointing) must do so in the first one, too; use_reentrant=False has no such limit"
            ) from None
        self._given[member] = grad
        self._versions[member] = grad._version

    def finish(self, is_changed: bool = False) -> Left:
        """Ends the step: reduces what was not handed over, and waits. A gradient that only other ranks have
        counts as zero here, and exists afterwards."""
        if self._native.is_open and not self._is_untouched():
            self._abandon()
        if not self._native.is_open:
            self._native.begin()
        for member, param in enumerate(self._members):
            if self._given[member] is not None:
                continue
            grad = param.grad
            if is_changed:
                self._native.decline(member)
            elif grad is not None and _fits(param, grad):
                self._given[member] = grad
                self._ready(member, grad.data_ptr())
            elif grad is not None:
                self._native.decline(member)
        self._end(_CHANGED if is_changed else 0, self._new_gradient)
        if self._native.flags_of_any & _ABANDONED:
            raise MismatchError(_DISAGREE)
        changed = bool(self._native.flags_of_any & _CHANGED)
        return Left([self._order[member] for member in self._native.declined], changed)

    def stand_in(self) -> None:
        """For a rank that has joined: makes the others' steps with them, without gradients, until all ranks
        have joined."""
        while True:
            if not self._native.is_open:
                self._native.begin()
            self._end(_JOINED, lambda member: torch.zeros_like(self._members[member].detach()))
            if self._native.flags_of_any & _CHANGED:
                self.leave()
                self.is_void = True
            if self.is_void or self._native.flags_of_all & _JOINED:
                return

    def leave(self) -> None:
        """Takes part no more; to be called before the plan is dropped."""
        self._native.leave()

    def times(self) -> dict[str, float]:
        """Seconds so far: `ready_s` inside the backward, `end_s` after it, of which `wait_s` for others."""
        times: dict[str, float] = self._native.times()
        return times

    def _end(self, flags: int, memory: Callable[[int], torch.Tensor]) -> None:
        while needs := self._native.end(flags):
            for member in needs:
                grad = self._given[member] = memory(member)
                self._native.supply(member, grad.data_ptr())
        self._given = [None] * len(self._given)

    def _new_gradient(self, member: int) -> torch.Tensor:
        param = self._members[member]
        grad = param.grad = torch.zeros_like(param.detach(), memory_format=torch.contiguous_format)
        return grad

    def _is_untouched(self) -> bool:
        """Whether what was handed over is still the gradients."""
        return all(
            grad is None or (param.grad is grad and grad._version == version)
            for param, grad, version in zip(self._members, self._given, self._versions, strict=True)
        )

    def _abandon(self) -> None:
        """Ends a step whose gradients are not wanted any more. Right if all ranks do so."""
        self._end(_ABANDONED, lambda member: torch.zeros_like(self._members[member].detach()))
        if not self._native.flags_of_all & _ABANDONED:
            raise MismatchError(_DISAGREE)


_DISAGREE = (
    "a backward pass has failed on some ranks after it had handed gradients over, and not on others (or "
    "gradients were changed during the backward): the ranks cannot go on together"
)


def _fits(param: torch.Tensor, grad: torch.Tensor) -> bool:
    return grad.layout is torch.strided and grad.dtype is param.dtype and buffers.is_buffer(grad)


class Arrivals:
    """The order in which gradients arrive in one backward, and whether any did twice in one."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.has_repeats = False

    def begin(self) -> None:
        """Another backward of the first step (`backward_passes_per_step`) has begun."""
        self.order = []

    def note(self, position: Any) -> None:
        if position in self.order:
            self.has_repeats = True
        elif position is not None:
            self.order.append(position)
