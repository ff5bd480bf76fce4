"""fit, transform, save and load on the Spark of this interpreter: `make test-oldest`. Fails by assertion."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ["PYSPARK_PYTHON"] = sys.executable
os.environ.pop("SPARK_HOME", None)


def main() -> None:
    import pyspark
    import torch
    from pyspark.ml import Pipeline, PipelineModel
    from pyspark.ml.evaluation import MulticlassClassificationEvaluator
    from pyspark.ml.feature import VectorAssembler
    from torch import nn

    import hvd_spark
    from tests.spark import jobs, nets
    from tests.spark.sessions import session

    spark = session()
    try:
        assert hvd_spark.run(jobs.reduce_rank, num_proc=2) == [3.0, 3.0]
        df = spark.createDataFrame(
            [(i % 10 / 10, i % 7 / 7, i % 2) for i in range(100)], "a double, b double, k long"
        )
        torch.manual_seed(1)
        estimator = hvd_spark.HorovodEstimator(
            model=nets.OneInput(2, outputs=2), optimizer=nets.adam, loss=nn.CrossEntropyLoss(),
            feature_cols="f", label_cols="k", num_proc=2, batch_size=25, epochs=2,
        )  # fmt: skip
        assembler = VectorAssembler(inputCols=["a", "b"], outputCol="f")
        fitted = Pipeline(stages=[assembler, estimator]).fit(df)
        out = fitted.transform(df)
        rows = out.orderBy("a", "b").collect()
        net = fitted.stages[-1].getModel()
        with torch.no_grad():
            want = net(torch.tensor([[r.a, r.b] for r in rows], dtype=torch.float32)).argmax(1).tolist()
        assert [r.prediction for r in rows] == want
        MulticlassClassificationEvaluator(labelCol="k", metricName="logLoss").evaluate(out)
        with tempfile.TemporaryDirectory() as folder:
            for _ in range(2):
                fitted.write().overwrite().save(f"{folder}/p")
            back = PipelineModel.load(f"{folder}/p")
            assert back.transform(df).orderBy("a", "b").collect() == rows
            assert back.stages[-1].history == fitted.stages[-1].history
        print(f"fit, transform, save and load are right on pyspark {pyspark.__version__}")
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
