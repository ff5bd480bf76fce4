"""From the command to the first allreduce in a script that imports torch: hvdrun against torchrun, 2 ranks.

python benchmarks/start.py [--quick]
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import report
import side_by_side
from race import LEAST_PAIRS, median_us, p99_us, ratio

_DONE = """
import os, time
with open(os.path.join(sys.argv[1], f"{rank}.part"), "w") as file:
    file.write(repr(time.monotonic()))
os.rename(file.name, os.path.join(sys.argv[1], str(rank)))
"""

HVD = f"""
import sys
import torch
import hvd_core.torch as hvd

hvd.init()
rank = hvd.rank()
assert hvd.allreduce(torch.ones(1000), op=hvd.Sum)[0] == 2
{_DONE}
"""

GLOO = f"""
import sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
ones = torch.ones(1000)
dist.all_reduce(ones)
assert ones[0] == 2
{_DONE}
dist.destroy_process_group()
"""


def seconds(launcher: list[str], script: str) -> float:
    """Until the last rank had its first result."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "train.py")
        path.write_text(script)
        begin = time.monotonic()
        done = subprocess.run(
            [sys.executable, *launcher, str(path), folder], stderr=subprocess.PIPE, text=True, check=False
        )
        if done.returncode != 0:
            raise RuntimeError(done.stderr)
        return max(float(Path(folder, str(rank)).read_text()) for rank in range(2)) - begin


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def hvdrun() -> float:
    return seconds(["-m", "hvd_core.launch.hvdrun", "-np", "2"], HVD)


def torchrun() -> float:
    """With a fixed rendezvous, which takes less time than --standalone."""
    rendezvous = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    return seconds(["-m", "torch.distributed.run", "--nproc-per-node", "2", *rendezvous], GLOO)


LAUNCHERS = {"hvdrun": hvdrun, "torchrun, gloo": torchrun}


def main() -> None:
    options = report.arguments(__doc__).parse_args()
    figure = report.Figure("start", "seconds from the command to the first result", options.quick)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun would say that it does this
    taken: dict[str, list[float]] = {name: [] for name in LAUNCHERS}
    load = side_by_side.Load()
    for turn in range(1 if options.quick else LEAST_PAIRS):
        for name in sorted(LAUNCHERS, reverse=bool(turn % 2)):
            taken[name].append(LAUNCHERS[name]())
    figure.foreign_cpu, figure.stolen_cpu = load.taken_by_others()
    times = {name: np.array(each) for name, each in taken.items()}
    for name, each in times.items():
        share, low, high = ratio(each, times["torchrun, gloo"])
        row: dict[str, Any] = {"launcher": name, "pairs": len(each), "median_s": median_us(each) / 1e6}
        row |= {"p99_s": p99_us(each) / 1e6, "of torchrun": share, "95%": f"{low:.2f}-{high:.2f}"}
        figure.rows.append(row)
    figure.targets = [
        report.Target("hvdrun / torchrun with gloo", figure.rows[0]["of torchrun"], 1, at_most=True)
    ]
    figure.publish()


if __name__ == "__main__":
    main()
