"""HorovodEstimator on Ray: sources, numbers, predictions, checkpoints, failures."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import hvd_core
from hvd_core import basics
from hvd_core.errors import ColumnError, DataError, InvalidArgument, NotPicklable, RankFailed
from hvd_core.train import TrainSpec
from hvd_core.train.local import fit_local

pytest.importorskip("ray")
torch = pytest.importorskip("torch")
from hvd_ray import HorovodEstimator  # noqa: E402
from hvd_ray.rows import deal  # noqa: E402

from ..conftest import KERNEL_TELLS  # noqa: E402


def table(rows: int, seed: int = 0) -> pa.Table:
    random = np.random.default_rng(seed)
    x = random.normal(size=(rows, 2)).astype(np.float32)
    y = x @ np.array([2.0, -1.0], np.float32) + 0.5
    return pa.table({"id": np.arange(rows), "a": x[:, 0], "b": x[:, 1], "y": y.astype(np.float32)})


def linear(width: int = 2, out: int = 1) -> Any:
    torch.manual_seed(3)
    return torch.nn.Linear(width, out)


def options(**more: Any) -> dict[str, Any]:
    return {
        "model": linear(),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, 0.1),
        "loss": torch.nn.MSELoss(),
        "feature_cols": ["a", "b"],
        "label_cols": "y",
        "epochs": 3,
        "batch_size": 8,
        "verbose": 0,
        **more,
    }


def state(model: Any) -> list[np.ndarray]:
    return [value.numpy() for value in model.getModel().state_dict().values()]


@pytest.mark.slow
@pytest.mark.parametrize("rows", [25, 3])
def test_r03_r05_same_numbers_from_every_source(cluster: Any, rows: int) -> None:
    """Full batches: N ranks give what one process gives on all rows. Blocks of 1, 20, 0, 4 rows; pandas."""
    whole = table(rows)
    parts = [whole.slice(0, 1), whole.slice(1, 20), whole.slice(21, 0), whole.slice(21)]
    source: Any = cluster.data.from_arrow(parts) if rows > 3 else whole.to_pandas()
    given = options(global_batch_size=64, batch_size=None, row_order="global")
    spec = TrainSpec(**{**given, "model": linear()})
    alone = fit_local(spec, whole)
    from hvd_core.train.torch_model import load_weights

    expected = [value.numpy() for value in load_weights(linear(), alone.weights).state_dict().values()]
    model = HorovodEstimator(num_proc=2, **given).fit(source)
    assert model.result.rows_seen == rows and len(model.history) == 3
    for found, value in zip(state(model), expected, strict=True):
        np.testing.assert_allclose(found, value, rtol=1e-5, atol=1e-6)
    assert torch.equal(given["model"].weight, linear().weight)  # the user's own is as it was


@pytest.mark.slow
def test_r37_predict_keeps_every_row(cluster: Any) -> None:
    whole = table(11)
    model = HorovodEstimator(num_proc=2, **options()).fit(whole)
    predicted = model.predict(cluster.data.from_arrow([whole.slice(0, 1), whole.slice(1)]))
    rows = sorted(predicted.take_all(), key=lambda row: row["id"])
    assert [row["id"] for row in rows] == list(range(11))
    with torch.no_grad():
        x = torch.tensor(np.stack([whole["a"].to_numpy(), whole["b"].to_numpy()], 1))
        expected = model.getModel()(x).reshape(-1).numpy()
    np.testing.assert_allclose([row["prediction"] for row in rows], expected, rtol=1e-6)
    assert predicted.schema().base_schema.field("prediction").type == pa.float32()
    again = pickle.loads(pickle.dumps(model))
    assert again.predict(whole.to_pandas()).count() == 11
    with pytest.raises(ColumnError, match="'prediction' exists already"):
        model.predict(predicted)
    with pytest.raises(ColumnError, match="'b' does not exist"):
        model.predict(whole.drop_columns("b"))


@pytest.mark.slow
def test_classes_and_arrays(cluster: Any) -> None:
    """numpy arrays in a Dataset are tensors of Ray's own type."""
    random = np.random.default_rng(0)
    x = random.normal(size=(60, 2, 2)).astype(np.float32)
    k = (x.sum(axis=(1, 2)) > 0).astype(np.int64)
    ds = cluster.data.from_numpy(x).map_batches(lambda batch: {"x": batch["data"]})
    ds = ds.zip(cluster.data.from_numpy(k).map_batches(lambda batch: {"k": batch["data"]}))
    net = torch.nn.Sequential(torch.nn.Flatten(), linear(4, 2))
    model = HorovodEstimator(
        num_proc=2,
        **options(
            model=net, loss=torch.nn.CrossEntropyLoss(), feature_cols=["x"], label_cols="k", epochs=20,
            optimizer=lambda parameters: torch.optim.Adam(parameters, 0.05),
        ),
    ).fit(ds)  # fmt: skip
    rows = model.predict(ds).take_all()
    assert np.mean([row["prediction"] == row["k"] for row in rows]) > 0.9
    assert all(abs(sum(row["probability"]) - 1) < 1e-6 and len(row["rawPrediction"]) == 2 for row in rows)


