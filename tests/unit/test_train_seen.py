"""A fit as picture, table, MLflow run and TensorBoard events."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn

from hvd_core.errors import InvalidArgument
from hvd_core.train import FitResult, TrainSpec, fit_local
from hvd_core.train.picture import as_html, draw, names_of
from hvd_core.train.trackers import MLflow, TensorBoard

pytestmark = pytest.mark.timeout(60)
EPOCHS = 3


def fit(*callbacks: Any, validation: float | None = 0.25) -> FitResult:
    rng = np.random.default_rng(1)
    table = pa.table({"x": rng.normal(size=64), "y": rng.normal(size=64)})
    torch.manual_seed(1)
    spec = TrainSpec(
        model=nn.Linear(1, 1).double(), optimizer=lambda p: torch.optim.SGD(p, 0.01), loss=nn.MSELoss(),
        metrics={"mae": lambda out, label: (out - label).abs()}, feature_cols=["x"], label_cols=["y"],
        batch_size=8, epochs=EPOCHS, validation=validation, callbacks=callbacks, verbose=0,
    )  # fmt: skip
    return fit_local(spec, table)


@pytest.fixture(scope="module")
def result() -> FitResult:
    return fit()


def drawn(axes: Any) -> dict[str, list[float]]:
    return {line.get_label(): list(line.get_ydata()) for line in axes.get_lines()}


def test_the_picture_shows_the_history(result: FitResult) -> None:
    loss, metrics, speed, where = draw(result.history, result.best_epoch).axes
    for axes, names in ((loss, ("loss", "val_loss")), (metrics, ("mae", "val_mae"))):
        curves = drawn(axes)
        for name in names:
            assert curves[name] == [entry[name] for entry in result.history]
        assert curves["best epoch"] == [0, 1] and len(curves) == 3
    (rates,) = drawn(speed).values()
    assert rates == [entry["rows"] / entry["seconds"] for entry in result.history]
    heights = [bar.get_height() for bars in where.containers for bar in bars]
    parts = ("data", "compute", "communication")
    assert heights == [entry[part] for part in parts for entry in result.history]


def test_without_metrics_there_is_no_panel_for_them(result: FitResult) -> None:
    bare = [{k: v for k, v in e.items() if "mae" not in k} for e in result.history]
    assert names_of(bare) == (["loss"], [])
    assert [axes.get_title("left") for axes in draw(bare).axes][:2] == [
        "Loss",
        "Training rows per second, all ranks",
    ]


def test_nothing_to_draw() -> None:
    with pytest.raises(ValueError, match="no epoch"):
        draw([])


def test_plot_writes_a_file(result: FitResult, tmp_path: Path) -> None:
    result.plot(tmp_path / "fit.png")
    assert (tmp_path / "fit.png").read_bytes().startswith(b"\x89PNG")


def test_the_table_of_a_notebook(result: FitResult) -> None:
    shown = result._repr_html_()
    for entry in result.history:
        assert f"<td>{entry['val_mae']:.6g}</td>" in shown
    assert f"<td>{result.best_epoch + 1} (best)</td>" in shown
    assert "data:image/png;base64," in shown
    assert "<script>" not in as_html(result.history, "<script>")
    cut = as_html([{**result.history[0], "epoch": i} for i in range(50)], "")
    assert "… 30 more …" in cut and "<td>11</td>" not in cut and "<td>50</td>" in cut


@pytest.fixture
def mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import mlflow

        before = mlflow.get_tracking_uri()
        mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
        yield mlflow
        mlflow.set_tracking_uri(before)


def test_an_active_run_gets_everything_and_stays_active(mlflow: Any) -> None:
    with mlflow.start_run() as run:
        result = fit(MLflow())
        assert mlflow.active_run().info.run_id == run.info.run_id
        client = mlflow.MlflowClient()
        assert client.get_run(run.info.run_id).info.status == "RUNNING"
    for name in ("loss", "val_mae", "seconds"):
        logged = client.get_metric_history(run.info.run_id, name)
        assert [(m.step, m.value) for m in logged] == [(e["epoch"], e[name]) for e in result.history]
    params = client.get_run(run.info.run_id).data.params
    assert params["batch_size"] == "8" and params["ranks"] == "1" and params["loss"] == "MSELoss"
    assert len(client.search_runs(["0"])) == 1


def test_without_an_active_run_it_makes_one_and_ends_it(mlflow: Any) -> None:
    fit(MLflow(experiment="flights", run_name="first"))
    assert mlflow.active_run() is None
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("flights").experiment_id])
    assert (run.info.status, run.info.run_name) == ("FINISHED", "first")


def test_a_run_of_its_own_fails_with_the_fit(mlflow: Any) -> None:
    class Breaks:
        def __init__(self, error: BaseException):
            self.error = error

        def on_epoch_end(self, run: Any, logs: Any) -> None:
            raise self.error

    client = mlflow.MlflowClient()
    for error, status in ((ValueError("boom"), "FAILED"), (KeyboardInterrupt(), "KILLED")):
        with pytest.raises(type(error)):
            fit(MLflow(), Breaks(error))
        newest, *_ = client.search_runs(["0"], order_by=["attributes.start_time DESC"])
        assert newest.info.status == status
    with mlflow.start_run() as run, pytest.raises(ValueError):
        fit(MLflow(), Breaks(ValueError("boom")))
    assert client.get_run(run.info.run_id).info.status == "FINISHED", "the user's run is the user's"


def test_a_second_fit_goes_to_the_same_run(mlflow: Any) -> None:
    """As in a cross-validation; MLflow lets nobody change a parameter."""
    with mlflow.start_run() as run:
        fit(MLflow(), validation=0.25)
        result = fit(MLflow(), validation=0.5)
    client = mlflow.MlflowClient()
    assert client.get_run(run.info.run_id).data.params["validation"] == "0.25"
    logged = client.get_metric_history(run.info.run_id, "loss")
    assert [m.value for m in logged[-EPOCHS:]] == [e["loss"] for e in result.history]


def test_tracking_uris() -> None:
    for uri in ("databricks", "databricks-uc", "http://host:5000", "sqlite:////x/y.db"):
        assert MLflow(run_id="0", tracking_uri=uri)._uri == uri
    assert MLflow(run_id="0", tracking_uri="runs")._uri == os.path.abspath("runs")


def test_a_server_that_fails_later_costs_one_warning(mlflow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    callback = MLflow()
    real, calls = mlflow.MlflowClient.log_batch, []

    def log_batch(self: Any, run_id: str, metrics: Any = (), **rest: Any) -> None:
        calls.append(metrics)
        if metrics:
            raise ConnectionError("gone")
        real(self, run_id, metrics=metrics, **rest)

    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", log_batch)
    with pytest.warns(UserWarning, match="was not written: ConnectionError") as caught:
        result = fit(callback)
    assert len(caught) == 1 and len(calls) == 1 + EPOCHS and len(result.history) == EPOCHS


def test_tensorboard_events(tmp_path: Path) -> None:
    result = fit(TensorBoard(tmp_path))
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    (path,) = tmp_path.iterdir()
    found = {
        (value.tag, event.step): value.tensor.float_val[0]
        for event in EventFileLoader(str(path)).Load()
        for value in event.summary.value
    }
    for entry in result.history:
        assert found["training/loss", entry["epoch"]] == pytest.approx(entry["loss"], rel=1e-6)
        assert found["validation/mae", entry["epoch"]] == pytest.approx(entry["val_mae"], rel=1e-6)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(InvalidArgument, match="pip install mlflow"):
        MLflow()
