"""The driver's side of a job: one barrier stage, its progress, and how it ended."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql import DataFrame, Observation
from pyspark.sql import functions as F

from hvd_core.config import Config
from hvd_core.errors import HvdError, NotEnoughSlots, RankFailed, RankFailure, RowsLost
from hvd_core.launch.display import Progress
from hvd_core.train import Layout
from hvd_core.train.trackers import tracking_env

from . import gpus, preflight, rows, session
from .feed import FeedServer
from .guard import guarded
from .parcel import Parcel
from .task import JobPlan
from .verdict import lost, translated, typed
from .waiting import Watch

#: A job that gets no slots says so after this time.
_SAY_AFTER_S = 5.0
#: After the end of the job, supervisors get this long to hang up.
_DRAIN_S = 3.0
#: The same after a cancelled or failed job, where Spark kills them, 2 s after it has told them to stop.
_KILLED_S = 20.0


@dataclass(frozen=True)
class Outcome:
    """results: what each rank returned, in parts, by rank. rows: how many rows it took."""

    results: list[list[bytes]]
    rows: list[int]


@dataclass(frozen=True)
class JobSpec:
    """A job for `launch`. payload: cloudpickle of (fn, args, kwargs), destroyed at its end. start_timeout_s:
    how long to wait while other jobs hold the slots. max_retries: how often to begin again after a lost rank,
    and restart: what is said of where that goes on. The rest is described at `task.JobPlan`."""

    size: int
    payload: Parcel
    description: str
    layout: Layout | None = None
    preload: tuple[str, ...] = ()
    envs: Sequence[Mapping[str, str]] = ()  # of each rank
    config: Config = field(default_factory=Config.from_env)
    verbose: int = 1
    printed: bool = True  # show what ranks print
    start_timeout_s: float = 600.0
    max_retries: int = 0
    restart: str = "from the start"


def launch(frame: DataFrame, spec: JobSpec) -> Outcome:
    """Runs `spec.size` ranks over the rows of `frame` and waits for them.

    With a layout the rows are dealt out evenly and counted on both sides (`RowsLost`); without one `frame`
    has one partition for each rank. Raises `RankFailed` with the first cause, or the typed error a rank
    reported about its rows; NotEnoughSlots when they do not start in time. What another attempt can help
    against (`error.retryable`) is raised after `max_retries` of them, as the first attempt's error with the
    count. A KeyboardInterrupt cancels the job and ends the ranks.
    """
    try:
        first: HvdError | None = None
        for attempt in range(spec.max_retries + 1):
            try:
                return _attempt(frame, spec, attempt)
            except HvdError as error:
                if not error.retryable:
                    raise
                first = first or error
                if attempt == spec.max_retries or not _slots_are_back(frame, spec):
                    raise _counted(first, attempt + 1) from first.__cause__
                say(f"{_headline(error)}; retry {attempt + 1} of {spec.max_retries}, {spec.restart}")
        raise AssertionError("there is always an attempt")
    finally:
        spec.payload.destroy()


def say(text: str) -> None:
    print(f"hvd: {text}", file=sys.stderr, flush=True)


def _headline(error: HvdError) -> str:
    return str(error).partition("\n")[0]


def _slots_are_back(frame: DataFrame, spec: JobSpec) -> bool:
    """Waits for the executor that takes the place of a lost one."""
    found = session.slots(frame.sparkSession, spec.size, spec.start_timeout_s)
    return found is None or found >= spec.size


def _counted(first: HvdError, attempts: int) -> HvdError:
    if attempts == 1:
        return first
    if isinstance(first, RankFailed):
        return RankFailed(first.failure, attempts)
    return type(first)(f"{first}\n{attempts} attempts failed, this is the first")


def _attempt(frame: DataFrame, spec: JobSpec, number: int) -> Outcome:
    spark = frame.sparkSession
    token = secrets.token_bytes(32)
    counted = None
    if spec.layout is not None:
        counted = Observation()
        frame = frame.observe(counted, F.count(F.lit(1)).alias("rows")).repartition(spec.size)
    feed = _open_feed(spark, token, spec.config)
    placed = gpus.slots(spark, spec.size)
    progress = Progress(verbose=spec.verbose, printed=spec.printed)
    failures: list[rows.Failure] = []

    def take(record: Mapping[str, Any]) -> None:
        if record.get("kind") == "failure":
            failures.append(rows.Failure(RankFailure.from_json(str(record["failure"])), "rank"))
        progress.take(record)

    shared, own = _shared(spec.envs)
    idle_s = session.idle_timeout_s(spark)
    plan = JobPlan(
        spec.size,
        token,
        spec.payload,
        layout=spec.layout,
        preload=spec.preload,
        sys_path=session.import_path(spark),
        env={**tracking_env(), **spec.config.to_env(), **shared},
        own_envs=own,
        config=spec.config,
        feed=None if feed is None else feed.address,
        beat_s=idle_s / 3 if idle_s > 0 else None,
        attempt=number,
        gpus=placed.per_rank,
    )
    job = session.map_in_arrow(frame, guarded(plan), rows.DDL, barrier=True, profile=placed.profile)
    if plan.beat_s is not None:
        job = job.where(F.col("kind") != rows.BEAT)
    try:
        collected = _wait(spark, job, spec, counted, feed, take)
    except NotEnoughSlots:
        raise
    except Exception as error:  # noqa: BLE001  raised again, translated
        raise translated(error, failures, spec.layout is not None) from None
    finally:
        progress.close()
        if feed is not None:
            feed.close()
    found, sent = collected
    if found.failures:
        raised, cause = typed(found.failures, spec.layout is not None)
        raise raised from cause
    missing = sorted(set(range(spec.size)) - set(found.results))
    if missing:
        raise RankFailed(lost(missing[0]))
    taken = [found.rows[rank] for rank in range(spec.size)]
    if sent is not None and sent != sum(taken):
        raise RowsLost(f"Spark sent {sent} rows, the ranks took {sum(taken)} ({taken} by rank)")
    return Outcome([found.results[rank] for rank in range(spec.size)], taken)


def _shared(envs: Sequence[Mapping[str, str]]) -> tuple[dict[str, str], tuple[dict[str, str], ...]]:
    """(what is the same for all ranks, what each has besides: nothing if none has)."""
    first, *rest = envs or [{}]
    shared = {name: value for name, value in first.items() if all(e.get(name) == value for e in rest)}
    own = tuple({n: v for n, v in env.items() if n not in shared} for env in envs)
    return shared, own if any(own) else ()


def _open_feed(spark: Any, token: bytes, config: Config) -> FeedServer | None:
    where = session.driver_host(spark)
    if where is None or (preflight.encrypted(spark) and not config.plain_text):
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
        drain_s = _KILLED_S
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
            if not job.failed:
                drain_s = _DRAIN_S
        except BaseException:
            job.cancel()
            raise
        finally:
            # After a cancel this is also how we know that supervisors and ranks are gone.
            for record in feed.drain(drain_s) if feed is not None else ():
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
            say(f"waiting for {what}; other jobs may hold them")
