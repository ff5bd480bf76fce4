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
import os
import sys
import time
import warnings
from pathlib import Path

import torch
from flights import CATEGORIES, IDS, LABEL, NUMBERS, SEED, WEATHER, DelayNet, TrainFacts, draw, read_tables
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.feature import Imputer, OneHotEncoder, StringIndexer, VectorAssembler
from pyspark.ml.regression import LinearRegression
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from torch import nn

import hvd_spark


def prepare(spark: SparkSession) -> tuple[DataFrame, DataFrame]:
    """(train, test): flights joined with the weather, split by day, gaps in the weather filled.

    A fifth of the days is the test, a tenth of the others is marked `validation`: rows of one day share its
    storms, so a split by rows would let the net see the answer.
    """
    flights, weather = map(spark.createDataFrame, read_tables())
    date = F.make_date(F.lit(2013), "month", "day")
    rows = (
        flights.join(weather, ["origin", "time_hour"], "left")
        .dropna(subset=[LABEL])
        .withColumn(LABEL, F.col(LABEL).cast("double"))
        .withColumn("weekday", F.dayofweek(date))
        .withColumn("yearday", F.dayofyear(date))
        .withColumn("departs_min", F.col("hour") * 60 + F.col("minute"))
        .withColumn(
            "arrives_min", F.floor(F.col("sched_arr_time") / 100) * 60 + F.col("sched_arr_time") % 100
        )
        .withColumn("is_test", F.pmod(F.xxhash64(F.lit(SEED), "yearday"), F.lit(5)) == 0)
        .withColumn("validation", F.pmod(F.xxhash64(F.lit(SEED + 1), "yearday"), F.lit(10)) == 0)
        .cache()
    )
    train = rows.filter("not is_test")
    fill = Imputer(inputCols=WEATHER, outputCols=WEATHER, strategy="median").fit(train)
    return fill.transform(train), fill.transform(rows.filter("is_test"))


def facts_of(train: DataFrame) -> TrainFacts:
    row = train.agg(
        *(F.countDistinct(name) for name in CATEGORIES),
        *(F.mean(name) for name in NUMBERS),
        *(F.stddev(name) for name in NUMBERS),
        F.percentile_approx(LABEL, 0.5),
    ).first()
    assert row is not None
    values = iter(row)
    return TrainFacts(
        levels=[next(values) + 1 for _ in CATEGORIES],
        mean=[next(values) for _ in NUMBERS],
        std=[next(values) for _ in NUMBERS],
        median=next(values),
    )


def fit_net(train: DataFrame, facts: TrainFacts, epochs: int, num_proc: int) -> PipelineModel:
    """Indexers, then the net on `num_proc` ranks. The same numbers in every run."""
    torch.manual_seed(SEED)  # for the first weights; the estimator's seed governs all that follows
    indexer = StringIndexer(inputCols=CATEGORIES, outputCols=IDS, handleInvalid="keep")
    estimator = hvd_spark.HorovodEstimator(
        model=DelayNet(facts),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=2e-3),
        loss=nn.L1Loss(),
        lr_schedule=lambda epoch: 0.6**epoch,
        feature_cols=[*IDS, *NUMBERS],
        input_columns=[*IDS, NUMBERS],
        label_cols=[LABEL],
        dtypes=dict.fromkeys(IDS, "int64"),  # StringIndexer makes doubles
        validation="validation",
        num_proc=num_proc,
        batch_size=512,
        epochs=epochs,
        seed=SEED,
    )
    return Pipeline(stages=[indexer, estimator]).fit(train)


def fit_linear(train: DataFrame) -> PipelineModel:
    """Spark's linear regression on the same columns, the categories one-hot."""
    hot = [f"{name}_hot" for name in CATEGORIES]
    return Pipeline(
        stages=[
            StringIndexer(inputCols=CATEGORIES, outputCols=IDS, handleInvalid="keep"),
            OneHotEncoder(inputCols=IDS, outputCols=hot),
            VectorAssembler(inputCols=[*hot, *NUMBERS], outputCol="features"),
            LinearRegression(featuresCol="features", labelCol=LABEL, predictionCol="linear"),
        ]
    ).fit(train)


