"""What we ask of a Spark session, and what we do without where there is no SparkContext (Spark Connect)."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from pyspark.sql import DataFrame, SparkSession

#: Executors of a cluster that has just started need a moment to register.
_SLOTS_WAIT_S = 6.0


def current() -> SparkSession:
    """The active session, or a new one from the environment's settings, with executors on our interpreter."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    return SparkSession.getActiveSession() or SparkSession.builder.getOrCreate()


def context_of(spark: SparkSession) -> Any | None:
    """The SparkContext; None under Spark Connect."""
    try:
        return spark.sparkContext
    except Exception:  # noqa: BLE001  the type depends on the version; without a context we do without
        return None


def is_stopped(spark: SparkSession) -> bool:
    context = context_of(spark)
    return context is not None and getattr(context, "_jsc", context) is None


def setting(spark: SparkSession, key: str, default: str = "") -> str:
    """A setting of the session or its cluster, "" or `default` when it is not set or not to be read."""
    context = context_of(spark)
    try:
        if context is not None:
            value = context.getConf().get(key)
            if value is not None:
                return str(value)
        return str(spark.conf.get(key, default))
    except Exception:  # noqa: BLE001  unknown or unreadable keys are as good as unset
        return default


def slots(spark: SparkSession, wanted: int, wait_s: float | None = None, profile: Any = None) -> int | None:
    """How many tasks can run at once; None when that cannot be known (Connect, unless settings say it).

    Waits a few seconds (`wait_s`) for executors to register while there are fewer than `wanted`, except in
    local mode. profile: Java's, None for the session's own.
    """
    context = context_of(spark)
    if context is None:
        return _slots_by_settings(spark)
    deadline = time.monotonic() + (0 if is_local(context) else _SLOTS_WAIT_S if wait_s is None else wait_s)
    while True:
        try:
            java = context._jsc.sc()
            default = java.resourceProfileManager().defaultResourceProfile()
            found = int(java.maxNumConcurrentTasks(default if profile is None else profile))
        except Exception:  # noqa: BLE001  an internal of Spark's scheduler: where it is absent we do without
            return None
        if found >= wanted or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def _slots_by_settings(spark: SparkSession) -> int | None:
    """From the master `local[N]`, or from a fixed number of executors."""
    try:
        cpus = int(setting(spark, "spark.task.cpus", "1"))
        local = re.fullmatch(r"local\[(\d+)(,\s*\d+)?\]", setting(spark, "spark.master"))
        if local is not None:
            return int(local[1]) // cpus
        instances = int(setting(spark, "spark.executor.instances", "0"))
        cores = int(setting(spark, "spark.executor.cores", "0"))
        return instances * (cores // cpus) or None
    except ValueError:
        return None


def is_local(context: Any) -> bool:
    """Driver and executors are one process."""
    return is_local_master(str(context.master))


def is_local_master(master: str) -> bool:
    return master.partition("[")[0] == "local"


def driver_host(spark: SparkSession) -> tuple[str, bool] | None:
    """The address at which executors reach the driver, and whether they run on this machine; None:
    unknown."""
    context = context_of(spark)
    if context is None:
        return None
    if is_local(context):
        return "127.0.0.1", True
    host = setting(spark, "spark.driver.host")
    return (host.strip("[]"), str(context.master).startswith("local-cluster")) if host else None


def import_path(spark: SparkSession) -> tuple[str, ...]:
    """Where this process finds modules, if executors run on its machine; else they have their own."""
    context = context_of(spark)
    if context is None or not str(context.master).startswith("local"):
        return ()
    return tuple(os.path.abspath(entry) for entry in sys.path)


def idle_timeout_s(spark: SparkSession) -> float:
    """After so many silent seconds Spark ends a Python worker; 0: never."""
    try:
        text = spark.conf.get("spark.sql.execution.pyspark.udf.idleTimeoutSeconds", "0") or "0"
        return float(text.rstrip("s"))
    except Exception:  # noqa: BLE001  older Sparks have no such setting
        return 0.0


def map_in_arrow(
    frame: DataFrame, function: Callable[..., Any], schema: Any, *, barrier: bool, profile: Any = None
) -> DataFrame:
    """`frame.mapInArrow`, which asks for pandas in a certain version although pandas takes no part in it."""
    with warnings.catch_warnings(), _no_pandas_needed(), _our_interpreter(context_of(frame.sparkSession)):
        warnings.simplefilter("ignore", FutureWarning)
        asked: dict[str, Any] = {"barrier": True} if barrier else {}  # Sparks before 4.0 know no profile
        return frame.mapInArrow(
            function, schema, **asked, **({} if profile is None else {"profile": profile})
        )


def interpreter(context: Any) -> str:
    """The Python that will run our tasks: what the user has set. In local mode, where executors are this
    machine, it is this process's if nothing was set; elsewhere Spark takes the `python3` of their PATH."""
    unset = "python3"  # what a context has that was told nothing
    told = os.environ.get("PYSPARK_PYTHON") == unset or context.getConf().get("spark.pyspark.python")
    if context.pythonExec != unset or told or not str(context.master).startswith("local"):
        return str(context.pythonExec)
    return sys.executable


@contextlib.contextmanager
def _our_interpreter(context: Any | None) -> Iterator[None]:
    """A function that Spark takes now will run on `interpreter(context)`."""
    if context is None:
        yield
        return
    before, context.pythonExec = context.pythonExec, interpreter(context)
    try:
        yield
    finally:
        context.pythonExec = before


@contextlib.contextmanager
def _no_pandas_needed() -> Iterator[None]:
    """Where pandas is not installed, pyspark's check for it is switched off."""
    from pyspark.sql.pandas import functions as module

    functions: Any = module
    check = getattr(functions, "require_minimum_pandas_version", None)
    if check is None or importlib.util.find_spec("pandas") is not None:
        yield
        return
    functions.require_minimum_pandas_version = lambda: None
    try:
        yield
    finally:
        functions.require_minimum_pandas_version = check


def _before_4(spark: SparkSession) -> bool:
    return int(str(spark.version).partition(".")[0]) < 4


def thread(spark: SparkSession, target: Callable[[], Any]) -> threading.Thread:
    """One that may talk to Spark; it leaves no connection behind."""
    from pyspark import InheritableThread

    own = {} if _before_4(spark) else {"session": spark}
    made: threading.Thread = InheritableThread(target, **own)
    made.daemon = True
    return made


class Job:
    """An action run in a thread of its own, so that the caller can watch it and a Ctrl-C reaches the caller.

    With an own JVM thread (or Connect call) the caller's connection to Spark is not left in mid-answer, and
    our job tag and description do not stick to the caller's later jobs.
    """

    def __init__(self, spark: SparkSession, tag: str, description: str, action: Callable[[], Any]):
        self._spark, self._tag, self._description, self._action = spark, tag, description, action
        self._context = context_of(spark)
        self._outcome: tuple[Any, BaseException | None] | None = None
        self._wake_read, self._wake_write = os.pipe()
        self.thread = thread(spark, self._run)

    def __enter__(self) -> Job:
        self.thread.start()
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is not None and not self.done:
            self.cancel()
        self.thread.join()
        os.close(self._wake_read)

    def fileno(self) -> int:
        """Readable when the action has ended."""
        return self._wake_read

    @property
    def done(self) -> bool:
        return self._outcome is not None

    @property
    def failed(self) -> bool:
        return self._outcome is not None and self._outcome[1] is not None

    def result(self) -> Any:
        """What the action returned; raises what it raised. Call when `done`."""
        assert self._outcome is not None
        value, error = self._outcome
        if error is not None:
            raise error
        return value

    def cancel(self) -> None:
        with contextlib.suppress(Exception):
            if self._context is not None:
                self._context.cancelJobsWithTag(self._tag)
            else:
                self._spark.interruptTag(self._tag)

    def _run(self) -> None:
        try:
            with self._tagged():
                self._outcome = (self._action(), None)
        except BaseException as error:  # noqa: BLE001  handed to the caller by result()
            self._outcome = (None, error)
        finally:
            os.close(self._wake_write)

    @contextlib.contextmanager
    def _tagged(self) -> Iterator[None]:
        if self._context is None:
            self._spark.addTag(self._tag)
            yield
            self._spark.removeTag(self._tag)
            return
        self._context.addJobTag(self._tag)
        self._context.setInterruptOnCancel(True)
        self._context.setJobDescription(self._description)
        yield


def await_readable(source: Any, timeout_s: float) -> None:
    """Waits until `source` is readable; Ctrl-C gets through."""
    import select

    select.select([source], [], [], timeout_s)
