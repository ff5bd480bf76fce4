"""A blocking call with little data, through Python: medians and the slow ones, 2 and 4 ranks.

python benchmarks/latency.py [--quick] [--ranks 2 4]
"""

from __future__ import annotations

from typing import Any

import numpy as np
import report
import side_by_side
import tensors
import torch
from race import Contender, median_us, p99_us, race, ratio
from side_by_side import Ranks

NBYTES = [4, 4 << 10]


def measure(ranks: Ranks, budget_s: float, most: int) -> list[dict[str, Any]]:
    group = tensors.connect(ranks)
    rows = []
    for size in NBYTES:
        tensor = torch.empty(size // 4)
        array: np.ndarray = tensor.numpy()
        contenders: list[Contender] = [
            tensors.hvd_allreduce(ranks, tensor),
            tensors.summed(
                ranks, "Group", tensor, lambda a=array, n=f"group.{size}": group.allreduce(a, name=n)
            ),
            tensors.gloo_allreduce(ranks, tensor),
            *tensors.mpi_allreduce(ranks, tensor),
        ]
        times = race(ranks, contenders, budget_s=budget_s, most=most)
        for name, taken in times.items():
            share, low, high = ratio(taken, times["gloo"])
            rows.append(
                {
                    "ranks": ranks.size,
                    "bytes": size,
                    "library": name,
                    "calls": len(taken),
                    "median_us": median_us(taken),
                    "p99_us": p99_us(taken),
                    "of gloo": share,
                    "95%": f"{low:.3f}-{high:.3f}",
                }
            )
    return rows


def targets_of(rows: list[dict[str, Any]], size: int) -> list[report.Target]:
    at = {(row["bytes"], row["library"]): row for row in rows}
    if size != 2:
        share = at[4096, "hvd"]["of gloo"]
        return [report.Target(f"n={size}, 4 KiB: hvd / gloo", share, 0.1, at_most=True)]
    targets = []
    for nbytes, most in ((4, 0.5), (4096, 0.25)):
        ours, gloo = at[nbytes, "hvd"], at[nbytes, "gloo"]
        tail = ours["p99_us"] / gloo["p99_us"]
        targets += [
            report.Target(f"n=2, {nbytes} B: hvd / gloo", ours["of gloo"], most, at_most=True),
            report.Target(f"n=2, {nbytes} B: p99 of hvd / p99 of gloo", tail, 1, at_most=True),
        ]
    return targets


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+")
    options = parser.parse_args()
    figure = report.Figure("latency", "one blocking call with little data", options.quick)
    for size in options.ranks or ([2] if options.quick else [2, 4]):
        budget_s, most = (0.05, 50) if options.quick else (8.0, 3000)
        outcome = side_by_side.run(measure, size=size, budget_s=budget_s, most=most)
        figure.saw(outcome)
        figure.rows += outcome.value
        figure.targets += targets_of(outcome.value, size)
    figure.publish()


if __name__ == "__main__":
    main()
