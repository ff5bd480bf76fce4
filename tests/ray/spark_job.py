"""Rows go from Spark to Ray, Spark is stopped, Ray trains on them. Prints one line of JSON."""

from __future__ import annotations

import json
import os
import sys
import time

os.environ["PYSPARK_PYTHON"] = sys.executable

import ray
import torch
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import hvd_ray
from hvd_ray.spark import from_spark


def main() -> None:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=200 << 20)
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.memory", "1g")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    x = (F.col("id") / 10_000).cast("float")
    frame = spark.range(10_000).select("id", x.alias("x"), (x * 2 + 1).alias("y")).repartition(4)
    rows = from_spark(frame)
    more = frame.limit(100)
    empty = from_spark(frame.where("id < 0"))
    apart = from_spark(more)
    spark.stop()
    began = time.monotonic()
    estimator = hvd_ray.HorovodEstimator(
        model=torch.nn.Linear(1, 1),
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
        loss=torch.nn.MSELoss(),
        feature_cols=["x"],
        label_cols="y",
        batch_size=100,
        epochs=2,
        num_proc=2,
        verbose=0,
    )
    model = estimator.fit(rows)
    predicted = model.predict(apart)
    del apart
    print(
        json.dumps(
            {
                "rows": rows.count(),
                "empty": [empty.count(), empty.columns()],
                "ids": sum(row["id"] for row in rows.take_all()),
                "predicted": len(predicted.take_all()),
                "seen": model.result.rows_seen,
                "loss": model.history[-1]["loss"],
                "seconds": time.monotonic() - began,
            }
        )
    )


if __name__ == "__main__":
    main()
