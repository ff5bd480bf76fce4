"""A Spark Connect client with a server of its own, in a process of its own. Prints JSON lines."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ["PYSPARK_PYTHON"] = sys.executable
os.environ["PYTHONPATH"] = str(ROOT)  # the server's workers find the tests' modules
os.environ["SPARK_TESTING"] = "1"  # any free port


def session() -> Any:
    from pyspark.sql import SparkSession

    return (
        SparkSession.builder.remote("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.memory", "1g")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.dynamicAllocation.enabled", "true")  # which Spark ignores in one process
        .getOrCreate()
    )


def tell(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def failure(fn: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    start = time.monotonic()
    try:
        fn(*args, **kwargs)
    except Exception as error:  # noqa: BLE001  told to the test
        return {"kind": type(error).__name__, "text": str(error), "took_s": time.monotonic() - start}
    return {"kind": "", "text": "no failure", "took_s": time.monotonic() - start}


def frame(spark: Any) -> Any:
    rows = [(i % 10 / 10, i % 7 / 7, 2.0 * (i % 10) / 10 - i % 7 / 7, i % 2) for i in range(200)]
    return spark.createDataFrame(rows, "a double, b double, y double, k long").repartition(2)


def estimator(**options: Any) -> Any:
    import torch
    from torch import nn

    from hvd_spark import HorovodEstimator
    from tests.spark import nets

    torch.manual_seed(4)
    defaults = {
        "model": nets.OneInput(2), "optimizer": nets.sgd, "loss": nn.MSELoss(), "feature_cols": ["a", "b"],
        "label_cols": "y", "num_proc": 2, "batch_size": 50, "epochs": 2,
    }  # fmt: skip
    return HorovodEstimator(**{**defaults, **options})


def weights(model: Any) -> list[float]:
    from tests.spark import nets

    return nets.parameters_of(model.getModel()).tolist()


def predictions(stage: Any, df: Any) -> list[float]:
    return sorted(row.prediction for row in stage.transform(df).select("prediction").collect())


def run_cases(spark: Any) -> None:
    import hvd_spark
    from tests.spark import jobs

    tell(case="run", got=hvd_spark.run(jobs.reduce_rank, num_proc=2))
    tell(case="too many", **failure(hvd_spark.run, jobs.reduce_rank, num_proc=4))
    tell(case="raises", **failure(hvd_spark.run, jobs.undefined_name, (tempfile.gettempdir(),), num_proc=2))


def preflight_case(spark: Any) -> None:
    """As on a cluster: what the client can read of the server's settings."""
    import hvd_spark
    from hvd_spark import session as ours
    from tests.spark import jobs

    real, ours.is_local_master = ours.is_local_master, lambda master: False
    try:
        tell(case="dynamic", **failure(hvd_spark.run, jobs.reduce_rank, num_proc=2))
    finally:
        ours.is_local_master = real


def stage_cases(spark: Any, folder: str) -> None:
    from hvd_spark import HorovodEstimator, HorovodModel

    df, est = frame(spark), estimator()
    model = est.fit(df)
    tell(case="fit", weights=weights(model), history=model.history[-1]["rows"])
    for stage, cls in ((est, HorovodEstimator), (model, HorovodModel)):
        for _ in range(2):
            stage.write().overwrite().save(f"{folder}/stage")
        back = cls.load(f"{folder}/stage")
        same = weights(back.fit(df) if cls is HorovodEstimator else back) == weights(model)
        tell(case=cls.__name__, same=same)
    tell(
        case="predictions",
        before=predictions(model, df),
        after=predictions(back, df),
        history=len(back.history),
    )
    tell(case="empty", got=back.transform(df.limit(0)).collect())


