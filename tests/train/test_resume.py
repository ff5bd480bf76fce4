"""A run that is cut short and goes on ends as the uninterrupted run does."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from hvd_core import errors  # noqa: E402
from hvd_core.train import (  # noqa: E402
    CheckpointWarning,
    EarlyStopping,
    FitResult,
    Scheduler,
    TrainSpec,
    fit_local,
    load_checkpoint,
)
from hvd_core.train.torch_model import load_weights  # noqa: E402
from hvd_core.train.torch_state import read_weights  # noqa: E402

from .runs import KillAt, Killed, adam, learned, net, newest, sgd, spec_of, table  # noqa: E402

pytestmark = pytest.mark.timeout(60)


def with_(spec: TrainSpec, **changes: Any) -> TrainSpec:
    return dataclasses.replace(spec, **changes)


def cut(spec: TrainSpec, directory: Path | str, step: int, **changes: Any) -> None:
    """Trains up to `step` and dies."""
    dying = with_(spec, checkpoint_dir=str(directory), callbacks=[KillAt(step)], **changes)
    with pytest.raises(Killed):
        fit_local(dying, table())


def resumed(spec: TrainSpec, directory: Path | str, **changes: Any) -> FitResult:
    return fit_local(with_(spec, checkpoint_dir=str(directory), resume=True, **changes), table())


def assert_same(a: FitResult, b: FitResult) -> None:
    assert learned(a) == learned(b)
    ours, theirs = read_weights(a.weights), read_weights(b.weights)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[k], theirs[k]) for k in ours)
    assert (a.best_epoch, a.stopped_early) == (b.best_epoch, b.stopped_early)


def halving(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)


def by_lambda(optimizer: Any) -> Any:
    class Slower:  # a callable object: torch keeps its attributes in the scheduler's state
        def __init__(self) -> None:
            self.rate = np.float32(0.9)
            self.kind = complex(1, 0)

        def __call__(self, epoch: int) -> float:
            return float(self.rate) ** epoch

    return torch.optim.lr_scheduler.LambdaLR(optimizer, Slower())


def plateau(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1, threshold=0.5)


CASES: dict[str, dict[str, Any]] = {
    "adam": {},
    "momentum": {"optimizer": sgd, "grad_clip_norm": 0.5, "accumulate_steps": 2, "batch_size": 4},
    "ema": {"ema_decay": 0.9, "validation": 0.2},
    "stepped": {"lr_schedule": Scheduler(halving, every="step"), "optimizer": sgd},
    "lambda": {"lr_schedule": Scheduler(by_lambda, every="epoch")},
    "plateau": {"lr_schedule": Scheduler(plateau, metric="val_loss"), "validation": 0.3},
    "function": {"lr_schedule": lambda epoch: 1 / (1 + epoch), "warmup_epochs": 1.5},
    "fp16": {"precision": "fp16", "model": net().float()},
    "bf16": {"model": net().bfloat16(), "ema_decay": 0.8},
    "norm": {"model": net(norm=True), "metrics": {"mae": nn.L1Loss()}},
    "arrival": {"row_order": "arrival", "shuffle": False},
    "steps": {"max_steps": 17, "epochs": None},
}


@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_ends_with_the_same_bits(name: str, tmp_path: Path) -> None:
    """Killed in the middle of the second epoch (of 7 steps), one step after a checkpoint."""
    spec = spec_of(**CASES[name])
    whole = fit_local(spec, table())
    cut(spec, tmp_path, 11, checkpoint_every=5)
    assert load_checkpoint(str(tmp_path)).facts["step"] == 10
    assert_same(resumed(spec, tmp_path, checkpoint_every=5), whole)
    again = resumed(spec, tmp_path, checkpoint_every=5)
    assert again.summary.count("resumed at") == 1
    assert_same(again, whole)


@pytest.mark.parametrize("step", [7, 8, 14, 20])
def test_checkpoints_at_the_ends_of_epochs(step: int, tmp_path: Path) -> None:
    spec = spec_of()
    whole = fit_local(spec, table())
    cut(spec, tmp_path, step)
    assert_same(resumed(spec, tmp_path), whole)


def test_a_checkpoint_due_with_the_last_step_waits_for_the_end_of_the_epoch(tmp_path: Path) -> None:
    spec = spec_of(validation=0.2, epochs=2)  # 5 steps an epoch
    cut(spec, tmp_path, 7, checkpoint_every=5)
    facts = load_checkpoint(str(tmp_path)).facts
    assert (facts["step"], facts["epoch"], facts["position"]) == (5, 1, 0)
    assert_same(resumed(spec, tmp_path), fit_local(spec, table()))


def test_r18_a_finished_run_returns_the_same_result_at_once(tmp_path: Path) -> None:
    class Never:
        def on_train_begin(self, run: Any) -> None:
            raise AssertionError("trained again")

    spec = spec_of(validation=0.2, checkpoint_dir=str(tmp_path), resume=True)
    first = fit_local(spec, table())
    again = fit_local(with_(spec, callbacks=[Never()]), table())
    lines = again.summary.splitlines()
    assert lines.pop().startswith("resumed at epoch 3, step 0")
    assert dataclasses.replace(again, summary="\n".join(lines)) == first


def test_more_epochs_go_on_after_a_finished_run(tmp_path: Path) -> None:
    spec = spec_of(checkpoint_dir=str(tmp_path), resume=True, epochs=2)
    fit_local(spec, table())
    assert_same(fit_local(with_(spec, epochs=5), table()), fit_local(spec_of(epochs=5), table()))


def test_early_stopping_goes_on_counting(tmp_path: Path) -> None:
    """Patience is used up across the interruption, and the best epoch lies before it."""
    values = [3.0, 1.0, 2.0, 2.5, 4.0, 5.0]

    class Drift:
        epoch = 0

        def on_train_begin(self, run: Any) -> None:
            Drift.epoch = len(run.history)

        def on_epoch_end(self, run: Any, logs: Any) -> None:
            Drift.epoch += 1

    def drift(output: Any, label: Any) -> float:
        return values[Drift.epoch]

    rule = EarlyStopping("val_drift", patience=3)
    spec = spec_of(metrics={"drift": drift}, validation=0.2, early_stopping=rule, epochs=6)
    spec = with_(spec, callbacks=[Drift()])
    whole = fit_local(spec, table())
    assert (len(whole.history), whole.best_epoch, whole.stopped_early) == (5, 1, True)
    dying = with_(spec, callbacks=[Drift(), KillAt(18)], checkpoint_dir=str(tmp_path), keep_checkpoints=1)
    with pytest.raises(Killed):
        fit_local(dying, table())
    assert len(list(tmp_path.glob("step-*"))) == 2  # the best and the last
    assert_same(resumed(spec, tmp_path), whole)
    assert_same(resumed(spec, tmp_path), whole)  # stopped early is finished

    best = tmp_path / load_checkpoint(str(tmp_path)).facts["best"]["checkpoint"]
    (best / "weights.safetensors").unlink()
    with pytest.warns(CheckpointWarning, match=r"best epoch's weights are lost.*is missing"):
        resumed(spec, tmp_path)


def test_a_damaged_last_checkpoint_is_skipped_with_a_reason(tmp_path: Path) -> None:
    spec = spec_of(epochs=4)
    whole = fit_local(spec, table())
    spoil = [
        (lambda p: (p / "weights.safetensors").write_bytes(b"x" * 100), "has 100 bytes instead of"),
        (lambda p: flip(p / "state.safetensors"), "does not have the checksum that the manifest states"),
        (lambda p: (p / "ranks.safetensors").unlink(), "ranks.safetensors is missing"),
        (lambda p: (p / "manifest.json").unlink(), "its write was not finished"),
        (lambda p: truncate(p / "manifest.json"), "manifest.json is not readable"),
        (lambda p: edit(p / "manifest.json"), "does not have the checksum it states"),
    ]
    for i, (spoiled, text) in enumerate(spoil):
        directory = tmp_path / str(i)
        cut(spec, directory, 25)
        spoiled(newest(directory))
        with pytest.warns(CheckpointWarning, match=f"skipped a damaged checkpoint.*{text}"):
            result = resumed(spec, directory)
        assert "resumed at epoch 2" in result.summary
        assert_same(result, whole)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def edit(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "step": 1}))


def test_nothing_but_damage_starts_from_the_beginning(tmp_path: Path) -> None:
    spec = spec_of()
    cut(spec, tmp_path, 8)
    (newest(tmp_path) / "manifest.json").unlink()
    with pytest.warns(CheckpointWarning):
        result = resumed(spec, tmp_path)
    assert_same(result, fit_local(spec, table()))


def test_other_rows_restart_the_epoch_with_a_warning(tmp_path: Path) -> None:
    spec = spec_of()
    cut(spec, tmp_path, 10, checkpoint_every=9)
    other = with_(spec, checkpoint_dir=str(tmp_path), resume=True)
    with pytest.warns(
        CheckpointWarning, match=r"rows of rank 0 are others: epoch 1 starts from its beginning"
    ):
        result = fit_local(other, table(seed=9))
    assert [e["epoch"] for e in result.history] == [0, 1, 2]
    assert [e["rows"] for e in result.history] == [50, 50, 50]


def test_other_settings(tmp_path: Path) -> None:
    spec = spec_of()
    cut(spec, tmp_path, 10, checkpoint_every=9)
    with pytest.warns(CheckpointWarning, match=r"batch_size was 8 and is 16: epoch 1 starts"):
        resumed(with_(spec, batch_size=16), tmp_path)
    cut(spec, tmp_path / "b", 10, checkpoint_every=9)
    with pytest.warns(
        CheckpointWarning, match=r"settings are others now: grad_clip_norm was None and is 1.0"
    ):
        resumed(with_(spec, grad_clip_norm=1.0), tmp_path / "b")
    with pytest.warns(CheckpointWarning, match=r"learning_rate was None and is 0.5, which is not used"):
        kept = resumed(with_(spec, learning_rate=0.5, epochs=4), tmp_path / "b")
    assert [e["lr"] for e in kept.history] == [0.01] * 4
    wider = nn.Sequential(nn.Linear(3, 9), nn.Identity(), nn.Tanh(), nn.Dropout(), nn.Linear(9, 1)).double()
    with pytest.raises(
        errors.CheckpointError, match=r"cannot resume from .*another model: 0.weight is \(8, 3\)"
    ):
        resumed(with_(spec, model=wider), tmp_path / "b")
    with pytest.raises(errors.CheckpointError, match=r"another model: 1.weight is not there"):
        resumed(with_(spec, model=net(norm=True)), tmp_path / "b")
    with pytest.raises(errors.CheckpointError, match="holds the state of Adam, but the optimizer is SGD"):
        resumed(with_(spec, optimizer=sgd), tmp_path / "b")


def test_without_resume_an_earlier_run_is_not_overwritten(tmp_path: Path) -> None:
    spec = spec_of(checkpoint_dir=str(tmp_path), epochs=1)
    fit_local(spec, table())
    with pytest.raises(errors.CheckpointError, match="set resume=True"):
        fit_local(spec, table())


def test_what_is_kept(tmp_path: Path) -> None:
    spec = spec_of(model=net(0.0), optimizer=frozen, early_stopping=EarlyStopping("loss", 9, min_delta=1e-6))
    fit_local(with_(spec, checkpoint_dir=str(tmp_path), checkpoint_every=2, keep_checkpoints=3), table())
    assert [int(p.name[5:]) for p in sorted(tmp_path.glob("step-*"))] == [7, 18, 20, 21]
    assert load_checkpoint(str(tmp_path)).facts["best"]["epoch"] == 0


def frozen(params: Any) -> Any:
    return torch.optim.SGD(params, lr=0.0)


def test_weights_are_read_without_our_code(tmp_path: Path) -> None:
    """Tied weights included: each name is there."""
    from safetensors.torch import load_file

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
            self.second.weight = self.first.weight

        def forward(self, x: Any) -> Any:
            return self.second(self.first(x)).sum(1)

    result = fit_local(spec_of(model=Tied(), checkpoint_dir=str(tmp_path), optimizer=adam), table())
    read = load_file(newest(tmp_path) / "weights.safetensors")
    own = load_weights(Tied(), result.weights).state_dict()
    assert read.keys() == own.keys()
    assert all(torch.equal(read[k], own[k]) for k in own)
    assert torch.equal(own["first.weight"], own["second.weight"])
    checkpoint = load_checkpoint(str(newest(tmp_path)))
    assert checkpoint.weights == result.weights
    assert checkpoint.state()["optimizer_class"] == "Adam"
    assert len(checkpoint.ranks()) == 1


def test_a_spec_that_makes_no_sense_is_refused() -> None:
    for field, value in (("resume", True), ("checkpoint_every", 3), ("keep_checkpoints", 1)):
        with pytest.raises(errors.InvalidArgument, match=f"{field} needs checkpoint_dir"):
            spec_of(**{field: value})
    for field, value in (("checkpoint_every", 0), ("checkpoint_every", "step"), ("keep_checkpoints", 0)):
        with pytest.raises(errors.InvalidArgument, match=field):
            spec_of(checkpoint_dir="x", **{field: value})


def test_rows_seen_are_those_of_this_run(tmp_path: Path) -> None:
    """More rows before the interruption than after it."""
    spec = spec_of(checkpoint_dir=str(tmp_path), epochs=1)
    fit_local(spec, table(80))
    with pytest.warns(CheckpointWarning, match="the rows of rank 0 are others"):
        result = fit_local(with_(spec, resume=True, epochs=2), table(50))
    assert [e["rows"] for e in result.history] == [80, 50]
    assert (result.rows_seen, result.rows_sent, result.timeline_path) == (50, 50, None)


def test_another_metric_begins_anew(tmp_path: Path) -> None:
    """A loss of the first run is not compared with a metric of the second."""
    far = {"far": lambda out, label: (out - label).abs() + 100.0}
    spec = spec_of(checkpoint_dir=str(tmp_path), epochs=2, metrics=far, validation=0.2)
    fit_local(with_(spec, early_stopping=EarlyStopping("val_loss", patience=5)), table())
    with pytest.warns(CheckpointWarning, match="early_stopping was EarlyStopping"):
        result = fit_local(
            with_(spec, resume=True, epochs=4, early_stopping=EarlyStopping("val_far", patience=1)), table()
        )
    assert len(result.history) == 4 and result.best_epoch >= 2
    assert result.history[result.best_epoch]["val_far"] == min(e["val_far"] for e in result.history[2:])


def test_a_run_that_had_ended_says_so_of_other_rows(tmp_path: Path) -> None:
    spec = spec_of(checkpoint_dir=str(tmp_path), epochs=1)
    first = fit_local(spec, table(80))
    with pytest.warns(CheckpointWarning, match="nothing is trained"):
        again = fit_local(with_(spec, resume=True), table(50))
    assert again.weights == first.weights and again.history == first.history
    assert again.rows_seen == again.rows_sent == 50


def test_the_rest_of_an_epoch_is_not_a_whole_one(tmp_path: Path) -> None:
    """7 steps each; the first run stops after 4, the second has nothing but the other 3."""
    spec = spec_of(checkpoint_dir=str(tmp_path))
    fit_local(with_(spec, epochs=None, max_steps=4), table())
    result = fit_local(with_(spec, epochs=1, resume=True), table())
    assert [e["steps"] for e in result.history] == [4, 3]
    assert result.rows_seen == result.rows_sent == 50


def test_fewer_steps_than_were_made_already(tmp_path: Path) -> None:
    spec = spec_of()
    cut(spec, tmp_path, 5, checkpoint_every=2)
    result = resumed(spec, tmp_path, epochs=None, max_steps=3)
    assert result.history == [] and result.best_epoch == 0


def test_a_relative_directory_is_this_process_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert spec_of(checkpoint_dir="runs/1").checkpoint_dir == str(tmp_path / "runs/1")
    assert spec_of(checkpoint_dir="s3://b/runs").checkpoint_dir == "s3://b/runs"
