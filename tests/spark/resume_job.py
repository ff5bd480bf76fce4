"""A driver of its own that is killed in its third epoch: `python resume_job.py DIRECTORY`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
from torch import nn

from tests.spark import cluster_job, nets


def frame(spark: Any) -> Any:
    rng = np.random.default_rng(18)
    x = rng.random((200, 5))
    return spark.createDataFrame([(*map(float, r), float(r.sum())) for r in x], [*"abcde", "y"])


def estimator(**options: Any) -> Any:
    from hvd_spark import HorovodEstimator

    torch.manual_seed(18)
    return HorovodEstimator(
        model=nets.OneInput(), optimizer=nets.sgd, loss=nn.MSELoss(), feature_cols=list("abcde"),
        label_cols="y", num_proc=2, batch_size=20, epochs=4, seed=3, row_order="global", **options,
    )  # fmt: skip


class KillDriver:
    """As the third epoch begins; the ranks then wait to be ended with it. They leave their pids beside the
    run's directory."""

    def __init__(self, pid: int, directory: str):
        self.pid, self.directory = pid, directory

    def on_batch_end(self, run: Any, batch: Any) -> None:
        if run.epoch == 2:
            Path(f"{self.directory}.rank{run.rank}").write_text(str(os.getpid()))
            if run.rank == 0:
                os.kill(self.pid, signal.SIGKILL)
            signal.pause()


if __name__ == "__main__":
    session = cluster_job.session("local[2]")
    estimator(checkpoint_dir=sys.argv[1], callbacks=[KillDriver(os.getpid(), sys.argv[1])]).fit(
        frame(session)
    )
