"""500 tensors of 4 KiB, submitted one by one in random order, against one tensor of the same size, 2 ranks.

    python benchmarks/many_small.py [--quick]

Beside them the peers' ways with the same 500 tensors, and what no library can go below: "calls alone" is 500
calls of a C function that gets a tensor and a name and does nothing, and 500 waits for handles that are done.
Nothing is reduced in it, so the least that 500 tensors can take is that and the one tensor. That 500 places
cost no more memory time than one is shown by `build/check/bench_shm_roofline many PAIRS`.

The rows "hvd: ..." and "calls alone: ..." divide these two, turn by turn on the rank that submitted last,
since the other one waits for it: the submissions; the first wait, in which all is agreed on and moved
(`work_s` of the Group's `stats`: copies, sums, and what this rank waits for the other in between); the other
waits.
"""

from __future__ import annotations

import operator
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import report
import side_by_side
import tensors
import torch
import torch.distributed as dist
from gradient_set import several
from race import Contender, median_us, race, ratio
from side_by_side import Ranks

import hvd_core.torch as hvd

MANY, COUNT = 500, 1024
CALLS = "calls alone"
SUBMITS, AGREES, MOVES, WAITS = PARTS = ("500 submissions", "agreeing", "moving the bytes", "499 waits")


@dataclass
class Parts:
    """Seconds of what a call is made of, by part and turn."""

    group: Any
    seconds: dict[str, list[float]] = field(default_factory=dict)
    _turn: dict[str, float] = field(default_factory=dict)
    _work_s: float = 0.0

    def run(self, submit: Callable[[], list[Any]], wait: Callable[[Any], object]) -> None:
        begin = time.perf_counter()
        handles = submit()
        submitted = time.perf_counter()
        wait(handles[0])
        first = time.perf_counter()
        for handle in handles[1:]:
            wait(handle)
        end = time.perf_counter()
        self._turn = {SUBMITS: submitted - begin, AGREES: first - submitted, WAITS: end - first}

    def of(self, contender: Contender) -> Contender:
        """The same with notes, taken outside of the timing."""

        def prepare(turn: int) -> None:
            contender.prepare(turn)
            self._work_s = self.group.stats()["work_s"]

        def check(turn: int) -> None:
            work_s = self.group.stats()["work_s"] - self._work_s
            moved = min(work_s, self._turn[AGREES])  # the Group's thread may have worked before
            self._turn = {**self._turn, AGREES: self._turn[AGREES] - moved, MOVES: moved}
            for part in PARTS:
                self.seconds.setdefault(part, []).append(self._turn[part])
            contender.check(turn)

        return Contender(contender.name, contender.call, prepare, check)

    def medians(self, ranks: Ranks, turns: int) -> dict[str, float]:
        """Of the last `turns`, each on the rank that submitted last."""
        by_rank = ranks.gather({part: taken[-turns:] for part, taken in self.seconds.items()})
        last = np.argmax([theirs[SUBMITS] for theirs in by_rank], axis=0)
        return {
            part: float(np.median(np.choose(last, [theirs[part] for theirs in by_rank])))
            for part in self.seconds
        }


