"""A driver of its own, in a process of its own: `python cluster_job.py MASTER WHAT`. Prints JSON lines.

WHAT: "cases" runs what needs separate executors; "gpus" what needs several ranks on each of them, and GPUs;
"sleep" waits to be interrupted, then runs again.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.spark import sessions

os.environ["PYSPARK_PYTHON"] = sys.executable


def session(master: str, **settings: str) -> Any:
    sizes = {"spark.driver.memory": "512m", "spark.executor.memory": "512m"}
    return sessions.session(master, **sizes, **settings)


def gpu_settings(directory: str) -> dict[str, str]:
    """A machine that says it has the GPUs 0 and 1, where executors see them as 6 and 7."""
    script = Path(directory) / "gpus.sh"
    script.write_text("""#!/bin/sh\necho '{"name": "gpu", "addresses": ["0", "1"]}'\n""")
    script.chmod(0o755)
    found = {"amount": "2", "discoveryScript": str(script)}
    return {
        **{
            f"spark.{who}.resource.gpu.{key}": value
            for who in ("worker", "executor")
            for key, value in found.items()
        },
        "spark.executorEnv.CUDA_VISIBLE_DEVICES": "6,7",
        "spark.authenticate": "true",
        "spark.authenticate.secret": "not told",
        "spark.network.crypto.enabled": "true",
    }