class Dies:
    """Ends rank 1 in epoch 1, and later both ranks in epoch 2."""

    def __init__(self, folder: Path):
        self._folder = folder

    def on_epoch_end(self, run: Any, logs: Any) -> None:
        flag = self._folder / f"died-{run.epoch}-{run.rank}"
        if (run.epoch, run.rank) in ((1, 1), (2, 0), (2, 1)) and not flag.exists():
            flag.write_text("x")
            os.kill(os.getpid(), 9)


def on_a_rank(spec: TrainSpec, parts: list[pa.Table]) -> Any:
    torch.set_num_threads(1)
    basics.init()
    return fit_local(spec, parts[basics.rank()], basics.default_group())


@pytest.mark.slow
@pytest.mark.timeout(180, func_only=True)
def test_r39_a_killed_worker_and_best_checkpoints(cluster: Any, tmp_path: Path) -> None:
    from ray.train import CheckpointConfig, FailureConfig, RunConfig

    whole = table(64)
    halves = [whole.slice(0, 32), whole.slice(32)]
    undisturbed = hvd_core.run(on_a_rank, (TrainSpec(**options()), halves), num_proc=2)[0]
    config = RunConfig(
        name="run",
        storage_path=str(tmp_path / "ray"),
        failure_config=FailureConfig(max_failures=2),
        checkpoint_config=CheckpointConfig(
            num_to_keep=1, checkpoint_score_attribute="loss", checkpoint_score_order="min"
        ),
    )
    model = HorovodEstimator(
        num_proc=2,
        run_config=config,
        **options(callbacks=[Dies(tmp_path)], checkpoint_dir=str(tmp_path / "own"), checkpoint_every=4),
    ).fit(whole)
    assert len(list(tmp_path.glob("died-*"))) == 3
    from hvd_core.train.torch_model import load_weights

    expected = load_weights(linear(), undisturbed.weights).state_dict().values()
    for found, value in zip(state(model), expected, strict=True):
        np.testing.assert_allclose(found, value.numpy(), rtol=1e-6)
    assert [entry["rows"] for entry in model.history] == [64, 64, 64]
    assert "resumed at" in model.result.summary
    assert len(model.ray_result.best_checkpoints) == 1
    assert list(model.ray_result.metrics_dataframe["epoch"])[-1] == 2
    with model.ray_result.checkpoint.as_directory() as folder:
        kept = load_weights(linear(), Path(folder, "weights.safetensors").read_bytes())
    for found, value in zip(kept.state_dict().values(), state(model), strict=True):
        np.testing.assert_array_equal(found.numpy(), value)


class Always:
    """Ends rank 1 in every attempt, and counts them."""

    def __init__(self, folder: Path, how: str):
        self._folder, self._how = folder, how

    def on_epoch_end(self, run: Any, logs: Any) -> None:
        if run.rank == 1:
            (self._folder / f"{self._how}-{os.getpid()}").write_text("x")
            if self._how == "kill":
                os.kill(os.getpid(), 9)
            raise ValueError("token-4711")


