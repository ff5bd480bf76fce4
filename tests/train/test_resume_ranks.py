"""Two ranks, killed from outside of Python, go on from their last checkpoint."""

from __future__ import annotations

import os
import select
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import hvd_core  # noqa: E402
from hvd_core import basics, errors  # noqa: E402
from hvd_core.train import CheckpointWarning, FitResult, TrainSpec, fit_local, load_checkpoint  # noqa: E402
from hvd_core.train.checkpoint import name_of  # noqa: E402
from hvd_core.train.storage import Storage  # noqa: E402
from hvd_core.train.torch_state import read_weights  # noqa: E402

from ..unit.thread_ranks import run_ranks  # noqa: E402
from .runs import learned, net, sgd, spec_of, table  # noqa: E402

pytestmark = pytest.mark.timeout(240)

ROWS = (40, 24)


class Die:
    """SIGKILL on these ranks, at this step."""

    def __init__(self, step: int, ranks: tuple[int, ...]):
        self.step, self.ranks = step, ranks

    def on_batch_end(self, run: Any, batch: Any) -> None:
        if run.step == self.step and run.rank in self.ranks:
            os.kill(os.getpid(), signal.SIGKILL)


class Ids:
    """Which rows were used, by the epoch's number."""

    used: dict[int, list[float]] = {}

    def on_batch_end(self, run: Any, batch: Any) -> None:
        Ids.used.setdefault(run.epoch, []).extend(batch.inputs[0][:, 0].tolist())


def train(specs: list[TrainSpec]) -> list[tuple[FitResult, dict[int, list[float]]]]:
    torch.set_num_threads(1)
    basics.init()
    group = basics.default_group()
    found = []
    for spec in specs:
        Ids.used = {}
        result = fit_local(spec, table(ROWS[group.rank], seed=group.rank), group)
        found.append((result, Ids.used))
    return found


def in_two(*specs: TrainSpec) -> list[list[tuple[FitResult, dict[int, list[float]]]]]:
    return hvd_core.run(train, (list(specs),), num_proc=2, timeout_s=200)


def spec_with(directory: Path | None = None, **changes: Any) -> TrainSpec:
    every = {} if directory is None else {"checkpoint_dir": str(directory), "checkpoint_every": 4}
    base = {"batch_size": 4, "model": net(norm=True), "optimizer": sgd, "validation": 0.1, "ema_decay": 0.9}
    return spec_of(**{**base, **every, **changes})


def test_r39_killed_ranks_go_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    """9 steps an epoch. Rank 1 is killed at step 15, six steps into the second epoch; then both at step 24.
    BatchNorm's buffers and dropout's random state differ between the ranks at the checkpoints there."""
    run = tmp_path / "run"
    for step, ranks in ((15, (1,)), (24, (0, 1))):
        with pytest.raises(errors.RankFailed, match="signal 9"):
            in_two(spec_with(run, callbacks=[Die(step, ranks)], resume=step > 15))
        if step == 15:
            shutil.copytree(run, tmp_path / "first")
            shutil.copytree(run, tmp_path / "alone")
    assert [load_checkpoint(str(tmp_path / p)).facts["step"] for p in ("first", "run")] == [12, 20]
    specs = [spec_with(callbacks=[Ids()])]
    specs += [spec_with(tmp_path / p, resume=True, callbacks=[Ids()]) for p in ("first", "run")]
    (whole, first, last), (whole1, first1, _) = in_two(*specs)
    weights = read_weights(whole[0].weights)
    for result, where in ((first[0], "epoch 1, step 3"), (last[0], "epoch 2, step 2")):
        assert f"resumed at {where}" in result.summary
        assert learned(result) == learned(whole[0])
        assert all(torch.equal(v, weights[k]) for k, v in read_weights(result.weights).items())
        assert [e["rows"] for e in result.history] == [58, 58, 58]
    for (_, ids), (_, of_whole) in ((first, whole), (first1, whole1)):
        assert sorted(ids) == [1, 2]
        assert 0 < len(ids[1]) < len(of_whole[1])
        assert of_whole[1][-len(ids[1]) :] == ids[1]
        assert of_whole[2] == ids[2]

    alone = spec_with(tmp_path / "alone", resume=True)
    with pytest.warns(CheckpointWarning, match="there were 2 ranks and now 1: epoch 1 starts"):
        result = fit_local(alone, table(64))
    assert [(e["epoch"], e["rows"]) for e in result.history] == [(0, 58), (1, 58), (2, 58)]


class DieWhileItIsWritten:
    """Rank 1, when the first file of the checkpoint of step 12 is there; rank 0 goes on writing then."""

    def __init__(self, fifo: Path):
        self.fifo = str(fifo)

    def on_train_begin(self, run: Any) -> None:
        if run.rank:
            threading.Thread(target=self._die_when_told, daemon=True).start()
        else:
            self._tell()

    def _die_when_told(self) -> None:
        with open(self.fifo) as pipe:
            pipe.readline()
        os.kill(os.getpid(), signal.SIGKILL)

    def _tell(self) -> None:
        write, group = Storage.write, basics.default_group()

        def telling(storage: Storage, path: str, data: bytes) -> None:
            write(storage, path, data)
            if path.startswith(name_of(12)) and group.reason is None:
                with open(self.fifo, "w") as pipe:
                    pipe.write("now\n")
                assert select.select([group.fileno()], [], [], 30)[0]

        Storage.write = telling  # type: ignore[method-assign]


def test_j9_a_rank_dies_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    """What is there then is whole, or is not taken for one."""
    run, fifo = tmp_path / "run", tmp_path / "word"
    os.mkfifo(fifo)
    with pytest.raises(errors.RankFailed, match="signal 9"):
        in_two(spec_with(run, callbacks=[DieWhileItIsWritten(fifo)]))
    assert len(list((run / name_of(12)).iterdir())) >= 1
    found = load_checkpoint(str(run)).facts["step"]
    assert found == (12 if (run / name_of(12) / "manifest.json").exists() else 9)  # the end of the epoch
    ((whole, _), (again, _)), _ = in_two(spec_with(), spec_with(run, resume=True))
    assert learned(again) == learned(whole)
    weights = read_weights(whole.weights)
    assert all(torch.equal(v, weights[k]) for k, v in read_weights(again.weights).items())


def test_a_directory_that_cannot_be_written_ends_all_ranks(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")

    def fit(rank: int) -> None:
        fit_local(spec_with(blocked / "run"), table(20, rank), basics.default_group())

    with pytest.raises(errors.CheckpointError, match="cannot write"):
        run_ranks(2, fit)
