"""Builds what a figure has in C++ (cpp/)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "check"


def build(target: str) -> Path:
    """Path of the program or library `target` of core/CMakeLists.txt, made if need be."""
    cmake = Path(sys.executable).with_name("cmake")
    flags = ["-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DHVD_BUILD_TESTS=ON", "--log-level=WARNING"]
    subprocess.run([cmake, "-S", ROOT / "core", "-B", BUILD, *flags], check=True, stdout=sys.stderr)
    subprocess.run([cmake, "--build", BUILD, "--target", target], check=True, stdout=sys.stderr)
    return next(path for path in (BUILD / target, BUILD / f"lib{target}.so") if path.exists())
