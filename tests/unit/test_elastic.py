"""States of `hvd.elastic`, on one rank."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import hvd_core.torch as hvd
from hvd_core import basics, world
from hvd_core.errors import InvalidArgument, LaunchFailed, PeerLost
from hvd_core.torch.elastic import on_host


@pytest.fixture
def alone() -> Iterator[None]:
    """One rank, whose launcher says that it replaces ranks, and does not."""
    world.set_current(world.World(replaced_within_s=0.2))
    hvd.init()
    yield
    hvd.shutdown()
    world.set_current(None)


def test_values_are_kept_by_copies(alone: None) -> None:
    state = hvd.elastic.ObjectState(epoch=0, best=[])
    state.epoch, state.best = 3, [1.0]
    state.commit()
    state.epoch += 1
    state.best.append(2.0)
    state.restore()
    assert (state.epoch, state.best) == (3, [1.0])
    state.best.append(4.0)
    state.restore()
    assert state.best == [1.0], "what was restored is no part of the copy"
    state.epoch = 5
    state.sync()
    state.restore()
    assert state.epoch == 5
    with pytest.raises(AttributeError, match="no 'batch': give it a value"):
        state.batch += 1


@pytest.mark.parametrize("name", ["commit", "_kept"])
def test_names_that_a_state_needs_itself(name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"'{name}' cannot be the name of a value"):
        hvd.elastic.ObjectState(**{name: 1})


def test_models_and_optimizers_go_back(alone: None) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(net.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    state = hvd.elastic.TorchState(net, optimizer, scheduler=scheduler, epoch=0)
    assert state.model is net and state.scheduler is scheduler

    def step() -> None:
        net(torch.ones(3, 2) * torch.arange(3)[:, None]).pow(2).sum().backward()
        optimizer.step()
        scheduler.step()
        state.epoch += 1

    def seen() -> Any:
        return on_host([net.state_dict(), optimizer.state_dict(), scheduler.state_dict(), state.epoch])

    step()
    state.commit()
    kept = seen()
    for _ in range(2):  # the second time from what the first has put back
        step()
        assert str(seen()) != str(kept)
        state.restore()
        assert str(seen()) == str(kept) and state.epoch == 1
        assert all(p.grad is None for p in net.parameters())
    state.sync()
    assert str(seen()) == str(kept)


def test_a_state_dict_keeps_its_versions() -> None:
    kept = on_host(torch.nn.BatchNorm1d(2).state_dict())
    assert kept._metadata[""]["version"] == 2


def test_nobody_comes(alone: None) -> None:
    calls = []

    @hvd.elastic.run
    def train(state: Any) -> None:
        calls.append(state.epoch)
        raise PeerLost("lost rank 1")

    began = time.monotonic()
    with pytest.raises(LaunchFailed, match=r"not told within 0\.2 s") as caught:
        train(hvd.elastic.ObjectState(epoch=7))
    assert calls == [7] and time.monotonic() - began < 5
    assert isinstance(caught.value.__cause__, PeerLost) and not basics.is_initialized()
