"""The learning rate: as the optimizer has it, unless the spec says otherwise."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..errors import InvalidArgument
from .spec import Scheduler, TrainSpec


class LearningRate:
    """Sets `optimizer.param_groups[...]["lr"]`. Nothing here differs between ranks."""

    def __init__(self, spec: TrainSpec, optimizer: torch.optim.Optimizer, size: int):
        self._optimizer, self._warmup = optimizer, spec.warmup_epochs
        scale = {None: 1.0, "linear": float(size), "sqrt": math.sqrt(size)}[spec.lr_scaling]
        for group in optimizer.param_groups:
            if spec.learning_rate is not None:
                group["lr"] = spec.learning_rate
                group.pop("initial_lr", None)
            if scale != 1.0:
                group["lr"] *= scale
        self._used: float | None = None
        self._base = [float(g["lr"]) for g in optimizer.param_groups]
        schedule = spec.lr_schedule
        self._rule = schedule if isinstance(schedule, Scheduler) else None
        self._factor = None if isinstance(schedule, Scheduler) else schedule
        self._scheduler: Any = None
        if self._rule is not None:
            self._scheduler = self._rule.factory(optimizer)
            if not hasattr(self._scheduler, "step"):
                raise InvalidArgument(
                    f"Scheduler: factory(optimizer) returned {self._scheduler!r}, not a scheduler"
                )

    @property
    def used(self) -> float:
        """By the last step; before the first one what the optimizer has. Of the first group."""
        return self._now() if self._used is None else self._used

    def _now(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])

    def before_step(self, epoch: int, step: int, steps: int) -> None:
        """steps: of a whole epoch."""
        self._set(epoch, step, steps)
        self._used = self._now()

    def _set(self, epoch: int, step: int, steps: int) -> None:
        if self._factor is None and not self._warmup:
            return
        at = epoch + step / steps
        factor = 1.0 if self._factor is None else float(self._factor(at))
        if self._warmup:
            factor *= min(1.0, (at + 1.0 / steps) / self._warmup)
        for group, rate in zip(self._optimizer.param_groups, self._base, strict=True):
            group["lr"] = rate * factor

    def after_step(self) -> None:
        if self._rule is not None and self._rule.every == "step":
            self._scheduler.step()

    def after_epoch(self, logs: dict[str, float]) -> None:
        """`logs`: equal on all ranks."""
        rule = self._rule
        if rule is None or rule.every != "epoch":
            return
        if rule.metric is None:
            self._scheduler.step()
        else:
            self._scheduler.step(logs[rule.metric])

    def state(self) -> Any:
        return None if self._scheduler is None else self._scheduler.state_dict()

    def load(self, state: Any) -> None:
        if self._scheduler is not None and state is not None:
            self._scheduler.load_state_dict(state)
