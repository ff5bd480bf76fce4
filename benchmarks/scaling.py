"""How training scales on one machine: two ranks that train together against two replicas that never talk.

    python benchmarks/scaling.py [--quick]

An MLP of 25 M parameters with a step of 0.4 s or more and a small transformer, one compute thread a rank. The
replicas run at the same time and wait for nobody within a turn of several steps, so what is left is the cost
of coupling, waiting for the slower rank of each step included. "barrier only" is that waiting by itself:
no way to train in step comes above it. DDP on gloo beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import report
import side_by_side
import torch
import training
from race import at_the_mean_rate, median_us, race, ratio
from side_by_side import Ranks

#: Steps of a turn, between two of which nobody is made to wait.
STEPS = 3

MODELS: dict[str, tuple[Callable[[], torch.nn.Module], tuple[int, ...]]] = {
    "MLP 25 M": (lambda: training.mlp(6), (256, 2048)),
    "transformer 3 M": (training.transformer, (16, 128, 256)),
    "tiny": (lambda: training.mlp(1, 64), (8, 64)),
}


LEAST_STEP_S = {"MLP 25 M": 0.4}


def measure(ranks: Ranks, models: list[str], budget_s: float) -> list[dict[str, Any]]:
    ranks.connect_hvd()
    ranks.connect_gloo()
    ranks.pin()
    torch.set_num_threads(1)
    rows = []
    for model in models:
        make, shape = MODELS[model]
        batch = torch.randn(shape, generator=torch.Generator().manual_seed(ranks.rank))
        ways, _ = training.contenders(ranks, make, batch, steps=STEPS)
        times = race(ranks, ways, budget_s=budget_s, combine=at_the_mean_rate)
        for name, taken in times.items():
            row: dict[str, Any] = {"model": model, "way": name, "pairs": len(taken)}
            row["step_ms"] = median_us(taken) / 1e3 / STEPS
            row["of two replicas"], low, high = ratio(times[training.ALONE], taken)
            rows.append({**row, "95%": f"{low:.3f}-{high:.3f}"})
    return rows


def main() -> None:
    options = report.arguments(__doc__).parse_args()
    figure = report.Figure("scaling", "throughput of two ranks / of two replicas", options.quick)
    for model in ["tiny"] if options.quick else ["MLP 25 M", "transformer 3 M"]:
        outcome = side_by_side.run(measure, size=2, models=[model], budget_s=0.05 if options.quick else 30.0)
        figure.saw(outcome)
        figure.rows += outcome.value
        of = {row["way"]: row["of two replicas"] for row in outcome.value}
        hvd, ddp = of[training.HVD], of[training.DDP]
        figure.targets.append(report.Target(f"{model}: hvd / two replicas", hvd, 0.97))
        figure.targets.append(report.Target(f"{model}: hvd / DDP on gloo", hvd / ddp, 1.0))
        waits = of[training.WAIT]
        figure.notes.append(
            f"{model}: ranks that only wait for each other reach {waits:.3f}, so {1 - waits:.3f} is lost to "
            f"waiting and {waits - hvd:.3f} to what hvd does"
        )
        if model in LEAST_STEP_S:
            alone = next(row["step_ms"] for row in outcome.value if row["way"] == training.ALONE) / 1e3
            figure.targets.append(report.Target(f"{model}: seconds of a step", alone, LEAST_STEP_S[model]))
    figure.publish()


if __name__ == "__main__":
    main()
