"""What can be known before anything is launched: each finding is an error that says what to do."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys

from pyspark.sql import DataFrame, SparkSession

from hvd_core.config import Config
from hvd_core.errors import (
    ColumnError,
    DataError,
    InvalidArgument,
    NotEnoughSlots,
    PlainTextRefused,
    PreflightError,
)
from hvd_core.train import Column, Layout, TrainSpec, plan_layout

from . import gpus, session
from .columns import columns_of, with_shapes_of


def check_cluster(spark: SparkSession, num_proc: int | None) -> int:
    """The number of ranks: `num_proc`, or as many as there are slots. Raises NotEnoughSlots,
    PreflightError."""
    if num_proc is not None and (not isinstance(num_proc, int) or num_proc < 1):
        raise PreflightError(f"num_proc must be a whole number of at least 1, not {num_proc!r}")
    _check_dynamic_allocation(spark)
    check_interpreter(spark)
    _check_encryption(spark, num_proc)
    found = gpus.slots(spark, num_proc)
    available = found.count
    if num_proc is None:
        if not available:
            raise PreflightError(
                "num_proc is not given and the number of slots is unknown here; set num_proc"
            )
        return available
    if available is not None and available < num_proc and found.profile is not None:
        raise NotEnoughSlots(
            f"{num_proc} ranks need {num_proc} GPUs that are free at the same time, but there are GPUs for "
            f"{available}: set num_proc to at most {available}, or let ranks share a GPU "
            "(spark.task.resource.gpu.amount=0.5, ...)"
        )
    if available is not None and available < num_proc:
        raise NotEnoughSlots(
            f"{num_proc} ranks need {num_proc} slots that are free at the same time, but the cluster has "
            f"{available}: set num_proc to at most {available}, or give Spark more cores (local[{num_proc}], "
            "more executors, or a smaller spark.task.cpus)"
        )
    return num_proc


#: What makes Spark encrypt what its processes say to each other.
_ENCRYPTED = (
    "spark.ssl.enabled",
    "spark.ssl.rpc.enabled",
    "spark.network.crypto.enabled",
    "spark.authenticate.enableSaslEncryption",
)


def encrypted(spark: SparkSession) -> str | None:
    """The setting by which this cluster encrypts what crosses the network."""
    if session.is_local_master(session.setting(spark, "spark.master")):
        return None  # one process; nothing leaves it
    return next((key for key in _ENCRYPTED if session.setting(spark, key).lower() == "true"), None)


def _check_encryption(spark: SparkSession, num_proc: int | None) -> None:
    setting = encrypted(spark)
    if setting is None or num_proc == 1 or Config.from_env().plain_text:
        return
    raise PlainTextRefused(
        f"{setting}=true asks for encryption, and ranks on different hosts talk to each other without it "
        "(they authenticate, but gradients and weights can be read on the network): if that network is "
        "trusted, set HVD_PLAIN_TEXT=1; num_proc=1 needs none"
    )


def _check_dynamic_allocation(spark: SparkSession) -> None:
    # Under Connect the server's settings are those of the session; where they are not to be read
    # (serverless) Spark itself refuses, and says so.
    if session.is_local_master(session.setting(spark, "spark.master")):
        return
    if session.setting(spark, "spark.dynamicAllocation.enabled", "false").lower() == "true":
        raise PreflightError(
            "Spark refuses barrier stages under dynamic allocation (SPARK-24942): start the session with "
            "spark.dynamicAllocation.enabled=false and a fixed spark.executor.instances"
        )


def check_interpreter(spark: SparkSession) -> None:
    """Where executors run on this machine their interpreter can be tried; elsewhere the tasks' own error
    names it. Raises PreflightError."""
    context = session.context_of(spark)
    if context is None or not str(context.master).startswith("local"):
        return
    name = session.interpreter(context)
    path = shutil.which(name)
    if path is None:
        raise PreflightError(f"the executors' Python is {name!r}, which does not exist: {_advice()}")
    if os.path.abspath(path) != os.path.abspath(sys.executable):
        _try_interpreter(path)


def _advice() -> str:
    return f"set PYSPARK_PYTHON={sys.executable} before the session starts"


@functools.cache  # of those that will do; an error is not kept
def _try_interpreter(path: str) -> None:
    code = "import sys, pyarrow, hvd_core; print('%d.%d' % sys.version_info[:2])"
    tried = subprocess.run([path, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    if tried.returncode:
        why = (tried.stderr.strip().splitlines() or ["it does not start"])[-1]
        raise PreflightError(f"the executors' Python is {path}, which cannot run hvd ({why}): {_advice()}")
    ours = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if tried.stdout.strip() != ours:
        raise PreflightError(
            f"the executors' Python is {path}, version {tried.stdout.strip()}, ours is {ours}: {_advice()}"
        )


def check_columns(frame: DataFrame, spec: TrainSpec) -> Layout:
    """Types and model inputs from the schema alone; runs no job. Raises ColumnError."""
    return plan_layout(columns_of(frame.schema), spec)


def check_rows(frame: DataFrame, spec: TrainSpec, layout: Layout) -> Layout:
    """Looks at one row (a job): that there is one, and the shapes that types leave open. Raises DataError."""
    first = frame.limit(1).collect()
    if not first:
        raise DataError("no rows: the DataFrame is empty, so there is nothing to train on")
    columns: list[Column] = with_shapes_of(layout.columns, first[0])
    return plan_layout(columns, spec)


def selected(frame: DataFrame, layout: Layout) -> DataFrame:
    """The columns of the layout under neutral names (pyspark's mapInArrow cannot name all; order is what
    counts)."""
    at = {name: f"c{i}" for i, name in enumerate(frame.columns)}
    return frame.toDF(*at.values()).select(*(at[column.name] for column in layout.columns))


def check_frame(frame: DataFrame) -> None:
    """A DataFrame of a live session, in which each column can be told by its name. Raises InvalidArgument,
    PreflightError, ColumnError."""
    if not hasattr(frame, "sparkSession"):
        kind = f"{type(frame).__module__}.{type(frame).__qualname__}".removeprefix("builtins.")
        raise InvalidArgument(f"expected a Spark DataFrame, not {kind}: make one by spark.createDataFrame")
    if session.is_stopped(frame.sparkSession):
        raise PreflightError("the SparkSession of this DataFrame was stopped: make a new one and read again")
    twice = sorted({name for name in frame.columns if frame.columns.count(name) > 1})
    if twice:
        raise ColumnError(f"the DataFrame has more than one column named {', '.join(map(repr, twice))}")


def check_finite(frame: DataFrame) -> None:
    """Raises DataError for a stream."""
    if frame.isStreaming:
        raise DataError("a stream has no end to train up to: fit inside writeStream.foreachBatch")