def errors_of(columns: dict[str, str], scored: DataFrame) -> dict[str, dict[str, float]]:
    """name → mean absolute error and root mean squared error, in minutes, of each prediction column."""
    measures = []
    for name, column in columns.items():
        error = F.col(column) - F.col(LABEL)
        measures.append(F.mean(F.abs(error)).alias(f"{name} mae"))
        measures.append(F.sqrt(F.mean(error * error)).alias(f"{name} rmse"))
    row = scored.agg(*measures).first()
    assert row is not None
    return {name: {kind: row[f"{name} {kind}"] for kind in ("mae", "rmse")} for name in columns}


def by_hour(scored: DataFrame) -> list[Row]:
    """Medians of truth and prediction, and the truth's quartiles, for each hour with 100 flights or more."""
    quartiles = F.percentile_approx(LABEL, [0.25, 0.5, 0.75])
    return (
        scored.groupBy("hour")
        .agg(F.count("*").alias("n"), quartiles.alias("true"), F.median("prediction").alias("predicted"))
        .filter("n >= 100")
        .orderBy("hour")
        .collect()
    )


def report(results: dict, num_proc: int) -> str:
    """The figures as text."""
    seconds, rows = results["seconds"], results["rows"]
    names = {
        "hvd": f"hvd, {num_proc} ranks (embeddings, 128-64, L1)",
        "median": "constant median",
        "linear": "pyspark.ml LinearRegression",
    }
    lines = [
        f"rows        {rows['sent']:,} sent by Spark, {rows['seen']:,} seen by the ranks in an epoch",
        f"speed       {results['rows_per_s']:,.0f} rows/s",
        "a rank's    " + ", ".join(f"{k} {seconds[k]:.1f} s" for k in ("data", "compute", "communication")),
        f"wall clock  fit {seconds['fit']:.1f} s, everything {seconds['total']:.1f} s",
        "",
        f"{'arrival delay on unseen days, minutes':<42}{'MAE':>8}{'RMSE':>8}",
        *(f"{names[k]:<42}{e['mae']:>8.2f}{e['rmse']:>8.2f}" for k, e in results["test"].items()),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument(
        "--num-proc", type=int, default=2, help="ranks; the embedded Spark gets as many cores"
    )
    parser.add_argument("--out", type=Path, default=Path(), help="where the .png and the .json go")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    # The data package brings pandas, which nothing here uses.
    warnings.filterwarnings("ignore", message="PySpark does not yet fully support pandas")

    started = time.monotonic()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spark = (
        SparkSession.builder.master(f"local[{args.num_proc}]")
        .appName("flight_delays")
        .config("spark.driver.memory", "700m")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", 2 * args.num_proc)
        .config("spark.ui.enabled", False)
        .config("spark.ui.showConsoleProgress", False)
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
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
        trained = net.stages[-1]

        scored = net.transform(test).withColumn("median", F.lit(facts.median)).drop(*IDS)
        scored = linear.transform(scored).select("hour", LABEL, "prediction", "median", "linear").cache()
        results = {
            "test": errors_of({"hvd": "prediction", "median": "median", "linear": "linear"}, scored),
            "rows": {"sent": trained.result.rows_sent, "seen": trained.result.rows_seen},
            "rows_per_s": sum(e["rows"] for e in trained.history)
            / sum(e["seconds"] for e in trained.history),
            "seconds": {**trained.result.seconds, "fit": fit_s, "total": time.monotonic() - started},
        }
        draw(trained.history, by_hour(scored), args.out / "flight_delays.png")
    finally:
        spark.stop()
    results["seconds"]["total"] = time.monotonic() - started
    (args.out / "flight_delays.json").write_text(json.dumps(results, indent=2) + "\n")
    print("\n" + report(results, args.num_proc))
    print(f"\nwritten: {args.out / 'flight_delays.png'}, {args.out / 'flight_delays.json'}")


if __name__ == "__main__":
    main()
