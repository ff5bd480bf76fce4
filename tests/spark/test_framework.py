"""A framework that is not torch, all the way on Spark: fit, transform, save, load, refusals by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvd_core.train import TrainSpec, fit_local, framework, register_framework
from hvd_spark import HorovodEstimator, HorovodModel, InvalidArgument
from hvd_spark.mlflow import save_model

from ..train.runs import COLUMNS, table
from ..train.toy import Linear


def nothing() -> float:
    return 0.0


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Any:
    found = {"torch": framework._registered["torch"]}
    monkeypatch.setattr("hvd_core.train.framework._registered", found)
    return found


@pytest.mark.filterwarnings("ignore")  # mlflow warns of itself when it is imported
def test_a_third_framework(spark: Any, tmp_path: Path, registry: Any, job_count: Any) -> None:
    rows = table(60)
    df = spark.createDataFrame(rows.to_pylist()).repartition(2).cache()
    settings: dict[str, Any] = {
        "model": Linear(3), "optimizer": nothing, "loss": nothing, "feature_cols": COLUMNS, "label_cols": "y",
        "batch_size": 60, "epochs": 4,
    }  # fmt: skip
    estimator = HorovodEstimator(num_proc=2, **settings)
    before = job_count()
    with pytest.raises(InvalidArgument, match=r"model must be .*, not tests.train.toy.Linear"):
        estimator.fit(df)
    register_framework("toy", "tests.train.toy:ToyFramework", lambda model: isinstance(model, Linear))
    with pytest.raises(InvalidArgument, match=r"^grad_clip_norm is not supported for toy models"):
        estimator.copy().setGradClipNorm(1.0).fit(df)
    assert job_count() == before

    model = estimator.fit(df)
    alone = fit_local(TrainSpec(**settings), rows)
    assert [e["loss"] for e in model.history] == pytest.approx([e["loss"] for e in alone.history], rel=1e-9)
    plain = model.getModel()
    assert type(plain) is Linear and plain is not settings["model"] and not settings["model"].weight.any()

    def predicted(model: HorovodModel) -> dict[int, float]:
        return {row.id: row.prediction for row in model.transform(df).collect()}

    found, x = predicted(model), np.stack([rows[c].to_numpy() for c in COLUMNS], 1)
    want = x @ plain.weight + plain.bias
    assert [found[i] for i in range(60)] == pytest.approx(want.tolist(), rel=1e-12)

    model.save(f"file:{tmp_path}/model")
    assert list((tmp_path / "model" / "weights").glob("*.parquet")), "numbers apart from the pickle"
    again = HorovodModel.load(f"file:{tmp_path}/model")
    assert predicted(again) == found
    estimator.save(f"file:{tmp_path}/estimator")
    assert type(HorovodEstimator.load(f"file:{tmp_path}/estimator")._objects["model"]) is Linear
    with pytest.raises(InvalidArgument, match="toy models cannot be stored for MLflow"):
        save_model(model, str(tmp_path / "pyfunc"))
    del registry["toy"]
    with pytest.raises(InvalidArgument, match="framework 'toy' is none of torch: register_framework"):
        HorovodModel.load(f"file:{tmp_path}/model")


def test_a_name_that_needs_no_registration(spark: Any, tmp_path: Path, registry: Any) -> None:
    """As where a model is loaded in another process."""
    name = "tests.train.toy:ToyFramework"
    df = spark.createDataFrame([(1.0, 2.0)], "a double, b double")
    model = HorovodModel(model=Linear(2), framework=name, feature_cols=["a", "b"])
    model.save(f"file:{tmp_path}/model")
    (row,) = HorovodModel.load(f"file:{tmp_path}/model").transform(df).collect()
    assert row.prediction == 0.0
