"""Which columns predicting adds for the outputs of a model, and how arrays become them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa

from .heads import CLASSES, column, has_probability
from .predict import head_for
from .result import OutputSpec


@dataclass(frozen=True)
class Wanted:
    """The user's parameters. Names are those for the first output; "" leaves a column out."""

    prediction: str
    probability: str
    raw: str
    heads: Sequence[str]
    threshold: float | None
    vectors: bool = False


@dataclass(frozen=True)
class OutColumn:
    """A column to add. output: which of the model's outputs it is made from; form: "flat" has one number in
    a row, whatever the output's shape."""

    name: str
    output: int
    what: Literal["prediction", "probability", "raw"]
    head: str
    form: Literal["flat", "array", "vector"]
    type: pa.DataType
    threshold: float | None = None

    def of(self, outputs: Sequence[np.ndarray]) -> pa.Array:
        """The column for the outputs (rows, *shape) of a batch."""
        rows = column(self.what, self.head, outputs[self.output], self.threshold)
        if self.form == "flat":
            return pa.array(rows.reshape(len(rows)), self.type)
        if self.form == "vector" and pa.types.is_struct(self.type):
            return as_vectors(rows, self.type)
        return as_lists(rows.astype(np.float64) if self.form == "vector" else rows, self.type)


def columns_for(specs: Sequence[OutputSpec], wanted: Wanted, vector: pa.DataType) -> list[OutColumn]:
    """In the order in which they are added. vector: the type of vectors of numbers, a list of doubles or
    Spark ML's struct. Raises InvalidArgument for an unknown head."""
    found = []
    for i, spec in enumerate(specs):
        head = head_for(wanted.heads[i] if i < len(wanted.heads) else "output", spec)
        found.append(_prediction(i, spec, head, wanted, vector))
        if has_probability(head) and wanted.probability:
            name = _numbered(wanted.probability, i)
            found.append(OutColumn(name, i, "probability", head, "vector", vector))
        if head != "output" and wanted.raw:
            found.append(OutColumn(_numbered(wanted.raw, i), i, "raw", head, "vector", vector))
    return found


def _numbered(name: str, i: int) -> str:
    return name if i == 0 else f"{name}_{i}"


def _prediction(i: int, spec: OutputSpec, head: str, wanted: Wanted, vector: pa.DataType) -> OutColumn:
    name = _numbered(wanted.prediction, i)
    if head in CLASSES:
        return OutColumn(name, i, "prediction", head, "flat", pa.float64())
    if head != "output" and wanted.threshold is not None:
        return OutColumn(name, i, "prediction", head, "flat", pa.float64(), wanted.threshold)
    if math.prod(spec.shape) == 1:
        return OutColumn(name, i, "prediction", head, "flat", column_type(spec.dtype))
    if wanted.vectors and len(spec.shape) == 1:
        return OutColumn(name, i, "prediction", head, "vector", vector)
    return OutColumn(name, i, "prediction", head, "array", column_type(spec.dtype, len(spec.shape)))


def column_type(dtype: str, axes: int = 0) -> pa.DataType:
    """The type of a prediction: its own dtype, lists for what is not a scalar; half floats as float."""
    type = _TYPES.get(dtype, pa.float32())
    for _ in range(axes):
        type = pa.list_(type)
    return type


#: Engines have no unsigned bytes.
_TYPES = {
    "bool": pa.bool_(),
    "int8": pa.int8(),
    "int16": pa.int16(),
    "int32": pa.int32(),
    "uint8": pa.int16(),
    "int64": pa.int64(),
    "float64": pa.float64(),
}


def as_lists(rows: np.ndarray, kind: pa.DataType) -> pa.Array:
    """(rows, *shape) as nested lists of type `kind`."""
    types = [kind]
    while pa.types.is_list(types[-1]):
        types.append(types[-1].value_type)
    column = pa.array(np.ascontiguousarray(rows).reshape(-1), types[-1])
    for axis in range(rows.ndim - 1, 0, -1):
        width = rows.shape[axis]
        offsets = np.arange(0, len(column) + 1, width, dtype=np.int32)
        column = pa.ListArray.from_arrays(pa.array(offsets), column, type=types[axis - 1])
    return column


def as_vectors(rows: np.ndarray, kind: pa.DataType) -> pa.Array:
    """(rows, k) as dense Spark ML vectors."""
    values = as_lists(rows.astype(np.float64), kind.field("values").type)
    dense = pa.array(np.ones(len(rows), np.int8))
    nothing = [pa.nulls(len(rows), kind.field(name).type) for name in ("size", "indices")]
    return pa.StructArray.from_arrays([dense, *nothing, values], fields=list(kind))
