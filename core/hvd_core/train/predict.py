"""Batched prediction for a platform's transform, and what the outputs of a model mean."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa

from ..errors import InvalidArgument
from .columns import Layout
from .framework import Framework, framework_of
from .heads import BINARY, CLASSES, HEADS
from .pack import Packer
from .result import OutputSpec


def head_for(head: str, output: OutputSpec) -> str:
    """`head`, or "output" where rows of this form are neither classes nor one number of two classes."""
    if head not in HEADS:
        raise InvalidArgument(f"heads: {head!r} is none of {', '.join(HEADS)}")
    if head in CLASSES and len(output.shape) == 1 and output.shape[0] > 1:
        return head
    return head if head in BINARY and math.prod(output.shape) == 1 else "output"


class Predictor:
    """Applies a fitted model to record batches. Not thread-safe.

    model: with its weights, as `Framework.trained` makes it. layout: the one it was trained with; batches
    need `layout.input_columns`, by name. `batch_size`: rows of one forward. framework: None: the one of the
    model's type. What the outputs are (dtype, shape of a row) is in `FitResult.output_spec`.
    """

    def __init__(
        self, model: Any, layout: Layout, *, batch_size: int = 4096, framework: Framework | None = None
    ):
        self._model, self._layout, self._batch_size = model, layout, batch_size
        self.framework = framework_of(model) if framework is None else framework
        self._packer = Packer(layout, layout.inputs)
        #: One of `framework.devices()`; None: where the model is.
        self.device: str | None = None

    def predict(self, batch: pa.RecordBatch) -> list[np.ndarray]:
        """One array (rows, *shape) for each output, in the output's dtype (bfloat16 as float32).

        Raises DataError as packing does. An empty batch gives [].
        """
        if batch.num_rows == 0:
            return []
        inputs = self._packer.pack(batch)
        self._packer.check()
        size = self._batch_size
        parts = [
            self.framework.predict(self._model, [x[i : i + size] for x in inputs], self.device)
            for i in range(0, batch.num_rows, size)
        ]
        return [np.concatenate(outputs) for outputs in zip(*parts, strict=True)]
