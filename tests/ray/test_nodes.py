"""A node dies under a job; two nodes on this machine, in a process of their own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.mark.parametrize("how", ["executor", "trainer"])
def test_a_killed_node_is_a_lost_rank(how: str) -> None:
    command = [sys.executable, str(Path(__file__).with_name("nodes_job.py")), how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    # A worker whose node dies under it leaves by itself, with status 1.
    assert found["kind"] in ("lost", "exit") and found["rank"] == found["expected"]
    headline, where, *_ = found["text"].splitlines()
    assert headline.startswith(f"rank {found['rank']} ")
    assert re.fullmatch(rf"on node [\d.]+ \(.+, id {found['node']}\)", where), found["text"]
    assert found["seconds"] < 20  # asked for: 10 s on a quiet machine
    assert how == "trainer" or found["again"] == 1
