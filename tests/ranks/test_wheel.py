"""The wheel of `pip wheel .` installs and reduces where there is no compiler; torch may come later."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]

NUMPY_RANKS = """
import numpy as np
import hvd_core

def fn(x):
    from hvd_core import basics
    basics.init()
    array = np.full(100_000, x * (basics.rank() + 1))
    basics.default_group().allreduce(array, name="x")
    basics.shutdown()
    return float(array.sum())

if __name__ == "__main__":
    assert hvd_core.run(fn, (1.5,), num_proc=2) == [450_000.0] * 2
    print("reduced by", hvd_core.__file__)
"""

TORCH_RANKS = """
import hvd_core

def fn():
    import torch
    import hvd_core.torch as hvd
    hvd.init()
    mean = hvd.allreduce(torch.arange(5.0) * (hvd.rank() + 1), name="x")
    hvd.shutdown()
    return mean.tolist()

if __name__ == "__main__":
    assert hvd_core.run(fn, num_proc=2) == [[0.0, 1.5, 3.0, 4.5, 6.0]] * 2
    print("reduced by", hvd_core.__file__)
"""


def call(*command: str | Path, **kwargs) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=500, **kwargs)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    call(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", folder, ROOT)
    (path,) = folder.glob("hvd-*.whl")
    return path


@pytest.fixture(scope="module")
def venv(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh venv that holds the wheel and what it depends on, nothing else."""
    folder = tmp_path_factory.mktemp("fresh")
    call(sys.executable, "-m", "venv", folder)
    call(folder / "bin/python", "-m", "pip", "install", "--constraint", ROOT / "constraints.txt", wheel)
    return folder


def ranks(venv: Path, script: str, folder: Path) -> None:
    """Runs `script` in `venv`, with a PATH that has no compiler, and checks whose code ran."""
    path = f"{venv}/bin"
    assert not any(shutil.which(name, path=path) for name in ("cc", "gcc", "g++", "c++", "clang", "cmake"))
    file = folder / "script.py"
    file.write_text(script)
    env = {key: os.environ[key] for key in ("HOME", "LANG", "TMPDIR") if key in os.environ}
    out = call(venv / "bin/python", file, env={**env, "PATH": path}, cwd=folder)
    assert f"reduced by {venv}" in out


def test_wheel_carries_only_what_runs(wheel: Path):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"hvd_core", "hvd_spark", "hvd_ray"}
    assert [name for name in names if name.endswith(".so")] == [
        f"hvd_core/_native{sysconfig.get_config_var('EXT_SUFFIX')}"
    ]
    assert not [name for name in names if name.endswith((".cc", ".h", ".a", ".o"))]


@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf (binutils)")
def test_extension_needs_only_the_language_runtimes(wheel: Path, tmp_path: Path):
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".so"))
    dynamic = call("readelf", "--dynamic", archive.extract(name, tmp_path))
    needed = {re.sub(r"[-.].*", "", lib) for lib in re.findall(r"Shared library: \[(.+)\]", dynamic)}
    assert needed
    assert needed <= {"libc", "libm", "libstdc++", "libgcc_s", "libpthread", "librt", "ld"}


def test_two_ranks_without_compiler_and_torch(venv: Path, tmp_path: Path):
    ranks(venv, NUMPY_RANKS, tmp_path)


def test_torch_installed_afterwards(venv: Path, tmp_path: Path):
    """The torch of this interpreter is added behind the installed wheel, which is not touched."""
    (site,) = venv.glob("lib/python3*/site-packages")
    (site / "torch_afterwards.pth").write_text(sysconfig.get_path("purelib") + "\n")
    ranks(venv, TORCH_RANKS, tmp_path)
