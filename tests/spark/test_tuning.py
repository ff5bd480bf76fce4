"""Parameter maps, pipelines and validators of pyspark.ml around the estimator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hvd_core.train.torch_state import weights_bytes
from hvd_spark import HorovodEstimator, HorovodModel, InvalidArgument, estimator
from hvd_spark.parts import unpickled

from . import nets


@pytest.fixture(scope="module")
def df(spark: Any) -> Any:
    rng = np.random.default_rng(5)
    x = rng.random((120, 2))
    rows = [(float(a), float(b), float(a - 2 * b)) for a, b in x]
    return spark.createDataFrame(rows, ["a", "b", "y"]).repartition(2).cache()


def linear(**options: Any) -> HorovodEstimator:
    torch.manual_seed(3)
    return HorovodEstimator(
        model=nets.OneInput(2), optimizer=nets.sgd, loss=nn.MSELoss(), feature_cols=["a", "b"],
        label_cols="y", num_proc=2, batch_size=30, epochs=6, **options,
    )  # fmt: skip


def weights(model: HorovodModel) -> torch.Tensor:
    return nets.parameters_of(model.getModel())


@pytest.fixture
def launches(monkeypatch: Any) -> list[int]:
    """The number of models of each job."""
    seen: list[int] = []

    def counted(frame: Any, job: Any) -> Any:
        outcome = launch(frame, job)
        seen.append(len(unpickled(list(outcome.results[0]))))
        return outcome

    launch = estimator.launch
    monkeypatch.setattr(estimator, "launch", counted)
    return seen


def test_maps_share_one_ingestion_and_train_as_if_alone(spark: Any, df: Any, launches: list[int]) -> None:
    est = linear().setModel(nets.Noisy(2))
    maps = [
        {est.learningRate: 0.3},
        {est.learningRate: 0.01, est.epochs: 1},
        {est.globalBatchSize: 12, est.batchSize: None},
        {est.featureCols: ["b", "a"]},  # other rows in the shard: a job of its own
    ]
    models = est.fit(df, maps)
    assert launches == [3, 1]
    assert [len(m.history) for m in models] == [6, 1, 6, 6]
    assert (
        [m.getLearningRate() for m in models[:2]] == [0.3, 0.01]
        if hasattr(models[0], "getLearningRate")
        else True
    )
    alone = [est.fit(df, maps[i]) for i in (1, 2)]
    assert torch.equal(weights(models[1]), weights(alone[0]))
    assert torch.equal(weights(models[2]), weights(alone[1]))
    assert models[2].history[0]["steps"] == 10
    assert not est.isSet(est.learningRate)


def test_large_models_come_back_in_several_jobs(
    spark: Any, df: Any, launches: list[int], monkeypatch: Any
) -> None:
    """As many in one job as the limit allows, and no model stays with the iterator that was handed out."""
    est = linear()
    maps = [{est.learningRate: rate} for rate in (0.1, 0.2, 0.3)]
    models = est.fit(df, maps)
    together = [weights(model) for model in models]
    nbytes = len(weights_bytes(models[0].getModel().state_dict()))
    monkeypatch.setattr(estimator, "_TOGETHER_NBYTES", 2 * nbytes)
    launches.clear()
    found = est.fitMultiple(df, maps)
    apart = [weights(next(found)[1]) for _ in maps]
    assert launches == [2, 1]
    assert all(torch.equal(a, b) for a, b in zip(apart, together, strict=True))
    assert not found._models  # type: ignore[attr-defined]


def test_a_bad_map_is_refused_before_anything_runs(df: Any, job_count: Any) -> None:
    est, before = linear(), job_count()
    with pytest.raises(InvalidArgument, match="learning_rate must be > 0"):
        est.fit(df, [{est.learningRate: 0.1}, {est.learningRate: -1.0}])
    assert job_count() == before


@pytest.mark.timeout(240)
def test_cross_validator_finds_the_better_rate(
    spark: Any, df: Any, launches: list[int], tmp_path: Path
) -> None:
    from pyspark.ml.evaluation import RegressionEvaluator
    from pyspark.ml.tuning import CrossValidator, CrossValidatorModel, ParamGridBuilder

    est = linear()
    grid = ParamGridBuilder().addGrid(est.learningRate, [1e-6, 0.4]).build()
    evaluator = RegressionEvaluator(labelCol="y", metricName="rmse")
    validator = CrossValidator(
        estimator=est, estimatorParamMaps=grid, evaluator=evaluator, numFolds=2, parallelism=2, seed=1
    )
    found = validator.fit(df)
    assert launches == [2, 2, 1], "two folds with both rates, then the better one on all rows"
    assert found.avgMetrics[1] < 0.8 * found.avgMetrics[0]
    assert torch.equal(weights(found.bestModel), weights(est.fit(df, grid[1])))
    found.write().overwrite().save(f"{tmp_path}/cv")
    back = CrossValidatorModel.load(f"{tmp_path}/cv")
    assert back.avgMetrics == pytest.approx(found.avgMetrics)
    assert torch.equal(weights(back.bestModel), weights(found.bestModel))
    assert back.getEstimator().uid == est.uid
    assert back.bestModel.summary == found.bestModel.summary


@pytest.mark.timeout(240)
def test_pipelines_in_parallel_wait_for_each_other(spark: Any, df: Any, tmp_path: Path) -> None:
    """Each of the two jobs needs both slots: one after the other, and neither is told that it waits."""
    from pyspark.ml import Pipeline
    from pyspark.ml.evaluation import RegressionEvaluator
    from pyspark.ml.feature import VectorAssembler
    from pyspark.ml.tuning import ParamGridBuilder, TrainValidationSplit, TrainValidationSplitModel

    est = linear(start_timeout_s=5.0).setFeatureCols(["f"])
    pipeline = Pipeline(stages=[VectorAssembler(inputCols=["a", "b"], outputCol="f"), est])
    grid = ParamGridBuilder().addGrid(est.learningRate, [1e-6, 0.4]).build()
    split = TrainValidationSplit(
        estimator=pipeline, estimatorParamMaps=grid, evaluator=RegressionEvaluator(labelCol="y"),
        trainRatio=0.75, parallelism=2, seed=2,
    )  # fmt: skip
    found = split.fit(df)
    assert found.validationMetrics[1] < 0.8 * found.validationMetrics[0]
    found.write().overwrite().save(f"{tmp_path}/tvs")
    back = TrainValidationSplitModel.load(f"{tmp_path}/tvs")
    assert torch.equal(weights(back.bestModel.stages[-1]), weights(found.bestModel.stages[-1]))


def test_summary_and_explained_parameters(spark: Any) -> None:
    plain = HorovodModel(model=nets.OneInput(2), feature_cols=["a", "b"])
    assert not plain.hasSummary
    with pytest.raises(RuntimeError, match="No training summary"):
        _ = plain.summary
    text = linear().explainParams()
    assert "batchSize: rows of one rank in one step" in text
    assert "(current: 30)" in text
    assert "model: torch.nn.Module to train; it is copied, never changed (current: OneInput)" in text
    assert "optimizer: " in text and "(current: sgd)" in text
    assert "earlyStopping: hvd_core.train.EarlyStopping (undefined)" in text
