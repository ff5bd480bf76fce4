"""D1: a rank of a fit stops taking part, and the others wait. The wait ends in time and tells where it is."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import hvd_spark
from hvd_spark import HorovodEstimator, RankFailed

from . import jobs, nets

pytest.importorskip("pyspark")

#: From the moment it stops to the exception at the driver.
LIMIT_S = 10.0


def sleeps() -> None:
    time.sleep(3600)


def is_stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


class BlocksOne:
    """Rank 1 does something else before its step 3."""

    def __init__(self, directory: Path, how: Callable[[], None]):
        self.directory, self.how = str(directory), how

    def on_train_begin(self, run: Any) -> None:
        jobs.own_pid(self.directory)

    def on_batch_end(self, run: Any, batch: Any) -> None:
        if run.rank == 1 and run.step == 3:
            (Path(self.directory) / "since").write_text(str(time.time()))
            self.how()


@pytest.mark.parametrize("how", [sleeps, is_stopped])
def test_d1_a_rank_that_does_not_take_part(
    spark: Any, tmp_path: Path, monkeypatch: Any, capfd: Any, how: Callable[[], None]
) -> None:
    df = spark.range(0, 64, 1, 2).selectExpr("cast(id as double) / 64 x", "cast(id as double) / 32 y")
    monkeypatch.setenv("HVD_STALL_WARN_S", "0.5")
    monkeypatch.setenv("HVD_STALL_SHUTDOWN_S" if how is sleeps else "HVD_PEER_TIMEOUT_S", "2")
    est = HorovodEstimator(
        model=nets.OneInput(1), optimizer=nets.sgd, loss=nn.MSELoss(), feature_cols="x", label_cols="y",
        num_proc=2, batch_size=4, callbacks=[BlocksOne(tmp_path, how)], verbose=0,
    )  # fmt: skip
    hvd_spark.run(jobs.place, num_proc=2)  # the workers and their templates are there
    with pytest.raises(RankFailed) as caught:
        est.fit(df)
    took_s = time.time() - float((tmp_path / "since").read_text())
    headline, *rest = str(caught.value).splitlines()
    if how is sleeps:
        assert headline.startswith("rank 0 raised CollectiveTimeout: epoch 0, step 3: ")
        assert (
            "fused batch of 'gradient of lin." in headline
            and "by rank 1 for 2 s (stall_shutdown_s)" in headline
        )
        said = capfd.readouterr()
        assert "by rank 1" in said.err + said.out and "(stall_warn_s)" in said.err + said.out
    else:
        assert headline.startswith("rank 0 raised PeerLost: ") and "rank 1" in headline
        assert "  it was stopped (SIGSTOP)" in rest
    assert "rank 1, when it was ended (most recent call first):" in rest
    assert f'  File "{__file__}", line {how.__code__.co_firstlineno + 1} in {how.__name__}' in rest
    assert len(rest) < 60
    assert took_s < LIMIT_S
    assert len(jobs.pids(tmp_path)) == 2
    assert all(jobs.ended(pid, 0.5) for pid in jobs.pids(tmp_path).values())
    assert hvd_spark.run(jobs.reduce_rank, num_proc=2) == [3.0, 3.0]
