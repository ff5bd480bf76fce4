"""What the outputs of a model mean: from numbers to classes and probabilities. numpy alone.

Travels with models that are stored for MLflow (torch_pyfunc.py), so it imports nothing of hvd.
"""

from __future__ import annotations

import numpy as np

#: What an output can be. "output": any numbers. Of several classes: "softmax" takes logits, "log_softmax"
#: logarithms of probabilities, "scores" what orders classes but is no probability. Of two classes, as one
#: number: "sigmoid" takes a logit, "probability" the probability of class 1.
HEADS = ("output", "softmax", "log_softmax", "scores", "sigmoid", "probability")
CLASSES = ("softmax", "log_softmax", "scores")
BINARY = ("sigmoid", "probability")


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
    if head in CLASSES:
        return x
    x = x.reshape(-1)
    if head == "probability":
        with np.errstate(divide="ignore"):
            x = np.log(x) - np.log1p(-x)
    return np.stack([-x, x], axis=1)


def prediction(head: str, output: np.ndarray, threshold: float | None) -> np.ndarray:
    """The number of the class in float64; of two classes the probability of class 1 in the output's dtype
    unless there is a threshold; else the output."""
    if head in CLASSES:
        return output.argmax(axis=1).astype(np.float64)
    if head not in BINARY:
        return output
    one = output if head == "probability" else _sigmoid(output.astype(np.float64)).astype(output.dtype)
    return one if threshold is None else (one > threshold).astype(np.float64)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    small = np.exp(-np.abs(x))  # never overflows
    return np.where(x >= 0, 1.0, small) / (1.0 + small)


def column(what: str, head: str, output: np.ndarray, threshold: float | None) -> np.ndarray:
    """The values of a column that is added for an output. what: "prediction", "probability" or "raw"."""
    if what == "prediction":
        return prediction(head, output, threshold)
    return probability(head, output) if what == "probability" else raw_prediction(head, output)
