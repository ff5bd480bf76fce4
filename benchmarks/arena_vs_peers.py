"""Blocking allreduce in hvd's arena against the peers' of ordinary tensors, 64 KiB to 100 MiB, 2 ranks.

    python benchmarks/arena_vs_peers.py [--quick] [--nbytes 65536 ...]

gloo's ranks sleep for milliseconds in each of its turns, and what comes after that finds cold caches, code
and data. A note tells the smallest size once more with gloo left out; the targets are those with it.
"""

from __future__ import annotations

from typing import Any

import report
import side_by_side
import tensors
import torch
from race import geometric_mean, race
from side_by_side import Ranks

MIB = 1 << 20
NBYTES = [64 << 10, 256 << 10, MIB, 4 * MIB, 16 * MIB, 25 * MIB, 64 * MIB, 100 * MIB]


def measure(ranks: Ranks, nbytes: list[int], budget_s: float, gloo: bool) -> list[dict[str, Any]]:
    group = tensors.connect(ranks)
    rows = []
    for size in nbytes:
        ordinary = torch.empty(size // 4)
        contenders = [
            tensors.hvd_allreduce(ranks, tensors.arena_tensor(group, size // 4)),
            *([tensors.gloo_allreduce(ranks, ordinary)] if gloo else []),
            *tensors.mpi_allreduce(ranks, ordinary),
        ]
        times = race(ranks, contenders, budget_s=budget_s)
        rows.append({"ranks": ranks.size, "bytes": size, **tensors.against_peers(times)})
    return rows


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--nbytes", type=int, nargs="+")
    options = parser.parse_args()
    figure = report.Figure(
        "arena_vs_peers", "blocking allreduce, float32 tensors in the arena", options.quick
    )
    nbytes = options.nbytes or (NBYTES[:1] if options.quick else NBYTES)
    how = {"size": 2, "budget_s": 0.05 if options.quick else 1.5}
    outcome = side_by_side.run(measure, nbytes=nbytes, gloo=True, **how)
    figure.saw(outcome)
    figure.rows = outcome.value
    (warm,) = side_by_side.run(measure, nbytes=nbytes[:1], gloo=False, **how).value
    if warm["mpi/hvd"] is not None:
        figure.notes = [
            f"without gloo in the turns, {nbytes[0]} bytes take {warm['hvd_us']:.1f} µs and Open MPI "
            f"{warm['mpi_us']:.1f}: {warm['mpi/hvd']:.2f} (95%: {warm['mpi/hvd 95%']})"
        ]
    for peer, name, each, mean in (("mpi", "Open MPI", 2, 3.5), ("gloo", "gloo", 8, 12)):
        ratios = [row[f"{peer}/hvd"] for row in figure.rows if row[f"{peer}/hvd"] is not None]
        figure.targets += [
            report.Target(f"lowest {name} / hvd", min(ratios, default=None), each),
            report.Target(f"geometric mean {name} / hvd", geometric_mean(ratios), mean),
        ]
    figure.publish()


if __name__ == "__main__":
    main()
