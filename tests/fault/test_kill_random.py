"""A rank is killed at any moment of any collective: the others hear of it, by name, and no sum was wrong."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

_KILLS = 200


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_two_hundred_kills_at_random_moments() -> None:
    seed = 20240601
    command = [sys.executable, "-m", "tests.fault.kill_rounds", str(seed), str(_KILLS)]
    env = os.environ | {"OPENBLAS_NUM_THREADS": "1"}  # what is forked must not have threads
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[2],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=220,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rounds = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rounds) == _KILLS
    after, checked = [], 0
    for a_round in rounds:
        for survivor in a_round["survivors"]:
            assert survivor["error"] == "PeerLost", (a_round, done.stderr[-4000:])
            assert f"rank {a_round['victim']}" in survivor["text"], a_round
            assert survivor["after_s"] < 5, a_round  # this machine may be busy
            assert survivor["closed_s"] < 5, a_round
            after.append(survivor["after_s"])
            checked += survivor["checked"]
    assert statistics.median(after) < 0.5
    assert checked > _KILLS, "they were to be in the middle of it"
