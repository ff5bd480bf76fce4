"""What ranks on several hosts do when one of them dies or stops in the middle of an allreduce or of
the step of a plan."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from hvd_core import Config
from tests.ranks.plan_calls import (
    end_a_step,
    end_a_step_after_a_long_phase,
    make_plan_only,
    stay_away,
    step_until_it_fails,
    use_in_a_child,
)

from .calls import add_until_it_fails
from .ranks import bound_ranks, connect, connected_ranks

pytestmark = pytest.mark.timeout(90)

#: Ranks of each host, and who is killed: at an end of the chain, in its middle, an owner of a slice, none.
CASES = [((1, 1, 1), 0), ((1, 1, 1), 1), ((1, 1, 1), 2), ((2, 2), 0), ((2, 2), 3), ((1, 3), 3)]

#: What the ranks are in the middle of.
WORK = {"allreduce": (add_until_it_fails, 3_000_000), "plan": (step_until_it_fails,)}


def _configs(layout: tuple[int, ...], **settings: float) -> list[Config]:
    hosts = [f"host{h}" for h, ranks in enumerate(layout) for _ in range(ranks)]
    return [replace(Config(), host_id=host, **settings) for host in hosts]  # type: ignore[arg-type]


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize(("layout", "victim"), CASES)
def test_a_killed_rank_is_named_on_all_hosts(layout: tuple[int, ...], victim: int, work: str) -> None:
    size = sum(layout)
    with bound_ranks(size, _configs(layout)) as ranks:
        assert not any(isinstance(answer, Exception) for answer in connect(ranks))
        for rank in ranks:
            rank.start(*WORK[work])
        assert not ranks[0].pipe.poll(0.3), "they were to be in the middle of it"
        killed_at = ranks[victim].kill()
        for number, rank in enumerate(ranks):
            if number == victim:
                continue
            kind, text, at = rank.result()
            assert kind == "PeerLost"
            assert f"rank {victim}" in text
            assert at - killed_at < 3


@pytest.mark.parametrize("work", WORK)
def test_a_stopped_rank_on_another_host_is_silent_not_crashed(work: str) -> None:
    with bound_ranks(3, _configs((1, 1, 1), peer_timeout_s=1.0)) as ranks:
        assert not any(isinstance(answer, Exception) for answer in connect(ranks))
        for rank in ranks:
            rank.start(*WORK[work])
        assert not ranks[0].pipe.poll(0.3), "they were to be in the middle of it"
        stopped_at = ranks[1].kill(signal.SIGSTOP)
        for rank in (ranks[0], ranks[2]):
            kind, text, at = rank.result()
            assert kind == "PeerLost"
            assert "rank 1" in text
            assert "no byte for" in text, text
            assert at - stopped_at < 4


@pytest.mark.parametrize("layout", [(3,), (1, 1), (2, 1)])
def test_a_stall_of_a_plan_has_one_text_on_all_ranks(layout: tuple[int, ...]) -> None:
    with bound_ranks(sum(layout), _configs(layout, stall_shutdown_s=0.5)) as ranks:
        assert not any(isinstance(answer, Exception) for answer in connect(ranks))
        for rank in ranks:
            rank.start(stay_away)
        for rank in ranks:
            kind, text = rank.result()
            assert kind == "CollectiveTimeout"
            beyond = "not back from the host of" if layout == (1, 1) else "not handed over by"
            assert f"fused batch of 't0', {beyond} rank 1 for" in text
            assert "stall_shutdown_s" in text


@pytest.mark.parametrize("layout", [(2,), (1, 1)])
def test_a_declared_phase_is_no_stall_of_a_plan(layout: tuple[int, ...]) -> None:
    with bound_ranks(2, _configs(layout, stall_warn_s=0.2, stall_shutdown_s=0.6)) as ranks:
        assert not any(isinstance(answer, Exception) for answer in connect(ranks))
        for rank in ranks:
            rank.start(make_plan_only)
        assert [rank.result() for rank in ranks] == [None, None]
        for phased in (0, 1):
            ranks[1 - phased].start(end_a_step)
            assert ranks[phased].call(end_a_step_after_a_long_phase, 1.5)[:2] == ("none", "")
            assert ranks[1 - phased].result()[:2] == ("none", "")


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_plan_refuses_to_work_and_ends_nothing() -> None:
    with connected_ranks(2) as ranks:
        for rank in ranks:
            rank.start(use_in_a_child)
        for rank in ranks:
            lines, status = rank.result()
            assert status == 0
            assert len(lines) == 2
            assert all("forked" in line for line in lines)
