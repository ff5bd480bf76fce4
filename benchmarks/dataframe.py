"""`fit` and `transform` on a Spark DataFrame: taking rows, two ranks against one, small jobs, memory.

python benchmarks/dataframe.py [--quick]

An embedded Spark with two slots; memory is looked at in a `local-cluster`, whose driver holds no executor.
Without Spark: `shard.py`.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import pyarrow as pa
import report
import side_by_side
import torch
from pyspark import BarrierTaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T
from race import Times, ratio, take_turns

import hvd_spark
from hvd_core.config import Config
from hvd_core.launch import dumps
from hvd_core.train.torch_loop import TorchFramework
from hvd_spark import preflight, rows, session
from hvd_spark.estimator import PRELOAD
from hvd_spark.parcel import Parcel
from hvd_spark.task import JobPlan, barrier_task
from tests.spark import sessions

COLUMNS = 50
NAMES = [f"c{i}" for i in range(COLUMNS)]
MIB = 1 << 20


def frame_of(spark: SparkSession, count: int, cached: bool = True) -> DataFrame:
    """COLUMNS float features and a label that depends on them, in Spark's cache."""
    features = [(F.rand(i) - 0.5).cast("float").alias(name) for i, name in enumerate(NAMES)]
    frame = spark.range(0, count, 1, 2).select(*features)
    frame = frame.withColumn("y", sum((F.col(name) for name in NAMES[:10]), F.lit(0.0)).cast("float"))
    if cached:
        frame = frame.cache()
        assert frame.count() == count
    return frame


def mlp(width: int) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(COLUMNS, width), torch.nn.ReLU(), torch.nn.Linear(width, width // 2), torch.nn.ReLU(),
        torch.nn.Linear(width // 2, 1),
    )  # fmt: skip


def estimator(width: int, **values: Any) -> hvd_spark.HorovodEstimator:
    return hvd_spark.HorovodEstimator(
        model=mlp(width),
        optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-3),
        loss=torch.nn.MSELoss(),
        feature_cols=NAMES,
        label_cols=["y"],
        verbose=0,
        **values,
    )


# -- taking rows --


def stamped(take: Callable[[Iterator[pa.RecordBatch]], Iterator[Any]]) -> Callable[..., Any]:
    """A barrier task that calls `take` on its batches and yields when it began and when the last one had been
    dealt with."""

    def task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        begin = time.monotonic()
        ends: list[float] = []

        def until_the_last() -> Iterator[pa.RecordBatch]:
            yield from batches
            ends.append(time.monotonic())

        yield from take(until_the_last())
        rank = BarrierTaskContext.get().partitionId()
        yield rows.batch(rank, "stamp", repr(ends[0] - begin).encode())

    return task


def drain(batches: Iterator[pa.RecordBatch]) -> Iterator[Any]:
    for _ in batches:
        pass
    yield from ()


def ingest(spark: SparkSession, frame: DataFrame, turns: int) -> Times:
    """Seconds from the start of the slower of two barrier tasks to its shard, and to the end of a task that
    only reads. What the product runs in a task, with a rank that does nothing."""
    spec = estimator(64, num_proc=2)._spec()
    layout = preflight.check_columns(frame, spec)
    chosen = preflight.selected(frame, layout)

    def nothing(shard: Any, attempt: int) -> int:
        return int(shard.rows)

    def seconds(task: Callable[..., Any]) -> float:
        job = session.map_in_arrow(chosen.repartition(2), task, rows.DDL, barrier=True)
        found = job.collect()
        assert not [row for row in found if row.kind.startswith("failure")], found
        stamps = [float(bytes(row.data)) for row in found if row.kind == "stamp"]
        assert len(stamps) == 2
        return max(stamps)

    payload = Parcel.of(spark, dumps(nothing, (), names=["nothing"]))

    def pack() -> float:
        plan = JobPlan(
            2, os.urandom(32), payload, layout=layout, config=Config.from_env(),
            preload=(*TorchFramework.preload, *PRELOAD), sys_path=session.import_path(spark),
        )  # fmt: skip
        return seconds(stamped(lambda batches: barrier_task(plan, batches)))

    calls: dict[str, Callable[[], float | None]] = {
        "shard": pack,
        "only read": lambda: seconds(stamped(drain)),
    }
    take_turns(calls, 1)
    return take_turns(calls, turns)


# -- fit and transform --


