"""Rows of any source as Arrow blocks in Ray's object store, and which of them a rank takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import ray
from ray.data import Dataset

from hvd_core.errors import DataError, InvalidArgument


@dataclass(frozen=True)
class Piece:
    """Rows [begin, end) of a block."""

    block: Any
    begin: int
    end: int


def as_dataset(data: Any) -> Dataset:
    """A Ray Dataset as it is; a pandas DataFrame, an Arrow table or a Spark DataFrame as one."""
    if isinstance(data, Dataset):
        return data
    if isinstance(data, pa.Table):
        return ray.data.from_arrow(data)
    module, name = type(data).__module__, type(data).__name__
    if module.partition(".")[0] == "pandas" and name == "DataFrame":
        return ray.data.from_pandas(data)
    if module.startswith("pyspark.sql.") and name == "DataFrame":
        from .spark import from_spark

        return from_spark(data)
    raise InvalidArgument(
        "expected a Ray Dataset, a pandas DataFrame, an Arrow table or a Spark DataFrame, "
        f"not {module}.{name}"
    )


def blocks_of(dataset: Any) -> list[tuple[Any, int]]:
    """(reference, rows) of each block with rows of an executed dataset. Raises DataError if there is none."""
    entries = [entry for bundle in dataset.iter_internal_ref_bundles() for entry in bundle.blocks]
    blocks = [(entry.ref, entry.metadata.num_rows) for entry in entries if entry.metadata.num_rows]
    if not blocks:
        raise DataError("no rows: there is nothing to train on")
    return blocks


def deal(blocks: Sequence[tuple[Any, int]], size: int) -> list[list[Piece]]:
    """Consecutive rows for each of `size` ranks; some have one more than others."""
    rows = sum(count for _, count in blocks)
    ends = [-(-rows * rank // size) for rank in range(size + 1)]
    dealt: list[list[Piece]] = [[] for _ in range(size)]
    first = 0
    for ref, count in blocks:
        for rank in range(size):
            begin, end = max(ends[rank], first), min(ends[rank + 1], first + count)
            if begin < end:
                dealt[rank].append(Piece(ref, begin - first, end - first))
        first += count
    return dealt


def table_of(block: Any) -> pa.Table:
    """A block as an Arrow table, with tensors of Ray's own type as Arrow's."""
    from ray.data.block import BlockAccessor

    table: pa.Table = BlockAccessor.for_block(block).to_arrow()
    for i, field in enumerate(table.schema):
        name = getattr(field.type, "extension_name", "")
        if name.startswith(("ray.data.arrow_tensor", "ray.data.arrow_variable_shaped_tensor")):
            table = table.set_column(i, field.name, _tensors(field, table.column(i)))
    return table


def _tensors(field: pa.Field, column: pa.ChunkedArray) -> pa.Array:
    """Raises DataError where the rows have different shapes."""
    chunks = [chunk.to_numpy(zero_copy_only=False) for chunk in column.chunks]
    if any(chunk.dtype == object for chunk in chunks) or len({chunk.shape[1:] for chunk in chunks}) > 1:
        raise DataError(f"column {field.name!r} has rows of different shapes; all rows must have one shape")
    values = np.concatenate(chunks) if chunks else np.empty((0, *field.type.shape))
    return pa.FixedShapeTensorArray.from_numpy_ndarray(np.ascontiguousarray(values))
