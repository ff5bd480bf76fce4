"""Rows dealt by hash: the same run however they are partitioned."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

torch = pytest.importorskip("torch")
import hvd_core  # noqa: E402
from hvd_core import basics  # noqa: E402
from hvd_core.train import FitResult, TrainSpec, exchange, fit_local, plan_layout  # noqa: E402
from hvd_core.train.columns import columns_of  # noqa: E402
from hvd_core.train.local import shard_of  # noqa: E402
from hvd_core.train.ranks import Ranks  # noqa: E402

from ..unit.thread_ranks import run_ranks  # noqa: E402
from .runs import learned, spec_of, table  # noqa: E402

pytestmark = pytest.mark.timeout(240)


def dealt(parts: list[pa.Table], spec: TrainSpec) -> list[list[bytes]]:
    """Rows of each rank after the exchange, sorted, as bytes."""

    layout = plan_layout(columns_of(parts[0].schema), spec)

    def rank_main(rank: int) -> list[bytes]:
        shard, ranks = shard_of(parts[rank], layout), Ranks(basics.default_group())
        before = [weakref.ref(array) for array in shard.maps] if shard.rows else []
        exchange.deal_by_hash(spec, shard, ranks)
        assert shard.is_dealt or ranks.size == 1
        assert ranks.size == 1 or all(ref() is None for ref in before), "the rows before are kept"
        if not shard.rows:
            return []
        columns = [shard.block(i).reshape(shard.rows, -1) for i in range(len(shard.blocks))]
        return sorted(b"".join(c[i].tobytes() for c in columns) for i in range(shard.rows))

    return run_ranks(len(parts), rank_main)


@pytest.mark.parametrize("round_bytes", [100, 4 << 20])
def test_each_rank_gets_an_equal_part_that_only_the_rows_decide(
    round_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With equal rows among them, rounds of three rows, and a rank that has none."""
    monkeypatch.setattr(exchange, "_ROUND_BYTES", round_bytes)
    spec = spec_of(row_order="global")
    rows = pa.concat_tables([table(100), *[table(1)] * 40])
    moved = rows.take(np.random.default_rng(0).permutation(140))
    first = dealt([rows.slice(0, 50), rows.slice(50, 90), rows.slice(140)], spec)
    other = dealt([moved.slice(140), moved.slice(0, 139), moved.slice(139)], spec)
    whole = dealt([rows.slice(140), rows, rows.slice(140)], spec)
    assert whole == other == first
    assert [len(r) for r in whole] == [47, 47, 46]
    assert sorted(x for r in whole for x in r) == dealt([rows], spec)[0]


def test_fewer_rows_than_ranks() -> None:
    rows = table(2)
    parts = dealt([rows, rows.slice(2), rows.slice(2)], spec_of(row_order="global"))
    assert sorted(map(len, parts)) == [0, 1, 1]


def fits(spec: TrainSpec, layouts: list[list[pa.Table]]) -> list[FitResult]:
    torch.set_num_threads(1)
    basics.init()
    group = basics.default_group()
    return [fit_local(spec, parts[group.rank], group) for parts in layouts]


def test_the_same_bits_whatever_the_partitioning() -> None:
    """1, 2 and 3 partitions, in several orders, on two ranks."""
    rows = table(75)
    thirds = [rows.slice(i, 25) for i in (0, 25, 50)]
    none = rows.slice(75)
    layouts = [
        [rows, none],
        [none, rows],
        [rows.slice(40), rows.slice(0, 40)],
        [pa.concat_tables([thirds[2], thirds[0]]), thirds[1]],
        [thirds[0], pa.concat_tables([thirds[1], thirds[2]])],
    ]
    spec = spec_of(row_order="global", validation=0.2)
    results: list[Any] = hvd_core.run(fits, (spec, layouts), num_proc=2, timeout_s=200)[0]
    for result in results[1:]:
        assert result.weights == results[0].weights
        assert learned(result) == learned(results[0])
    assert (results[0].rows_seen, results[0].rows_sent) == (75, 75)
