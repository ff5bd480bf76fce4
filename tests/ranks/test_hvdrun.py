"""`hvdrun` as a user calls it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(90)

SCRIPT = """
import sys
import torch
import hvd_core.torch as hvd

hvd.init()
mean = hvd.allreduce(torch.full((3,), float(hvd.rank())))
print(f"rank {hvd.rank()} of {hvd.size()}: {mean.tolist()} {sys.argv[1:]} {torch.get_num_threads()}")
if "fail" in sys.argv and hvd.rank() == 1:
    raise ValueError("boom-77")
if "leave" in sys.argv:
    if hvd.rank() == 1:
        sys.exit(7)
    hvd.allreduce(torch.ones(1), name="never")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def hvdrun(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hvd_core.launch.hvdrun", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_script_finds_its_ranks(script: Path) -> None:
    done = hvdrun("-np", "2", "--cpus-per-rank", "1", "--", sys.executable, script, "--lr", "0.1")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"[{rank}] rank {rank} of 2: [0.5, 0.5, 0.5] ['--lr', '0.1'] 1" for rank in range(2)
    ]


def test_the_first_cause_is_the_status_and_the_last_word(script: Path) -> None:
    raised = hvdrun("-np", "2", script, "fail")
    assert raised.returncode == 1
    said = raised.stderr.splitlines()
    assert f"hvdrun: rank 1 raised ValueError: boom-77 ({script}:10)" in said
    assert said[-1] == "ValueError: boom-77"
    assert not any("runpy" in line or "hvd_core" in line for line in said)
    left = hvdrun("-np", "2", script, "leave")
    assert left.returncode == 7
    assert "rank 1 exited with status 7" in left.stderr


def test_code_needs_no_torch() -> None:
    code = (
        "import sys; from hvd_core import basics; basics.init(); print(basics.rank(), 'torch' in sys.modules)"
    )
    done = hvdrun("-np", "2", "-c", code)
    assert sorted(done.stdout.splitlines()) == ["[0] 0 False", "[1] 1 False"], done.stderr
