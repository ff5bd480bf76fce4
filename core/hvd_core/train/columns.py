"""From columns to model inputs: which columns are sent, how they are joined, in which dtype. Pure; runs on
the driver.

Every way in which the columns cannot feed the model is found here, before anything is launched, as a
`ColumnError` that names the column, its type and what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa
import pyarrow.types as pt

from ..errors import ColumnError
from .spec import TrainSpec

Kind = Literal["scalar", "array", "vector", "binary", "unsupported"]

ACCEPTED = (
    "boolean, integers, floats, decimals (become float64), arrays of these (also nested or of fixed size), "
    "Spark ML vectors, and binary with a transform_fn"
)

#: How Spark ML vectors (DenseVector, SparseVector) look in Arrow.
VECTOR_FIELDS = ("type", "size", "indices", "values")


@dataclass(frozen=True)
class Column:
    """A column the platform can send. `shape` is that of one row where the type says it, else None."""

    name: str
    type: pa.DataType
    shape: tuple[int, ...] | None
    kind: Kind

    @classmethod
    def of(cls, name: str, type: pa.DataType) -> Column:
        """Classifies an Arrow type."""
        kind = _kind(type)
        return cls(name, type, _shape(type) if kind in ("scalar", "array") else None, kind)

    @property
    def leaf(self) -> Literal["float", "int", "bool", "other"]:
        """What its numbers are."""
        type = _leaf(self.type)
        if self.kind == "vector" or pt.is_floating(type) or pt.is_decimal(type):
            return "float"
        if pt.is_boolean(type):
            return "bool"
        return "int" if pt.is_integer(type) else "other"


def columns_of(schema: pa.Schema) -> list[Column]:
    """All columns of an Arrow schema."""
    return [Column.of(f.name, f.type) for f in schema]


def _is_list(type: pa.DataType) -> bool:
    return bool(pt.is_list(type) or pt.is_large_list(type) or pt.is_fixed_size_list(type))


def _is_tensor(type: pa.DataType) -> bool:
    return isinstance(type, pa.FixedShapeTensorType)


def _leaf(type: pa.DataType) -> pa.DataType:
    if _is_tensor(type):
        return type.value_type
    while _is_list(type):
        type = type.value_type
    return type


def _kind(type: pa.DataType) -> Kind:
    leaf = _leaf(type)
    if pt.is_struct(type) and tuple(f.name for f in type) == VECTOR_FIELDS:
        return "vector"
    if pt.is_binary(type) or pt.is_large_binary(type) or pt.is_fixed_size_binary(type):
        return "binary"
    if not (pt.is_boolean(leaf) or pt.is_integer(leaf) or pt.is_floating(leaf) or pt.is_decimal(leaf)):
        return "unsupported"
    return "scalar" if leaf is type else "array"


def _shape(type: pa.DataType) -> tuple[int, ...] | None:
    if _is_tensor(type):
        shape = tuple(type.shape)
        return shape if type.permutation is None else tuple(shape[axis] for axis in type.permutation)
    sizes: list[int] = []
    while _is_list(type):
        if not pt.is_fixed_size_list(type):
            return None
        sizes.append(type.list_size)
        type = type.value_type
    return tuple(sizes)


@dataclass(frozen=True)
class ModelFacts:
    """What the layout needs to know of the model and losses; a framework finds it (`framework.facts`).

    inputs: names of forward's positional parameters; required: how many have no default; varargs: it takes
    *args. float_dtype: numpy name of the dtype of the first floating parameter. class_index: for each
    label, whether its loss takes class numbers. heads: what the losses say of the outputs, see predict.HEADS.
    """

    inputs: tuple[str, ...]
    required: int
    varargs: bool
    float_dtype: str
    class_index: tuple[bool, ...]
    name: str = "model"
    heads: tuple[str, ...] = ()


@dataclass(frozen=True)
class Block:
    """Columns that are packed side by side, row by row: one input, one label, the weights or the validation
    marks.

    joined: the columns are flattened and concatenated to (B, k); otherwise one column gives (B, *shape).
    dtype, shape: numpy name and shape of one row; None where only the rows can tell (arrays without a stated
    length, anything that transform_fn makes). class_index: integers stay int64 (labels).
    """

    role: Literal["input", "label", "weight", "validation"]
    name: str
    columns: tuple[str, ...]
    joined: bool
    dtype: str | None
    shape: tuple[int, ...] | None
    float_dtype: str
    class_index: bool = False

    def dtype_for(self, kinds: Sequence[str], is_array: bool) -> str:
        """The stated rule: float when any column is; a label is int64 for class numbers, else floating.
        Arrays of floats as the label of a class loss are probabilities and stay floating."""
        if self.role == "validation":
            return "uint8"
        if self.role == "weight":
            return self.float_dtype
        if self.role == "label":
            is_probability = is_array and "float" in kinds
            return "int64" if self.class_index and not is_probability else self.float_dtype
        return "int64" if all(k == "int" for k in kinds) else self.float_dtype


@dataclass(frozen=True)
class Layout:
    """How rows become batches. Picklable (cloudpickle, for transform_fn); sent to every rank with the spec.

    columns: what the platform must send, in this order, with these Arrow types (`schema`).
    blocks: inputs in the order of forward's parameters, then labels, then weight and validation if there
    are any.
    """

    columns: tuple[Column, ...]
    blocks: tuple[Block, ...]
    shapes: Mapping[str, tuple[int, ...]]
    null_value: float | Mapping[str, float] | None
    transform_fn: Callable[[dict[str, Any]], dict[str, Any]] | None

    @property
    def schema(self) -> pa.Schema:
        return pa.schema([pa.field(c.name, c.type) for c in self.columns])

    @property
    def inputs(self) -> tuple[Block, ...]:
        return tuple(b for b in self.blocks if b.role == "input")

    @property
    def labels(self) -> tuple[Block, ...]:
        return tuple(b for b in self.blocks if b.role == "label")

    @property
    def input_columns(self) -> tuple[str, ...]:
        """The columns that predicting needs, as sent (before transform_fn)."""
        used = {c for b in self.inputs for c in b.columns}
        others = {c for b in self.blocks if b.role != "input" for c in b.columns}
        return tuple(c.name for c in self.columns if c.name in used or c.name not in others)

    def null_value_of(self, column: str) -> float | None:
        if isinstance(self.null_value, Mapping):
            return self.null_value.get(column)
        return self.null_value


def plan_layout(columns: Sequence[Column], spec: TrainSpec, facts: ModelFacts | None = None) -> Layout:
    """Binds columns to the model's inputs. `columns`: all the platform has; only those the spec names are
    used.

    facts: of the model; None asks the framework of `spec.model`. Raises ColumnError.
    """
    if facts is None:
        from .framework import framework_for

        facts = framework_for(spec).facts(spec)
    have = {c.name: c for c in columns}
    sent = _sent(have, spec)
    entries = _bind(spec, facts)
    blocks = [_block("input", _input_name(facts, i), e, have, spec, facts) for i, e in enumerate(entries)]
    for i, label in enumerate(spec.label_cols):
        blocks.append(_block("label", label, label, have, spec, facts, facts.class_index[i]))
    if spec.sample_weight_col:
        blocks.append(_block("weight", spec.sample_weight_col, spec.sample_weight_col, have, spec, facts))
    if isinstance(spec.validation, str):
        blocks.append(_block("validation", spec.validation, spec.validation, have, spec, facts))
    shapes = {name: tuple(int(n) for n in shape) for name, shape in spec.shapes.items()}
    return Layout(tuple(sent), tuple(blocks), shapes, spec.null_value, spec.transform_fn)


def _sent(have: Mapping[str, Column], spec: TrainSpec) -> list[Column]:
    extra = [c for c in (spec.sample_weight_col, spec.validation) if isinstance(c, str)]
    names = dict.fromkeys([*spec.input_names, *spec.transform_cols, *spec.label_cols, *extra])
    sent = []
    for name in names:
        if name not in have:
            if spec.transform_fn is not None and name not in (*spec.transform_cols, *extra):
                continue  # transform_fn makes it; checked with the first rows
            raise ColumnError(
                f"column {name!r} does not exist; there are {', '.join(map(repr, have)) or 'none'}"
            )
        column = have[name]
        if spec.transform_fn is None or name in extra:
            _refuse_unsupported(column, spec)
        sent.append(column)
    return sent


def _refuse_unsupported(column: Column, spec: TrainSpec) -> None:
    type = column.type
    if column.kind == "binary":
        raise ColumnError(
            f"column {column.name!r} is {type}: bytes need a transform_fn that makes numbers of them"
        )
    if column.kind == "unsupported":
        todo = "leave it out, or turn it into numbers first"
        if pt.is_string(type) or pt.is_large_string(type):
            todo = "index or encode it first (e.g. StringIndexer), or leave it out"
        elif pt.is_date(type) or pt.is_timestamp(type) or pt.is_time(type) or pt.is_duration(type):
            todo = "cast it to a number first (e.g. seconds or days as double)"
        elif pt.is_null(type):
            todo = "it holds nothing but nulls"
        raise ColumnError(f"column {column.name!r} is of type {type}: {todo}. Accepted are: {ACCEPTED}")
    if column.name in (spec.sample_weight_col, spec.validation) and column.kind != "scalar":
        raise ColumnError(f"column {column.name!r} must hold one number per row, but is {type}")
    if column.name == spec.validation and column.leaf == "float":
        raise ColumnError(f"validation column {column.name!r} must be boolean or 0/1 integers, but is {type}")


def _bind(spec: TrainSpec, facts: ModelFacts) -> list[str | tuple[str, ...]]:
    """One entry for each model input: a column, or the columns to join."""
    if spec.input_columns is not None:
        entries: list[str | tuple[str, ...]] = [
            e if isinstance(e, str) else tuple(e) for e in spec.input_columns
        ]
        _check_count(len(entries), f"input_columns has {len(entries)} entries", facts)
        return entries
    if facts.varargs:
        raise ColumnError(
            f"forward of {facts.name} takes *args, so the number of its inputs is unknown: set "
            f"input_columns, "
            "e.g. [['a', 'b']] for one input of two columns or ['a', 'b'] for two inputs"
        )
    if len(facts.inputs) == 1 or facts.required == 1:
        return [tuple(spec.feature_cols)]
    _check_count(len(spec.feature_cols), f"there are {len(spec.feature_cols)} feature columns", facts)
    return list(spec.feature_cols)


def _check_count(n: int, what: str, facts: ModelFacts) -> None:
    if (facts.varargs and n >= facts.required) or facts.required <= n <= len(facts.inputs):
        return
    takes = (
        f"{facts.required}"
        if facts.required == len(facts.inputs)
        else f"{facts.required} to {len(facts.inputs)}"
    )
    raise ColumnError(
        f"forward of {facts.name} takes {takes} inputs ({', '.join(facts.inputs)}), but {what}. Give one "
        "column for each input, or say how they are joined: input_columns=['a', ['b', 'c']] feeds two inputs "
        "from three columns"
    )


def _input_name(facts: ModelFacts, i: int) -> str:
    return facts.inputs[i] if i < len(facts.inputs) else f"input {i}"


def _block(
    role: Literal["input", "label", "weight", "validation"],
    name: str,
    entry: str | tuple[str, ...],
    have: Mapping[str, Column],
    spec: TrainSpec,
    facts: ModelFacts,
    class_index: bool = False,
) -> Block:
    names = (entry,) if isinstance(entry, str) else tuple(entry)
    made = role in ("input", "label") and spec.transform_fn is not None
    columns = [have[n] for n in names if n in have]
    shapes = [None if made else _row_shape(c, spec) for c in columns]
    alone = len(names) == 1 and not (
        shapes and shapes[0] == ()
    )  # a lone array in a joined entry keeps its shape
    joined = not isinstance(entry, str) and not alone
    if len(names) == 1 and not isinstance(entry, str) and made:
        joined = (
            True  # what transform_fn makes of it decides: a scalar gives (B, 1), an array keeps its shape
        )
    float_dtype = facts.float_dtype
    block = Block(role, name, names, joined, None, None, float_dtype, class_index)
    asked = {spec.dtypes[n] for n in names if n in spec.dtypes}
    if len(asked) > 1:
        raise ColumnError(f"columns {list(names)} are joined into one input but dtypes says {sorted(asked)}")
    dtype = (
        asked.pop()
        if asked
        else None
        if made
        else block.dtype_for([c.leaf for c in columns], columns[0].kind != "scalar")
    )
    return Block(
        role, name, names, joined, dtype, _joined_shape(names, shapes, joined), float_dtype, class_index
    )


def _row_shape(column: Column, spec: TrainSpec) -> tuple[int, ...] | None:
    if column.name in spec.shapes:
        return tuple(int(n) for n in spec.shapes[column.name])
    return column.shape


def _joined_shape(
    names: tuple[str, ...], shapes: list[tuple[int, ...] | None], joined: bool
) -> tuple[int, ...] | None:
    if not shapes or any(s is None for s in shapes):
        return None
    if not joined:
        return shapes[0]
    width = 0
    for name, shape in zip(names, shapes, strict=True):
        assert shape is not None
        if len(shape) > 1:
            raise ColumnError(
                f"column {name!r} has rows of shape {shape} and cannot be joined with "
                f"{[n for n in names if n != name]} "
                "into one input; give it an input of its own (input_columns)"
            )
        width += shape[0] if shape else 1
    return (width,)