def measure(ranks: Ranks, budget_s: float) -> list[dict[str, Any]]:
    group = tensors.connect(ranks)
    small = [torch.empty(COUNT) for _ in range(MANY)]
    arrays = [tensor.numpy() for tensor in small]
    names = [f"small.{i}" for i in range(MANY)]
    order = list(range(MANY))
    shuffle = random.Random(ranks.rank).shuffle
    parts = {"hvd": Parts(group), CALLS: Parts(group)}

    def by_torch() -> None:
        parts["hvd"].run(
            lambda: [hvd.allreduce_async_(small[i], name=names[i], op=hvd.Sum) for i in order],
            hvd.synchronize,
        )

    def by_group() -> None:
        handles = [group.allreduce_async(arrays[i], name=names[i]) for i in order]
        for handle in handles:
            handle.wait()

    def grouped() -> None:
        hvd.grouped_allreduce_(small, name="grouped", op=hvd.Sum)

    def shuffled(contender: Contender) -> Contender:
        def prepare(turn: int) -> None:
            shuffle(order)
            contender.prepare(turn)

        return Contender(contender.name, contender.call, prepare, contender.check)

    done = [group.allreduce_async(array, name=name) for array, name in zip(arrays, names, strict=True)]
    for handle in done:
        handle.wait()

    def calls_alone() -> None:
        def submit() -> list[Any]:
            _ = [operator.is_(small[i], names[i]) for i in order]
            return done

        parts[CALLS].run(submit, type(done[0]).wait)

    contenders = [
        tensors.hvd_allreduce(ranks, torch.empty(MANY * COUNT), "one tensor"),
        parts["hvd"].of(shuffled(several(ranks, "hvd", small, by_torch))),
        shuffled(several(ranks, "Group", small, by_group)),
        several(ranks, "grouped", small, grouped),
        parts[CALLS].of(shuffled(unchecked(several(ranks, CALLS, small, calls_alone)))),
        *peers(ranks, small),
    ]
    times = race(ranks, contenders, budget_s=budget_s)
    rows = []
    for name, taken in times.items():
        share, low, high = ratio(taken, times["one tensor"])
        rows.append(
            {
                "way": name,
                "turns": len(taken),
                "median_us": median_us(taken),
                "of one tensor": share,
                "95%": f"{low:.2f}-{high:.2f}",
            }
        )
    one = float(np.median(times["one tensor"]))
    for name, notes in parts.items():
        for part, seconds in notes.medians(ranks, len(times[name])).items():
            row = {"way": f"{name}: {part}", "turns": len(times[name]), "median_us": seconds * 1e6}
            rows.append({**row, "of one tensor": seconds / one, "95%": None})
    return rows


def unchecked(contender: Contender) -> Contender:
    return Contender(contender.name, contender.call, contender.prepare, lambda turn: None)


def peers(ranks: Ranks, small: list[torch.Tensor]) -> list[Contender]:
    """All tensors through one buffer, which is the fastest way of both; and Open MPI's tensor by tensor."""
    flat = torch.empty(MANY * COUNT)
    views = list(flat.split(COUNT))

    def through_one(allreduce: Callable[[], object]) -> Callable[[], None]:
        def call() -> None:
            torch._foreach_copy_(views, small)
            allreduce()
            torch._foreach_copy_(small, views)

        return call

    contenders = [several(ranks, "gloo flat", small, through_one(lambda: dist.all_reduce(flat)))]
    if ranks.mpi is None:
        return contenders
    from mpi4py import MPI

    world, whole, arrays = ranks.mpi, flat.numpy(), [tensor.numpy() for tensor in small]

    def per_tensor() -> None:
        for array in arrays:
            world.Allreduce(MPI.IN_PLACE, array, MPI.SUM)

    in_one = through_one(lambda: world.Allreduce(MPI.IN_PLACE, whole, MPI.SUM))
    return [
        *contenders,
        several(ranks, "mpi flat", small, in_one),
        several(ranks, "mpi per tensor", small, per_tensor),
    ]


def main() -> None:
    options = report.arguments(__doc__).parse_args()
    figure = report.Figure("many_small", "500 tensors of 4 KiB against one of 2 MB", options.quick)
    outcome = side_by_side.run(measure, size=2, budget_s=0.05 if options.quick else 8.0)
    figure.saw(outcome)
    figure.rows = outcome.value
    share = {row["way"]: row["of one tensor"] for row in figure.rows}
    figure.targets = [report.Target("500 × 4 KiB / one tensor", share["hvd"], 1.5, at_most=True)]
    least = 1 + share[CALLS]
    figure.notes = [
        f"limit: the calls alone, which reduce nothing, take {share[CALLS]:.2f} of the one tensor, so no "
        f"library with two calls a tensor comes below {least:.2f} here"
    ]
    figure.publish()


if __name__ == "__main__":
    main()
