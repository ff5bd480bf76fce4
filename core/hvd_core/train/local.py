"""Training on an Arrow table in this process, without a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from .result import FitResult
from .spec import TrainSpec

if TYPE_CHECKING:
    from ..group import Group


def fit_local(spec: TrainSpec, table: pa.Table, group: Group | None = None) -> FitResult:
    """Every rank of `group` (None: this process alone) calls it with its own rows. The spec's model is copied."""
    raise NotImplementedError
