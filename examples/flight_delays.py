"""Arrival delays of the 336,776 flights that left New York in 2013, learnt on a Spark DataFrame by two ranks.

    python examples/flight_delays.py [--epochs 6] [--num-proc 2] [--out DIR]

What can be known before take-off goes in: carrier, route, calendar, timetable, and the weather at the origin
in the scheduled hour. A small torch net under L1 loss is compared, on days that it has not seen, with the
constant median and with Spark's linear regression on the same columns. Prints the comparison and writes
flight_delays.png and flight_delays.json.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from flights import CATEGORIES, IDS, LABEL, NUMBERS, SEED, DelayNet, TrainFacts, draw
from flights_spark import by_hour, embedded, errors_of, facts_of, prepare, report
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.feature import OneHotEncoder, StringIndexer, VectorAssembler
from pyspark.ml.regression import LinearRegression
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from torch import nn

from hvd_spark import HorovodEstimator


def fit_net(train: DataFrame, facts: TrainFacts, epochs: int, num_proc: int) -> PipelineModel:
    """Indexers, then the net on `num_proc` ranks. The same numbers in every run."""
    torch.manual_seed(SEED)  # for the first weights; the estimator's seed governs all that follows
    indexer = StringIndexer(inputCols=CATEGORIES, outputCols=IDS, handleInvalid="keep")
    estimator = HorovodEstimator(
        model=DelayNet(facts), optimizer=lambda parameters: torch.optim.Adam(parameters, lr=2e-3),
        loss=nn.L1Loss(), lr_schedule=lambda epoch: 0.6**epoch, feature_cols=[*IDS, *NUMBERS],
        input_columns=[*IDS, NUMBERS], label_cols=[LABEL], validation="validation",
        dtypes=dict.fromkeys(IDS, "int64"),  # StringIndexer makes doubles
        num_proc=num_proc, batch_size=512, epochs=epochs, seed=SEED,
    )  # fmt: skip
    return Pipeline(stages=[indexer, estimator]).fit(train)


def fit_linear(train: DataFrame) -> PipelineModel:
    """Spark's linear regression on the same columns, the categories one-hot."""
    hot = [f"{name}_hot" for name in CATEGORIES]
    stages = [
        StringIndexer(inputCols=CATEGORIES, outputCols=IDS, handleInvalid="keep"),
        OneHotEncoder(inputCols=IDS, outputCols=hot),
        VectorAssembler(inputCols=[*hot, *NUMBERS], outputCol="features"),
        LinearRegression(featuresCol="features", labelCol=LABEL, predictionCol="linear"),
    ]
    return Pipeline(stages=stages).fit(train)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--num-proc", type=int, default=2, help="ranks; Spark gets as many cores")
    parser.add_argument("--out", type=Path, default=Path(), help="where the .png and the .json go")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    spark = embedded(args.num_proc)
    try:
        print("Joining flights with the weather ...", flush=True)
        train, test = prepare(spark)
        facts = facts_of(train)
        print("Fitting the linear baseline ...", flush=True)
        linear = fit_linear(train)
        print(f"Training on {args.num_proc} ranks ...", flush=True)
        fit_started = time.monotonic()
        net = fit_net(train, facts, args.epochs, args.num_proc)
        fit_s = time.monotonic() - fit_started

        scored = net.transform(test).withColumn("median", F.lit(facts.median)).drop(*IDS)
        scored = linear.transform(scored).select("hour", LABEL, "prediction", "median", "linear").cache()
        history, result = net.stages[-1].history, net.stages[-1].result
        results = {
            "test": errors_of({"hvd": "prediction", "median": "median", "linear": "linear"}, scored),
            "rows": {"sent": result.rows_sent, "seen": result.rows_seen},
            "rows_per_s": sum(e["rows"] for e in history) / sum(e["seconds"] for e in history),
        }
        draw(history, by_hour(scored), args.out / "flight_delays.png")
    finally:
        spark.stop()
    results["seconds"] = {**result.seconds, "fit": fit_s, "total": time.monotonic() - started}
    (args.out / "flight_delays.json").write_text(json.dumps(results, indent=2) + "\n")
    print("\n" + report(results, args.num_proc))
    print(f"\nwritten: {args.out / 'flight_delays.png'}, {args.out / 'flight_delays.json'}")


if __name__ == "__main__":
    main()
