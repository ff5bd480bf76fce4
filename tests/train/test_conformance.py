"""What every framework must do, run over torch and over a toy in numpy, on one rank and on two."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pytest

torch = pytest.importorskip("torch")
from hvd_core import basics, errors  # noqa: E402
from hvd_core.train import (  # noqa: E402
    EarlyStopping,
    FitResult,
    Predictor,
    Scheduler,
    Shard,
    TrainSpec,
    fit_local,
    fit_shard,
    load_checkpoint,
    plan_layout,
    register_framework,
    tree,
)
from hvd_core.train.columns import columns_of  # noqa: E402
from hvd_core.train.framework import (  # noqa: E402
    OPTIONAL,
    Framework,
    _registered,
    framework_for,
    portable,
)
from hvd_core.train.local import shard_of  # noqa: E402
from hvd_core.train.ranks import Ranks  # noqa: E402
from hvd_core.train.torch_loop import TorchFramework  # noqa: E402

from ..unit.thread_ranks import run_ranks  # noqa: E402
from .runs import COLUMNS, KillAt, Killed, learned, net, spec_of, table  # noqa: E402
from .toy import Linear, ToyFramework  # noqa: E402

pytestmark = pytest.mark.timeout(90)


@dataclass
class Subject:
    """options: of a spec that learns the rows of `table()`; shaken: changes that draw random numbers in each
    step."""

    make: Callable[[], Framework]
    model: Callable[[int], Any]
    options: dict[str, Any]
    shaken: dict[str, Any]

    def spec(self, width: int = 3, **changes: Any) -> TrainSpec:
        return spec_of(**{"model": self.model(width), **self.options, **changes})

    def fit(self, spec: TrainSpec, rows: pa.Table, group: Any = None) -> FitResult:
        spec = cloudpickle.loads(cloudpickle.dumps(spec))
        return fit_shard(spec, packed(self, spec, rows), group, framework=self.make())

    def on_two(self, spec: TrainSpec, parts: list[pa.Table]) -> list[FitResult]:
        def fit(rank: int) -> FitResult:
            torch.set_num_threads(1)  # those of several ranks spin against each other
            return self.fit(spec, parts[rank], basics.default_group())

        return run_ranks(2, fit)


def torch_model(width: int, outputs: int = 1) -> Any:
    torch.manual_seed(2)
    return torch.nn.Sequential(torch.nn.Linear(width, outputs)).double()


def no_noise() -> float:
    return 0.0


def noise() -> float:
    return 0.1


SUBJECTS = {
    "torch": Subject(TorchFramework, torch_model, {}, {"model": net()}),
    "toy": Subject(ToyFramework, Linear, {"loss": no_noise, "optimizer": no_noise}, {"loss": noise}),
}


@pytest.fixture(params=SUBJECTS)
def subject(request: pytest.FixtureRequest) -> Subject:
    return SUBJECTS[request.param]


def packed(subject: Subject, spec: TrainSpec, rows: pa.Table) -> Shard:
    return shard_of(rows, plan_layout(columns_of(rows.schema), spec, subject.make().facts(spec)))


def prepared(subject: Subject, ranks: Ranks | None = None) -> Framework:
    spec = subject.spec()
    framework = subject.make()
    framework.prepare(spec, ranks or Ranks(None), packed(subject, spec, table()))
    framework.bind_outputs(1)
    return framework


def test_it_learns_and_counts(subject: Subject) -> None:
    result = subject.fit(subject.spec(epochs=5, validation=0.2), table(200))
    assert result.history[-1]["loss"] < result.history[0]["loss"]
    assert result.history[-1]["val_loss"] < result.history[0]["val_loss"]
    assert (result.rows_seen, result.output_spec[0].dtype) == (200, "float64")
    assert "a, b, c -> float64 (B, 3)" in result.summary and "label y: y -> float64 (B,)" in result.summary


def test_two_ranks_are_one(subject: Subject) -> None:
    """Batches that hold all rows, so both see the same steps; ranks with uneven rows."""
    rows = table(60)
    parts = [rows.slice(0, 45), rows.slice(45)]
    spec = subject.spec(batch_size=60, epochs=4)
    alone = subject.fit(spec, rows)

    def fit(rank: int) -> FitResult:
        return subject.fit(spec, parts[rank], basics.default_group())

    both = run_ranks(2, fit)
    assert [e["loss"] for e in both[0].history] == pytest.approx([e["loss"] for e in alone.history], rel=1e-9)
    assert learned(both[0]) == learned(both[1])
    assert both[1].weights == b""


def test_what_it_saves_is_plain_and_brings_it_back(subject: Subject) -> None:
    framework = prepared(subject)
    x = [np.random.default_rng(0).normal(size=(5, len(COLUMNS)))]
    weights, state, own = framework.weights(), framework.state(), framework.own_state()
    for saved in (state, own):
        assert b"$pickle" not in tree.dumps(saved)
    before = copy.deepcopy(framework.predict(framework.model, x)[0])
    subject.fit(subject.spec(), table())
    other = prepared(subject)
    other.load(weights, tree.loads(tree.dumps(state), trust=False), tree.loads(tree.dumps(own), trust=False))
    assert np.array_equal(other.predict(other.model, x)[0], before)
    assert other.weights() == weights
    assert other.digests() == framework.digests()
    assert tree.dumps(other.state()) == tree.dumps(state)
    assert tree.dumps(other.own_state()) == tree.dumps(own)
    assert np.array_equal(other.predict(other.trained(subject.spec(), BytesIO(weights)), x)[0], before)


def test_weights_are_the_whole_model_and_read_by_others(subject: Subject, tmp_path: Path) -> None:
    from safetensors.numpy import load

    result = subject.fit(subject.spec(checkpoint_dir=str(tmp_path)), table())
    assert sorted(a.size for a in load(result.weights).values()) == [1, 3]
    assert load_checkpoint(str(tmp_path)).weights == result.weights


def test_resume_ends_with_the_same_bits(subject: Subject, tmp_path: Path) -> None:
    plain = subject.spec(validation=0.2, **subject.shaken)
    spec = dataclasses.replace(plain, checkpoint_dir=str(tmp_path), checkpoint_every=4)
    whole = subject.fit(plain, table())
    with pytest.raises(Killed):
        subject.fit(dataclasses.replace(spec, callbacks=[KillAt(9)]), table())
    result = subject.fit(dataclasses.replace(spec, resume=True), table())
    assert "resumed at epoch 1, step 3" in result.summary
    assert result.weights == whole.weights
    assert learned(result) == learned(whole)


def test_another_model_is_refused(subject: Subject, tmp_path: Path) -> None:
    subject.fit(subject.spec(checkpoint_dir=str(tmp_path)), table())
    wider = subject.spec(4, checkpoint_dir=str(tmp_path), resume=True, feature_cols=[*COLUMNS, "id"])
    with pytest.raises(errors.CheckpointError, match=r"cannot resume from .*another model"):
        subject.fit(wider, table())


def test_early_stopping_gives_the_best_weights(subject: Subject) -> None:
    """The first epoch is the best, because nothing is better by so much."""
    rule = EarlyStopping("loss", patience=2, min_delta=1e9)
    result = subject.fit(subject.spec(epochs=9, early_stopping=rule), table())
    assert (len(result.history), result.best_epoch, result.stopped_early) == (3, 0, True)
    one = subject.fit(subject.spec(epochs=1), table())
    assert result.weights == one.weights


def test_a_rank_without_rows_takes_part(subject: Subject) -> None:
    """In all steps, and in some: one rank has a row for every twentieth of the other's."""
    rows = table(60)
    for cut, size in ((60, 60), (57, 19)):
        spec = subject.spec(batch_size=size, epochs=2, row_order="arrival", validation=0.1)
        both = subject.on_two(spec, [rows.slice(0, cut), rows.slice(cut)])
        assert learned(both[0]) == learned(both[1])
        assert both[0].rows_seen == 60
    spec = subject.spec(batch_size=60, epochs=3)
    alone, both = subject.fit(spec, rows), subject.on_two(spec, [rows, rows.slice(60)])
    assert [e["loss"] for e in both[0].history] == pytest.approx([e["loss"] for e in alone.history], rel=1e-9)