@pytest.mark.slow
@pytest.mark.timeout(150, func_only=True)
def test_r39_retries_are_counted_and_bugs_are_not_tried_again(
    cluster: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for how, attempts in (("kill", 2), ("bug", 1)):
        estimator = HorovodEstimator(num_proc=2, max_retries=1, **options(callbacks=[Always(tmp_path, how)]))
        with pytest.raises(RankFailed) as caught:
            estimator.fit(table(16))
        assert caught.value.rank == 1 and caught.value.attempts == attempts
        assert len(list(tmp_path.glob(f"{how}-*"))) == attempts
        told = "hvd: rank 1 was killed by signal 9; retry 1 of 1, from the start" in capfd.readouterr().err
        assert told == (how == "kill") or not KERNEL_TELLS
    assert "token-4711" in str(caught.value)


def mlflow_net() -> Any:
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # a server would need none
    return linear()


def log_by_hand() -> str:
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    import mlflow

    import hvd_core.torch as hvd

    hvd.init()
    if hvd.rank() == 0:
        mlflow.log_metric("by_hand", 1.0)
    return str(mlflow.active_run().info.run_id) if hvd.rank() == 0 else ""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_s6_one_mlflow_run(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    from hvd_core.train import MLflow
    from hvd_ray import run

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    try:
        with mlflow.start_run() as active:
            given = {**options(callbacks=[MLflow()], model_fn=mlflow_net), "model": None}
            model = HorovodEstimator(num_proc=2, **given).fit(table(20))
            assert run(log_by_hand, num_proc=2)[0] == active.info.run_id
            assert mlflow.active_run().info.run_id == active.info.run_id
        client = mlflow.MlflowClient()
        assert [one.info.run_id for one in client.search_runs(["0"])] == [active.info.run_id]
        logged = sorted(client.get_metric_history(active.info.run_id, "loss"), key=lambda metric: metric.step)
        assert [metric.value for metric in logged] == [entry["loss"] for entry in model.history]
    finally:
        mlflow.set_tracking_uri(before)


def test_what_is_found_before_and_after_the_launch(cluster: Any) -> None:
    whole = table(10)
    began = time.monotonic()
    with pytest.raises(DataError, match="no rows"):
        HorovodEstimator(num_proc=2, **options()).fit(whole.slice(0, 0))
    with pytest.raises(ColumnError, match="'c' does not exist"):
        HorovodEstimator(num_proc=2, **options(feature_cols=["a", "c"])).fit(whole)
    with pytest.raises(InvalidArgument, match="did you mean batch_size"):
        HorovodEstimator(num_proc=2, **options(batchsize=3))
    with pytest.raises(InvalidArgument, match=r"expected a Ray Dataset.*not builtins.list"):
        HorovodEstimator(num_proc=2, **options()).fit([1])
    lock = __import__("threading").Lock()
    with pytest.raises(NotPicklable, match="lock"):
        HorovodEstimator(num_proc=2, **options(callbacks=[lambda run, logs: lock])).fit(whole)
    assert time.monotonic() - began < 20
    holes = whole.set_column(1, "a", pa.array([None, *range(9)], pa.float32()))
    with pytest.raises(RankFailed, match="column 'a'") as caught:
        HorovodEstimator(num_proc=2, **options()).fit(holes)
    assert isinstance(caught.value.__cause__, DataError) and caught.value.rank == 0


def test_rows_are_dealt_evenly() -> None:
    blocks = [("p", 1), ("q", 20), ("r", 4)]
    for size in range(1, 8):
        dealt = deal(blocks, size)
        counts = [sum(piece.end - piece.begin for piece in pieces) for pieces in dealt]
        assert sum(counts) == 25 and max(counts) - min(counts) <= 1
        assert [(p.block, i) for pieces in dealt for p in pieces for i in range(p.begin, p.end)] == [
            (name, i) for name, count in blocks for i in range(count)
        ]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_s4_spark_rows_outlive_spark() -> None:
    script = Path(__file__).with_name("spark_job.py")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["rows"] == found["seen"] == 10_000 and found["ids"] == sum(range(10_000))
    assert found["predicted"] == 100
    assert found["empty"] == [0, ["id", "x", "y"]]
    assert found["loss"] < 0.1
