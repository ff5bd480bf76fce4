"""Plans of ranks on several hosts (HVD_HOST_ID parts them, TCP on loopback joins them), and staged ones."""

from __future__ import annotations

import select
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

import hvd_core
import hvd_core.torch as hvd
from hvd_core import Config
from hvd_core.errors import HorovodInternalError
from tests.fault.ranks import bound_ranks, connect
from tests.ranks.plan_calls import end_without_peers, one_plan_at_a_time, run_steps, same_bits_as_eager

pytestmark = pytest.mark.timeout(90)

#: Ranks per host.
LAYOUTS = [(2, 2), (3, 1), (1, 3), (1, 1, 2), (1, 1, 1, 1), (4,)]


def _hosts(layout: tuple[int, ...]) -> list[str]:
    return [f"host-{host}" for host, ranks in enumerate(layout) for _ in range(ranks)]


def _results(layout: tuple[int, ...], calls: list[tuple[Any, ...]], **settings: Any) -> list[list[Any]]:
    """What all ranks return of each call."""
    configs = [replace(Config(), host_id=host, **settings) for host in _hosts(layout)]
    results = []
    with bound_ranks(len(configs), configs) as ranks:
        assert not any(isinstance(answer, Exception) for answer in connect(ranks))
        for fn, *args in calls:
            for rank in ranks:
                rank.start(fn, *args)
            results.append([rank.result() for rank in ranks])
    return results


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sums_in_any_order_with_missing_members(layout: tuple[int, ...]) -> None:
    calls = [(run_steps, 6), (same_bits_as_eager,)]
    checked, bits = _results(layout, calls)
    assert len(set(checked)) == 1
    assert checked[0] > 30
    assert bits == [True] * 4


def test_one_plan_at_a_time_has_the_links_and_all_ranks_know() -> None:
    assert _results((2, 1), [(one_plan_at_a_time,)]) == [[[True, False, True]] * 3]


def test_a_rank_of_another_host_that_closes_is_named() -> None:
    (answers,) = _results((1, 1), [(end_without_peers,)])
    assert answers[0] == ("", "")
    assert answers[1][0] in ("GroupClosed", "Aborted")
    assert "rank 0" in answers[1][1]


# -- the optimizer -----------------------------------------------------------------------------------------


def net() -> Any:
    torch.manual_seed(3)
    layers = [torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(256, 1), torch.nn.Linear(8, 8)).double()


def rows(step: int) -> Any:
    return torch.randn(24, 64, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def loss_of(model: Any, step: int, rank: int, size: int) -> Any:
    """Some steps leave layers out on some ranks; the last layer is used nowhere."""
    hidden = model[:2](rows(step)[rank::size])
    if step % 3 != 1 or rank % 2 == 0:
        hidden = model[2:4](hidden)
    return model[4](hidden).pow(2).mean() / size


def oracle() -> Any:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(7):
        optimizer.zero_grad()
        for rank in range(4):
            for half in (step, step + 50):
                loss_of(model, half, rank, 4).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def train(optimizers: int) -> tuple[list[Any], bool, int]:
    hvd.init()
    model = net()
    parts = [model] if optimizers == 1 else [model[:2], model[2:]]
    made = [
        hvd.DistributedOptimizer(
            torch.optim.SGD(part.parameters(), 0.1), backward_passes_per_step=2, op=hvd.Sum
        )
        for part in parts
    ]
    group = hvd_core.basics.default_group()
    for step in range(7):
        before = group.stats()["collectives"]
        for optimizer in made:
            optimizer.zero_grad()
        for half in (step, step + 50):
            loss_of(model, half, hvd.rank(), hvd.size()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for optimizer in made:
            optimizer.step()
    messages = group.stats()["collectives"] - before
    unused = model[5].weight.grad is None
    return [p.detach() for p in model.parameters()], unused, messages


@pytest.mark.parametrize(("layout", "optimizers"), [((2, 2), 1), ((3, 1), 2), ((1, 1, 2), 1), ((4,), 2)])
def test_training_with_unused_parameters_accumulation_and_clipping(
    layout: tuple[int, ...], optimizers: int
) -> None:
    hosts = _hosts(layout)
    results = hvd_core.run(
        train, (optimizers,), num_proc=4, env=lambda rank: {"HVD_HOST_ID": hosts[rank]}, timeout_s=80
    )
    expected = oracle()
    for params, unused, messages in results:
        assert unused
        assert messages == 0 or optimizers == 2  # in the steady state
        for p, q in zip(params, expected, strict=True):
            assert torch.allclose(p, q, rtol=0, atol=1e-9)


def steps(optimizer: Any, model: Any, first: int, last: int) -> None:
    for step in range(first, last):
        optimizer.zero_grad()
        model[:5](rows(step)).sum().backward()
        optimizer.step()


def abort_and_connect_again(times: int) -> list[tuple[str, float]]:
    """Rank 3 aborts while the others are in the end of a step; then all train on in a Group of their own, and
    so on. What each step ended with, and when, or when rank 3 aborted."""
    ends = []
    model = net()
    for time_ in range(times):
        hvd.init()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 1e-4))
        steps(optimizer, model, 0, 3)
        if hvd.rank() == 3:
            select.select([hvd_core.basics.default_group()], [], [], 0.2)  # the others are in their step then
            ends.append(("", time.monotonic()))
            hvd_core.basics.default_group().abort(f"enough of {time_}")
        else:
            try:
                steps(optimizer, model, 3, 4)
                ends.append(("nothing", time.monotonic()))
            except HorovodInternalError as error:
                ends.append((str(error), time.monotonic()))
        hvd.shutdown()
        with torch.no_grad():  # an aborted step may have moved some
            for p in model.parameters():
                p.fill_(0.01)
    return ends


@pytest.mark.parametrize("layout", [(4,), (2, 2), (1, 1, 1, 1)])
def test_an_abort_reaches_the_end_of_a_step_and_ranks_connect_again(layout: tuple[int, ...]) -> None:
    hosts, times = _hosts(layout), 3
    ends = hvd_core.run(
        abort_and_connect_again,
        (times,),
        num_proc=4,
        env=lambda rank: {"HVD_HOST_ID": hosts[rank]},
        timeout_s=80,
    )
    slowest = []
    for time_ in range(times):
        aborted_at = ends[3][time_][1]
        for rank in range(3):
            assert f"enough of {time_}" in ends[rank][time_][0]
        slowest.append(max(ends[rank][time_][1] for rank in range(3)) - aborted_at)
    assert min(slowest) < 0.1, slowest  # this machine may be busy
