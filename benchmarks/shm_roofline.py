"""What synchronisation costs an allreduce in the arena, with two ranks on two cores.

    python benchmarks/shm_roofline.py [--quick]

benchmarks/cpp/shm_roofline.cc runs the kernel alone and the whole allreduce, turn by turn; buffers are
rewritten before every turn, and a turn takes as long as its slower rank. It also compares the ways of
ordinary tensors: build/check/bench_shm_roofline ways RANKS PAIRS.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import report

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "check"
LEAST = 0.90


def main() -> None:
    options = report.arguments(__doc__).parse_args()
    figure = report.Figure("shm_roofline", "arena, fp32, n=2, median microseconds", options.quick)
    cmake = Path(sys.executable).with_name("cmake")
    flags = ["-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DHVD_BUILD_TESTS=ON", "--log-level=WARNING"]
    subprocess.run([cmake, "-S", ROOT / "core", "-B", BUILD, *flags], check=True, stdout=sys.stderr)
    target = ["--target", "bench_shm_roofline"]
    subprocess.run([cmake, "--build", BUILD, *target], check=True, stdout=sys.stderr)
    command = [BUILD / "bench_shm_roofline", "arena", "5" if options.quick else "21"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=300)
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
