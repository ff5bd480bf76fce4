"""Who uses which row when: every row once, at an even pace, the same however it is computed."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

pytest.importorskip("pyarrow")
from hvd_core.train import order
from hvd_core.train.order import EpochPlan, micro_batches, rows_in_use, split_rows, validation_counts

pytestmark = pytest.mark.timeout(60)

SHARDS = [
    (0, 1),
    (1,),
    (3, 0),
    (2, 1),
    (13, 12),
    (1000, 10),
    (1000, 10, 0, 1),
    (429, 429),
    (7, 7, 7),
    (5, 4, 4, 4, 4),
]


@pytest.mark.parametrize("rows", SHARDS)
@pytest.mark.parametrize("capacity", [1, 2, 3, 8, 32, 5000])
@pytest.mark.parametrize("per_rank", [True, False])
@pytest.mark.parametrize("pairs", [True, False])
def test_every_row_once(rows: tuple[int, ...], capacity: int, per_rank: bool, pairs: bool) -> None:
    plan = EpochPlan(rows, capacity, per_rank, pairs)
    assert plan.steps >= 1
    totals = [0] * plan.steps
    for rank, n in enumerate(rows):
        at = 0
        for step in range(plan.steps):
            begin, end = plan.span(rank, step)
            assert begin == at
            assert begin <= end
            assert end - begin <= plan.largest(rank)
            totals[step] += end - begin
            at = end
        assert at == n
    assert totals == [plan.global_rows(s) for s in range(plan.steps)]


@pytest.mark.parametrize("rows", SHARDS)
@pytest.mark.parametrize("capacity", [1, 3, 8, 32])
def test_batch_size_is_what_a_rank_uses_at_most(rows: tuple[int, ...], capacity: int) -> None:
    plan = EpochPlan(rows, capacity)
    sizes = np.diff([plan.used_before(s) for s in range(plan.steps + 1)], axis=0)
    assert sizes.max() <= capacity
    assert plan.steps == -(-max(rows) // capacity)
    # At an even pace: never more than a row away from the rank's share of what the largest has used.
    for step in range(plan.steps):
        done = step * capacity / max(rows)
        assert all(abs(u - done * n) <= 0.5 for u, n in zip(plan.used_before(step), rows, strict=True))


@pytest.mark.parametrize("rows", SHARDS)
@pytest.mark.parametrize("capacity", [1, 3, 8, 32])
def test_global_batch_size_is_what_all_use_together(rows: tuple[int, ...], capacity: int) -> None:
    plan = EpochPlan(rows, capacity, per_rank=False)
    used = [plan.global_rows(s) for s in range(plan.steps)]
    assert used[:-1] == [capacity] * (plan.steps - 1)
    assert 0 < used[-1] <= capacity


def test_global_order_is_the_merge_of_the_ranks_positions() -> None:
    rows = (5, 3, 11, 0)
    keys = sorted(((k + 0.5) / n, r) for r, n in enumerate(rows) for k in range(n))
    plan = EpochPlan(rows, 1, per_rank=False)
    for count in range(sum(rows) + 1):
        oracle = tuple(sum(r == q for _, r in keys[:count]) for q in range(len(rows)))
        assert plan.used_before(count) == oracle


def test_one_rank_takes_plain_batches_and_the_tail_is_shared() -> None:
    assert [EpochPlan((26,), 8).global_rows(s) for s in range(4)] == [8, 8, 8, 2]
    plan = EpochPlan((429, 429), 8)
    assert [plan.span(r, 53) for r in (0, 1)] == [(424, 429)] * 2
    assert [b - a for a, b in (EpochPlan((13, 12), 4).span(1, s) for s in range(4))] == [4, 3, 4, 1]


def test_pairs_leave_no_row_alone() -> None:
    for rows, capacity in itertools.product([(9, 8), (25, 3), (1000, 11), (2, 2), (3, 5)], [1, 2, 4, 7]):
        plan = EpochPlan(rows, capacity, pairs=True)
        for rank in range(len(rows)):
            sizes = [b - a for a, b in (plan.span(rank, s) for s in range(plan.steps))]
            assert 1 not in sizes
    assert EpochPlan((1, 4), 2, pairs=True).used_before(2) == (1, 4)


def test_micro_batches_hold_all_rows_and_no_single_one() -> None:
    for rows, size, pairs in itertools.product(range(20), range(1, 6), (False, True)):
        parts = micro_batches(rows, size, pairs=pairs)
        assert [i for part in parts for i in range(part.start, part.stop)] == list(range(rows))
        sizes = [part.stop - part.start for part in parts]
        assert not sizes or max(sizes) <= size + pairs
        assert not pairs or size == 1 or rows == 1 or 1 not in sizes
    assert [p.stop - p.start for p in micro_batches(7, 3)] == [3, 3, 1]


@pytest.mark.parametrize("rows", SHARDS)
@pytest.mark.parametrize("fraction", [0.01, 0.2, 0.5, 0.999])
def test_validation_counts_are_exact_and_fair(rows: tuple[int, ...], fraction: float) -> None:
    counts = validation_counts(rows, fraction)
    total = sum(rows)
    assert all(0 <= c <= n for c, n in zip(counts, rows, strict=True))
    if total < 2:
        assert sum(counts) == 0
        return
    assert sum(counts) == min(max(round(fraction * total), 1), total - 1)
    assert all(abs(c - sum(counts) * n / total) < 1 for c, n in zip(counts, rows, strict=True))


def test_the_split_is_disjoint_whole_and_seeded() -> None:
    order = np.random.default_rng(0).permutation(100).astype(np.int64)
    split = split_rows(100, order, seed=3, validation_rows=20)
    assert split.train is not None
    assert (len(split.train), len(split.validation), split.train_rows) == (80, 20, 80)
    assert sorted([*split.train, *split.validation]) == list(range(100))
    again, other = (split_rows(100, order, seed=s, validation_rows=20) for s in (3, 4))
    assert np.array_equal(split.validation, again.validation)
    assert set(split.validation) != set(other.validation)
    # Which rows validate follows from their place in the sorted order, not from where they arrived.
    shuffled = np.random.default_rng(1).permutation(100).astype(np.int64)
    moved = split_rows(100, np.argsort(shuffled)[order], seed=3, validation_rows=20)
    assert set(shuffled[moved.validation]) == set(split.validation)


def test_marks_choose_the_validation_rows() -> None:
    marks = np.zeros(10, np.uint8)
    marks[[2, 5]] = 1
    split = split_rows(10, np.arange(9, -1, -1), marks=marks)
    assert split.validation.tolist() == [5, 2]
    assert split.train is not None
    assert split.train.tolist() == [9, 8, 7, 6, 4, 3, 1, 0]


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_uses_each_row_once_and_can_start_anywhere(shuffle: bool) -> None:
    split = split_rows(101, None, seed=1, validation_rows=11)
    whole = rows_in_use(split, (0, 90), seed=7, epoch=2, shuffle=shuffle)
    assert split.train is not None
    assert sorted(whole) == sorted(split.train)
    parts = [
        rows_in_use(split, s, seed=7, epoch=2, shuffle=shuffle) for s in ((0, 1), (1, 40), (40, 40), (40, 90))
    ]
    assert np.array_equal(np.concatenate(parts), whole)
    other = rows_in_use(split, (0, 90), seed=7, epoch=3, shuffle=shuffle)
    assert np.array_equal(whole, other) is not shuffle


@pytest.mark.parametrize("rows_at_once", [1, 20, 16384])
@pytest.mark.parametrize("plan", [EpochPlan((90, 31), 8), EpochPlan((90, 0, 7), 8, per_rank=False)])
def test_requests_are_what_each_step_uses(
    plan: EpochPlan, rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order, "_ROWS_AT_ONCE", rows_at_once)
    for rank, rows in enumerate(plan.rows):
        split, how = split_rows(rows, None), {"seed": 7, "epoch": 2, "shuffle": True}
        steps = range(3, plan.steps)
        found = list(order.requests(split, plan, rank, steps, **how))
        assert [request.step for request in found] == list(steps)
        for request in found:
            span = plan.span(rank, request.step)
            assert np.array_equal(request.index, rows_in_use(split, span, **how))
            assert request.global_rows == plan.global_rows(request.step)
