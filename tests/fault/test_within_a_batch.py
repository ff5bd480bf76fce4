"""What comes while a rank is in the middle of a fused batch: signal handlers, somebody who keeps the GIL, an
abort."""

from __future__ import annotations

import signal

import pytest

from .batch_calls import abort_while_it_moves, add_while_a_thread_holds_the_gil, add_with_handler
from .calls import add, start_adding
from .ranks import Rank, connected_ranks

pytestmark = pytest.mark.timeout(90)

_COUNT = 1_000_000


def _stop_after_announcing(ranks: list[Rank], name: str) -> None:
    """Rank 0 now waits in the batch of `name`, not for it to be decided."""
    ranks[1].call(start_adding, name, _COUNT)
    for rank in ranks:
        rank.start(add)
    assert [rank.result() for rank in ranks] == [2.0, 2.0]
    ranks[1].kill(signal.SIGSTOP)


def test_a_handler_may_close_the_group() -> None:
    with connected_ranks(2) as ranks:
        _stop_after_announcing(ranks, "large")
        ranks[0].start(add_with_handler, "large", _COUNT, "close")
        assert not ranks[0].pipe.poll(0.5), "it was to be in the batch"
        ranks[0].kill(signal.SIGTERM)
        kind, text, raised = ranks[0].result(10)
        assert (kind, raised) == ("GroupClosed", "")
        assert "'large'" in text


def test_a_handler_that_wants_a_sum_is_refused_and_the_batch_goes_on() -> None:
    with connected_ranks(2) as ranks:
        _stop_after_announcing(ranks, "large")
        ranks[0].start(add_with_handler, "large", _COUNT, "add")
        assert not ranks[0].pipe.poll(0.5), "it was to be in the batch"
        ranks[0].kill(signal.SIGTERM)
        assert not ranks[0].pipe.poll(0.3)
        ranks[1].kill(signal.SIGCONT)
        kind, _, raised = ranks[0].result()
        assert kind == ""
        assert "signal handler" in raised
        assert "'in the handler'" in raised


def test_who_waits_for_the_gil_is_not_taken_for_dead() -> None:
    with connected_ranks(2, peer_timeout_s=2.0) as ranks:
        _stop_after_announcing(ranks, "large")
        ranks[0].start(add_while_a_thread_holds_the_gil, "large", _COUNT, 5.0)
        assert not ranks[0].pipe.poll(0.8), "it was to be in the batch"
        ranks[1].kill(signal.SIGCONT)
        assert ranks[0].result() == ("", "")
        for rank in ranks:
            rank.start(add)
        assert [rank.result() for rank in ranks] == [2.0, 2.0]


@pytest.mark.parametrize("form", ["broadcast", "allgather"])
def test_an_abort_ends_what_moves_many_bytes(form: str) -> None:
    with connected_ranks(2) as ranks:
        for rank in ranks:
            rank.start(abort_while_it_moves, form, 1 << 30)
        (kind, _), (kind_there, seconds) = (rank.result(60) for rank in ranks)
        assert (kind, kind_there) == ("Aborted", "Aborted")
        assert seconds < 0.5
