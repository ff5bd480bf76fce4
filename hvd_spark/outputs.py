"""The columns that transform adds, as Spark knows them."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
from pyspark.sql import types as T

from hvd_core.train import OutputSpec
from hvd_core.train.outputs import OutColumn, Wanted, columns_for

from .columns import arrow_type, spark_type


def fields_for(specs: Sequence[OutputSpec], wanted: Wanted) -> list[tuple[T.StructField, OutColumn]]:
    """In the order in which they are added. Raises InvalidArgument for an unknown head."""
    from pyspark.ml.linalg import VectorUDT

    vector = VectorUDT()
    return [
        (T.StructField(column.name, vector if column.form == "vector" else _type(column.type)), column)
        for column in columns_for(specs, wanted, arrow_type(vector))
    ]


def _type(type: pa.DataType) -> T.DataType:
    if pa.types.is_list(type):
        return T.ArrayType(_type(type.value_type), False)
    return spark_type(type)
