"""What a connected Group costs that has nothing to do: CPU time of a rank over some seconds.

python benchmarks/idle.py [--quick]
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import report
import side_by_side
from side_by_side import Ranks


def measure(ranks: Ranks, seconds: float) -> list[dict[str, Any]]:
    group = ranks.connect_hvd()
    for _ in range(20):
        group.allreduce(np.ones(1000, np.float32), name="warm")
    begin, cpu = time.monotonic(), time.process_time()
    time.sleep(seconds)
    share = (time.process_time() - cpu) / (time.monotonic() - begin)
    group.barrier()
    return [
        {"rank": rank, "seconds": seconds, "percent of a core": 100 * share}
        for rank, share in enumerate(ranks.gather(share))
    ]


def main() -> None:
    options = report.arguments(__doc__).parse_args()
    figure = report.Figure("idle", "CPU time of a connected, idle Group", options.quick)
    outcome = side_by_side.run(measure, size=2, seconds=0.5 if options.quick else 12.0)
    figure.saw(outcome)
    figure.rows = outcome.value
    worst = max(row["percent of a core"] for row in figure.rows)
    figure.targets = [report.Target("percent of a core", worst, 1, at_most=True)]
    figure.publish()


if __name__ == "__main__":
    main()
