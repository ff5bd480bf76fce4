"""What the loop can do, on Spark: each fit against `fit_local` on two ranks and the same rows, to the bit."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hvd_core
import hvd_spark
from hvd_core import basics
from hvd_core.train import EarlyStopping, FitResult, TrainSpec, fit_local, load_checkpoint
from hvd_core.train.torch_state import read_weights
from hvd_spark import HorovodEstimator, HorovodModel, HvdError, RowsLost
from hvd_spark.estimator import _checked
from hvd_spark.launcher import Outcome
from hvd_spark.rank import Portion

from ..ranks.test_torch_run import mixed_use_quietly
from ..train.runs import learned
from . import nets

pytestmark = pytest.mark.timeout(300, func_only=True)


@pytest.fixture(scope="module")
def df(spark: Any) -> Any:
    return spark.range(97).selectExpr(
        "id", "sin(id) AS a", "CAST(id % 13 AS DECIMAL(10, 2)) / 10 AS b", "cos(3 * id) AS c",
        "sin(id) - cos(3 * id) / 2 AS y", "(id % 5) / 5.0d AS z", "id % 6 = 0 AS held",
    ).repartition(3).cache()  # fmt: skip


class Two(nn.Module):
    """Two outputs, for two labels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.body = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Dropout(0.2))
        self.heads = nn.ModuleList([nn.Linear(6, 1), nn.Linear(6, 1)])
        self.double()

    def forward(self, x: Tensor) -> list[Tensor]:
        body = self.body(x)
        return [head(body) for head in self.heads]


def normed() -> nn.Module:
    """Draws from torch and from numpy."""
    model = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 1))
    with torch.no_grad():
        model[0].bias += float(np.random.rand())
    return model


def narrow() -> nn.Module:
    torch.manual_seed(8)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))


def slower(epoch: float) -> float:
    return 1.0 / (1.0 + epoch)


def absolute(output: Tensor, label: Tensor) -> Tensor:
    return (output - label).abs().mean()


class Disagree:
    """With `drift` as a metric: rises by 3 an epoch on rank 0, falls by 1 on rank 1. Writes each rank's
    epochs to a file."""

    epoch = 0

    def __init__(self, folder: Path):
        self.folder = folder

    def on_batch_end(self, run: Any, batch: Any) -> None:
        Disagree.epoch = run.epoch

    def on_epoch_end(self, run: Any, logs: Any) -> None:
        with (self.folder / f"rank{run.rank}").open("a") as file:
            file.write(f"{run.epoch} {logs['val_drift']}\n")


def drift(output: Tensor, label: Tensor) -> Tensor:
    return torch.tensor([3.0, -1.0][basics.rank()] * Disagree.epoch)


def on_a_rank(spec: TrainSpec, parts: list[Any]) -> FitResult:
    torch.set_num_threads(1)
    basics.init()
    return fit_local(spec, parts[basics.rank()], basics.default_group())


def both(df: Any, env: dict[str, str] | None = None, **options: Any) -> tuple[HorovodModel, FitResult]:
    """On Spark, and on two ranks of this machine; rows are dealt by their hash, so to the same ranks. env: of
    the first."""
    options = {
        "optimizer": nets.adam, "loss": nn.MSELoss(), "feature_cols": ["a", "b", "c"], "label_cols": "y",
        "batch_size": 8, "seed": 3, "row_order": "global", **options,
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (env or {}).items():
            patch.setenv(name, value)
        model = HorovodEstimator(num_proc=2, **options).fit(df)
    spec = TrainSpec(**{k: v for k, v in options.items() if "checkpoint" not in k})
    rows = df.toArrow()
    parts = [rows.slice(30), rows.slice(0, 30)]
    return model, hvd_core.run(on_a_rank, (spec, parts), num_proc=2)[0]


def assert_same(model: HorovodModel, want: FitResult) -> None:
    assert learned(model.summary) == learned(want)
    state, weights = model.getModel().state_dict(), read_weights(want.weights)
    assert state.keys() == weights.keys()
    for name, value in weights.items():
        assert torch.equal(state[name], value), name
    assert (model.summary.rows_seen, model.summary.size) == (want.rows_seen, 2)


def test_labels_accumulation_clipping_warm_up_ema_and_stopping(df: Any, tmp_path: Path) -> None:
    model, want = both(
        df,
        model=Two(), label_cols=["y", "z"], loss=[nn.MSELoss(), nn.L1Loss()], loss_weights=[1.0, 0.5],
        metrics={"far": absolute}, accumulate_steps=2, grad_clip_norm=0.5, warmup_epochs=1.5,
        ema_decay=0.9, validation="held", epochs=5,
        early_stopping=EarlyStopping("val_z_loss", patience=2, min_delta=1e9),
        checkpoint_dir=str(tmp_path / "run"), checkpoint_every=3, keep_checkpoints=9,
    )  # fmt: skip
    assert_same(model, want)
    first = model.history[0]
    assert first["rows"] == 80 and first["lr"] < 0.05 and {"y_loss", "z_loss", "val_y_far"} <= first.keys()
    assert model.summary.stopped_early and len(model.history) == 3 and model.summary.best_epoch == 0
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"step-0000000003", "step-0000000006", "step-0000000009"} == names
    best = load_checkpoint(str(tmp_path / "run"), best=True)
    assert best.facts["epoch"] == 1 and best.weights == want.weights
    assert {"prediction", "prediction_1"} <= set(model.transform(df).columns)
    lines = model.summary.summary
    assert "input x: a, b, c -> float64 (B, 3)" in lines and "label z: z -> float64 (B,)" in lines


