"""What transform adds for classifiers, what pyspark's evaluators make of it, and streams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hvd_spark import ColumnError, HorovodEstimator, HorovodModel, InvalidArgument

from . import nets


@pytest.fixture(scope="module")
def df(spark: Any) -> Any:
    rng = np.random.default_rng(8)
    x = rng.normal(size=(150, 2))
    kind = (x[:, 0] > 0).astype(int) + (x[:, 1] > 0.5)
    rows = [
        (i, float(a), float(b), int(k), int(k > 0)) for i, ((a, b), k) in enumerate(zip(x, kind, strict=True))
    ]
    return (
        spark.createDataFrame(rows, "id long, a double, b double, kind long, two long").repartition(2).cache()
    )


def trained(df: Any, model: nn.Module, loss: Any, label: str, **options: Any) -> HorovodModel:
    return HorovodEstimator(
        model=model, optimizer=nets.adam, loss=loss, feature_cols=["a", "b"], label_cols=label,
        num_proc=2, batch_size=25, epochs=4, **options,
    ).fit(df)  # fmt: skip


def outputs(model: HorovodModel, rows: list[Any]) -> np.ndarray:
    x = torch.tensor([[row.a, row.b] for row in rows], dtype=torch.float32)
    with torch.no_grad():
        return model.getModel()(x).numpy()


def column(rows: list[Any], name: str) -> np.ndarray:
    return np.array([row[name].toArray() if hasattr(row[name], "toArray") else row[name] for row in rows])


def test_classes(spark: Any, df: Any, tmp_path: Path) -> None:
    from pyspark.ml.evaluation import MulticlassClassificationEvaluator

    torch.manual_seed(1)
    model = trained(df, nets.OneInput(2, outputs=3), nn.CrossEntropyLoss(), "kind")
    out = model.transform(df)
    types = dict(out.dtypes)
    assert [types[n] for n in ("prediction", "probability", "rawPrediction")] == [
        "double",
        "vector",
        "vector",
    ]
    rows = out.collect()
    logits = outputs(model, rows)
    np.testing.assert_allclose(column(rows, "rawPrediction"), logits, rtol=1e-5)
    want = torch.softmax(torch.tensor(logits, dtype=torch.float64), 1).numpy()
    np.testing.assert_allclose(column(rows, "probability"), want, rtol=1e-5)
    assert column(rows, "prediction").tolist() == logits.argmax(1).tolist()
    kinds = column(rows, "kind")
    accuracy = MulticlassClassificationEvaluator(labelCol="kind", metricName="accuracy").evaluate(out)
    assert accuracy == pytest.approx((logits.argmax(1) == kinds).mean())
    log_loss = MulticlassClassificationEvaluator(labelCol="kind", metricName="logLoss").evaluate(out)
    assert log_loss == pytest.approx(-np.log(want[np.arange(150), kinds]).mean(), rel=1e-5)
    # The model's output as it is, for who does the rest themselves; and after a save, all as before.
    plain = model.copy().setHeads(["output"]).transform(df).orderBy("id")
    assert dict(plain.dtypes)["prediction"] == "array<float>" and "probability" not in plain.columns
    few = model.copy().setParams(probability_col="", rawPredictionCol="").transform(df)
    assert few.columns == [*df.columns, "prediction"]
    vectors = model.copy().setParams(heads=["output"], vectorPrediction=True).transform(df)
    assert dict(vectors.dtypes)["prediction"] == "vector"
    row = vectors.first()
    np.testing.assert_allclose(row.prediction.toArray(), outputs(model, [row])[0], rtol=1e-5)
    with pytest.raises(ColumnError, match=r"'prediction' exists already.*probability_col"):
        model.transform(out)
    with pytest.raises(InvalidArgument, match="heads: 'softmin' is none of"):
        model.copy().setHeads(["softmin"]).transform(df)
    model.save(f"{tmp_path}/m")
    back = HorovodModel.load(f"{tmp_path}/m").transform(df)
    assert sorted(map(str, back.collect())) == sorted(map(str, rows))


def test_two_classes(spark: Any, df: Any) -> None:
    """r09: the probability itself; with a threshold the class."""
    from pyspark.ml.evaluation import BinaryClassificationEvaluator, MulticlassClassificationEvaluator

    torch.manual_seed(2)
    model = trained(df, nets.sigmoid_net(2), nn.BCELoss(), "two")
    out = model.transform(df)
    rows = out.collect()
    p = outputs(model, rows)[:, 0]
    assert dict(out.dtypes)["prediction"] == "float"
    np.testing.assert_allclose(column(rows, "prediction"), p, rtol=1e-5)
    np.testing.assert_allclose(column(rows, "probability"), np.stack([1 - p, p], 1), rtol=1e-4)
    order = [np.argsort(column(rows, "rawPrediction")[:, 1]).tolist(), np.argsort(p).tolist()]
    assert order[0] == order[1]
    as_double = out.withColumn("prediction", out.prediction.cast("double"))  # as Spark wants it
    areas = [
        BinaryClassificationEvaluator(labelCol="two", rawPredictionCol=name).evaluate(as_double)
        for name in ("rawPrediction", "probability", "prediction")
    ]
    assert areas[0] == pytest.approx(areas[1]) == pytest.approx(areas[2])
    cut = model.copy().setThreshold(0.5).transform(df)
    accuracy = MulticlassClassificationEvaluator(labelCol="two", metricName="accuracy").evaluate(cut)
    assert accuracy == pytest.approx(((p > 0.5) == column(rows, "two")).mean())
    logit = HorovodModel(model=nets.OneInput(2), feature_cols=["a", "b"], heads=["sigmoid"]).transform(df)
    row = logit.first()
    raw = row.rawPrediction[1]
    assert row.probability[1] == pytest.approx(1 / (1 + np.exp(-raw))) == pytest.approx(row.prediction)


@pytest.mark.parametrize("counts", [(10, 1), (1, 1), (10, 10, 2)])
def test_r37_every_row_is_predicted(spark: Any, counts: tuple[int, ...]) -> None:
    """Blocks of few rows: one partition holds each of them."""
    total = sum(counts)
    ids = spark.sparkContext.parallelize(
        [range(sum(counts[:i]), sum(counts[: i + 1])) for i in range(len(counts))], len(counts)
    )
    frame = ids.flatMap(lambda block: [(i, float(i)) for i in block]).toDF("id long, a double")
    assert sorted(frame.rdd.glom().map(len).collect()) == sorted(counts)
    model = HorovodModel(model=nets.OneInput(1), feature_cols=["a"], inference_batch_size=4)
    rows = model.transform(frame).collect()
    assert sorted(row.id for row in rows) == list(range(total))
    x = torch.tensor([[row.a] for row in rows])
    with torch.no_grad():
        want = model.getModel()(x)[:, 0].numpy()
    np.testing.assert_allclose([row.prediction for row in rows], want, rtol=1e-5)


def test_a_stream(spark: Any, df: Any, tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = HorovodModel(model=nets.OneInput(2, outputs=3), feature_cols=["a", "b"], heads=["softmax"])
    df.write.parquet(f"{tmp_path}/in")
    stream = model.transform(spark.readStream.schema(df.schema).parquet(f"{tmp_path}/in"))
    assert stream.isStreaming
    query = stream.writeStream.option("checkpointLocation", f"{tmp_path}/c").start(f"{tmp_path}/out")
    try:
        query.processAllAvailable()
    finally:
        query.stop()
    got = spark.read.parquet(f"{tmp_path}/out").orderBy("id").collect()
    assert got == model.transform(df).orderBy("id").collect()
    assert len(got) == 150


def test_empty_frame_of_a_classifier(spark: Any, df: Any) -> None:
    model = HorovodModel(model=nets.OneInput(2, outputs=3), feature_cols=["a", "b"], heads=["softmax"])
    empty, full = model.transform(df.limit(0)), model.transform(df)
    assert empty.schema == full.schema
    assert empty.collect() == []
