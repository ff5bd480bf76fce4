"""The examples on Ray run as they are read: as scripts, each with a Ray of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

EXAMPLES = Path(__file__).parents[2] / "examples"


def printed(name: str, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_flights(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    text = printed("ray_flight_delays", "--epochs", "2", "--out", str(tmp_path))
    errors = [float(value) for value in re.findall(r"(?:ranks|median) +(\d+\.\d+)$", text, re.MULTILINE)]
    assert len(errors) == 2 and errors[0] < 0.97 * errors[1], text
    assert "258,171 given, 258,171 seen" in text
    assert (tmp_path / "ray_flight_delays.png").stat().st_size > 10_000


def test_executor() -> None:
    text = printed("ray_executor")
    assert "weights: 3.000 -2.000, the same on both ranks: True" in text


def test_tune() -> None:
    text = printed("ray_tune")
    assert "best: lr 0.1" in text and len(re.findall(r"^lr .* loss ", text, re.MULTILINE)) == 2
