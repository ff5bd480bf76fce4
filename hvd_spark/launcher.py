"""The driver's side of a job: one barrier stage, its progress, and how it ended."""

from __future__ import annotations

import pickle
import re
import secrets
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql import DataFrame, Observation
from pyspark.sql import functions as F

from hvd_core import errors
from hvd_core.config import Config
from hvd_core.errors import (
    HorovodInternalError,
    HvdError,
    NotEnoughSlots,
    PreflightError,
    RankFailed,
    RankFailure,
    RowsLost,
    first_cause,
)
from hvd_core.train import Layout
from hvd_core.train.trackers import tracking_env

from . import rows, session
from .feed import FeedServer
from .parcel import Parcel
from .progress import Progress
from .task import JobPlan, barrier_task
from .waiting import Watch

#: A job that gets no slots says so after this time.
_SAY_AFTER_S = 5.0
#: After the end of the job, supervisors get this long to hang up.
_DRAIN_S = 3.0


@dataclass(frozen=True)
class Outcome:
    """results: what each rank returned, by rank. rows: how many rows it took."""

    results: list[bytes]
    rows: list[int]


@dataclass(frozen=True)
class JobSpec:
    """A job for `launch`. payload: cloudpickle of (fn, args, kwargs); start_timeout_s: how long to wait while
    other jobs hold the slots; the rest is described at `task.JobPlan`."""

    size: int
    payload: bytes
    description: str
    layout: Layout | None = None
    preload: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    config: Config = field(default_factory=Config.from_env)
    verbose: int = 1
    printed: bool = True  # show what ranks print
    start_timeout_s: float = 600.0


def launch(frame: DataFrame, spec: JobSpec) -> Outcome:
    """Runs `spec.size` ranks over the rows of `frame` and waits for them.

    With a layout the rows are dealt out evenly and counted on both sides (`RowsLost`); without one `frame`
    has one partition for each rank. Raises `RankFailed` with the first cause, or the typed error a rank
    reported about its rows; NotEnoughSlots when they do not start in time. A KeyboardInterrupt cancels the
    job and ends the ranks.
    """
    spark = frame.sparkSession
    token = secrets.token_bytes(32)
    counted = None
    if spec.layout is not None:
        counted = Observation()
        frame = frame.observe(counted, F.count(F.lit(1)).alias("rows")).repartition(spec.size)
    feed = _open_feed(spark, token)
    progress = Progress(verbose=spec.verbose, printed=spec.printed)
    failures: list[rows.Failure] = []

    def take(record: Mapping[str, Any]) -> None:
        if record.get("kind") == "failure":
            failures.append(rows.Failure(RankFailure.from_json(str(record["failure"])), "rank"))
        progress.take(record)

    idle_s = session.idle_timeout_s(spark)
    parcel = Parcel.of(spark, spec.payload)
    plan = JobPlan(
        spec.size,
        token,
        parcel,
        layout=spec.layout,
        preload=spec.preload,
        sys_path=session.import_path(spark),
        env={**tracking_env(), **spec.config.to_env(), **spec.env},
        config=spec.config,
        feed=None if feed is None else feed.address,
        beat_s=idle_s / 3 if idle_s > 0 else None,
    )
    job = session.map_in_arrow(frame, _task(plan), rows.DDL, barrier=True)
    if plan.beat_s is not None:
        job = job.where(F.col("kind") != rows.BEAT)
    try:
        collected = _wait(spark, job, spec, counted, feed, take)
    except NotEnoughSlots:
        raise
    except Exception as error:  # noqa: BLE001  raised again, translated
        raise _translate(error, failures, spec.layout is not None) from None
    finally:
        progress.close()
        parcel.destroy()
        if feed is not None:
            feed.close()
    found, sent = collected
    if found.failures:
        raised, cause = _typed(found.failures, spec.layout is not None)
        raise raised from cause
    missing = sorted(set(range(spec.size)) - set(found.results))
    if missing:
        raise RankFailed(RankFailure(missing[0], "lost"))
    taken = [found.rows[rank] for rank in range(spec.size)]
    if sent is not None and sent != sum(taken):
        raise RowsLost(f"Spark sent {sent} rows, the ranks took {sum(taken)} ({taken} by rank)")
    return Outcome([found.results[rank] for rank in range(spec.size)], taken)


def _task(plan: JobPlan) -> Callable[..., Any]:
    def task(batches: Any) -> Any:
        yield from barrier_task(plan, batches)

    return task


def _open_feed(spark: Any, token: bytes) -> FeedServer | None:
    where = session.driver_host(spark)
    if where is None:
        return None
    try:
        return FeedServer(token, where[0], local=where[1])
    except OSError:
        return None