def fits(frame: DataFrame, width: int, batch: int, turns: int) -> Times:
    """Seconds of `fit` by two ranks and by one, the same model: one epoch, the same joined batches."""

    def fit(num_proc: int) -> None:
        model = estimator(width, num_proc=num_proc, global_batch_size=batch, epochs=1).fit(frame)
        assert np.isfinite(model.history[-1]["loss"])

    calls = {f"fit, {n} rank{'s' * (n > 1)}": (lambda n=n: fit(n)) for n in (2, 1)}
    return take_turns(calls, turns)


def small_fits(spark: SparkSession, turns: int) -> Times:
    """A trivial fit in a session that has trained before, and a bare barrier stage."""
    frame = frame_of(spark, 200)
    trivial = estimator(16, num_proc=2, batch_size=32, epochs=3)

    def fit() -> None:
        trivial.fit(frame)

    def bare() -> None:
        def task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            BarrierTaskContext.get().barrier()
            yield from drain(batches)

        session.map_in_arrow(frame.repartition(2), task, rows.DDL, barrier=True).collect()

    calls: dict[str, Callable[[], None]] = {"trivial fit": fit, "bare barrier stage": bare}
    take_turns(calls, 1)
    return take_turns(calls, turns)


def transforms(frame: DataFrame, few: DataFrame, turns: int) -> Times:
    """Seconds of `transform` of `frame`, and of `few` rows one at a time, as Horovod's TorchModel does it."""
    net = mlp(128).eval()
    model = hvd_spark.HorovodModel(model=net, feature_cols=NAMES)

    def write(result: DataFrame) -> None:
        result.write.format("noop").mode("overwrite").save()

    def one_by_one(partition: Iterator[Any]) -> Iterator[Any]:
        torch.set_num_threads(1)
        with torch.no_grad():
            for row in partition:
                yield (*row, net(torch.tensor([row[name] for name in NAMES])).item())

    schema = T.StructType([*few.schema, T.StructField("prediction", T.DoubleType())])

    def each_alone() -> DataFrame:
        found = few.rdd.mapPartitions(one_by_one)
        return few.sparkSession.createDataFrame(found, schema, verifySchema=False)

    calls: dict[str, Callable[[], None]] = {
        "transform": lambda: write(model.transform(frame)),
        "mapPartitions, row by row": lambda: write(each_alone()),
    }
    take_turns(calls, 1)
    return take_turns(calls, turns)


# -- memory --


@dataclass
class Peaks:
    """In MiB. driver: this process and what lives on the JVM's heap; ranks: the Python processes of all
    tasks, memory that they share counted once."""

    driver: float = 0.0
    ranks: float = 0.0


class Watch:
    """Peaks of the memory while it is entered, looked at several times a second."""

    def __init__(self, spark: SparkSession):
        self._jvm = spark.sparkContext._jvm
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.peaks = Peaks()

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        runtime = self._jvm.java.lang.Runtime.getRuntime()
        while not self._over.wait(0.2):
            self.peaks.ranks = max(self.peaks.ranks, sum(map(proportional_mib, python_tasks())))
            self._jvm.java.lang.System.gc()
            heap = (runtime.totalMemory() - runtime.freeMemory()) / MIB
            own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            self.peaks.driver = max(self.peaks.driver, heap + own)


def python_tasks() -> list[int]:
    """The Python processes below the JVM that this process has started."""
    found, left = [], [(os.getpid(), False)]
    while left:
        pid, is_below = left.pop()
        try:
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            tasks = [int(t.name) for t in Path(f"/proc/{pid}/task").iterdir()]
            children = [c for t in tasks for c in Path(f"/proc/{pid}/task/{t}/children").read_text().split()]
        except OSError:
            continue
        if is_below and name != "java":
            found.append(pid)
        left += [(int(child), is_below or name == "java") for child in children]
    return found


