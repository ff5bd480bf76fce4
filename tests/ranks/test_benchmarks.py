"""The benchmarks run and say what they should; their numbers are nobody's concern here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(320)]

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

#: Script → how many rows its quick run has, at least.
SCRIPTS = {
    "shm_roofline": 4,
    "step": 4,
    "scaling": 4,
    "tcp": 6,
    "arena_vs_peers": 1,
    "allreduce_vs_peers": 2,
    "latency": 4,
    "half": 6,
    "gradient_set": 4,
    "many_small": 4,
    "ranks": 3,
    "idle": 2,
    "start": 2,
    "shard": 9,
    "dataframe": 8,
    "on_ray": 6,
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_quick_run_prints_its_figure(name: str) -> None:
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    figure = json.loads(done.stdout.splitlines()[-1])
    if "skipped" in figure:
        pytest.skip(f"{name}: {figure['skipped']}")
    assert figure["name"] == name
    assert len(figure["rows"]) >= SCRIPTS[name]
    assert len({tuple(row) for row in figure["rows"]}) == 1, "rows with different columns"
    assert figure["targets"]
    for target in figure["targets"]:
        assert target["met"] in (True, False) or target["achieved"] is None
    assert {"cpu", "cpus", "caches", "kernel", "versions", "date"} <= figure["facts"].keys()
    foreign = figure["foreign_cpu"]
    assert name == "on_ray" or 0 <= foreign <= 1, "nobody looked, or it is no share"