def _wait(
    spark: Any,
    frame: DataFrame,
    spec: JobSpec,
    counted: Observation | None,
    feed: FeedServer | None,
    take: Callable[[Mapping[str, Any]], None],
) -> tuple[rows.Collected, int | None]:
    """Collects in a thread while this one shows what the ranks say."""

    def action() -> tuple[rows.Collected, int | None]:
        found = rows.read(frame.collect())
        complete = counted is not None and not found.failures
        return found, int(counted.get["rows"]) if complete and counted is not None else None

    tag = f"hvd-{secrets.token_hex(6)}"
    with session.Job(spark, tag, spec.description, action) as job, Watch(spark, tag, job.thread) as watch:
        patience = _Patience(spec, watch)
        try:
            while not job.done:
                if feed is not None and feed.heard:
                    watch.stop()
                patience.check()
                if feed is None:
                    session.await_readable(job, 1.0)
                else:
                    for record in feed.read(1.0, job.fileno()):
                        take(record)
        except BaseException:
            job.cancel()
            raise
        finally:
            # After a cancel this is also how we know that the supervisors, hence their ranks, are gone.
            for record in feed.drain(_DRAIN_S) if feed is not None else ():
                take(record)
        return job.result()


class _Patience:
    """Says that other jobs hold the slots, and in the end gives up."""

    def __init__(self, spec: JobSpec, watch: Watch):
        self._spec, self._watch = spec, watch
        self._said = False

    def check(self) -> None:
        """Raises NotEnoughSlots."""
        waited_s, spec = self._watch.waited_s(), self._spec
        what = f"{spec.size} slots that are free at the same time"
        if waited_s >= spec.start_timeout_s:
            raise NotEnoughSlots(
                f"waited {waited_s:.0f} s for {what}; other jobs hold them "
                f"(start_timeout_s={spec.start_timeout_s:g})"
            )
        if waited_s >= _SAY_AFTER_S and not self._said:
            self._said = True
            print(f"hvd: waiting for {what}; other jobs may hold them", file=sys.stderr, flush=True)


def _typed(failures: list[rows.Failure], fitting: bool) -> tuple[HvdError, BaseException | None]:
    """The first cause as the exception to raise, and what to raise it from.

    What hvd itself finds about rows and losses is raised as what it is; all else is a RankFailed, from the
    rank's own exception if that can be unpickled here.
    """
    whats = [failure.what for failure in failures]
    first = failures[whats.index(first_cause(whats))]
    failed = RankFailed(first.what)
    kind = getattr(errors, first.what.exc_type, None)
    if fitting and isinstance(kind, type) and issubclass(kind, HvdError):
        if not issubclass(kind, (RankFailed, HorovodInternalError)):
            if first.stage == "rows":
                return kind(_said_of_rows(failures)), None
            return kind(first.what.message), failed
    failed.__cause__ = _unpickled(first.exception)
    return failed, failed.__cause__


def _said_of_rows(failures: list[rows.Failure]) -> str:
    """Each rank counts in its own rows, so all have something to say."""
    said = [failure.what for failure in failures if failure.stage == "rows"]
    if len(said) == 1:
        return said[0].message
    return "\n".join(f"rank {what.rank}: {what.message}" for what in said)


def _unpickled(exception: bytes) -> BaseException | None:
    try:
        value = pickle.loads(exception) if exception else None
    except Exception:  # noqa: BLE001  its class may not exist here, or not rebuild
        return None
    return value if isinstance(value, BaseException) else None


_RANK_OF_TASK = re.compile(r"ResultTask\(\d+, (\d+)\)")
_MISSING = re.compile(
    r"ModuleNotFoundError: No module named '(hvd_core|hvd_spark|cloudpickle|numpy|pyarrow)[.\w]*'"
)


def _translate(error: Exception, failures: list[rows.Failure], fitting: bool) -> Exception:
    """What to raise instead of Spark's own error about a barrier stage; other errors are the user's to
    see."""
    text = str(error)
    if failures:
        return _typed(failures, fitting)[0]
    missing = _MISSING.search(text)
    if missing:
        return PreflightError(
            f"the executors' Python has no module {missing[1]}: install hvd there, or point PYSPARK_PYTHON "
            "(spark.pyspark.python) at an interpreter that has it"
        )
    if "PYTHON_VERSION_MISMATCH" in text:
        line = next(line for line in text.splitlines() if "PYTHON_VERSION_MISMATCH" in line)
        return PreflightError(
            f"driver and executors run different Pythons; set PYSPARK_PYTHON. {line.strip()}"
        )
    if re.search(r"\bcancell?ed\b", text) and "barrier" not in text:
        return HvdError("the Spark job was cancelled")
    task = _RANK_OF_TASK.search(text)
    if task:
        reason = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("at ")]
        return RankFailed(RankFailure(int(task[1]), "lost", traceback="\n".join(reason[:20])))
    return error
