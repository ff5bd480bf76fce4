"""Epochs, validation, early stopping, history: the loop of every framework."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .result import FitResult
from .shard import Shard
from .spec import TrainSpec

if TYPE_CHECKING:
    from ..group import Group


def fit_shard(
    spec: TrainSpec,
    shard: Shard,
    group: Group,
    *,
    on_progress: Callable[[dict[str, Any]], None] | None = None,
) -> FitResult:
    """Trains in this process; every rank of `group` calls it at the same time with the same spec.

    on_progress is called on rank 0 with {"epoch", "epochs", "step", "steps", "rows_per_s", "loss"}, about twice a
    second. `group` must be hvd's default Group (`hvd_core.basics.default_group()`).
    """
    raise NotImplementedError
