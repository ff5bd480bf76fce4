"""What the rows look like: nulls, NaN, infinities and ranges of each column and rank, before training."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from .columns import Column
from .ranks import Ranks
from .shard import Shard

#: Rows are measured in pieces that stay in the cache.
_PIECE_BYTES = 1 << 18
#: Above this many lines a fit keeps only those that tell of trouble.
_MOST_LINES = 2000


@dataclass
class ColumnReport:
    """One column on one rank. low, high: of its finite numbers, in all elements of arrays; NaN where there
    are none. nulls: also those that null_value has replaced."""

    column: str
    rank: int = 0
    rows: int = 0
    nulls: int = 0
    nans: int = 0
    infinities: int = 0
    low: float = math.nan
    high: float = math.nan

    @property
    def trouble(self) -> str:
        """ "3 NaN, 1 infinity"; "" for a clean column."""
        counts = (
            (self.nulls, "null" + "s" * (self.nulls != 1)),
            (self.nans, "NaN"),
            (self.infinities, "infinit" + ("y" if self.infinities == 1 else "ies")),
        )
        return ", ".join(f"{n} {what}" for n, what in counts if n)

    def __str__(self) -> str:
        what = f"{self.low:g} to {self.high:g}" if not math.isnan(self.low) else "no finite numbers"
        trouble = f", {self.trouble}" if self.trouble else ""
        return f"column {self.column!r} on rank {self.rank}: {self.rows} rows, {what}{trouble}"

    def add(self, values: np.ndarray) -> None:
        """Numbers of any shape."""
        if not values.size:
            return
        low, high = float(values.min()), float(values.max())
        if values.dtype.kind == "f" and not (math.isfinite(low) and math.isfinite(high)):
            nans, infinite = np.isnan(values), np.isinf(values)
            self.nans += int(nans.sum())
            self.infinities += int(infinite.sum())
            values = values[~(nans | infinite)]
            if not values.size:
                return
            low, high = float(values.min()), float(values.max())
        self.low, self.high = float(np.fmin(self.low, low)), float(np.fmax(self.high, high))


def examine(data: pa.Table | Iterable[pa.RecordBatch], rank: int = 0) -> list[ColumnReport]:
    """The numeric columns of Arrow data as they are, before anything refuses or replaces a null: in a driver
    of one's own, or on each partition of a cluster. Columns without numbers have rows and nulls only."""
    batches = data.to_batches() if isinstance(data, pa.Table) else data
    found: dict[str, ColumnReport] = {}
    for batch in batches:
        for field, values in zip(batch.schema, batch.columns, strict=True):
            report = found.setdefault(field.name, ColumnReport(field.name, rank))
            report.rows += len(values)
            report.nulls += values.null_count
            numbers = _numbers(field, values, report)
            if numbers is not None:
                report.add(numbers)
    return list(found.values())


def _numbers(field: pa.Field, values: pa.Array, report: ColumnReport) -> np.ndarray | None:
    kind = Column.of(field.name, field.type).kind
    if kind in ("binary", "unsupported"):
        return None
    if isinstance(values, pa.ExtensionArray):
        values = values.storage
    values = values.drop_null()
    if kind == "vector":
        values = values.field("values")
    while pt.is_list(values.type) or pt.is_large_list(values.type) or pt.is_fixed_size_list(values.type):
        values = values.flatten()
        report.nulls += values.null_count
        values = values.drop_null()
    if pt.is_decimal(values.type):
        values = values.cast(pa.float64())
    numbers: np.ndarray = values.to_numpy(zero_copy_only=False)
    return numbers


def examine_shard(shard: Shard, ranks: Ranks) -> list[ColumnReport]:
    """Of the packed rows of all ranks; every rank calls it and gets the same. Columns that were joined with
    arrays into one input are reported together."""
    own = [r for i in range(len(shard.blocks)) for r in _of_block(shard, i, ranks.rank)] if shard.rows else []
    if len(own) * ranks.size > _MOST_LINES:
        own = [r for r in own if r.trouble]
    gathered = ranks.gather(json.dumps([asdict(r) for r in own]).encode(), "data_report")
    return [ColumnReport(**r) for data in gathered for r in json.loads(data)]


def _of_block(shard: Shard, i: int, rank: int) -> list[ColumnReport]:
    block, values = shard.blocks[i], shard.block(i)
    values = values.reshape(shard.rows, -1)
    apart = len(block.columns) == values.shape[1]
    together = [(name,) for name in block.columns] if apart else [block.columns]
    reports = [
        ColumnReport(", ".join(names), rank, shard.rows, sum(shard.nulls.get(name, 0) for name in names))
        for names in together
    ]
    if not apart:
        values = values.reshape(-1, 1)
    step = max(1, _PIECE_BYTES // max(1, values.shape[1] * values.itemsize))
    low = high = np.full(len(reports), math.nan)
    for begin in range(0, len(values), step):
        piece = values[begin : begin + step]
        lowest, highest = piece.min(axis=0), piece.max(axis=0)
        clean = np.isfinite(lowest) & np.isfinite(highest)
        low = np.fmin(low, np.where(clean, lowest, math.nan))
        high = np.fmax(high, np.where(clean, highest, math.nan))
        for j in np.flatnonzero(~clean):
            reports[j].add(piece[:, j])
    for j in np.flatnonzero(~np.isnan(low)):
        reports[j].add(np.array([low[j], high[j]]))
    return reports


def lines_of(reports: Sequence[ColumnReport], most: int = 20) -> list[str]:
    """A line for each column, those that are not clean first."""
    return [str(r) for r in sorted(reports, key=lambda r: not r.trouble)][:most]


def troubles(reports: Sequence[ColumnReport]) -> list[str]:
    """A line for each column that is not clean."""
    return [str(r) for r in reports if r.trouble]
