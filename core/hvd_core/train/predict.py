"""Batched prediction for a platform's transform."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from .columns import Layout
from .pack import Packer


class Predictor:
    """Applies a fitted torch model to record batches. Not thread-safe.

    model: with its weights loaded (`torch_model.load_weights`). layout: the one it was trained with;
    batches need `layout.input_columns`, by name. `batch_size`: rows of one forward. What the outputs are
    (dtype, shape of a row) is in `FitResult.output_spec`.
    """

    def __init__(self, model: Any, layout: Layout, *, batch_size: int = 4096):
        self._model, self._layout, self._batch_size = model, layout, batch_size
        self._packer = Packer(layout, layout.inputs)

    def predict(self, batch: pa.RecordBatch) -> list[np.ndarray]:
        """One array (rows, *shape) for each output, in the output's dtype (bfloat16 as float32).

        Raises DataError as packing does. An empty batch gives [].
        """
        from .torch_model import run_model

        if batch.num_rows == 0:
            return []
        inputs = self._packer.pack(batch)
        self._packer.check()
        size = self._batch_size
        parts = [
            run_model(self._model, [x[i : i + size] for x in inputs]) for i in range(0, batch.num_rows, size)
        ]
        return [np.concatenate(outputs) for outputs in zip(*parts, strict=True)]
