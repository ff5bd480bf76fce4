"""The flights on Spark: the session, the join with the weather, and what predictions are measured by."""

from __future__ import annotations

import os
import sys
import warnings

from flights import CATEGORIES, LABEL, NUMBERS, SEED, WEATHER, TrainFacts, read_tables
from pyspark.ml.feature import Imputer
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F


def embedded(cores: int) -> SparkSession:
    # The data package brings pandas, which nothing here uses.
    warnings.filterwarnings("ignore", message="PySpark does not yet fully support pandas")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spark = (
        SparkSession.builder.master(f"local[{cores}]")
        .appName("flight_delays")
        .config("spark.driver.memory", "700m")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", 2 * cores)
        .config("spark.ui.enabled", False)
        .config("spark.ui.showConsoleProgress", False)
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def prepare(spark: SparkSession) -> tuple[DataFrame, DataFrame]:
    """(train, test): flights joined with the weather, split by day, gaps in the weather filled.

    A fifth of the days is the test, a tenth of the others is marked `validation`: rows of one day share its
    storms, so a split by rows would let the net see the answer.
    """
    flights, weather = map(spark.createDataFrame, read_tables())
    date = F.make_date(F.lit(2013), "month", "day")
    arrives = F.col("sched_arr_time")
    rows = (
        flights.join(weather, ["origin", "time_hour"], "left")
        .dropna(subset=[LABEL])
        .withColumn(LABEL, F.col(LABEL).cast("double"))
        .withColumn("weekday", F.dayofweek(date))
        .withColumn("yearday", F.dayofyear(date))
        .withColumn("departs_min", F.col("hour") * 60 + F.col("minute"))
        .withColumn("arrives_min", F.floor(arrives / 100) * 60 + arrives % 100)
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
