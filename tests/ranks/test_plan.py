"""`Group.plan`, and the optimizer on top of it, between processes."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch

import hvd_core
import hvd_core.torch as hvd
from hvd_core.errors import HorovodInternalError, MismatchError
from tests.fault.calls import abort
from tests.fault.ranks import connected_ranks
from tests.ranks.plan_calls import (
    disagree,
    end_a_step,
    end_without_peers,
    make_plan_only,
    run_steps,
    step_until_it_fails,
)

pytestmark = pytest.mark.timeout(60)


def test_sums_in_any_order_with_missing_members() -> None:
    with connected_ranks(3) as ranks:
        for rank in ranks:
            rank.start(run_steps, 12)
        checked = {rank.result() for rank in ranks}
        assert len(checked) == 1
        assert checked.pop() > 60


def test_a_killed_rank_is_named_by_all_within_half_a_second() -> None:
    for delay_s in (0.25, 0.31):
        with connected_ranks(3) as ranks:
            for rank in ranks:
                rank.start(step_until_it_fails)
            assert not ranks[0].pipe.poll(delay_s), "they were to be in the middle of it"
            killed_at = ranks[1].kill()
            for survivor in (ranks[0], ranks[2]):
                kind, text, at = survivor.result()
                assert kind == "PeerLost"
                assert "rank 1" in text
                assert at - killed_at < 0.5


def test_a_stopped_rank_that_goes_on_finds_the_group_dead() -> None:
    with connected_ranks(2, peer_timeout_s=0.5) as ranks:
        for rank in ranks:
            rank.start(step_until_it_fails)
        assert not ranks[0].pipe.poll(0.3)
        ranks[1].kill(signal.SIGSTOP)
        kind, text, _ = ranks[0].result()
        assert kind == "PeerLost"
        assert "rank 1" in text
        ranks[1].kill(signal.SIGCONT)
        assert ranks[1].result()[0] in ("PeerLost", "Aborted")


def test_an_abort_ends_the_end_of_a_step_within_100_ms() -> None:
    with connected_ranks(3) as ranks:
        for rank in ranks:
            rank.start(make_plan_only)
        for rank in ranks:
            assert rank.result() is None
        for rank in ranks[1:]:
            rank.start(end_a_step)
        assert not ranks[1].pipe.poll(0.2)
        aborted_at = ranks[0].call(abort, "rank 0 raised ValueError: boom")
        for rank in ranks[1:]:
            kind, text, at = rank.result()
            assert kind == "Aborted"
            assert "rank 0 raised ValueError: boom" in text
            assert at - aborted_at < 0.1


def test_a_mismatch_names_tensor_and_ranks() -> None:
    with connected_ranks(2) as ranks:
        for rank in ranks:
            rank.start(disagree)
        for rank in ranks:
            assert rank.result() == "fc.weight: rank 1 has shape (11,), rank 0 has (10,)"


def test_a_rank_that_closes_is_named() -> None:
    with connected_ranks(2) as ranks:
        for rank in ranks:
            rank.start(end_without_peers)
        assert ranks[0].result() == ("", "")
        kind, text = ranks[1].result()
        assert kind in ("GroupClosed", "Aborted")
        assert "rank 0" in text


# -- the optimizer -----------------------------------------------------------------------------------------


def net() -> Any:
    torch.manual_seed(3)
    layers = [torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(256, 1)).double()


def rows(step: int) -> Any:
    return torch.randn(24, 64, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def train() -> tuple[list[Any], list[Any]]:
    hvd.init()
    model = net()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    for step in range(6):
        optimizer.zero_grad()
        model(rows(step)[hvd.rank() :: hvd.size()]).pow(2).mean().backward()
        optimizer.step()
    distributor = optimizer._hvd
    assert distributor._planned is not None
    assert distributor._planned.times()["ready_s"] >= 0
    before = hvd_core.basics.default_group().stats()["collectives"]
    optimizer.zero_grad()
    model(rows(9)[hvd.rank() :: hvd.size()]).pow(2).mean().backward()
    assert hvd_core.basics.default_group().stats()["collectives"] == before  # no control messages
    kept = [p.grad for p in model.parameters()]
    copies = [grad.clone() for grad in kept]
    hvd.shutdown()
    del optimizer, distributor
    # A kept gradient is memory of its own, of its own size, also after shutdown.
    for grad, copy in zip(kept, copies, strict=True):
        assert grad.untyped_storage().nbytes() == grad.numel() * 8
        assert torch.equal(grad, copy)
        grad.add_(1)
    return [p.detach() for p in model.parameters()], copies


def test_the_optimizer_trains_with_a_plan_and_gradients_stay_ordinary_memory() -> None:
    oracle = net()
    plain = torch.optim.SGD(oracle.parameters(), 0.1)
    for step in range(6):
        plain.zero_grad()
        oracle(rows(step)).pow(2).mean().backward()
        plain.step()
    plain.zero_grad()
    oracle(rows(9)).pow(2).mean().backward()
    for params, grads in hvd_core.run(train, num_proc=3):
        for p, q in zip(params, oracle.parameters(), strict=True):
            assert torch.allclose(p, q, rtol=0, atol=1e-9)
        for g, q in zip(grads, oracle.parameters(), strict=True):
            assert torch.allclose(g, q.grad, rtol=0, atol=1e-9)


def fail_in_the_middle() -> str:
    """Rank 1's backward fails after gradients were handed over; rank 0's does not."""
    hvd.init()
    model = net()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))

    def one_step(fails: bool) -> None:
        optimizer.zero_grad()
        hidden = model[:2](rows(0))
        if fails:
            hidden.register_hook(lambda _: 1 / 0)
        model[2:](hidden).sum().backward()
        optimizer.step()

    one_step(False)
    for fails in (True, False):  # on all ranks: nothing happened
        try:
            one_step(fails)
        except ZeroDivisionError:
            assert fails
    try:
        one_step(hvd.rank() == 1)
    except ZeroDivisionError:
        try:
            one_step(False)
        except MismatchError as error:
            return str(error)
    except MismatchError as error:
        return str(error)
    return ""


def test_a_backward_that_fails_on_one_rank_only_is_told() -> None:
    texts = hvd_core.run(fail_in_the_middle, num_proc=2)
    assert all("has failed on some ranks" in text for text in texts), texts


def lose_a_rank() -> str:
    hvd.init()
    model = net()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
    try:
        for step in range(100):
            if step == 4 and hvd.rank() == 1:
                hvd_core.basics.default_group().abort("enough")
            optimizer.zero_grad()
            model(rows(step)).sum().backward()
            optimizer.step()
    except HorovodInternalError as error:
        return str(error)
    return ""


def test_an_abort_reaches_a_backward() -> None:
    assert all("enough" in text for text in hvd_core.run(lose_a_rank, num_proc=2))
