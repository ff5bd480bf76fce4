"""`ElasticSampler`: who gets which rows, and what is left of an epoch after a reset."""

from __future__ import annotations

import itertools

import pytest
import torch

import hvd_core.torch as hvd
from hvd_core.errors import InvalidArgument
from tests.unit.thread_ranks import run_ranks

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(("size", "rows"), [(1, 5), (2, 8), (3, 8), (4, 1), (3, 0)])
def test_every_row_is_dealt_and_all_ranks_get_as_many(size: int, rows: int) -> None:
    def body(rank: int) -> list[list[int]]:
        sampler = hvd.elastic.ElasticSampler(range(rows), seed=3)
        first, again = list(sampler), list(sampler)
        assert first == again and len(first) == len(sampler) == -(-rows // size)
        sampler.set_epoch(1)
        return [first, list(sampler)]

    for epoch in zip(*run_ranks(size, body), strict=True):
        dealt = [row for mine in epoch for row in mine]
        assert sorted(set(dealt)) == list(range(rows))
        assert len(dealt) - rows < size
    plain = run_ranks(2, lambda rank: list(hvd.elastic.ElasticSampler(range(6), shuffle=False)))
    assert plain == [[0, 2, 4], [1, 3, 5]]


def test_epochs_have_different_orders() -> None:
    def body(rank: int) -> list[list[int]]:
        sampler = hvd.elastic.ElasticSampler(range(50))
        orders = []
        for epoch in range(3):
            sampler.set_epoch(epoch)
            orders.append(list(sampler))
        return orders

    for one, other in itertools.combinations(run_ranks(1, body)[0], 2):
        assert one != other


def test_a_state_keeps_it_and_deals_what_is_left() -> None:
    """Two ranks are through with two batches of two rows each, and with a third that was not committed."""
    batch_size, rows = 2, 16

    def body(rank: int) -> tuple[list[int], list[int]]:
        sampler = hvd.elastic.ElasticSampler(range(rows))
        loader = torch.utils.data.DataLoader(torch.arange(rows), batch_size, sampler=sampler)
        state = hvd.elastic.TorchState(sampler=sampler)
        seen = []
        for i, batch in zip(range(3), loader, strict=False):
            sampler.record_batch(i, batch_size)
            assert sampler.processed_num == 2 * batch_size * (i + 1)
            if i < 2:
                seen += batch.tolist()
                state.commit()
        assert len(list(loader)) == 4, "what is iterated over stays"
        state.restore()
        state.sync()
        return seen, [row for batch in loader for row in batch.tolist()]

    results = run_ranks(2, body)
    assert sorted(row for pair in results for part in pair for row in part) == list(range(rows))
    assert [len(left) for _, left in results] == [4, 4]


def test_a_batch_has_rows() -> None:
    def body(rank: int) -> None:
        with pytest.raises(InvalidArgument, match="batch_size=0"):
            hvd.elastic.ElasticSampler(range(4)).record_batch(0, 0)

    run_ranks(1, body)
