"""GPUs of the executors: how many ranks can have one, and the resource profile that gives each its own."""

from __future__ import annotations

import inspect
import time
from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from . import session

_EXECUTOR, _TASK = "spark.executor.resource.gpu.amount", "spark.task.resource.gpu.amount"
#: Later than this after the session's start no executor is waited for.
_STARTING_S = 60.0


@dataclass(frozen=True)
class Slots:
    """count: ranks that can run at the same time; None: unknown. profile: for `mapInArrow`, None for the
    session's own settings. per_rank: GPUs that Spark gives a rank, 0.0 if it gives none."""

    count: int | None
    profile: Any = None
    per_rank: float = 0.0


def choose(wanted: int | None, per_task: float | None, whole: int | None, configured: int | None) -> bool:
    """Whether each rank is to have a GPU of its own by a profile, on a cluster whose executors have GPUs.

    per_task: `spark.task.resource.gpu.amount`; a fraction lets ranks share, which they do if there are too
    few GPUs. whole: ranks that can have one each, None if profiles do not work here; configured: ranks that
    can run by the session's settings.
    """
    if whole is None or (per_task is not None and per_task >= 1):
        return False
    shares = per_task is not None and wanted is not None and whole < wanted
    return not (shares and configured is not None and wanted is not None and configured >= wanted)


def slots(spark: SparkSession, wanted: int | None) -> Slots:
    """How `wanted` ranks (None: as many as there can be) are to be placed; waits a moment for executors that
    are registering."""
    per_task = _number(session.setting(spark, _TASK))
    configured = session.slots(spark, wanted or 1)
    context = session.context_of(spark)
    if context is None or session.is_local(context) or not _number(session.setting(spark, _EXECUTOR)):
        return Slots(configured, per_rank=per_task or 0.0)
    profile = None if per_task is not None and per_task >= 1 else _profile(spark, context)
    whole = None
    if profile is not None:
        is_starting = time.time() - context.startTime / 1000 < _STARTING_S
        whole = session.slots(
            spark, wanted or 1, None if is_starting else 0.0, profile._java_resource_profile
        )
    if choose(wanted, per_task, whole, configured):
        return Slots(whole, profile, 1.0)
    return Slots(configured, per_rank=per_task or 0.0)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _profile(spark: SparkSession, context: Any) -> Any | None:
    """One whole GPU and the session's CPUs for a task, and no wish about executors: Spark allows no other in
    a barrier stage. None where there is no such thing: before 4.0, and for some cluster managers."""
    if "profile" not in inspect.signature(DataFrame.mapInArrow).parameters:
        return None
    from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

    cpus = int(session.setting(spark, "spark.task.cpus", "1"))
    try:
        made = ResourceProfileBuilder().require(TaskResourceRequests().cpus(cpus).resource("gpu", 1.0)).build
        context._jsc.sc().resourceProfileManager().addResourceProfile(made._java_resource_profile)
    except Exception:  # noqa: BLE001  Spark says so with a JVM exception
        return None
    return made
