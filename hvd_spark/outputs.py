"""Which columns transform adds for the outputs of a model, and how arrays become them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
from pyspark.sql import types as T

from hvd_core.train import OutputSpec
from hvd_core.train.heads import column, has_probability
from hvd_core.train.predict import head_for

from .columns import arrow_type, spark_type


@dataclass(frozen=True)
class Wanted:
    """The user's parameters. Names are those for the first output; "" leaves a column out."""

    prediction: str
    probability: str
    raw: str
    heads: Sequence[str]
    threshold: float | None
    vectors: bool


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
        return as_vectors(rows, self.type) if self.form == "vector" else as_lists(rows, self.type)


def columns_for(specs: Sequence[OutputSpec], wanted: Wanted) -> list[tuple[T.StructField, OutColumn]]:
    """In the order in which they are added. Raises InvalidArgument for an unknown head."""
    found = []
    for i, spec in enumerate(specs):
        head = head_for(wanted.heads[i] if i < len(wanted.heads) else "output", spec)
        found.append(_prediction(i, spec, head, wanted))
        if has_probability(head) and wanted.probability:
            found.append(_vector(_numbered(wanted.probability, i), i, "probability", head))
        if head != "output" and wanted.raw:
            found.append(_vector(_numbered(wanted.raw, i), i, "raw", head))
    return found


def _numbered(name: str, i: int) -> str:
    return name if i == 0 else f"{name}_{i}"


def _prediction(i: int, spec: OutputSpec, head: str, wanted: Wanted) -> tuple[T.StructField, OutColumn]:
    name = _numbered(wanted.prediction, i)
    if head in ("softmax", "log_softmax", "scores"):
        return _field(name, T.DoubleType(), i, head, "flat", None)
    if head != "output" and wanted.threshold is not None:
        return _field(name, T.DoubleType(), i, head, "flat", wanted.threshold)
    if math.prod(spec.shape) == 1:
        return _field(name, spark_type(spec.dtype, ()), i, head, "flat", None)
    if wanted.vectors and len(spec.shape) == 1:
        return _vector(name, i, "prediction", head)
    return _field(name, spark_type(spec.dtype, spec.shape), i, head, "array", None)


def _field(
    name: str, type: T.DataType, i: int, head: str, form: Literal["flat", "array"], threshold: float | None
) -> tuple[T.StructField, OutColumn]:
    column = OutColumn(name, i, "prediction", head, form, arrow_type(type), threshold)
    return T.StructField(name, type), column


def _vector(
    name: str, i: int, what: Literal["prediction", "probability", "raw"], head: str
) -> tuple[T.StructField, OutColumn]:
    from pyspark.ml.linalg import VectorUDT

    type = VectorUDT()
    return T.StructField(name, type), OutColumn(name, i, what, head, "vector", arrow_type(type))


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
