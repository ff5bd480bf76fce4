"""What can be known before anything is launched: each finding is an error that says what to do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from hvd_core.errors import ColumnError, DataError, NotEnoughSlots, PreflightError
from hvd_core.train import Column, Layout, TrainSpec, plan_layout

from . import session
from .columns import columns_of, quoted, with_shapes_of


def check_cluster(spark: SparkSession, num_proc: int | None) -> int:
    """The number of ranks: `num_proc`, or as many as there are slots. Raises NotEnoughSlots,
    PreflightError."""
    if num_proc is not None and num_proc < 1:
        raise PreflightError(f"num_proc must be at least 1, not {num_proc}")
    _check_dynamic_allocation(spark)
    _check_interpreter(spark)
    available = session.slots(spark, num_proc or 1)
    if num_proc is None:
        if not available:
            raise PreflightError(
                "num_proc is not given and the number of slots is unknown here; set num_proc"
            )
        return available
    if available is not None and available < num_proc:
        raise NotEnoughSlots(
            f"{num_proc} ranks need {num_proc} slots that are free at the same time, but the cluster has "
            f"{available}: set num_proc to at most {available}, or give Spark more cores (local[{num_proc}], "
            "more executors, or a smaller spark.task.cpus)"
        )
    return num_proc


def _check_dynamic_allocation(spark: SparkSession) -> None:
    context = session.context_of(spark)
    if context is None or session.is_local(context):
        return
    if session.setting(spark, "spark.dynamicAllocation.enabled", "false").lower() == "true":
        raise PreflightError(
            "Spark refuses barrier stages under dynamic allocation (SPARK-24942): start the session with "
            "spark.dynamicAllocation.enabled=false and a fixed spark.executor.instances"
        )


def _check_interpreter(spark: SparkSession) -> None:
    """Where executors run on this machine their interpreter can be tried; elsewhere the tasks' own error
    names it."""
    context = session.context_of(spark)
    if context is None or not str(context.master).startswith("local"):
        return
    name = str(context.pythonExec)
    path = shutil.which(name)
    if path is not None and os.path.abspath(path) == os.path.abspath(sys.executable):
        return
    advice = f"set PYSPARK_PYTHON={sys.executable} before the session starts"
    if path is None:
        raise PreflightError(f"the executors' Python is {name!r}, which does not exist: {advice}")
    code = "import sys, pyarrow, hvd_core; print('%d.%d' % sys.version_info[:2])"
    tried = subprocess.run([path, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    if tried.returncode:
        why = (tried.stderr.strip().splitlines() or ["it does not start"])[-1]
        raise PreflightError(f"the executors' Python is {path}, which cannot run hvd ({why}): {advice}")
    ours = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if tried.stdout.strip() != ours:
        raise PreflightError(
            f"the executors' Python is {path}, version {tried.stdout.strip()}, ours is {ours}: {advice}"
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
    picked: list[Any] = [F.col(quoted(c.name)).alias(f"c{i}") for i, c in enumerate(layout.columns)]
    return frame.select(*picked)


def check_distinct(frame: DataFrame) -> None:
    """Two columns of one name cannot be told apart. Raises ColumnError."""
    twice = sorted({name for name in frame.columns if frame.columns.count(name) > 1})
    if twice:
        raise ColumnError(f"the DataFrame has more than one column named {', '.join(map(repr, twice))}")
