"""R39 and what it is about: a rank that is lost, another attempt, the last checkpoint."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hvd_spark import HorovodEstimator, RankFailed, errors

from . import nets

pytest.importorskip("pyspark")

#: 64 rows on two ranks in batches of 4: 8 steps an epoch. The sixth step of the second epoch:
FATAL = 14
LAST_CHECKPOINT = 12


class Diary:
    """Writes what each rank does in each step; kills the ranks `dying` in step FATAL, `times` times each."""

    def __init__(self, directory: Path, dying: tuple[int, ...] = (), times: int = 0, how: str = "kill"):
        self.directory, self.dying, self.times, self.how = str(directory), dying, times, how

    def on_batch_end(self, run: Any, batch: Any) -> None:
        ids = batch.inputs[0][:, 0].astype(int).tolist()
        with open(Path(self.directory) / f"rank{run.rank}", "a") as file:
            file.write(json.dumps([os.getpid(), run.epoch, run.step, ids]) + "\n")
        if run.step != FATAL or run.rank not in self.dying:
            return
        deaths = Path(self.directory) / f"deaths{run.rank}"
        done = len(deaths.read_text()) if deaths.exists() else 0
        if done < self.times:
            deaths.write_text("x" * (done + 1))
            if self.how == "raise":
                raise ValueError("mine")
            os.kill(os.getpid(), signal.SIGKILL)

    def steps(self) -> list[dict[int, list[tuple[int, int, list[int]]]]]:
        """Of each rank: what it did, by process: (epoch, step, ids)."""
        found = []
        for rank in (0, 1):
            lines: dict[int, list[tuple[int, int, list[int]]]] = {}
            for line in (Path(self.directory) / f"rank{rank}").read_text().splitlines():
                pid, *what = json.loads(line)
                lines.setdefault(pid, []).append(tuple(what))
            found.append(lines)
        return found

    def attempts(self, rank: int) -> int:
        return len(self.steps()[rank])


@pytest.fixture(scope="module")
def df(spark: Any) -> Any:
    x = np.random.default_rng(39).random(64)
    return spark.createDataFrame(
        [(float(i), float(v), float(2 * v)) for i, v in enumerate(x)], "id double, x double, y double"
    )


def estimator(**options: Any) -> HorovodEstimator:
    torch.manual_seed(39)
    made = {} if "model_fn" in options else {"model": nets.WithId()}
    return HorovodEstimator(
        optimizer=nets.sgd, loss=nn.MSELoss(), feature_cols=["id", "x"], label_cols="y",
        num_proc=2, batch_size=4, epochs=3, seed=5, verbose=0, **made, **options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(df: Any) -> torch.Tensor:
    return nets.parameters_of(estimator().fit(df).getModel())


@pytest.mark.parametrize("dying", [(1,), (0, 1)])
def test_r39_killed_once(
    df: Any, undisturbed: torch.Tensor, tmp_path: Path, capfd: Any, dying: tuple[int, ...]
) -> None:
    diary = Diary(tmp_path, dying, 1)
    est = estimator(
        checkpoint_dir=str(tmp_path / "run"), checkpoint_every=4, keep_checkpoints=2, callbacks=[diary]
    )
    model = est.fit(df, max_retries=1)
    assert torch.equal(nets.parameters_of(model.getModel()), undisturbed)
    said = capfd.readouterr().err
    assert "was killed by signal 9; retry 1 of 1, from the last checkpoint" in said
    assert f"resumed at epoch 1, step {LAST_CHECKPOINT - 8}" in model.summary.summary

    committed: dict[int, Counter[int]] = {}
    for by_process in diary.steps():
        first, second = by_process.values()
        assert [step for _, step, _ in second] == list(range(LAST_CHECKPOINT + 1, 25))
        for epoch, _, ids in [*(line for line in first if line[1] <= LAST_CHECKPOINT), *second]:
            committed.setdefault(epoch, Counter()).update(ids)
    assert committed == {epoch: Counter(range(64)) for epoch in range(3)}
    assert [entry["rows"] for entry in model.history] == [64, 64, 64]


def test_r39_every_attempt_fails(df: Any, tmp_path: Path) -> None:
    diary = Diary(tmp_path, (1,), 99)
    est = estimator(
        checkpoint_dir=str(tmp_path / "run"), checkpoint_every=4, callbacks=[diary], max_retries=2
    )
    assert est.getMaxRetries() == 2
    with pytest.raises(RankFailed) as caught:
        est.fit(df)
    lines = str(caught.value).splitlines()
    assert lines[0] == "rank 1 was killed by signal 9"
    assert lines[1] == "3 attempts failed (max_retries=2), this is the first"
    assert caught.value.attempts == 3 and caught.value.failure.host
    assert "out of memory" in str(caught.value)
    assert diary.attempts(1) == 3


def test_without_checkpoints_a_retry_begins_at_the_start(
    df: Any, undisturbed: torch.Tensor, tmp_path: Path, capfd: Any
) -> None:
    diary = Diary(tmp_path, (0,), 1)
    model = estimator(callbacks=[diary], max_retries=1).fit(df)
    assert torch.equal(nets.parameters_of(model.getModel()), undisturbed)
    assert "retry 1 of 1, from the start, as there is no checkpoint_dir" in capfd.readouterr().err
    assert [len(steps) for steps in diary.steps()[0].values()] == [FATAL, 24]


def test_an_exception_of_the_user_is_not_retried(df: Any, tmp_path: Path) -> None:
    diary = Diary(tmp_path, (1,), 99, how="raise")
    with pytest.raises(RankFailed, match="rank 1 raised ValueError: mine") as caught:
        estimator(callbacks=[diary], max_retries=3).fit(df)
    assert caught.value.attempts == 1
    assert diary.attempts(1) == 1


def test_a_retry_does_not_go_on_with_the_checkpoints_of_another_run(df: Any, tmp_path: Path) -> None:
    """The first attempt dies before it has looked at the directory."""
    directory = tmp_path / "run"
    estimator(checkpoint_dir=str(directory)).fit(df)
    before = sorted(path.name for path in directory.iterdir())
    diary = tmp_path / "died"

    est = estimator(checkpoint_dir=str(directory), model_fn=_DiesOnce(diary), max_retries=1)
    with pytest.raises(errors.CheckpointError, match="earlier run"):
        est.fit(df)
    assert diary.exists()
    assert sorted(path.name for path in directory.iterdir()) == before


class _DiesOnce:
    """Makes the model; kills the first rank that asks for it."""

    def __init__(self, path: Path):
        self.path, self.driver = str(path), os.getpid()

    def __call__(self) -> nn.Module:
        return nets.WithId()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state
        if os.getpid() != self.driver and not os.path.exists(self.path):
            Path(self.path).touch()
            os.kill(os.getpid(), signal.SIGKILL)
