"""Which rank uses which rows in which step. Pure functions of row counts and the seed; every rank computes
the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from .._native import gather_rows, permutation

#: Keeps the draw of the validation rows apart from the order of use.
_VALIDATION_STREAM = 0x76616C6964


@dataclass(frozen=True)
class EpochPlan:
    """How the rows of all ranks are dealt over the steps of an epoch: each once, uneven shards at an even
    pace.

    rows: training rows of each rank. per_rank: `capacity` is the most a rank uses in a step; every rank
    spreads its rows over the epoch in proportion, so the last step is shared too. Otherwise `capacity` is
    what all ranks use together in each step but the last, again in proportion to what they have. With one
    rank both are plain batches. pairs: no rank uses a single row in a step unless that is all it has (batch
    normalisation needs two); a step may then hold one row more or less.
    """

    rows: tuple[int, ...]
    capacity: int
    per_rank: bool = True
    pairs: bool = False

    @property
    def total(self) -> int:
        return sum(self.rows)

    @property
    def steps(self) -> int:
        """At least 1 when there is any row."""
        return -(-(max(self.rows) if self.per_rank else self.total) // self.capacity)

    def used_before(self, step: int) -> tuple[int, ...]:
        """Rows of each rank used by steps 0 .. step-1; `used_before(steps) == rows`."""
        if step <= 0:
            return (0,) * len(self.rows)
        if step >= self.steps:
            return self.rows
        if len(self.rows) == 1 and not self.pairs:
            return (step * self.capacity,)
        used = _paced(self.rows, step * self.capacity) if self.per_rank else self._dealt(step * self.capacity)
        return tuple(_even(u, n) for u, n in zip(used, self.rows, strict=True)) if self.pairs else used

    def span(self, rank: int, step: int) -> tuple[int, int]:
        """[begin, end) of the rank's own sequence of rows that it uses in `step`."""
        return self.used_before(step)[rank], self.used_before(step + 1)[rank]

    def global_rows(self, step: int) -> int:
        """Rows all ranks use in `step`."""
        return sum(self.used_before(step + 1)) - sum(self.used_before(step))

    def largest(self, rank: int) -> int:
        """An upper bound of the rows `rank` uses in one step."""
        share = (
            self.capacity if self.per_rank else -(-self.capacity * self.rows[rank] // max(self.total, 1)) + 1
        )
        return max(1, min(share + 3 * self.pairs, self.rows[rank]))

    def _dealt(self, count: int) -> tuple[int, ...]:
        """The first `count` rows when row k of rank r stands at (k + 1/2) / rows[r], ties by rank."""
        total, rows = self.total, self.rows
        used = [(2 * count * n + total) // (2 * total) for n in rows]
        while (missing := count - sum(used)) != 0:
            if missing > 0:
                r = min(
                    (r for r in range(len(rows)) if used[r] < rows[r]),
                    key=lambda r: (2 * used[r] + 1) / rows[r],
                )
                used[r] += 1
            else:
                r = max(
                    (r for r in range(len(rows)) if used[r]), key=lambda r: ((2 * used[r] - 1) / rows[r], r)
                )
                used[r] -= 1
        return tuple(used)


@lru_cache(maxsize=4)
def _paced(rows: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Each rank's share when the largest has used `count`, rounded to the nearest row."""
    most = max(rows)
    return tuple((2 * n * count + most) // (2 * most) for n in rows)


def micro_batches(rows: int, size: int, *, pairs: bool = False) -> list[slice]:
    """Parts of at most `size` of the rows of a step, in order. pairs: no part has a single row, unless that
    is the step's only one or size is 1; the last may then have one more."""
    begins = list(range(0, rows, size))
    if pairs and size > 1 and rows > size and rows % size == 1:
        begins.pop()
    return [slice(a, b) for a, b in pairwise([*begins, rows])]


def _even(used: int, rows: int) -> int:
    used -= used % 2
    return max(0, used - 2) if rows - used == 1 else used


def validation_counts(rows: Sequence[int], fraction: float) -> tuple[int, ...]:
    """How many rows of each rank validate: round(fraction * total) in all (at least 1, at most total - 1), in
    proportion to what the ranks have (largest remainders, ties to the lower rank)."""
    total = sum(rows)
    if total < 2:
        return (0,) * len(rows)
    want = min(max(round(fraction * total), 1), total - 1)
    counts = [want * n // total for n in rows]
    by_remainder = sorted(range(len(rows)), key=lambda r: (-(want * rows[r] % total), r))
    for r in by_remainder[: want - sum(counts)]:
        counts[r] += 1
    return tuple(counts)


@dataclass(frozen=True)
class RowSplit:
    """Row numbers of a shard, int64, in the order before shuffling. `train` None: all rows, as they are."""

    train: np.ndarray | None
    validation: np.ndarray
    train_rows: int


def split_rows(
    rows: int,
    order: np.ndarray | None,
    *,
    seed: int = 0,
    validation_rows: int = 0,
    marks: np.ndarray | None = None,
) -> RowSplit:
    """order: the sorted order of the shard, None: as it is. validation_rows: that many are drawn with the
    seed; marks: (rows,) uint8, nonzero rows validate instead."""
    if marks is None and not validation_rows:
        return RowSplit(order, np.empty(0, np.int64), rows)
    base = np.arange(rows, dtype=np.int64) if order is None else order
    if marks is not None:
        chosen = marks[base] != 0
    else:
        chosen = np.zeros(rows, bool)
        chosen[permutation(rows, seed ^ _VALIDATION_STREAM, 0, 0, validation_rows)] = True
    train, validation = base[~chosen], base[chosen]
    return RowSplit(train, validation, len(train))


#: The order of that many rows is computed at once, for steps of a few rows cost more to call than to compute.
_ROWS_AT_ONCE, _STEPS_AT_ONCE = 16384, 256


@dataclass(frozen=True)
class Request:
    """What a rank uses in one step: row numbers of its shard (int64, may be empty), and how many rows all
    ranks use."""

    step: int
    index: np.ndarray
    global_rows: int


def requests(
    split: RowSplit, plan: EpochPlan, rank: int, steps: range, *, seed: int, epoch: int, shuffle: bool
) -> Iterator[Request]:
    """The rows of each of `steps`, one after the other."""
    at_once = min(max(1, _ROWS_AT_ONCE // plan.largest(rank)), _STEPS_AT_ONCE)
    for first in steps[::at_once]:
        last = min(first + at_once, steps.stop)
        used = [plan.used_before(step) for step in range(first, last + 1)]
        begin, end = used[0][rank], used[-1][rank]
        index = rows_in_use(split, (begin, end), seed=seed, epoch=epoch, shuffle=shuffle)
        for step, before, after in zip(range(first, last), used, used[1:], strict=False):
            part = index[before[rank] - begin : after[rank] - begin]
            yield Request(step, part, sum(after) - sum(before))


def rows_in_use(
    split: RowSplit, span: tuple[int, int], *, seed: int, epoch: int, shuffle: bool
) -> np.ndarray:
    """Row numbers [begin, end) of the epoch's order: a seekable permutation of (seed, epoch). int64."""
    begin, end = span
    if shuffle:
        at = permutation(split.train_rows, seed, epoch, begin, end - begin)
    else:
        at = np.arange(begin, end, dtype=np.int64)
    if split.train is None:
        return at
    rows = np.empty(len(at), np.int64)  # as split.train[at], which waits for one cache miss after the other
    gather_rows(split.train.view(np.uint8), rows.itemsize, at, rows.view(np.uint8))
    return rows
