"""Allreduces of bf16 and fp16 against fp32 of as many bytes, 2 ranks: sums in fp32 at the speed of the bytes?

    python benchmarks/half.py [--quick]

1 means as fast per byte, though twice as many numbers are added, in fp32, and rounded.
"""

from __future__ import annotations

from typing import Any

import report
import side_by_side
import tensors
import torch
from race import Contender, geometric_mean, median_us, race, ratio
from side_by_side import Ranks

import hvd_core.torch as hvd

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def measure(ranks: Ranks, sizes: list[int], budget_s: float) -> list[dict[str, Any]]:
    group = tensors.connect(ranks)
    rows = []
    for nbytes in sizes:
        for place in ("ordinary", "arena"):
            ways = [_way(group, place, dtype, nbytes) for dtype in DTYPES]
            times = race(ranks, ways, budget_s=budget_s)
            for name, taken in times.items():
                row: dict[str, Any] = {"tensor": place, "kib": nbytes >> 10, "dtype": name}
                row["median_us"] = median_us(taken)
                row["fp32 / this"], low, high = ratio(times[str(torch.float32)], taken)
                rows.append({**row, "95%": f"{low:.2f}-{high:.2f}"})
    return rows


def _way(group: Any, place: str, dtype: torch.dtype, nbytes: int) -> Contender:
    memory = group.empty(nbytes) if place == "arena" else bytearray(nbytes)
    tensor = torch.frombuffer(memory, dtype=dtype)

    def check(turn: int) -> None:
        assert bool((tensor == group.size).all()), f"{dtype}: not the sum"

    return Contender(
        str(dtype), lambda: hvd.allreduce_(tensor, op=hvd.Sum), lambda turn: tensor.fill_(1), check
    )


def main() -> None:
    options = report.arguments(__doc__).parse_args()
    figure = report.Figure("half", "bf16 and fp16 against fp32 of as many bytes", options.quick)
    sizes = [64 << 10] if options.quick else [256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]
    outcome = side_by_side.run(measure, size=2, sizes=sizes, budget_s=0.02 if options.quick else 1.0)
    figure.saw(outcome)
    figure.rows = outcome.value
    for place in ("ordinary", "arena"):
        others = [row for row in figure.rows if row["tensor"] == place and row["dtype"] != str(torch.float32)]
        mean = geometric_mean([row["fp32 / this"] for row in others])
        figure.targets.append(report.Target(f"{place}: mean of fp32 / bf16 or fp16, same bytes", mean, 0.95))
    figure.publish()


if __name__ == "__main__":
    main()
