"""Acceptance cases whose recipe needs ranks and no engine, on ranks of Ray: one executor runs them all."""

from __future__ import annotations

import json
import os
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from hvd_core.errors import RankFailed

from ..conftest import children

pytest.importorskip("ray")
torch = pytest.importorskip("torch")
import hvd_core  # noqa: E402
import hvd_core.torch as hvd  # noqa: E402
import hvd_ray  # noqa: E402
from hvd_core.train import EarlyStopping  # noqa: E402

from ..ranks import test_torch_run, test_train_behaviour, test_train_contract  # noqa: E402


def test_r27_r29_r32_r33_on_ranks_of_ray(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Early stopping that one rank would not ask for; accumulation; clipping, and steps that a rank takes by
    itself; two runs give the same bits, and those of one process."""
    with hvd_ray.RayExecutor(num_hosts=1, num_workers_per_host=2) as executor:
        runs: list[Any] = []

        def run(fn: Any, args: Any = (), **_: Any) -> list[Any]:
            executor.run(hvd.shutdown)
            runs.append(executor.run(fn, args))
            return runs[-1]

        monkeypatch.setattr(hvd_core, "run", run)
        test_train_behaviour.test_r27_all_ranks_stop_at_the_same_epoch()
        test_torch_run.test_r29_and_mixed_use()
        test_train_contract.test_r32_clipping_sees_the_global_gradient()
        test_train_behaviour.test_divergence_names_parameter_and_rank_on_every_rank()
        test_torch_run.test_two_ranks_equal_one_on_the_joined_batch_and_each_other()
        assert len(runs) == 5


def undefined() -> None:
    hvd.init()
    undefined_name()  # type: ignore[name-defined]  # noqa: F821


def interrupt_and_sleep(driver: int) -> None:
    import signal
    import time

    hvd.init()
    if hvd.rank() == 0:
        os.kill(driver, signal.SIGINT)
    time.sleep(120)


def test_r24_r33_again_and_again_in_one_session(cluster: Any) -> None:
    """Success, failure, success, an interrupt, one rank (which is plain training to the bit), two again; then
    threads, children and descriptors of the driver are those of before."""

    def counts() -> tuple[set[str], set[int], int]:
        names = {t.name for t in threading.enumerate() if not t.name.startswith("Thread-")}
        return names, set(children()), len(os.listdir("/proc/self/fd"))

    def sums() -> list[float]:
        return hvd_ray.run(added, num_proc=2)

    assert sums() == [3.0, 3.0]
    before = counts()
    with pytest.raises(RankFailed, match="NameError: name 'undefined_name'"):
        hvd_ray.run(undefined, num_proc=2)
    assert sums() == [3.0, 3.0]
    with pytest.raises(KeyboardInterrupt):
        hvd_ray.run(interrupt_and_sleep, (os.getpid(),), num_proc=2)
    hvd_ray.run(test_torch_run.test_r33_one_rank_equals_plain_training_bit_for_bit, num_proc=1)
    assert sums() == [3.0, 3.0]
    after = counts()
    assert after[:2] == before[:2]
    assert after[2] <= before[2] + 8, "Ray's own connections come and go"


def added() -> float:
    hvd.init()
    return float(hvd.allreduce(torch.tensor(1.0 + hvd.rank()), op=hvd.Sum))


class Drifts:
    """As a metric: rises by 3 an epoch on rank 0, falls by 1 on rank 1. As a callback: writes ids and ends of
    epochs to a file for each rank."""

    epoch = 0

    def __init__(self, folder: Path):
        self._folder = folder

    def on_batch_end(self, run: Any, batch: Any) -> None:
        Drifts.epoch = run.epoch
        self._write(run, "ids", batch.inputs[0][:, 0].astype(int).tolist() if batch.rows else [])

    def on_epoch_end(self, run: Any, logs: Any) -> None:
        self._write(run, "drift", logs["val_drift"])

    def _write(self, run: Any, kind: str, what: Any) -> None:
        with (self._folder / f"rank{run.rank}").open("a") as file:
            print(json.dumps([run.epoch, kind, what]), file=file)


def drift(output: Any, label: Any) -> Any:
    return torch.tensor([3.0, -1.0][hvd.rank()] * Drifts.epoch)


@pytest.mark.slow
def test_r05_r27_skewed_blocks_and_early_stopping(cluster: Any, tmp_path: Path) -> None:
    """Blocks of 1000, 10, 0 and 1 rows; every id once an epoch; both ranks stop after the second."""
    ids = np.arange(1011)
    held = ids % 5 == 0
    x = np.stack([ids, np.sin(ids)], 1)
    table = pa.table({"id": x[:, 0], "x": x[:, 1], "y": x[:, 1] * 2, "held": held})
    ds = cluster.data.from_arrow(
        [table.slice(a, n) for a, n in ((0, 1000), (1000, 10), (1010, 0), (1010, 1))]
    )
    model = hvd_ray.HorovodEstimator(
        model=torch.nn.Linear(2, 1).double(), optimizer=lambda p: torch.optim.SGD(p, 1e-9),
        loss=torch.nn.MSELoss(), feature_cols=["id", "x"], label_cols="y", batch_size=64, epochs=9,
        num_proc=2, verbose=0, validation="held", metrics={"drift": drift}, callbacks=[Drifts(tmp_path)],
        early_stopping=EarlyStopping("val_drift", patience=1),
    ).fit(ds)  # fmt: skip
    seen: dict[int, list[int]] = defaultdict(list)
    drifts: list[list[float]] = []
    for rank in range(2):
        lines = [json.loads(line) for line in (tmp_path / f"rank{rank}").read_text().splitlines()]
        drifts.append([what for _, kind, what in lines if kind == "drift"])
        for epoch, kind, what in lines:
            seen[epoch] += what if kind == "ids" else []
    assert drifts[0] == drifts[1] and len(drifts[0]) == len(model.history) == 2
    assert model.history[1]["val_drift"] > 0 and model.result.best_epoch == 0
    assert {epoch: sorted(found) for epoch, found in seen.items()} == dict.fromkeys(
        (0, 1), ids[~held].tolist()
    )
    assert model.result.rows_seen == 1011
