"""From a Spark schema to the columns that training knows. Nothing here runs a job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
from pyspark.sql import types as T

from hvd_core.train import Column

_SIMPLE: dict[type[T.DataType], pa.DataType] = {
    T.BooleanType: pa.bool_(),
    T.ByteType: pa.int8(),
    T.ShortType: pa.int16(),
    T.IntegerType: pa.int32(),
    T.LongType: pa.int64(),
    T.FloatType: pa.float32(),
    T.DoubleType: pa.float64(),
    T.StringType: pa.string(),
    T.BinaryType: pa.binary(),
    T.DateType: pa.date32(),
    T.TimestampType: pa.timestamp("us", "UTC"),
    T.TimestampNTZType: pa.timestamp("us"),
    T.NullType: pa.null(),
}


def arrow_type(type: T.DataType) -> pa.DataType:
    """The Arrow type in which Spark sends a column. Types that cannot be trained on need only be named
    right."""
    if isinstance(type, T.UserDefinedType):
        return arrow_type(type.sqlType())
    if isinstance(type, T.ArrayType):
        return pa.list_(arrow_type(type.elementType))
    if isinstance(type, T.MapType):
        return pa.map_(arrow_type(type.keyType), arrow_type(type.valueType))
    if isinstance(type, T.StructType):
        return pa.struct([(f.name, arrow_type(f.dataType)) for f in type])
    if isinstance(type, T.DecimalType):
        return pa.decimal128(type.precision, type.scale)
    for known, arrow in _SIMPLE.items():
        if isinstance(type, known):
            return arrow
    return pa.struct([(type.simpleString(), pa.null())])


def columns_of(schema: T.StructType) -> list[Column]:
    """All columns; vectors have a shape where their ML attributes state it."""
    return [_column(field) for field in schema.fields]


def _column(field: T.StructField) -> Column:
    column = Column.of(field.name, arrow_type(field.dataType))
    if column.kind == "vector":
        attributes = (field.metadata or {}).get("ml_attr", {})
        if "num_attrs" in attributes:
            return replace(column, shape=(int(attributes["num_attrs"]),))
    return column


def with_shapes_of(columns: Sequence[Column], row: Any) -> list[Column]:
    """`columns` with the shapes that `row` (a `Row` holding all of them) has where the types leave them open.

    A null says nothing. That all rows are alike is checked where they are packed.
    """
    return [_with_shape(column, row[i]) for i, column in enumerate(columns)]


def _with_shape(column: Column, value: Any) -> Column:
    if column.shape is not None or value is None:
        return column
    if column.kind == "vector":
        return replace(column, shape=(int(value.size),))
    if column.kind == "array":
        return replace(column, shape=_shape(value))
    return column


def _shape(value: Any) -> tuple[int, ...] | None:
    sizes: list[int] = []
    while isinstance(value, (list, tuple)):
        sizes.append(len(value))
        if not value:
            break
        value = value[0]
    return tuple(sizes) if value is not None else None


def spark_type(type: pa.DataType) -> T.DataType:
    """The Spark type of a number that Arrow sends."""
    return next(spark() for spark, arrow in _SIMPLE.items() if arrow == type)
