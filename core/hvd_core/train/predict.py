"""Batched prediction for a platform's transform."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from .columns import Layout
from .result import OutputSpec


class Predictor:
    """model: with its weights loaded. layout: the one it was trained with; `layout.input_columns` must be sent."""

    def __init__(self, model: Any, layout: Layout, *, batch_size: int = 4096):
        raise NotImplementedError

    def predict(self, batch: pa.RecordBatch) -> list[np.ndarray]:
        """One array (rows, *shape) for each output, in the output's dtype (bfloat16 as float32)."""
        raise NotImplementedError

    def output_spec(self) -> tuple[OutputSpec, ...]:
        raise NotImplementedError
