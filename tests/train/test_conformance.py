"""What every framework must do, run over torch and over a toy in numpy, on one rank and on two."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
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
    Shard,
    TrainSpec,
    fit_shard,
    load_checkpoint,
    plan_layout,
    tree,
)
from hvd_core.train.columns import columns_of  # noqa: E402
from hvd_core.train.framework import Framework  # noqa: E402
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


def torch_model(width: int) -> Any:
    torch.manual_seed(2)
    return torch.nn.Sequential(torch.nn.Linear(width, 1)).double()


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
    before = copy.deepcopy(framework.predict(x)[0])
    subject.fit(subject.spec(), table())
    other = prepared(subject)
    other.load(weights, tree.loads(tree.dumps(state), trust=False), tree.loads(tree.dumps(own), trust=False))
    assert np.array_equal(other.predict(x)[0], before)
    assert other.weights() == weights
    assert other.digests() == framework.digests()
    assert tree.dumps(other.state()) == tree.dumps(state)
    assert tree.dumps(other.own_state()) == tree.dumps(own)


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


def test_evaluate_changes_nothing(subject: Subject) -> None:
    with_it = subject.fit(subject.spec(validation="held", row_order="arrival"), held(table()))
    assert "val_loss" in with_it.history[0]
    trained = held(table()).filter(pa.compute.invert(held(table())["held"])).drop_columns("held")
    assert with_it.weights == subject.fit(subject.spec(row_order="arrival"), trained).weights


def held(rows: pa.Table) -> pa.Table:
    return rows.append_column("held", pa.array(np.arange(rows.num_rows) % 5 == 0))
