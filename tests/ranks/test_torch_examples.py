"""The examples for scripts run as their first lines say, and learn."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(120)

EXAMPLES = Path(__file__).parents[2] / "examples"


def hvdrun(*words: str) -> str:
    command = [sys.executable, "-m", "hvd_core.launch.hvdrun", "-np", "2", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    return done.stdout


def test_digits() -> None:
    options = ["--epochs", "5", "--fp16-allreduce", "--batches-per-allreduce", "2"]
    out = hvdrun(str(EXAMPLES / "torch_mnist_like.py"), *options)
    tests = re.findall(r"^\[0\] test: loss [\d.]+, accuracy ([\d.]+) of 297 rows$", out, re.MULTILINE)
    assert len(tests) == 5
    assert float(tests[-1]) > 0.85
    assert "[1]" not in out  # only rank 0 talks


def test_recommender() -> None:
    errors = re.findall(
        r"test error ([\d.]+)", hvdrun(str(EXAMPLES / "torch_recommender.py"), "--epochs", "5")
    )
    assert len(errors) == 5
    assert float(errors[-1]) < 0.5 < float(errors[0])


def test_transformer() -> None:
    out = hvdrun(str(EXAMPLES / "torch_transformer.py"), "--sharded")
    (right,) = re.findall(r"([\d.]+) of the letters are right", out)
    assert float(right) > 0.95