def pipeline_cases(spark: Any, folder: str) -> None:
    from pyspark.ml import Pipeline, PipelineModel
    from pyspark.ml.evaluation import MulticlassClassificationEvaluator, RegressionEvaluator
    from pyspark.ml.feature import VectorAssembler
    from pyspark.ml.tuning import CrossValidator, CrossValidatorModel, ParamGridBuilder
    from torch import nn

    from tests.spark import nets

    df = frame(spark)
    assembler = VectorAssembler(inputCols=["a", "b"], outputCol="f")
    classifier = estimator(
        model=nets.OneInput(2, outputs=2), loss=nn.CrossEntropyLoss(), feature_cols="f", label_cols="k"
    )
    pipeline = Pipeline(stages=[assembler, classifier])
    fitted = pipeline.fit(df)
    accuracy = MulticlassClassificationEvaluator(labelCol="k", metricName="accuracy").evaluate(
        fitted.transform(df)
    )
    for stage in (pipeline, fitted):
        stage.write().overwrite().save(f"{folder}/{type(stage).__name__}")
    back = PipelineModel.load(f"{folder}/PipelineModel")
    same = predictions(back, df) == predictions(fitted, df)
    uid = Pipeline.load(f"{folder}/Pipeline").getStages()[1].uid
    tell(case="pipeline", same=same, accuracy=accuracy, uid=uid == classifier.uid)

    est = estimator()
    grid = ParamGridBuilder().addGrid(est.learningRate, [1e-6, 0.4]).build()
    validator = CrossValidator(
        estimator=est, estimatorParamMaps=grid, evaluator=RegressionEvaluator(labelCol="y"), numFolds=2,
        parallelism=2, seed=1,
    )  # fmt: skip
    found = validator.fit(df)
    found.write().overwrite().save(f"{folder}/cv")
    back_cv = CrossValidatorModel.load(f"{folder}/cv")
    tell(
        case="cv",
        metrics=[float(m) for m in found.avgMetrics],
        same=weights(back_cv.bestModel) == weights(found.bestModel),
        best=weights(found.bestModel) == weights(est.fit(df, grid[1])),
    )


def large_case(spark: Any, folder: str) -> None:
    """36 M parameters, 144 MB: above every limit of a message."""
    import torch
    from torch import nn

    from hvd_spark import HorovodModel
    from tests.spark import nets

    df = frame(spark).limit(20)
    net = nn.Sequential(nn.Linear(2, 6000), nn.Linear(6000, 6000), nn.Linear(6000, 1))
    model = estimator(model=net, epochs=1, batch_size=10).fit(df)
    model.save(f"{folder}/large")
    back = HorovodModel.load(f"{folder}/large")
    first, second = (nets.parameters_of(m.getModel()) for m in (model, back))
    tell(case="large", same=torch.equal(first, second), rows=len(predictions(back, df)))


def busy_case(spark: Any) -> None:
    """Another job of this session holds both slots."""
    import threading

    import pyarrow as pa

    import hvd_spark
    from tests.spark import jobs

    with tempfile.TemporaryDirectory() as folder:
        fifo = f"{folder}/hold"
        os.mkfifo(fifo)

        def hold(batches: Any) -> Any:
            with open(fifo) as pipe:
                pipe.read()
            yield pa.RecordBatch.from_pydict({"x": [1]})

        held = spark.range(0, 2, 1, 2).mapInArrow(hold, "x long")
        holder = threading.Thread(target=held.collect)
        holder.start()
        with open(fifo, "w"):
            tell(case="busy", **failure(hvd_spark.run, jobs.reduce_rank, num_proc=2, start_timeout_s=8.0))
        holder.join(30)
    tell(case="after", got=hvd_spark.run(jobs.reduce_rank, num_proc=2))


def main() -> None:
    spark = session()
    with tempfile.TemporaryDirectory() as folder:
        try:
            run_cases(spark)
            preflight_case(spark)
            stage_cases(spark, folder)
            pipeline_cases(spark, folder)
            large_case(spark, folder)
            busy_case(spark)
        finally:
            spark.stop()


if __name__ == "__main__":
    main()
