"""Batched prediction for a platform's transform, and what the outputs of a model mean."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa

from ..errors import InvalidArgument
from .columns import Layout
from .pack import Packer
from .result import OutputSpec
from .spec import TrainSpec

#: What an output can be. "output": any numbers. Of several classes: "softmax" takes logits, "log_softmax"
#: logarithms of probabilities, "scores" what orders classes but is no probability. Of two classes, as one
#: number: "sigmoid" takes a logit, "probability" the probability of class 1.
HEADS = ("output", "softmax", "log_softmax", "scores", "sigmoid", "probability")
_CLASSES = ("softmax", "log_softmax", "scores")
_BINARY = ("sigmoid", "probability")


def heads_of(spec: TrainSpec) -> tuple[str, ...]:
    """What the losses of `spec` say about the model's outputs, one for each label."""
    from .torch_losses import terms_for

    return tuple(term.head for term in terms_for(spec))


def head_for(head: str, output: OutputSpec) -> str:
    """`head`, or "output" where rows of this form are neither classes nor one number of two classes."""
    if head not in HEADS:
        raise InvalidArgument(f"heads: {head!r} is none of {', '.join(HEADS)}")
    if head in _CLASSES and len(output.shape) == 1 and output.shape[0] > 1:
        return head
    return head if head in _BINARY and math.prod(output.shape) == 1 else "output"


def has_probability(head: str) -> bool:
    return head not in ("output", "scores")


def probability(head: str, output: np.ndarray) -> np.ndarray:
    """(rows, classes) in float64, from the output (rows, classes), or (rows,) or (rows, 1) of two classes."""
    x = output.astype(np.float64)
    if head == "softmax":
        x = np.exp(x - x.max(axis=1, keepdims=True))
        return x / x.sum(axis=1, keepdims=True)
    if head == "log_softmax":
        return np.exp(x)
    one = x.reshape(-1) if head == "probability" else _sigmoid(x.reshape(-1))
    return np.stack([1.0 - one, one], axis=1)


def raw_prediction(head: str, output: np.ndarray) -> np.ndarray:
    """(rows, classes) in float64: what orders the classes; of two classes the logit and its negative."""
    x = output.astype(np.float64)
    if head in _CLASSES:
        return x
    x = x.reshape(-1)
    if head == "probability":
        with np.errstate(divide="ignore"):
            x = np.log(x) - np.log1p(-x)
    return np.stack([-x, x], axis=1)


def prediction(head: str, output: np.ndarray, threshold: float | None) -> np.ndarray:
    """The number of the class in float64; of two classes the probability of class 1 in the output's dtype
    unless there is a threshold; else the output."""
    if head in _CLASSES:
        return output.argmax(axis=1).astype(np.float64)
    if head not in _BINARY:
        return output
    one = output if head == "probability" else _sigmoid(output.astype(np.float64)).astype(output.dtype)
    return one if threshold is None else (one > threshold).astype(np.float64)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    small = np.exp(-np.abs(x))  # never overflows
    return np.where(x >= 0, 1.0, small) / (1.0 + small)


class Predictor:
    """Applies a fitted torch model to record batches. Not thread-safe.

    model: with its weights loaded (`torch_model.load_weights`). layout: the one it was trained with;
    batches need `layout.input_columns`, by name. `batch_size`: rows of one forward. What the outputs are
    (dtype, shape of a row) is in `FitResult.output_spec`.
    """

    def __init__(self, model: Any, layout: Layout, *, batch_size: int = 4096):
        self._model, self._layout, self._batch_size = model, layout, batch_size
        self._packer = Packer(layout, layout.inputs)
        self._device: str | None = None

    def to(self, device: str) -> None:
        """Runs the model on this torch device ("cuda:0") from now on."""
        self._model.to(device)
        self._device = device

    def predict(self, batch: pa.RecordBatch) -> list[np.ndarray]:
        """One array (rows, *shape) for each output, in the output's dtype (bfloat16 as float32).

        Raises DataError as packing does. An empty batch gives [].
        """
        from .torch_model import run_model

        if batch.num_rows == 0:
            return []
        inputs = self._packer.pack(batch)
        self._packer.check()
        size, device = self._batch_size, self._device
        parts = [
            run_model(self._model, [x[i : i + size] for x in inputs], device)
            for i in range(0, batch.num_rows, size)
        ]
        return [np.concatenate(outputs) for outputs in zip(*parts, strict=True)]
