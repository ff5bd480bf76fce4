"""`HorovodRunner` and what ranks log: the calls that notebooks know."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import hvd_core
import hvd_spark
from hvd_core.train import MLflow
from hvd_spark import HorovodEstimator, HorovodRunner, InvalidArgument, RankFailed

from . import nets


def speak(lr: float) -> tuple[int, float]:
    """What both ways of speaking say; returns something that only rank 0 can have returned."""
    import hvd_core
    import hvd_core.torch as hvd

    hvd.init()
    print(f"printed by {hvd.rank()}", flush=True)
    hvd_core.log_to_driver(f"logged by {hvd.rank()}\nlr {lr}")
    return 10 * hvd.rank() + hvd.size(), lr


LOGGED = {f"[{rank}] {line}" for rank in (0, 1) for line in (f"logged by {rank}", "lr 0.5")}
PRINTED = {"[0] printed by 0", "[1] printed by 1"}


@pytest.mark.parametrize("np", [2, 0, -2])
def test_main_gets_its_arguments_and_rank_0s_result_comes_back(spark: Any, capfd: Any, np: int) -> None:
    assert HorovodRunner(np=np).run(speak, lr=0.5) == (2, 0.5)
    assert set(capfd.readouterr().out.splitlines()) == LOGGED | PRINTED


def test_local_mode_needs_no_spark(capfd: Any) -> None:
    assert HorovodRunner(np=2, local_mode=True).run(speak, lr=0.5) == (2, 0.5)
    assert set(capfd.readouterr().out.splitlines()) == LOGGED | PRINTED
    assert hvd_spark.run(os.getenv, ("KEY",), num_proc=2, env={"KEY": "y"}, local_mode=True) == ["y"] * 2
    with pytest.raises(InvalidArgument, match="local_mode needs num_proc"):
        hvd_spark.run(speak, (0.5,), local_mode=True)
    with pytest.raises(InvalidArgument, match="local_mode needs np"):
        HorovodRunner(np=0, local_mode=True)


@pytest.mark.parametrize("np", [2, -2])
def test_log_callback_only_shows_nothing_else(spark: Any, capfd: Any, np: int) -> None:
    runner = HorovodRunner(np=np, driver_log_verbosity="log_callback_only")
    assert runner.run(speak, lr=0.5) == (2, 0.5)
    assert set(capfd.readouterr().out.splitlines()) == LOGGED


def test_outside_a_rank_a_log_is_printed(capsys: Any) -> None:
    hvd_core.log_to_driver("alone")
    assert capsys.readouterr().out == "alone\n"


def fail() -> None:
    raise ValueError("token-runner")


@pytest.mark.parametrize("np", [2, -2])
def test_the_first_cause_comes_back(spark: Any, np: int) -> None:
    with pytest.raises(RankFailed, match="ValueError: token-runner"):
        HorovodRunner(np=np).run(fail)


def test_bad_arguments() -> None:
    with pytest.raises(InvalidArgument, match="np must be a whole number, not '2'"):
        HorovodRunner(np="2")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="'all' or 'log_callback_only', not 'quiet'"):
        HorovodRunner(np=2, driver_log_verbosity="quiet")  # type: ignore[arg-type]


def log_metrics() -> str:
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # a server would need none
    import mlflow.pytorch

    import hvd_core.torch as hvd

    mlflow.pytorch.autolog()
    hvd.init()
    if hvd.rank() == 0:
        for epoch in range(3):
            mlflow.log_metric("loss", 1.0 / (1 + epoch), step=epoch)
    hvd.barrier()
    return str(mlflow.active_run().info.run_id) if hvd.rank() == 0 else ""


def on_a_rank() -> nn.Module:
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    return nets.OneInput(1)


@pytest.mark.filterwarnings("ignore")
def test_s6_ranks_log_to_the_active_run_of_the_driver(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import mlflow
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    client = mlflow.MlflowClient()

    def logged(run: Any) -> list[float]:
        found = sorted(client.get_metric_history(run.info.run_id, "loss"), key=lambda metric: metric.step)
        return [metric.value for metric in found]

    try:
        with mlflow.start_run() as by_hand:
            assert HorovodRunner(np=2).run(log_metrics) == by_hand.info.run_id
            assert mlflow.active_run().info.run_id == by_hand.info.run_id
        assert logged(by_hand) == [1.0, 0.5, 1 / 3]
        frame = spark.range(40).selectExpr("id / 40.0d AS x", "id / 20.0d AS y")
        with mlflow.start_run() as of_a_fit:
            model = HorovodEstimator(
                model_fn=on_a_rank, optimizer=nets.sgd, loss=nn.MSELoss(), feature_cols=["x"], label_cols="y",
                epochs=3, num_proc=2, callbacks=[MLflow()], verbose=0,
            ).fit(frame)  # fmt: skip
            assert mlflow.active_run().info.run_id == of_a_fit.info.run_id
        assert logged(of_a_fit) == [entry["loss"] for entry in model.history]
        runs = {run.info.run_id for run in client.search_runs(["0"])}
        assert runs == {by_hand.info.run_id, of_a_fit.info.run_id}, "no run of a rank's own"
    finally:
        mlflow.set_tracking_uri(before)
