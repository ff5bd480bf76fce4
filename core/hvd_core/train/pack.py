"""Arrow columns to numpy rows of one shape and dtype."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from ..errors import DataError
from .columns import Block, Column, Layout

# What is joined at a time: 1 million rows of 50 columns take 0.41 s as a whole, 0.20 by 32 KiB, 0.105 by 256.
_IN_CACHE_NBYTES = 256 << 10


class Packer:
    """Turns record batches into one array (rows, *shape) for each block.

    Shapes and dtypes that the layout leaves open are decided by the first rows and then hold. Nulls without a
    `null_value` are counted and reported by `check`, so that the message has the whole number.
    """

    def __init__(self, layout: Layout, blocks: tuple[Block, ...] | None = None):
        self._layout = layout
        self.blocks = layout.blocks if blocks is None else blocks
        needed = {c for b in self.blocks for c in b.columns}
        self._columns = [c for c in layout.columns if layout.transform_fn is not None or c.name in needed]
        self.dtypes: list[str | None] = [b.dtype for b in self.blocks]
        self.shapes: list[tuple[int, ...] | None] = [b.shape for b in self.blocks]
        self._nulls: dict[str, int] = {}
        self._rows = 0
        #: By column, replaced ones among them, since the beginning.
        self.nulls: dict[str, int] = {}

    def pack(self, batch: pa.RecordBatch) -> list[np.ndarray]:
        """Raises DataError for ragged or changing shapes and for values that do not fit."""
        self._rows += batch.num_rows
        have = set(batch.schema.names)
        arrays = {c.name: self._array(c, batch.column(c.name)) for c in self._columns if c.name in have}
        if self._layout.transform_fn is not None:
            arrays = _transformed(self._layout, arrays, batch.num_rows)
        return [self._block(i, b, arrays) for i, b in enumerate(self.blocks)]

    def check(self) -> None:
        """Raises DataError if the rows since the last check had a null that nothing replaces."""
        nulls, rows = self._nulls, self._rows
        self._nulls, self._rows = {}, 0
        if nulls:
            each = [f"column {name!r} has {n} null{'s' * (n != 1)}" for name, n in nulls.items()]
            raise DataError(f"{', '.join(each)} in {rows} rows; drop or fill them, or set null_value")

    def _array(self, column: Column, values: pa.Array) -> np.ndarray:
        if column.kind in ("binary", "unsupported"):
            return np.array([*values.to_pylist(), None], dtype=object)[:-1]
        fill = self._layout.null_value_of(column.name)
        shape = self._layout.shapes.get(column.name)
        if column.kind != "scalar" and shape is None and 0 < len(values) == values.null_count:
            shape = self._known_shape(column.name)
            if shape is None:
                self._say_only_nulls(column.name, len(values), fill)
        try:
            rows, nulls = to_rows(column, values, fill, shape)
        except (pa.ArrowInvalid, OverflowError) as error:
            with_fill = "" if fill is None else f" with null_value {fill!r}"
            raise DataError(f"column {column.name!r}{with_fill}: {error}") from error
        if nulls:
            self.nulls[column.name] = self.nulls.get(column.name, 0) + nulls
        if nulls and fill is None:
            self._nulls[column.name] = self._nulls.get(column.name, 0) + nulls
        return rows

    def _known_shape(self, name: str) -> tuple[int, ...] | None:
        """Of a row of this column, from the rows before; None where it feeds a block with others."""
        if self._layout.transform_fn is None:
            for block, shape in zip(self.blocks, self.shapes, strict=True):
                if tuple(block.columns) == (name,):
                    return shape
        return None

    def _say_only_nulls(self, name: str, count: int, fill: float | None) -> NoReturn:
        if fill is None:
            self._nulls[name] = self._nulls.get(name, 0) + count
            self.check()
        raise DataError(
            f"column {name!r} begins with {count} nulls, so the shape of its rows is not known: set "
            f"shapes={{{name!r}: (...)}}"
        )

    def _block(self, i: int, block: Block, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        missing = [n for n in block.columns if n not in arrays]
        if missing:
            made = " after transform_fn" if self._layout.transform_fn else ""
            raise DataError(f"column {missing[0]!r} of {block.role} {block.name!r} is missing{made}")
        parts = [arrays[n] for n in block.columns]
        dtype = self.dtypes[i] or block.dtype_for([_leaf(p) for p in parts], parts[0].ndim > 1)
        for name, part in zip(block.columns, parts, strict=True):
            _check_values(block, name, part, dtype)
        rows = _joined(block, parts, dtype) if block.joined else np.ascontiguousarray(parts[0], dtype)
        if self.shapes[i] is not None and rows.shape[1:] != self.shapes[i]:
            raise DataError(
                f"column {', '.join(map(repr, block.columns))}: rows of shape {rows.shape[1:]} and of "
                f"{self.shapes[i]}; all rows must have one shape"
            )
        if not all(rows.shape[1:]):
            raise DataError(f"column {block.columns[0]!r} has empty rows, of shape {rows.shape[1:]}")
        self.dtypes[i], self.shapes[i] = dtype, rows.shape[1:]
        return rows


def _joined(block: Block, parts: list[np.ndarray], dtype: str) -> np.ndarray:
    if len(parts) == 1 and parts[0].ndim > 1:
        return np.ascontiguousarray(parts[0], dtype)
    for name, part in zip(block.columns, parts, strict=True):
        if part.ndim > 2:
            raise DataError(
                f"column {name!r} has rows of shape {part.shape[1:]} and cannot be joined with others into "
                "one input"
            )
    wide = [p if p.ndim == 2 else p[:, None] for p in parts]
    out = np.empty((len(wide[0]), sum(p.shape[1] for p in wide)), dtype)
    step = max(1, _IN_CACHE_NBYTES // max(1, out.strides[0]))
    for begin in range(0, len(out), step):
        some, at = slice(begin, begin + step), 0
        for part in wide:
            out[some, at : at + part.shape[1]] = part[some]
            at += part.shape[1]
    return out


def _leaf(array: np.ndarray) -> str:
    return {"f": "float", "b": "bool"}.get(array.dtype.kind, "int")


def _check_values(block: Block, name: str, values: np.ndarray, dtype: str) -> None:
    if values.dtype.kind not in "fiub":
        raise DataError(
            f"column {name!r} holds {values.dtype} and not numbers; transform_fn must make numbers of it"
        )
    if dtype.startswith("int") and values.dtype.kind == "f":
        wrong = ~((np.floor(values) == values) & (np.abs(values) < 2.0**63))
        if wrong.any():
            raise DataError(
                f"column {name!r} must hold whole numbers ({block.role} of dtype {dtype}) but has "
                f"{values[wrong][0]}"
            )
    if dtype == "int64" and values.dtype == np.uint64 and (values > np.iinfo(np.int64).max).any():
        raise DataError(f"column {name!r} holds {values.max()}, which does not fit int64")
    if block.role == "weight" and (wrong := ~((values >= 0) & np.isfinite(values))).any():
        raise DataError(
            f"weight column {name!r} holds {values[wrong][0]}; weights must be 0 or more, and finite"
        )
    if block.role == "validation" and not np.isin(values, (0, 1)).all():
        raise DataError(
            f"validation column {name!r} holds {values[~np.isin(values, (0, 1))][0]}; only 0 and 1 are"
        )


def _transformed(layout: Layout, arrays: dict[str, np.ndarray], rows: int) -> dict[str, np.ndarray]:
    assert layout.transform_fn is not None
    made: Any = layout.transform_fn(dict(arrays))
    if not isinstance(made, Mapping):
        raise DataError(f"transform_fn must return a dict of column name to array, not {type(made).__name__}")
    out = {}
    for name, value in made.items():
        array = _stacked(name, value)
        if array.ndim == 0 or len(array) != rows:
            raise DataError(f"transform_fn returned column {name!r} of shape {array.shape} for {rows} rows")
        if name in layout.shapes and array.ndim and array.shape[1:] != tuple(layout.shapes[name]):
            array = _reshaped(name, array, layout.shapes[name])
        out[name] = array
    return {**{k: v for k, v in arrays.items() if k not in out and k not in _inputs_of(layout)}, **out}


def _inputs_of(layout: Layout) -> set[str]:
    """Columns that transform_fn must hand on itself; labels, weights and marks it may leave out."""
    return {c for b in layout.inputs for c in b.columns}


def _stacked(name: str, value: Any) -> np.ndarray:
    """A list or object array of equal arrays as one array."""
    if isinstance(value, np.ndarray) and value.dtype != object:
        return value
    rows = [np.asarray(v) for v in value]
    for row in rows:
        if row.shape != rows[0].shape:
            raise DataError(
                f"transform_fn returned rows of shape {rows[0].shape} and {row.shape} for column {name!r}; "
                f"all rows "
                "must have one shape"
            )
    return np.stack(rows) if rows else np.empty((0,))


def to_rows(
    column: Column, values: pa.Array, fill: float | None, shape: tuple[int, ...] | None = None
) -> tuple[np.ndarray, int]:
    """One column as (rows, *shape), and how many nulls it had (0 is stored for them when fill is None)."""
    nulls = int(values.null_count)
    valid = None
    if nulls and column.kind != "scalar":
        valid = pc.is_valid(values).to_numpy(zero_copy_only=False)
        values = values.drop_null()
    replace = 0 if fill is None else fill
    if valid is not None and not valid.any() and shape is not None:
        rows = np.empty((0, *shape), _leaf_dtype(values.type))
    elif column.kind == "vector":
        rows = _vectors(column.name, values)
    elif column.kind == "scalar":
        rows, inner = _numbers(values, replace)
    else:
        rows, inner = _lists(column.name, values, replace)
        nulls += inner
    if shape is not None:
        rows = _reshaped(column.name, rows, shape)
    if valid is not None:
        full = np.full((len(valid), *rows.shape[1:]), replace, dtype=rows.dtype)
        full[valid] = rows
        rows = full
    return rows, nulls


def _leaf_dtype(type: pa.DataType) -> Any:
    """The numpy dtype of the numbers in lists or vectors of this type."""
    while hasattr(type, "value_type"):
        type = type.value_type
    return np.float64 if pt.is_struct(type) else type.to_pandas_dtype()


def _reshaped(name: str, rows: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if math.prod(rows.shape[1:]) != math.prod(shape):
        raise DataError(
            f"column {name!r} has rows of shape {rows.shape[1:]}, but shape {tuple(shape)} is declared"
        )
    return rows.reshape(len(rows), *shape)


def _numbers(values: pa.Array, fill: float) -> tuple[np.ndarray, int]:
    """A flat array without nulls, and how many it had."""
    if isinstance(values, pa.ExtensionArray):
        values = values.storage
    if pt.is_decimal(values.type):
        values = values.cast(pa.float64())
    elif pt.is_float16(values.type) and values.null_count:
        values = values.cast(pa.float32())
    nulls = int(values.null_count)
    if nulls:
        whole = float(fill).is_integer()
        if pt.is_integer(values.type) and not whole:
            values = values.cast(pa.float64())
        elif pt.is_integer(values.type) and not pt.is_uint64(values.type):
            values = values.cast(pa.int64())  # else -1 would not fit uint8
        value = (
            bool(fill)
            if pt.is_boolean(values.type)
            else int(fill)
            if pt.is_integer(values.type)
            else float(fill)
        )
        values = values.fill_null(pa.scalar(value, values.type))
    return values.to_numpy(zero_copy_only=False), nulls


def _lists(name: str, values: pa.Array, fill: float) -> tuple[np.ndarray, int]:
    """Lists of one length, nested to any depth, without null rows."""
    if isinstance(values, pa.FixedShapeTensorArray):
        flat, nulls = _numbers(values.storage.flatten(), fill)
        rows = flat.reshape(len(values), *values.type.shape)
        order = values.type.permutation  # of the stored axes, where the type has one
        return rows if order is None else rows.transpose(0, *(axis + 1 for axis in order)), nulls
    outer: list[int] = []
    count = len(values)
    while pt.is_list(values.type) or pt.is_large_list(values.type) or pt.is_fixed_size_list(values.type):
        if values.null_count:
            raise DataError(
                f"column {name!r} has {values.null_count} null lists inside its rows; drop or fill them"
            )
        if pt.is_fixed_size_list(values.type):
            width = values.type.list_size
        else:
            width = _one_length(
                name, pc.list_value_length(values).to_numpy(zero_copy_only=False), tuple(outer)
            )
        values = values.flatten()
        outer.append(width)
    flat, nulls = _numbers(values, fill)
    return flat.reshape(count, *outer), nulls


def _one_length(name: str, lengths: np.ndarray, outer: tuple[int, ...]) -> int:
    if not len(lengths):
        return 0
    other = np.flatnonzero(lengths != lengths[0])
    if len(other):
        raise DataError(
            f"column {name!r} has rows of shape {(*outer, int(lengths[0]))} and of "
            f"{(*outer, int(lengths[other[0]]))}; "
            "all rows must have one shape"
        )
    return int(lengths[0])


def _vectors(name: str, values: pa.Array) -> np.ndarray:
    """Spark ML vectors, dense and sparse mixed, without null rows: (rows, size) float64."""
    content = pc.struct_field(values, "values")
    lengths = pc.list_value_length(content).to_numpy(zero_copy_only=False).astype(np.int64)
    numbers = content.flatten().to_numpy(zero_copy_only=False)
    sparse = pc.struct_field(values, "type").to_numpy(zero_copy_only=False) == 0
    if not sparse.any():
        return numbers.reshape(len(values), _one_length(name, lengths, ()))
    sizes = np.where(
        sparse, pc.struct_field(values, "size").fill_null(0).to_numpy(zero_copy_only=False), lengths
    )
    out = np.zeros((len(values), _one_length(name, sizes, ())), numbers.dtype)
    row = np.repeat(np.arange(len(values)), lengths)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    at = np.arange(len(numbers)) - starts[row]
    from_sparse = sparse[row]
    indices = (
        pc.struct_field(values.filter(pa.array(sparse)), "indices").flatten().to_numpy(zero_copy_only=False)
    )
    at[from_sparse] = indices
    out[row, at] = numbers
    return out
