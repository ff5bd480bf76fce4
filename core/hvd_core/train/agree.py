"""What the ranks find out together about their rows before the first epoch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import ColumnError, DataError
from .batches import Batches
from .framework import Framework
from .order import Request, RowSplit, split_rows, validation_counts
from .ranks import Ranks
from .result import OutputSpec
from .shard import Shard, ShardBlock, describe_blocks
from .spec import TrainSpec


@dataclass(frozen=True)
class Rows:
    """shard: the one given, which now knows the form of its blocks also without rows. rows: of each rank,
    training and validation together; train, validation: of each rank. split: this rank's. fingerprint: of
    this rank's rows in the order before shuffling, "" if not asked for."""

    shard: Shard
    rows: tuple[int, ...]
    train: tuple[int, ...]
    validation: tuple[int, ...]
    split: RowSplit
    fingerprint: str = ""


def agree_on_rows(spec: TrainSpec, shard: Shard, ranks: Ranks, *, fingerprint: bool) -> Rows:
    """Every rank calls it. Raises DataError where there is nothing to train on, or the ranks packed other
    shapes."""
    rows, blocks = compare_shards(shard, ranks)
    shard = shard if shard.rows else Shard(0, blocks, [np.empty(0, np.uint8) for _ in blocks])
    order = shard.sorted_order() if spec.row_order != "arrival" and shard.rows else None
    marks = shard.of_role("validation")
    if marks:
        split = split_rows(shard.rows, order, marks=shard.block(marks[0]) if shard.rows else None)
        own = np.zeros(ranks.size, np.int64)
        own[ranks.rank] = len(split.validation)
        validation = [int(v) for v in ranks.sum(own, "validation_rows")]
    elif isinstance(spec.validation, (int, float)):
        validation = list(validation_counts(rows, float(spec.validation)))
        split = split_rows(shard.rows, order, seed=spec.seed, validation_rows=validation[ranks.rank])
    else:
        validation = [0] * len(rows)
        split = split_rows(shard.rows, order)
    train = [n - v for n, v in zip(rows, validation, strict=True)]
    if not sum(train):
        raise DataError(f"no rows to train on: all {sum(rows)} are validation rows")
    _check_weights(spec, shard, ranks)
    mark = shard.fingerprint(order) if fingerprint else ""
    return Rows(shard, tuple(rows), tuple(train), tuple(validation), split, mark)


def compare_shards(shard: Shard, ranks: Ranks) -> tuple[list[int], tuple[ShardBlock, ...]]:
    """Rows of each rank, and the blocks, also on a rank without rows. All ranks must have packed their rows
    alike."""
    blocks = describe_blocks(shard.blocks) if shard.rows else []
    own = json.dumps({"rows": shard.rows, "blocks": blocks}).encode()
    shards = [json.loads(data) for data in ranks.gather(own, "shards")]
    filled = [r for r, s in enumerate(shards) if s["rows"]]
    if not filled:
        raise DataError("no rows: there is nothing to train on")
    first = filled[0]
    for r in filled[1:]:
        for a, b in zip(shards[first]["blocks"], shards[r]["blocks"], strict=True):
            if a != b:
                names = ", ".join(map(repr, b["columns"]))
                raise DataError(
                    f"column {names}: rows of shape {tuple(a['shape'])} ({a['dtype']}) on rank {first} and "
                    f"of {tuple(b['shape'])} ({b['dtype']}) on rank {r}; all rows must have one shape"
                )
    found = (ShardBlock.from_json(b) for b in shards[first]["blocks"])
    return [int(s["rows"]) for s in shards], tuple(found)


def _check_weights(spec: TrainSpec, shard: Shard, ranks: Ranks) -> None:
    blocks = shard.of_role("weight")
    if blocks:
        total = np.array([shard.block(blocks[0]).sum(dtype=np.float64)])
        if not ranks.sum(total, "weights")[0]:
            raise DataError(f"all weights in column {spec.sample_weight_col!r} are 0")


def find_outputs(
    framework: Framework, shard: Shard, ranks: Ranks, rows: Sequence[int]
) -> tuple[OutputSpec, ...]:
    """The model's outputs, found with one row by the first rank that has any."""
    root = next(r for r, n in enumerate(rows) if n)
    data = None
    if ranks.rank == root:
        request = Request(0, np.zeros(1, np.int64), 1)
        with Batches(shard, iter([request]), largest=1, prefetch=1) as batches:
            outputs = _first_outputs(framework, shard, next(batches).inputs)
        data = json.dumps([[o.dtype.name, o.shape[1:]] for o in outputs]).encode()
    found = json.loads(ranks.broadcast(data, root, "outputs"))
    return tuple(OutputSpec(dtype, tuple(shape)) for dtype, shape in found)


def _first_outputs(framework: Framework, shard: Shard, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    try:
        return framework.predict(framework.model, inputs)
    # What frameworks raise for shapes and dtypes that do not go together.
    except (RuntimeError, IndexError) as error:
        blocks = [shard.blocks[i] for i in shard.of_role("input")]
        given = ", ".join(f"{b.name} {x.dtype} {x.shape}" for b, x in zip(blocks, inputs, strict=True))
        hint = ""
        if "int64" in given:
            hint = "; dtypes={column: 'float32'} makes floats of whole numbers"
        elif "Long" in str(error) or "Int" in str(error):  # as an embedding says of its indices
            hint = "; dtypes={column: 'int64'} makes whole numbers of a column, such as StringIndexer's"
        raise ColumnError(f"the model does not take one row of its inputs, {given}: {error}{hint}") from error
