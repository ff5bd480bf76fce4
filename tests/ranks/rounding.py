"""What 16-bit floats do to values, by numpy, as an oracle. bfloat16 stands in uint16."""

from __future__ import annotations

import numpy as np


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """The nearest, of two equally near ones the even one. Not for NaN."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def widen(values: np.ndarray) -> np.ndarray:
    """As they are summed."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32) if values.dtype == np.float16 else values


def through(wire: str, values: np.ndarray) -> np.ndarray:
    """float32 values that have travelled as `wire`, a `wire_dtype`."""
    return widen(to_bfloat16(values) if wire == "bf16" else values.astype(np.float16))
