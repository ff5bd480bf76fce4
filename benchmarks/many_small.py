"""500 tensors of 4 KiB, submitted one by one in random order, against one tensor of the same size, 2 ranks.

python benchmarks/many_small.py [--quick]
"""

from __future__ import annotations

import random
from typing import Any

import report
import side_by_side
import tensors
import torch
from gradient_set import several
from race import Contender, median_us, race, ratio
from side_by_side import Ranks

import hvd_core.torch as hvd

MANY, COUNT = 500, 1024


def measure(ranks: Ranks, budget_s: float) -> list[dict[str, Any]]:
    group = tensors.connect(ranks)
    small = [torch.empty(COUNT) for _ in range(MANY)]
    arrays = [tensor.numpy() for tensor in small]
    names = [f"small.{i}" for i in range(MANY)]
    order = list(range(MANY))
    shuffle = random.Random(ranks.rank).shuffle

    def by_torch() -> None:
        handles = [hvd.allreduce_async_(small[i], name=names[i], op=hvd.Sum) for i in order]
        for handle in handles:
            hvd.synchronize(handle)

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

    contenders = [
        tensors.hvd_allreduce(ranks, torch.empty(MANY * COUNT), "one tensor"),
        shuffled(several(ranks, "hvd", small, by_torch)),
        shuffled(several(ranks, "Group", small, by_group)),
        several(ranks, "grouped", small, grouped),
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
    return rows


def main() -> None:
    options = report.arguments(__doc__).parse_args()
    figure = report.Figure("many_small", "500 tensors of 4 KiB against one of 2 MB", options.quick)
    outcome = side_by_side.run(measure, size=2, budget_s=0.05 if options.quick else 8.0)
    figure.saw(outcome)
    figure.rows = outcome.value
    share = {row["way"]: row["of one tensor"] for row in figure.rows}
    figure.targets = [report.Target("500 × 4 KiB / one tensor", share["hvd"], 1.5, at_most=True)]
    figure.publish()


if __name__ == "__main__":
    main()