def proportional_mib(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def memory(count: int) -> Peaks:
    """Of a fit by two ranks, in executors of their own, whose rows are made as they are read."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        os.environ["SPARK_HOME"] = sessions.home_of_links(home)
        sizes = {"spark.driver.memory": "1g", "spark.executor.memory": "2g"}
        spark = sessions.session("local-cluster[2,1,2048]", **sizes)
        with Watch(spark) as watch:
            estimator(64, num_proc=2, batch_size=1024, epochs=1).fit(frame_of(spark, count, cached=False))
        spark.stop()
    return watch.peaks


def memory_apart(count: int) -> Peaks:
    command = [sys.executable, __file__, "--memory", str(count)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Peaks(**json.loads(done.stdout.splitlines()[-1]))


# -- the figure --


def rows_of(times: Times, counts: dict[str, int], what: str) -> Iterator[dict[str, Any]]:
    first, second = times
    share, low, high = ratio(times[first], times[second])
    for name, each in times.items():
        seconds = float(np.median(each))
        yield {
            "what": what,
            "way": name,
            "rows": counts[name],
            "turns": len(each),
            "seconds": seconds,
            "rows/s": counts[name] / seconds,
            "of the other": share if name == first else None,
            "95%": f"{low:.3g}-{high:.3g}" if name == first else "",
        }


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--memory", type=int, help="only print the peaks of a fit of so many rows, as JSON")
    options = parser.parse_args()
    os.environ["PYSPARK_PYTHON"] = sys.executable
    warnings.filterwarnings("ignore", message="PySpark does not yet fully support pandas")
    if options.memory:
        print(json.dumps(asdict(memory(options.memory))))
        return
    figure = measured(options.quick)
    figure.publish()


def measured(quick: bool) -> report.Figure:
    figure = report.Figure("dataframe", "fit and transform on a Spark DataFrame, 2 slots", quick)
    load = side_by_side.Load()
    many, half, few = (4_000, 2_000, 500) if quick else (2_000_000, 1_000_000, 50_000)
    peaks = [memory_apart(count) for count in (many // 10, many)]
    spark = sessions.session(**{"spark.driver.memory": "6g"})
    trivial = small_fits(spark, 1 if quick else 9)
    figure.rows += rows_of(trivial, dict.fromkeys(trivial, 200), "trivial fit")
    frame = frame_of(spark, many)
    ingested = ingest(spark, frame, 1 if quick else 5)
    figure.rows += rows_of(ingested, dict.fromkeys(ingested, many), "take rows")
    fitted = fits(frame, 512, 2048, 1 if quick else 2)
    figure.rows += rows_of(fitted, dict.fromkeys(fitted, many), "one epoch")
    frame.unpersist()
    frame, part = frame_of(spark, half), frame_of(spark, few)
    served = transforms(frame, part, 1 if quick else 3)
    figure.rows += rows_of(served, dict(zip(served, (half, few), strict=True)), "transform")
    spark.stop()
    data = [count * (COLUMNS + 1) * 4 / MIB for count in (many // 10, many)]
    each = (peaks[1].ranks - data[1]) / 2
    growth = (peaks[1].driver - peaks[0].driver) / (data[1] - data[0])
    figure.targets = targets(trivial, ingested, fitted, served, half / few, each, growth)
    figure.notes = [
        f"{COLUMNS} float columns and a label, in Spark's cache; one thread a rank",
        f"one epoch: a whole `fit` of an MLP {COLUMNS}-512-256-1 with joined batches of 2048",
        f"memory, {many:,} rows ({data[1]:.0f} MiB packed): driver {peaks[1].driver:.0f} MiB",
        f"memory, a tenth of the rows: driver {peaks[0].driver:.0f} MiB",
        f"memory: all Python processes of two ranks {peaks[1].ranks:.0f} MiB",
    ]
    figure.foreign_cpu, figure.stolen_cpu = load.taken_by_others()
    return figure


def targets(
    trivial: Times, ingested: Times, fitted: Times, served: Times, more: float, each: float, growth: float
) -> list[report.Target]:
    """more: how many times the rows that were served one at a time."""
    seconds = {
        name: float(np.median(t))
        for times in (trivial, ingested, fitted, served)
        for name, t in times.items()
    }
    transform, by_row = (seconds[name] for name in served)
    two, one = (seconds[name] for name in fitted)
    return [
        report.Target("shard ready / only read", seconds["shard"] / seconds["only read"], 1.25, at_most=True),
        report.Target("fit by 1 rank / by 2", one / two, 1.6),
        report.Target("trivial warm fit, seconds", seconds["trivial fit"], 3, at_most=True),
        report.Target("transform / row by row, rows/s", by_row * more / transform, 5),
        report.Target("MiB of a rank above its shard", each, 300, at_most=True),
        report.Target("driver's growth / the data's", growth, 0.05, at_most=True),
    ]


if __name__ == "__main__":
    main()
