"""Blocking allreduce of ordinary torch tensors against gloo and Open MPI, 4 B to 256 MiB, 2 and 4 ranks.

python benchmarks/allreduce_vs_peers.py [--quick] [--ranks 2 4] [--nbytes 4096 ...]
"""

from __future__ import annotations

from typing import Any

import report
import side_by_side
import tensors
import torch
from race import geometric_mean, race
from side_by_side import Ranks

NBYTES = [4, 256, 4 << 10, 16 << 10, *(64 << 10 << shift for shift in range(0, 13, 2))]
#: From here on speed is a matter of copies, below of waiting.
LARGE = 64 << 10


def measure(ranks: Ranks, nbytes: list[int], budget_s: float) -> list[dict[str, Any]]:
    tensors.connect(ranks)
    rows = []
    for size in nbytes:
        tensor = torch.empty(size // 4)
        contenders = [
            tensors.hvd_allreduce(ranks, tensor),
            tensors.gloo_allreduce(ranks, tensor),
            *tensors.mpi_allreduce(ranks, tensor),
        ]
        times = race(ranks, contenders, budget_s=budget_s)
        rows.append({"ranks": ranks.size, "bytes": size, **tensors.against_peers(times)})
    return rows


def targets_of(rows: list[dict[str, Any]], size: int) -> list[report.Target]:
    large = [row for row in rows if row["bytes"] >= LARGE]
    small = [row for row in rows if row["bytes"] < LARGE]
    gloo = [row["gloo/hvd"] for row in large]
    mpi = [row["mpi/hvd"] for row in large if row["mpi/hvd"] is not None]
    targets = []
    if large:
        targets += [
            report.Target(f"n={size}, ≥ 64 KiB: lowest Open MPI / hvd", min(mpi, default=None), 0.9),
            report.Target(f"n={size}, ≥ 64 KiB: geometric mean Open MPI / hvd", geometric_mean(mpi), 1.2),
            report.Target(f"n={size}, ≥ 64 KiB: geometric mean gloo / hvd", geometric_mean(gloo), 4),
        ]
    if small:
        lowest = min(row["gloo/hvd"] for row in small)
        targets.append(report.Target(f"n={size}, < 64 KiB: lowest gloo / hvd", lowest, 1))
    return targets


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+")
    parser.add_argument("--nbytes", type=int, nargs="+")
    options = parser.parse_args()
    figure = report.Figure(
        "allreduce_vs_peers", "blocking allreduce, ordinary float32 tensors", options.quick
    )
    nbytes = options.nbytes or ([4, 64 << 10] if options.quick else NBYTES)
    for size in options.ranks or ([2] if options.quick else [2, 4]):
        budget_s = 0.05 if options.quick else 1.5
        outcome = side_by_side.run(measure, size=size, nbytes=nbytes, budget_s=budget_s)
        figure.saw(outcome)
        figure.rows += outcome.value
        figure.targets += targets_of(outcome.value, size)
    figure.publish()


if __name__ == "__main__":
    main()
