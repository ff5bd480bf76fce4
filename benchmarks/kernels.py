"""GB/s of the reduction kernels on one thread, by dtype, size and kernel set: benchmarks/cpp/kernels.cc."""

import subprocess
import sys

import native


def main() -> None:
    subprocess.run([native.build("bench_kernels"), *sys.argv[1:]], check=True)


if __name__ == "__main__":
    main()