def test_weights_count_and_rows_of_weight_0_do_not(subject: Subject) -> None:
    rows = table(60)
    weight = np.arange(60) % 3
    weighted = rows.append_column("w", pa.array(weight.astype(float)))
    repeated = rows.take(np.repeat(np.arange(60), weight))
    spec = subject.spec(batch_size=60, epochs=3, shuffle=False)
    alone = subject.fit(spec, repeated)
    spec = dataclasses.replace(spec, sample_weight_col="w")
    for result in (
        subject.fit(spec, weighted),
        subject.on_two(spec, [weighted.slice(0, 41), weighted.slice(41)])[0],
    ):
        assert [e["loss"] for e in result.history] == pytest.approx(
            [e["loss"] for e in alone.history], rel=1e-9
        )
        assert result.rows_seen == 60


def test_max_steps_ends_in_the_middle(subject: Subject) -> None:
    result = subject.fit(subject.spec(epochs=None, max_steps=9), table())
    assert [e["steps"] for e in result.history] == [7, 2]
    both = subject.on_two(subject.spec(epochs=None, max_steps=9), [table(50), table(50, 1)])
    assert [e["steps"] for e in both[1].history] == [7, 2]


def test_the_rate_is_the_one_asked_for_and_end_epoch_may_change_it(subject: Subject) -> None:
    falling = {"lr_schedule": Scheduler(halving)} if "lr_schedule" in subject.make().supports else {}
    result = subject.fit(subject.spec(epochs=2, learning_rate=0.01, **falling), table())
    first, second = (e["lr"] for e in result.history)
    assert first == 0.01
    assert 0 < second < first


