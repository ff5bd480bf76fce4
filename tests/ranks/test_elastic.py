"""Survivors go back to their last commit and go on with who replaces the lost ranks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hvd_core
import hvd_core.torch as hvd
from hvd_core.errors import RankFailed

from .elastic_job import COMMIT_EVERY, STEPS, net_of, rows

pytestmark = pytest.mark.timeout(90)


class Rank:
    """A process of `elastic_job`, and how to talk with it."""

    def __init__(self, **dies: int):
        self.dies = dies
        self.told, to_rank = os.pipe()
        from_rank, self.say = os.pipe()
        self._to, self._from = os.fdopen(to_rank, "w"), os.fdopen(from_rank)
        self.pid, self.endpoint = 0, ""

    def tell(self, rank: int, endpoints: list[str], generation: int) -> None:
        told = {"rank": rank, "endpoints": endpoints, "generation": generation}
        print(json.dumps(told), file=self._to, flush=True)

    def hear(self) -> str:
        """A line; "" when the process has ended."""
        return self._from.readline().strip()

    def close(self) -> None:
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self._to.close()
        self._from.close()


@contextlib.contextmanager
def started(*ranks: Rank) -> Iterator[None]:
    fds = [fd for rank in ranks for fd in (rank.told, rank.say)]
    arguments = [json.dumps([rank.told, rank.say, rank.dies]) for rank in ranks]
    command = [sys.executable, "-m", "tests.ranks.elastic_job", *arguments]
    subprocess.run(command, pass_fds=fds, cwd=Path(__file__).parents[2], check=True, timeout=60)
    for fd in fds:
        os.close(fd)
    try:
        for rank in ranks:
            pid, _, rank.endpoint = rank.hear().partition(" ")
            rank.pid = int(pid)
        yield
    finally:
        for rank in ranks:
            rank.close()


def plain() -> tuple[list[Any], list[float]]:
    """One process, all rows, from what rank 0 begins with."""
    net, optimizer, scheduler = net_of(seed=0)
    for step in range(STEPS):
        x, y = rows(step)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
        scheduler.step()
    return [p.detach() for p in net.parameters()], scheduler.get_last_lr()


def test_survivors_keep_their_process_and_the_numbers_those_of_an_undisturbed_run() -> None:
    """Rank 1 dies within a backward, rank 0 between two steps, both before they commit; then all three are
    others than in the beginning but for rank 2. The last one dies when the others are done."""
    ranks = [Rank(before=5), Rank(backward=3), Rank()]
    spare = [Rank(end=STEPS), Rank(), Rank()]
    survivor = ranks[2]
    with started(*ranks, *spare):
        for generation, lost in enumerate((None, 1, 0, 1)):
            if lost is not None:
                assert ranks[lost].hear() == "", "it has ended without a word"
                ranks[lost] = spare.pop(0)
            for rank, one in enumerate(ranks):
                one.tell(rank, [r.endpoint for r in ranks], generation)
        found = [json.loads(one.hear()) for one in ranks]
    assert ranks[2] is survivor
    weights, rate = plain()
    for rank, one in enumerate(found):
        assert one["said"] == "trained" and one["weights"] == found[0]["weights"]
        assert one["done"] == list(range(STEPS)) and one["local"] == rank
        assert one["lr"] == pytest.approx(rate)
        for got, want in zip(one["weights"], weights, strict=True):
            torch.testing.assert_close(torch.tensor(got, dtype=torch.float64), want, rtol=1e-9, atol=1e-12)
    committed = [step - step % COMMIT_EVERY for step in (3, 5, STEPS)]
    assert [one["resets"] for one in found] == [committed[2:], [], committed]
    assert [one["begins"] for one in found] == [committed[1:], committed[2:], [0, *committed]]


def dies_on_rank_1() -> None:
    hvd.init()

    @hvd.elastic.run
    def train(state: Any) -> None:
        if hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        hvd.allreduce(torch.ones(3), name="never")

    train(hvd.elastic.ObjectState(step=0))


def test_where_nobody_replaces_ranks_a_loss_is_a_loss() -> None:
    with pytest.raises(RankFailed, match="rank 1 was killed by signal 9"):
        hvd_core.run(dies_on_rank_1, num_proc=2)
