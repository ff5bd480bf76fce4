"""Saved and loaded again: everything is as before. Spark Connect: test_connect.py."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from hvd_core.errors import InvalidArgument, NotPicklable
from hvd_spark import HorovodEstimator, HorovodModel

from . import nets


@pytest.fixture(scope="module")
def df(spark: Any) -> Any:
    rows = [(i % 10 / 10, i % 7 / 7, 2.0 * (i % 10) / 10 - i % 7 / 7) for i in range(200)]
    return spark.createDataFrame(rows, ["a", "b", "y"]).repartition(2).cache()


def estimator(**options: Any) -> HorovodEstimator:
    return HorovodEstimator(
        loss=nn.MSELoss(), feature_cols=["a", "b"], label_cols="y", num_proc=2, batch_size=50, epochs=2,
        **options,
    )  # fmt: skip


def predictions(stage: Any, frame: Any) -> list[float]:
    return sorted(row.prediction[0] if isinstance(row.prediction, list) else row.prediction
                  for row in stage.transform(frame).select("prediction").collect())  # fmt: skip


@pytest.fixture(scope="module")
def fitted(spark: Any, df: Any) -> Any:
    from pyspark.ml import Pipeline
    from pyspark.ml.feature import VectorAssembler

    scale = 3.0
    est = estimator(
        model=nets.OneInput(2), optimizer=lambda p: torch.optim.SGD(p, 0.1 * scale), validation=0.2
    )
    stages = [VectorAssembler(inputCols=["a", "b"], outputCol="f"), est.copy().setFeatureCols(["f"])]
    pipeline = Pipeline(stages=stages)
    return pipeline, pipeline.fit(df)


def test_model(spark: Any, df: Any, fitted: Any, tmp_path: Path) -> None:
    model = fitted[1].stages[-1]
    model.save(f"{tmp_path}/m")
    back = HorovodModel.load(f"{tmp_path}/m")
    assert back.uid == model.uid
    assert {p.name: v for p, v in back.extractParamMap().items()} == {
        p.name: v for p, v in model.extractParamMap().items()
    }
    assert back.result == model.result and back.history == model.history
    loss, *_ = back.plot(tmp_path / "fit.png").axes
    assert list(loss.get_lines()[0].get_ydata()) == [entry["loss"] for entry in model.history]
    assert (tmp_path / "fit.png").exists() and model.summary.summary.splitlines()[0] in back._repr_html_()
    assert type(back.getModel()) is nets.OneInput
    assert torch.equal(nets.parameters_of(back.getModel()), nets.parameters_of(model.getModel()))
    frame = fitted[1].stages[0].transform(df)
    assert predictions(back, frame) == predictions(model, frame)
    # Weights, with Parquet and safetensors only.
    load = pytest.importorskip("safetensors.torch").load
    table = pq.read_table(f"{tmp_path}/m/weights").sort_by("offset")
    plain = load(b"".join(table["data"].to_pylist()))
    want = model.getModel().state_dict()
    assert plain.keys() == want.keys() and all(torch.equal(plain[k], want[k]) for k in want)


def test_overwrite_and_what_is_no_model(spark: Any, fitted: Any, tmp_path: Path) -> None:
    path = f"{tmp_path}/m"
    one = HorovodModel(model=nets.OneInput(2), feature_cols=["a", "b"])
    assert one._repr_html_() is None
    one.save(path)
    for save in (one.save, one.write().save, estimator(model=nets.OneInput(2)).write().save):
        with pytest.raises(InvalidArgument, match=r"/m already: write\(\)\.overwrite\(\)"):
            save(path)
    assert HorovodModel.load(path).getModel().lin.in_features == 2, "left as it was"
    other = HorovodModel(model=nets.OneInput(3), feature_cols=["a", "b", "c"])
    other.write().overwrite().save(path)
    assert HorovodModel.load(path).getModel().lin.in_features == 3
    with pytest.raises(InvalidArgument, match=r"is hvd_spark\.HorovodModel, not HorovodEstimator"):
        HorovodEstimator.load(path)
    fitted[1].stages[0].save(f"{tmp_path}/assembler")
    with pytest.raises(InvalidArgument, match=r"VectorAssembler, not HorovodModel"):
        HorovodModel.load(f"{tmp_path}/assembler")
    part = next((tmp_path / "m" / "weights").glob("*.parquet"))
    part.unlink()
    (tmp_path / "m" / "weights" / f".{part.name}.crc").unlink()
    pq.write_table(pq.read_table(tmp_path / "m" / "objects"), part)
    with pytest.raises(InvalidArgument, match=r"weights is damaged"):
        HorovodModel.load(path)
    lock = threading.Lock()
    locked = HorovodModel(model=nets.OneInput(2), transform_fn=lambda batch: lock and batch)
    with pytest.raises(NotPicklable, match="closure variable 'lock'"):
        locked.save(f"{tmp_path}/no")
    assert not (tmp_path / "no").exists()


def test_estimator_with_bound_optimizer_and_lambdas(spark: Any, df: Any, tmp_path: Path) -> None:
    torch.manual_seed(4)
    net = nets.OneInput(2)
    factor = 0.5
    est = estimator(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), 0.05),
        lr_schedule=lambda epoch: factor**epoch,
        metrics={"mae": lambda out, y: (out - y).abs().mean()},
        input_columns=[["a", "b"]],
        shapes={},
    )
    est.write().overwrite().save(f"{tmp_path}/e")
    back = HorovodEstimator.load(f"{tmp_path}/e")
    assert back.uid == est.uid and back.getBatchSize() == 50 and back.getInputColumns() == [["a", "b"]]
    first, second = (nets.parameters_of(e.fit(df).getModel()) for e in (est, back))
    assert torch.equal(first, second)


def test_pipeline(spark: Any, df: Any, fitted: Any, tmp_path: Path) -> None:
    from pyspark.ml import Pipeline, PipelineModel

    pipeline, model = fitted
    pipeline.write().overwrite().save(f"{tmp_path}/p")
    model.write().overwrite().save(f"{tmp_path}/pm")
    assert Pipeline.load(f"{tmp_path}/p").getStages()[-1].uid == pipeline.getStages()[-1].uid
    back = PipelineModel.load(f"{tmp_path}/pm")
    assert back.stages[-1].history == model.stages[-1].history
    assert predictions(back, df) == predictions(model, df)
