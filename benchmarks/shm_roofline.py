"""What synchronisation costs an allreduce in the arena, with two ranks on two cores.

    python benchmarks/shm_roofline.py [--quick]

benchmarks/cpp/shm_roofline.cc runs the kernel alone and the whole allreduce, turn by turn; buffers are
rewritten before every turn, and a turn takes as long as its slower rank. It also compares the ways of
ordinary tensors: build/check/bench_shm_roofline ways RANKS PAIRS.
"""

from __future__ import annotations

import subprocess

import native
import report
import side_by_side

LEAST = 0.90


def main() -> None:
    options = report.arguments(__doc__).parse_args()
    figure = report.Figure("shm_roofline", "arena, fp32, n=2, median microseconds", options.quick)
    command = [native.build("bench_shm_roofline"), "arena", "5" if options.quick else "21"]
    load = side_by_side.Load()
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=300)
    figure.saw_load(*load.taken_by_others())
    for line in done.stdout.splitlines():
        nbytes, kernel, ours = (float(word) for word in line.split())
        figure.rows.append(
            {
                "MiB": int(nbytes) >> 20,
                "kernel alone": kernel,
                "allreduce": ours,
                "kernel / allreduce": kernel / ours,
            }
        )
    figure.targets = [
        report.Target(f"{row['MiB']} MiB: kernel / allreduce", row["kernel / allreduce"], LEAST)
        for row in figure.rows
    ]
    figure.publish()


if __name__ == "__main__":
    main()
