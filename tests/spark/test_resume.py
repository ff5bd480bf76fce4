"""R18: the driver is killed after two epochs; another one goes on."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from . import jobs, nets, resume_job

pyspark = pytest.importorskip("pyspark")


@pytest.mark.timeout(200)
def test_r18_a_new_driver_goes_on_after_the_second_epoch(spark: Any, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    killed = subprocess.run(
        [sys.executable, resume_job.__file__, str(directory)], capture_output=True, text=True, timeout=120
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    pids = [int(path.read_text()) for path in tmp_path.glob("run.rank*")]
    assert pids and all(jobs.ended(pid, 10) for pid in pids)  # E8
    names = sorted(p.name for p in directory.glob("step-*"))
    assert len(names) == 2  # after the first and the second epoch; 5 steps each
    df = resume_job.frame(spark)

    def resumed() -> Any:
        return resume_job.estimator(checkpoint_dir=str(directory), resume=True).fit(df)

    whole, second = resume_job.estimator().fit(df), resumed()
    assert "resumed at epoch 2, step 0" in second.result.summary
    assert [e["epoch"] for e in second.result.history] == [0, 1, 2, 3]
    want = nets.parameters_of(whole.getModel())
    torch.testing.assert_close(nets.parameters_of(second.getModel()), want, rtol=0, atol=1e-6)

    third = resumed()  # nothing to do
    assert third.result.history == second.result.history
    assert torch.equal(nets.parameters_of(third.getModel()), nets.parameters_of(second.getModel()))

    last = max(directory.glob("step-*")) / "state.safetensors"
    last.write_bytes(last.read_bytes()[:-8])
    fourth = resumed()
    assert "skipped a damaged checkpoint" in fourth.result.summary
    assert "resumed at epoch 3, step 0" in fourth.result.summary
    torch.testing.assert_close(nets.parameters_of(fourth.getModel()), want, rtol=0, atol=1e-6)
