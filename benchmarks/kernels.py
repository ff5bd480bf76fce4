"""GB/s of the reduction kernels on one thread, by dtype, size and kernel set: benchmarks/cpp/kernels.cc."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "check"


def main() -> None:
    cmake = Path(sys.executable).with_name("cmake")
    options = ["-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DHVD_BUILD_TESTS=ON", "--log-level=WARNING"]
    subprocess.run([cmake, "-S", ROOT / "core", "-B", BUILD, *options], check=True)
    subprocess.run([cmake, "--build", BUILD, "--target", "bench_kernels"], check=True)
    subprocess.run([BUILD / "bench_kernels", *sys.argv[1:]], check=True)


if __name__ == "__main__":
    main()