def tell(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def failure(fn: Any, *args: Any, **options: Any) -> dict[str, Any]:
    """How a run fails, and after how long."""
    import hvd_spark

    start = time.monotonic()
    try:
        hvd_spark.run(fn, args, **{"num_proc": 2, **options})
    except hvd_spark.HvdError as error:
        return {"kind": type(error).__name__, "text": str(error), "took_s": time.monotonic() - start}
    return {"kind": "", "text": "no failure", "took_s": time.monotonic() - start}


def cases(spark: Any, directory: Path) -> None:
    import hvd_spark
    from tests.spark import jobs

    got = hvd_spark.run(jobs.greet, ("hello",))  # first: an executor may register a while after the session
    executors = spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size() - 1
    tell(case="slots", executors=executors, got=got)
    tell(case="r33", fits=two_fits(spark))
    transform_case(spark)
    unreachable_case(directory)
    tell(case="r20", **failure(jobs.raise_on_one, str(directory), "token-20", "sleep"))
    gone = all(jobs.ended(pid) for pid in jobs.pids(directory).values())
    tell(case="r21", **failure(jobs.exit_hard, str(directory), "between"), gone=gone)
    tell(case="worker", **failure(jobs.kill_worker, fresh(directory, "worker")))
    died = fresh(directory, "executor")
    tell(case="executor", **failure(jobs.kill_executor, died))
    tell(case="executor gone", gone=all(jobs.ended(pid) for pid in jobs.pids(Path(died)).values()))
    tell(case="again", got=hvd_spark.run(jobs.reduce_rank, num_proc=2))
    retry_case(spark, directory)


def fresh(directory: Path, name: str) -> str:
    (directory / name).mkdir()
    return str(directory / name)


def transform_case(spark: Any) -> None:
    import torch

    from hvd_spark import HorovodModel
    from tests.spark import nets

    torch.manual_seed(1)
    net = nets.OneInput(2)
    df = spark.range(0, 1000, 1, 4).selectExpr("id", "cast(id % 7 as double) a", "cast(id % 11 as double) b")
    rows = HorovodModel(model=net, feature_cols=["a", "b"]).transform(df).collect()
    with torch.no_grad():
        want = net(torch.tensor([[row.a, row.b] for row in rows], dtype=torch.float32)).flatten().tolist()
    error = max(abs(row.prediction - w) for row, w in zip(rows, want, strict=True))
    tell(case="transform", rows=len(rows), error=error)


def unreachable_case(directory: Path) -> None:
    """No executor can connect to the driver: 198.51.100.0/24 is nowhere (RFC 5737)."""
    import hvd_spark
    from hvd_spark import session as ours
    from tests.spark import jobs

    real, ours.driver_host = ours.driver_host, lambda spark: ("198.51.100.1", False)
    try:
        got = hvd_spark.run(jobs.reduce_rank, num_proc=2)
        told = failure(jobs.raise_on_one, fresh(directory, "alone"), "token-alone", "sleep")
        tell(case="unreachable", got=got, **told)
    finally:
        ours.driver_host = real


class KillExecutorOnce:
    """In the first step after the second checkpoint, rank 1's."""

    def __init__(self, path: str):
        self.path = path

    def on_batch_end(self, run: Any, batch: Any) -> None:
        if run.rank == 1 and run.step == 9 and not os.path.exists(self.path):
            from tests.spark import jobs

            Path(self.path).touch()
            jobs.end_executor()
            time.sleep(60)


def retry_case(spark: Any, directory: Path) -> None:
    """An executor dies in mid-epoch, and its successor goes on."""
    from tests.spark import nets

    df, start = cluster_frame(spark), time.monotonic()
    whole = estimator().fit(df)
    retried = estimator(
        checkpoint_dir=str(directory / "run"), checkpoint_every=4, row_order="global",
        callbacks=[KillExecutorOnce(str(directory / "killed"))],
    ).fit(df, max_retries=1)  # fmt: skip
    tell(
        case="retry",
        killed=(directory / "killed").exists(),
        summary=retried.summary.summary,
        same=nets.parameters_of(whole.getModel()).tolist() == nets.parameters_of(retried.getModel()).tolist(),
        rows=[entry["rows"] for entry in retried.history],
        took_s=time.monotonic() - start,
    )


def cluster_frame(spark: Any) -> Any:
    return spark.range(0, 400, 1, 4).selectExpr("(id * 3) % 97 / 97.0D a", "(id * 7) % 97 / 97.0D b")


def estimator(**options: Any) -> Any:
    import torch
    from torch import nn

    from hvd_spark import HorovodEstimator
    from tests.spark import nets

    torch.manual_seed(33)
    defaults = {"num_proc": 2, "batch_size": 50, "row_order": "global", "epochs": 3}
    return HorovodEstimator(
        model=nets.OneInput(2), optimizer=nets.adam, loss=nn.MSELoss(), feature_cols=["a", "b"],
        label_cols="b", **{**defaults, **options},
    )  # fmt: skip


def gpu_cases(spark: Any) -> None:
    """Two executors with two CPUs and two GPUs each; encryption is on."""
    import hvd_spark
    from tests.spark import jobs

    tell(case="encrypted", **failure(jobs.reduce_rank))
    os.environ["HVD_PLAIN_TEXT"] = "1"
    tell(case="gpus", got=hvd_spark.run(jobs.see_gpus, num_proc=4))
    tell(case="too many", **failure(jobs.reduce_rank, num_proc=5))
    tell(case="own mask", got=hvd_spark.run(jobs.see_gpus, num_proc=2, env={"CUDA_VISIBLE_DEVICES": "9"}))
    from tests.spark import nets  # imports torch, which ranks then have from their template

    df = cluster_frame(spark)
    two, four = (estimator(num_proc=n, batch_size=400 // n).fit(df) for n in (2, 4))
    apart = (nets.parameters_of(two.getModel()) - nets.parameters_of(four.getModel())).abs().max()
    tell(case="fit", apart=float(apart))


def two_fits(spark: Any) -> list[list[float]]:
    """The parameters of two fits on two ranks with one seed; the rows come out of a shuffle in any order."""
    from tests.spark import nets

    df = cluster_frame(spark)
    est = estimator(batch_size=20, row_order="shard")
    return [nets.parameters_of(est.fit(df).getModel()).tolist() for _ in range(2)]


def sleep(directory: Path, fifo: str) -> None:
    import hvd_spark
    from tests.spark import jobs

    try:
        hvd_spark.run(jobs.sleep_and_say, (str(directory), fifo), num_proc=2)
    except KeyboardInterrupt:
        tell(case="interrupted", gone=all(jobs.ended(pid, 0.5) for pid in jobs.pids(directory).values()))
    tell(case="again", got=hvd_spark.run(jobs.reduce_rank, num_proc=2))


def main() -> None:
    master, what, *rest = sys.argv[1:]
    with tempfile.TemporaryDirectory() as directory:
        home, seen = Path(directory) / "home", Path(directory) / "seen"
        home.mkdir()
        seen.mkdir()
        os.environ["SPARK_HOME"] = sessions.home_of_links(home)
        spark = session(master, **(gpu_settings(directory) if what == "gpus" else {}))
        try:
            if what == "cases":
                cases(spark, seen)
            elif what == "gpus":
                gpu_cases(spark)
            else:
                sleep(seen, *rest)
        finally:
            spark.stop()


if __name__ == "__main__":
    main()
