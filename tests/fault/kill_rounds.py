"""Ranks forked from one process that has everything loaded, so that a test can afford to kill hundreds.

`python -m tests.fault.kill_rounds SEED ROUNDS` connects 2 to 4 ranks on 1 to 3 hosts, lets them compute
whatever comes, kills one of them at some moment, and starts again; one line of JSON for each round.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import signal
import sys
import time
import traceback
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

from hvd_core import Config, Group, Listener
from hvd_core.errors import HvdError

_PATIENCE_S = 20
#: Ranks of each host.
_LAYOUTS = [(2,), (3,), (4,), (1, 1), (2, 1), (2, 2), (1, 1, 1)]
_CONFIG = Config(connect_timeout_s=20.0, chunk_bytes=64 << 10, fusion_bytes=1 << 20)


class _Traffic:
    """Collectives of all kinds, the same on all ranks, each result compared with what it must be."""

    def __init__(self, group: Group, seed: int):
        self._group = group
        self._same = random.Random(seed)  # draws alike on all ranks
        self._own = random.Random(seed * 31 + group.rank)
        self._arena = np.empty(0, np.float32)
        self._plan: Any = None
        self.checked = 0

    def run(self) -> None:
        self._arena = self._group.empty(1 << 20).view(np.float32)
        step = 0
        while True:
            kind = self._same.choice(
                [self._small, self._small, self._large, self._arena_sum, self._many, self._rest]
                + [self._planned] * 4
            )
            kind(step)
            step += 1

    def _sum(self, step: int) -> float:
        n = self._group.size
        return n * (n + 1) / 2 + n * (step % 7)

    def _mine(self, step: int) -> float:
        return self._group.rank + 1 + step % 7

    def _check(self, array: np.ndarray, value: float) -> None:
        assert (array == value).all(), f"{array[array != value][:3]} instead of {value}"
        self.checked += 1

    def _small(self, step: int) -> None:
        array = np.full(self._same.choice([1, 12, 700]), self._mine(step), np.float32)
        self._check(self._group.allreduce(array, name="small"), self._sum(step))

    def _large(self, step: int) -> None:
        array = np.full(self._same.choice([100_000, 700_000]), self._mine(step), np.float32)
        self._check(self._group.allreduce(array, name="large"), self._sum(step))

    def _arena_sum(self, step: int) -> None:
        self._arena.fill(self._mine(step))
        self._check(self._group.allreduce(self._arena, name="arena"), self._sum(step))

    def _many(self, step: int) -> None:
        sizes = [self._same.choice([3, 1000, 40_000]) for _ in range(6)]
        arrays = [np.full(size, self._mine(step), np.float32) for size in sizes]
        handles = [None] * len(arrays)
        for i in self._own.sample(range(len(arrays)), len(arrays)):
            handles[i] = self._group.allreduce_async(arrays[i], name=f"many.{i}")
        for i in self._own.sample(range(len(arrays)), len(arrays)):
            self._check(handles[i].wait(), self._sum(step))

    def _planned(self, step: int) -> None:
        """A step of a plan; some have a tensor that rank 0 lacks, so that it counts as zero there."""
        counts = [3, 1000, 40_000, 200_000]
        if self._plan is None:
            tensors = [(f"p{i}", "float32", (count,)) for i, count in enumerate(counts)]
            self._plan = self._group.plan(tensors, name="plan", first_bytes=1 << 14, batch_bytes=1 << 18)
        missing = self._same.choice([None, None, *range(len(counts))])
        arrays = [np.full(count, self._mine(step), np.float32) for count in counts]
        self._plan.begin()
        for i in self._own.sample(range(len(arrays)), len(arrays)):
            if i != missing or self._group.rank != 0:
                self._plan.ready(i, arrays[i].ctypes.data)
        while needs := self._plan.end(0):
            assert needs == [missing]
            arrays[missing].fill(0)
            self._plan.supply(missing, arrays[missing].ctypes.data)
        for i, array in enumerate(arrays):
            self._check(array, self._sum(step) - (1 + step % 7 if i == missing else 0))

    def _rest(self, step: int) -> None:
        rank, size = self._group.rank, self._group.size
        rows = self._group.allgather(np.full((rank + 1, 2), rank, np.int32), name="rows")
        assert [int(r) for r in rows[:, 1]] == [r for r in range(size) for _ in range(r + 1)]
        root = self._same.randrange(size)
        array = np.full(5000, self._mine(step) if rank == root else -1, np.float32)
        self._check(self._group.broadcast(array, root=root, name="root"), root + 1 + step % 7)


def _rank_main(pipe: Connection, seed: int, host: str) -> None:
    faulthandler.enable()
    listener = Listener.bind(replace(_CONFIG, host_id=host))
    pipe.send(listener.endpoint)
    rank, endpoints = pipe.recv()
    group = Group.connect(listener, endpoints, rank=rank, token=b"kill", config=_CONFIG)
    pipe.send("connected")
    pipe.recv()
    traffic = _Traffic(group, seed)
    try:
        traffic.run()
    except HvdError as error:
        answer = {"error": type(error).__name__, "text": str(error), "at": time.monotonic()}
    except Exception:  # noqa: BLE001 - the test shows it; a wrong sum too
        answer = {"error": "wrong", "text": traceback.format_exc(), "at": time.monotonic()}
    group.close()
    pipe.send({**answer, "closed_s": time.monotonic() - answer["at"], "checked": traffic.checked})


def _fork(seed: int, host: str) -> tuple[int, Connection]:
    ours, theirs = Pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            ours.close()
            _rank_main(theirs, seed, host)
            status = 0
        finally:
            os._exit(status)
    theirs.close()
    return pid, ours


def _answer(pipe: Connection, pid: int) -> Any:
    if not pipe.poll(_PATIENCE_S):
        os.kill(pid, signal.SIGABRT)  # its threads' stacks go to standard error
        return {"error": "hangs", "text": "", "at": time.monotonic()}
    try:
        return pipe.recv()
    except EOFError:
        return {"error": "died", "text": "", "at": time.monotonic()}


def _round(number: int, rng: random.Random) -> dict[str, Any]:
    layout = rng.choice(_LAYOUTS)
    size = sum(layout)
    ranks = [_fork(number, f"host{host}") for host, count in enumerate(layout) for _ in range(count)]
    try:
        endpoints = [_answer(pipe, pid) for pid, pipe in ranks]
        for rank, (_, pipe) in enumerate(ranks):
            pipe.send((rank, endpoints))
        connected = [_answer(pipe, pid) for pid, pipe in ranks]
        assert connected == ["connected"] * size, connected
        for _, pipe in ranks:
            pipe.send("go")
        victim = rng.randrange(size)
        wait([ranks[victim][1]], rng.expovariate(1 / 0.03))  # some moment in the middle of it
        os.kill(ranks[victim][0], signal.SIGKILL)
        killed_at = time.monotonic()
        survivors = [_answer(pipe, pid) for rank, (pid, pipe) in enumerate(ranks) if rank != victim]
    finally:
        for pid, pipe in ranks:
            pipe.close()
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    for survivor in survivors:
        survivor["after_s"] = survivor.pop("at") - killed_at
    return {"round": number, "layout": layout, "victim": victim, "survivors": survivors}


def main() -> None:
    seed, rounds = int(sys.argv[1]), int(sys.argv[2])
    rng = random.Random(seed)
    for number in range(rounds):
        print(json.dumps(_round(number, rng)), flush=True)


if __name__ == "__main__":
    main()
