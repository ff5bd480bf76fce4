"""What communication adds to a training step: forward, backward, step, one thread a rank.

    python benchmarks/step.py [--quick]

MLPs of 25 and 110 M parameters. Four copies of the same model take turns: without communication, with a
barrier only, with DistributedOptimizer, with torch's DistributedDataParallel on gloo. `after_backward_ms` is
what comes after the backward, less the same without communication: what the backward does not hide. DDP waits
within the backward and has nothing left there.

The last two rows are hvd without and with a timeline, which take turns of several steps with each other only,
so that what is written while a program trains is written within the turns.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import report
import side_by_side
import torch
import training
from race import median_us, race, ratio
from side_by_side import Ranks

ROWS = 32
MODELS = {"25 M": 6, "110 M": 26, "tiny": 1}
TIMELINE_STEPS = 4
#: Columns that say what communication adds to a step.
_ADDED = ("adds_ms", "after_backward_ms", "adds / DDP adds")


def measure(ranks: Ranks, models: list[str], budget_s: float) -> list[dict[str, Any]]:
    ranks.connect_hvd()
    ranks.connect_gloo()
    ranks.pin()
    torch.set_num_threads(1)
    rows = []
    for model in models:
        generator = torch.Generator().manual_seed(ranks.rank)
        batch = torch.randn(ROWS, 2048, generator=generator)
        ways, tails = training.contenders(ranks, lambda model=model: training.mlp(MODELS[model]), batch)
        times = race(ranks, ways, budget_s=budget_s)
        after = {name: np.median(taken[-len(times[name]) :]) for name, taken in tails.items()}
        alone = median_us(times[training.ALONE])
        ddp = median_us(times[training.DDP]) - alone
        for name, taken in times.items():
            median = median_us(taken)
            row: dict[str, Any] = {"model": model, "way": name, "pairs": len(taken)}
            row |= {"median_ms": median / 1e3, "adds_ms": (median - alone) / 1e3}
            row["after_backward_ms"] = float(after[name] - after[training.ALONE]) * 1e3
            rows.append({**row, "adds / DDP adds": (median - alone) / ddp})
    return rows


def measure_timeline(ranks: Ranks, model: str, budget_s: float) -> tuple[list[dict[str, Any]], float]:
    """Two rows, and the time with a timeline over that without."""
    ranks.connect_hvd()
    ranks.connect_gloo()
    ranks.pin()
    torch.set_num_threads(1)
    batch = torch.randn(ROWS, 2048, generator=torch.Generator().manual_seed(ranks.rank))
    names = (training.HVD, training.TIMELINE)
    ways, _ = training.contenders(
        ranks, lambda: training.mlp(MODELS[model]), batch, steps=TIMELINE_STEPS, names=names
    )
    times = race(ranks, ways, budget_s=budget_s)
    rows = []
    for name, taken in times.items():
        row: dict[str, Any] = {
            "model": f"{model}, {TIMELINE_STEPS} steps a turn",
            "way": name,
            "pairs": len(taken),
        }
        rows.append(row | {"median_ms": median_us(taken) / 1e3 / TIMELINE_STEPS} | dict.fromkeys(_ADDED))
    return rows, ratio(times[training.TIMELINE], times[training.HVD])[0]


def main() -> None:
    options = report.arguments(__doc__).parse_args()
    figure = report.Figure("step", "step time, and what communication adds to it", options.quick)
    models = ["tiny"] if options.quick else ["25 M", "110 M"]
    for model in models:
        outcome = side_by_side.run(measure, size=2, models=[model], budget_s=0.05 if options.quick else 15.0)
        figure.saw(outcome)
        figure.rows += outcome.value
    for row in figure.rows:
        if row["way"] == training.HVD:
            what = f"{row['model']}: added by hvd / by DDP on gloo"
            figure.targets.append(report.Target(what, row["adds / DDP adds"], 0.4, at_most=True))
    model = models[0]
    outcome = side_by_side.run(
        measure_timeline, size=2, model=model, budget_s=0.05 if options.quick else 25.0
    )
    figure.saw(outcome)
    rows, cost = outcome.value
    figure.rows += rows
    what = f"{model}: a step with a timeline / without"
    figure.targets.append(report.Target(what, cost, 1.02, at_most=True))
    figure.publish()


if __name__ == "__main__":
    main()