def halving(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


class Tamper:
    """Changes the last number of the weight on rank 1."""

    def on_batch_end(self, run: Any, batch: Any) -> None:
        if run.rank == 1 and run.step == 2:
            first = run.model.weight if isinstance(run.model, Linear) else run.model[0].weight.data[0]
            first[2] += 1e-3


def test_each_number_of_a_parameter_is_compared(subject: Subject) -> None:
    spec = subject.spec(callbacks=[Tamper()])
    with pytest.raises(errors.RanksDiverged, match=r"parameter .*weight of rank 1 differs"):
        subject.on_two(spec, [table(50), table(50, 1)])
    assert {len(d) for d in prepared(subject).digests().values()} == {8}


def squares(output: Any, label: Any) -> Any:
    return ((output - label.reshape(output.shape)) ** 2).mean()


def half(epoch: float) -> float:
    return 0.5


@pytest.mark.parametrize(
    "option",
    [
        {"sample_weight_col": "id"}, {"loss_weights": [0.5]}, {"loss_reduction": "mean"},
        {"metrics": {"m": squares}}, {"accumulate_steps": 2}, {"learning_rate": 0.01},
        {"lr_scaling": "linear"}, {"lr_schedule": half}, {"warmup_epochs": 1.0}, {"grad_clip_norm": 1.0},
        {"precision": "bf16"}, {"wire_dtype": "bf16"}, {"ema_decay": 0.5}, {"sync_batchnorm": True},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(subject: Subject, option: dict[str, Any]) -> None:
    (name,) = option
    assert name in OPTIONAL
    spec = subject.spec(epochs=1, **option)
    if name in subject.make().supports:
        subject.fit(spec, table())
        return
    with pytest.raises(errors.InvalidArgument, match=f"^{name} is not supported for toy models"):
        subject.fit(spec, table())


def test_several_labels_are_learned_or_refused(subject: Subject) -> None:
    spec = subject.spec(label_cols=["y", "a"])
    if subject.make().name == "toy":
        with pytest.raises(errors.InvalidArgument, match="label_cols"):
            subject.fit(spec, table())
        return
    result = subject.fit(dataclasses.replace(spec, model=torch_model(3, 2)), table())
    assert result.output_spec[0].shape == (2,)


def test_objects_come_back_as_they_were(subject: Subject, tmp_path: Path) -> None:
    framework, model = subject.make(), subject.model(3)
    file = tmp_path / "numbers"
    data = framework.save_objects({"model": model, "other": {"a": 1}}, file)
    back = subject.make().load_objects(data, file)
    assert back["other"] == {"a": 1}
    x = [np.random.default_rng(0).normal(size=(5, 3))]
    assert np.array_equal(framework.predict(back["model"], x)[0], framework.predict(model, x)[0])


def test_a_registered_framework_is_found_by_its_models_or_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    toy, before = SUBJECTS["toy"], dict(_registered)
    monkeypatch.setattr("hvd_core.train.framework._registered", dict(before))
    with pytest.raises(errors.InvalidArgument, match=r"torch.nn.Module, not tests.train.toy.Linear"):
        framework_for(toy.spec())
    register_framework("toy", "tests.train.toy:ToyFramework", lambda model: isinstance(model, Linear))
    assert isinstance(framework_for(toy.spec()), ToyFramework)
    assert isinstance(framework_for(SUBJECTS["torch"].spec()), TorchFramework)
    made = toy.spec(framework="toy")
    made = dataclasses.replace(made, model=None, model_fn=make_linear)
    assert isinstance(framework_for(made), ToyFramework)
    sent = portable(made)
    monkeypatch.setattr("hvd_core.train.framework._registered", dict(before))
    rows = table()
    result = fit_local(sent, rows)
    assert learned(result) == learned(toy.fit(toy.spec(), rows))
    layout, framework = plan_layout(columns_of(rows.schema), sent), framework_for(sent)
    predictor = Predictor(framework.trained(sent, BytesIO(result.weights)), layout, framework=framework)
    assert predictor.predict(rows.combine_chunks().to_batches()[0])[0].shape == (50,)


def make_linear() -> Linear:
    return Linear(3)


def test_evaluate_changes_nothing(subject: Subject) -> None:
    with_it = subject.fit(subject.spec(validation="held", row_order="arrival"), held(table()))
    assert "val_loss" in with_it.history[0]
    trained = held(table()).filter(pa.compute.invert(held(table())["held"])).drop_columns("held")
    assert with_it.weights == subject.fit(subject.spec(row_order="arrival"), trained).weights


def held(rows: pa.Table) -> pa.Table:
    return rows.append_column("held", pa.array(np.arange(rows.num_rows) % 5 == 0))
