"""A driver of its own, in a process of its own: `python cluster_job.py MASTER WHAT`. Prints JSON lines.

WHAT: "cases" runs the acceptance cases that need separate executors; "sleep" waits to be interrupted, then
runs again.
"""

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


def spark_home(directory: str) -> str:
    """A SPARK_HOME of links: local-cluster writes its `work` folder there, not into the package."""
    import pyspark

    source = Path(pyspark.__file__).parent
    for name in ("bin", "sbin", "jars", "python", "data"):
        if (source / name).exists():
            (Path(directory) / name).symlink_to(source / name)
    return directory


def session(master: str) -> Any:
    from pyspark.sql import SparkSession

    made = (
        SparkSession.builder.master(master)
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.memory", "512m")
        .config("spark.executor.memory", "512m")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "2")
        .getOrCreate()
    )
    made.sparkContext.setLogLevel("OFF")
    return made


def tell(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def failure(fn: Any, *args: Any) -> dict[str, Any]:
    """How a run fails, and after how long."""
    import hvd_spark

    start = time.monotonic()
    try:
        hvd_spark.run(fn, args, num_proc=2)
    except hvd_spark.RankFailed as error:
        return {"text": str(error), "took_s": time.monotonic() - start}
    return {"text": "no failure", "took_s": time.monotonic() - start}


def cases(spark: Any, directory: Path) -> None:
    import hvd_spark
    from tests.spark import jobs

    got = hvd_spark.run(jobs.greet, ("hello",))  # first: an executor may register a while after the session
    executors = spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size() - 1
    tell(case="slots", executors=executors, got=got)
    tell(case="r33", fits=two_fits(spark))
    tell(case="r20", **failure(jobs.raise_on_one, str(directory), "token-20", "sleep"))
    gone = all(jobs.ended(pid) for pid in jobs.pids(directory).values())
    tell(case="r21", **failure(jobs.exit_hard, str(directory), "between"), gone=gone)
    tell(case="again", got=hvd_spark.run(jobs.reduce_rank, num_proc=2))


def two_fits(spark: Any) -> list[list[float]]:
    """The parameters of two fits on two ranks with one seed; the rows come out of a shuffle in any order."""
    import torch
    from pyspark.sql import functions as F
    from torch import nn

    from hvd_spark import HorovodEstimator
    from tests.spark import nets

    torch.manual_seed(33)
    df = spark.range(0, 400, 1, 4).select(
        *(((F.col("id") * k) % 97 / 97).alias(c) for k, c in ((3, "a"), (7, "b")))
    )
    est = HorovodEstimator(
        model=nets.OneInput(2), optimizer=nets.adam, loss=nn.MSELoss(), feature_cols=["a", "b"],
        label_cols="b", num_proc=2, batch_size=20, epochs=3,
    )  # fmt: skip
    return [nets.parameters_of(est.fit(df).getModel()).tolist() for _ in range(2)]


def sleep(directory: Path, fifo: str) -> None:
    import hvd_spark
    from tests.spark import jobs

    try:
        hvd_spark.run(jobs.sleep_and_say, (str(directory), fifo), num_proc=2)
    except KeyboardInterrupt:
        tell(case="interrupted", gone=all(jobs.ended(pid) for pid in jobs.pids(directory).values()))
    tell(case="again", got=hvd_spark.run(jobs.reduce_rank, num_proc=2))


def main() -> None:
    master, what, *rest = sys.argv[1:]
    with tempfile.TemporaryDirectory() as directory:
        home, seen = Path(directory) / "home", Path(directory) / "seen"
        home.mkdir()
        seen.mkdir()
        os.environ["SPARK_HOME"] = spark_home(str(home))
        spark = session(master)
        try:
            cases(spark, seen) if what == "cases" else sleep(seen, *rest)
        finally:
            spark.stop()


if __name__ == "__main__":
    main()