def test_a_model_fn_with_batchnorm_scaling_and_bf16(df: Any, tmp_path: Path) -> None:
    model, want = both(
        df, {"HVD_TIMELINE": str(tmp_path / "timeline.json")}, model_fn=normed, sync_batchnorm=True,
        lr_scaling="linear", learning_rate=0.01, max_steps=9, precision="bf16",
    )  # fmt: skip
    assert_same(model, want)
    assert [e["steps"] for e in model.history] == [7, 2] and model.history[0]["lr"] == 0.02
    assert model.summary.timeline_path == str(tmp_path / "timeline.json")
    assert '"ph"' in (tmp_path / "timeline.json").read_text()


def test_fp16_and_a_narrow_wire_and_an_evaluator(df: Any) -> None:
    from pyspark.ml.evaluation import RegressionEvaluator

    model, want = both(
        df, model=narrow(), precision="fp16", wire_dtype="fp16", lr_schedule=slower, validation=0.25, epochs=3
    )
    assert_same(model, want)
    assert model.summary.validation_rows == 24
    out = model.transform(df)
    assert dict(out.dtypes)["prediction"] == "float"
    rows = out.collect()
    error = np.sqrt(np.mean([(row.prediction - row.y) ** 2 for row in rows]))
    assert RegressionEvaluator(labelCol="y").evaluate(out) == pytest.approx(float(error), rel=1e-6)


def test_r27_all_ranks_stop_at_the_same_epoch(df: Any, tmp_path: Path) -> None:
    model = HorovodEstimator(
        model=narrow(), optimizer=nets.sgd, loss=nn.MSELoss(), feature_cols=["a", "b", "c"], label_cols="y",
        num_proc=2, epochs=9, validation=0.2, metrics={"drift": drift}, callbacks=[Disagree(tmp_path)],
        early_stopping=EarlyStopping("val_drift", patience=1),
    ).fit(df)  # fmt: skip
    first, second = ((tmp_path / f"rank{rank}").read_text().splitlines() for rank in range(2))
    assert first == second and len(first) == len(model.history) == 2
    assert model.history[1]["val_drift"] > 0 and model.summary.best_epoch == 0


class ForgetsToReduce:
    """Takes a step of its own, by the gradient of its own rows."""

    def on_batch_end(self, run: Any, batch: Any) -> None:
        x, y = (torch.from_numpy(a[0].copy()) for a in (batch.inputs, batch.labels))
        gradient = torch.autograd.grad(((run.model(x)[:, 0] - y) ** 2).mean(), run.model.lin.weight)[0]
        torch.nn.utils.clip_grad_norm_([run.model.lin.weight], 0.1)
        with torch.no_grad():
            run.model.lin.weight -= 0.1 * gradient


def clipped(df: Any, **options: Any) -> HorovodModel:
    torch.manual_seed(4)
    return HorovodEstimator(
        **{
            "model": nets.OneInput(3).double(), "optimizer": nets.sgd, "loss": nn.MSELoss(),
            "feature_cols": ["a", "b", "c"], "label_cols": "y", "num_proc": 2, "batch_size": 50, "epochs": 3,
            "grad_clip_norm": 0.1, **options,
        }
    ).fit(df)  # fmt: skip


def test_r32_clipping_sees_the_global_gradient_and_steps_of_ones_own_are_found(df: Any) -> None:
    model, rows = clipped(df), df.toArrow()
    x = torch.tensor(np.stack([rows[c].to_numpy().astype(float) for c in "abc"], 1))
    y = torch.tensor(rows["y"].to_numpy())[:, None]
    torch.manual_seed(4)
    plain = nets.OneInput(3).double()
    optimizer = nets.sgd(plain.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        ((plain(x) - y) ** 2).mean().backward()
        assert torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1) > 0.1
        optimizer.step()
    want = nets.parameters_of(plain)
    torch.testing.assert_close(nets.parameters_of(model.getModel()), want, rtol=1e-9, atol=1e-12)
    with pytest.raises(HvdError, match=r"lin\.weight of rank 1 differs from rank 0's"):
        clipped(df, callbacks=[ForgetsToReduce()])


def test_r29_left_over_gradients_and_one_reduction_per_step(spark: Any) -> None:
    assert hvd_spark.run(mixed_use_quietly, num_proc=2) == [None, None]


def test_rows_that_the_ranks_did_not_use_end_the_fit(df: Any) -> None:
    spec = TrainSpec(
        model=narrow(), optimizer=nets.sgd, loss=nn.MSELoss(), feature_cols=["a", "b", "c"], label_cols="y"
    )
    result = fit_local(spec, df.toArrow())
    assert _checked(Portion(result.to_json(), []), Outcome([], [48, 49]), spec).rows_seen == 97
    lost = dataclasses.replace(result, rows_seen=96)
    with pytest.raises(RowsLost, match="given 97 rows, but used 96 in an epoch"):
        _checked(Portion(lost.to_json(), []), Outcome([], [48, 49]), spec)
    with pytest.raises(RowsLost, match="given 99 rows"):
        _checked(Portion(result.to_json(), []), Outcome([], [49, 50]), spec)
