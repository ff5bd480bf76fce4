"""The fitted model: predictions, their types, Pipeline, models made from a plain module."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn

from hvd_core.launch import dumps
from hvd_core.train import Predictor, TrainSpec, plan_layout
from hvd_core.train.columns import columns_of
from hvd_spark import ColumnError, HorovodEstimator, HorovodModel, serve

from . import nets


@pytest.fixture(scope="module")
def df(spark: Any) -> Any:
    rows = [
        (i, i % 10 / 10, i % 7 / 7, ["red", "green", "blue"][i % 3], 2.0 * (i % 10) / 10) for i in range(300)
    ]
    return spark.createDataFrame(rows, ["id", "a", "b", "colour", "y"]).repartition(3).cache()


def features(frame: Any, *names: str) -> torch.Tensor:
    rows = frame.select(*names).collect()
    return torch.tensor([[row[n] for n in names] for row in rows], dtype=torch.float32)


def test_pipeline_with_indexer_and_assembler(spark: Any, df: Any) -> None:
    from pyspark.ml import Pipeline
    from pyspark.ml.feature import StringIndexer, VectorAssembler

    stages = [
        StringIndexer(inputCol="colour", outputCol="colour_id"),
        VectorAssembler(inputCols=["a", "b", "colour_id"], outputCol="features"),
        HorovodEstimator(
            model=nets.OneInput(3), optimizer=nets.adam, loss=nn.MSELoss(), featuresCol="features",
            labelCol="y",
            num_proc=2, batch_size=50, epochs=3, validation=0.2,
        ),
    ]  # fmt: skip
    fitted = Pipeline(stages=stages).fit(df)
    model = fitted.stages[-1]
    assert isinstance(model, HorovodModel)
    assert model.uid == stages[-1].uid
    assert model.history[-1]["val_loss"] < model.history[0]["val_loss"]
    assert model.getFeatureCols() == ["features"]
    out = fitted.transform(df)
    assert [field.name for field in out.schema] == [*df.columns, "colour_id", "features", "prediction"]
    rows = out.select("features", "prediction").collect()
    x = torch.tensor(np.array([row.features.toArray() for row in rows]), dtype=torch.float32)
    with torch.no_grad():
        want = model.getModel()(x)[:, 0].numpy()
    np.testing.assert_allclose([row.prediction for row in rows], want, rtol=1e-5)
    sparse_and_dense = {type(row.features).__name__ for row in rows}
    assert sparse_and_dense == {"DenseVector", "SparseVector"}, "the case is meant to have both"


def test_types_rows_and_other_columns(spark: Any, df: Any, job_count: Any) -> None:
    from pyspark.sql import functions as F

    mixed = df.withColumn("m", F.create_map("colour", "a")).withColumn("odd.name", F.col("id"))
    net = nets.OneInput(2, outputs=3).double()
    before = job_count()
    out = HorovodModel(model=net, feature_cols=["a", "b"], prediction_col="p").transform(mixed)
    assert dict(out.dtypes)["p"] == "array<double>"
    assert job_count() == before, "transform is lazy"
    rows = out.collect()
    assert sorted(row.id for row in rows) == list(range(300))
    assert all(row.m == {row.colour: row.a} and row["odd.name"] == row.id for row in rows)
    x = torch.tensor([[row.a, row.b] for row in rows], dtype=torch.float64)
    with torch.no_grad():
        np.testing.assert_allclose([row.p for row in rows], net(x).numpy(), rtol=1e-12)


def test_empty_frame(spark: Any, df: Any) -> None:
    out = HorovodModel(model=nets.OneInput(2), feature_cols=["a", "b"]).transform(df.limit(0))
    assert dict(out.dtypes)["prediction"] == "float"
    assert out.collect() == []


class TwoOutputs(nn.Module):
    def forward(self, x: Any) -> Any:
        return x.sum(1), x.argmax(1)


def test_several_outputs(spark: Any, df: Any) -> None:
    out = HorovodModel(model=WithParameter(), feature_cols=["a", "b"]).transform(df)
    assert dict(out.dtypes)["prediction"] == "float"
    assert dict(out.dtypes)["prediction_1"] == "bigint"
    row = out.where("id = 9").first()
    assert row.prediction == pytest.approx(0.9 + 2 / 7)
    assert row.prediction_1 == 0


class WithParameter(TwoOutputs):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1), requires_grad=False)


def test_what_does_not_fit_the_model(spark: Any, df: Any) -> None:
    model = HorovodModel(model=nets.OneInput(2), feature_cols=["a", "b"])
    with pytest.raises(ColumnError, match="'b' does not exist"):
        model.transform(df.drop("b"))
    with pytest.raises(ColumnError, match=r"(?s)'colour'.*string"):
        model.copy().setFeatureCols(["a", "colour"]).transform(df)
    with pytest.raises(ColumnError, match="'prediction' exists already"):
        model.transform(df.withColumnRenamed("y", "prediction"))
    with pytest.raises(ColumnError, match=r"(?s)float32 \(1, 1\).*dtypes=.*shapes="):
        model.copy().setFeatureCols(["a"]).transform(df)
    with pytest.raises(ColumnError, match=r"int64 \(1, 2\).*same dtype"):
        model.copy().setFeatureCols(["id", "id"]).transform(df)


def test_params_sweep_and_copy(spark: Any, df: Any) -> None:
    from pyspark.ml.tuning import ParamGridBuilder

    est = HorovodEstimator(
        model=nets.OneInput(2), optimizer=nets.sgd, loss=nn.MSELoss(), feature_cols=["a", "b"],
        label_cols="y",
        num_proc=1, batch_size=300,
    )  # fmt: skip
    grid = ParamGridBuilder().addGrid(est.learningRate, [1e-6, 0.3]).build()
    small, large = (nets.parameters_of(m.getModel()) for m in est.fit(df, grid))
    start = nets.parameters_of(est.getModel())
    assert (small - start).abs().max() < 1e-4 < (large - start).abs().max()
    assert not est.isSet(est.learningRate), "the estimator itself keeps its parameters"


class Counted:
    """In the place of a parcel."""

    def __init__(self, data: bytes):
        self.data, self.opened = data, 0

    def open(self) -> bytes:
        self.opened += 1
        return self.data


def test_a_worker_loads_a_model_once_and_keeps_the_last_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "_loaded", OrderedDict())
    batch = pa.RecordBatch.from_pydict({"a": [1.0, 2.0]})
    spec = TrainSpec(
        model=nets.OneInput(1), optimizer=nets.sgd, loss=nn.MSELoss(), feature_cols="a", label_cols="y"
    )
    layout = plan_layout(columns_of(pa.schema([("a", pa.float64()), ("y", pa.float64())])), spec)
    data = dumps(Predictor, (spec.model, layout), names=["model"])
    parcels = {key: Counted(data) for key in "abc"}

    def use(keys: str) -> list[int]:
        for key in keys:
            serving = serve.Serving(parcels[key], key, ((0, "a"),), (), gpu=False)  # type: ignore[arg-type]
            assert [b.num_rows for b in serving.run(iter([batch, batch]))] == [2, 2]
        return [parcels[key].opened for key in "abc"]

    assert use("aaba") == [1, 1, 0]
    assert use("ca") == [1, 1, 1], "the one that was not used for longest has left"
    assert use("b") == [1, 2, 1]
