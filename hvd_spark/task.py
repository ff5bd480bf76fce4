"""Inside a barrier task: take the rows, fork a rank, watch over it until the job ends.

The task never raises; what goes wrong becomes a failure row, so the driver decides what to do with it.
Training runs in the rank, a child of this Python worker's template; this process ingests and supervises and
never computes.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow as pa

from hvd_core import train
from hvd_core.config import Config
from hvd_core.errors import LaunchFailed, RankFailed, RankFailure
from hvd_core.group import Group, Listener
from hvd_core.launch import Assignment, RankProcess, Template
from hvd_core.launch import failure as failures
from hvd_core.launch.cpus import thread_env
from hvd_core.launch.events import Failed, Output, Report, Result
from hvd_core.launch.gpus import gpus_for
from hvd_core.launch.rank_process import note_stacks
from hvd_core.world import World

from . import rows
from .feed import Address, FeedClient
from .guard import MISSING
from .parcel import Parcel

#: A rank gets this long to leave by itself when another one failed.
_GRACE_S = 0.1
#: A rank has to be polled at least this often (see RankProcess).
_POLL_S = 1.0
#: A rank that only reports a lost peer waits this long for the peer's own supervisor to say why.
_ECHO_WAIT_S = 0.5
#: Ranks may end hours apart.
_FOREVER_S = 1e9


@dataclass(frozen=True)
class JobPlan:
    """What the driver tells every task.

    payload: holds a cloudpickle of (fn, args, kwargs); only the rank unpickles it. With a `layout` the rows
    are packed into a shard and the rank calls `fn(*args, shard=shard, **kwargs)`; without one they are
    ignored.
    token: the job's secret, 32 bytes. preload: modules that the template imports before ranks are forked.
    sys_path: where the driver finds modules, when tasks run on its machine: functions travel by name then.
    env: of all ranks; own_envs: of each what others do not have, if anybody has.
    beat_s: yield a row at least this often; None: no need. attempt: how many before this one have failed;
    a `fn` that gets a shard is told. gpus: how many Spark gives a rank, if it gives any.
    """

    size: int
    token: bytes
    payload: Parcel
    layout: train.Layout | None = None
    preload: tuple[str, ...] = ()
    sys_path: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    own_envs: tuple[Mapping[str, str], ...] = ()
    config: Config = field(default_factory=Config)
    feed: Address | None = None
    beat_s: float | None = None
    attempt: int = 0
    gpus: float = 0.0


def barrier_task(plan: JobPlan, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The function of `mapInArrow(..., barrier=True)`: yields rows of `rows.SCHEMA`."""
    from pyspark import BarrierTaskContext

    context = BarrierTaskContext.get()
    with contextlib.ExitStack() as stack:
        task = _Task(plan, context, stack)
        try:
            yield from task.run(batches)
        except Exception as error:  # noqa: BLE001  a raising barrier task reaches the driver as a JVM stack
            task.abort(f"the supervisor of rank {task.rank} failed: {error!r}")
            yield rows.failure(describe(task.rank, error), "rank")


class _Task:
    """One rank's supervisor. `rank` is the partition's number until the ranks are arranged by host."""

    def __init__(self, plan: JobPlan, context: Any, stack: contextlib.ExitStack):
        self.plan = plan
        self.context = context
        self.stack = stack
        self.rank: int = context.partitionId()
        self.feed: FeedClient | None = None
        self.watch: Group | None = None
        self._beaten = time.monotonic()

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        index = self.rank
        process: RankProcess | None = None
        mine: RankFailure | None = None
        try:
            taken, listener, process = self._open(batches)
            endpoint = yield from self._endpoint_of(process)
            offer = {"endpoint": endpoint, "watch": listener.endpoint}
        except Exception as error:  # noqa: BLE001  the others wait in allGather: take part, then say it
            mine = describe(index, error)
            offer = {"error": mine.headline()}
        gathering = _Background(lambda: self.context.allGather(json.dumps(offer)))
        while not (yield from self._wait([gathering])):
            pass
        offers = [json.loads(text) for text in gathering.result()]
        if mine is not None:
            yield rows.failure(mine, _stage(mine, process))
        if process is None or any("error" in other for other in offers):
            return
        order = World.arrange([other["endpoint"] for other in offers])
        self.rank = order.index(index)
        yield rows.ingested(self.rank, taken, {"host": socket.gethostname()})
        ordered = [offers[old] for old in order]
        endpoints = tuple(other["endpoint"] for other in ordered)
        env = self.plan.own_envs[self.rank] if self.plan.own_envs else {}
        process.assign(Assignment(self.rank, self.plan.size, endpoints, self.plan.token, env))
        self.watch = self._watch(listener, [other["watch"] for other in ordered])
        yield from self._supervise(process)

    def _wait(self, sources: Sequence[Any]) -> Generator[pa.RecordBatch, None, list[Any]]:
        """Those of `sources` that are readable, perhaps none; after a second at most: ranks must be polled.
        Yields signs of life when they are due."""
        beat_s = self.plan.beat_s
        ready = list(wait(sources, _POLL_S if beat_s is None else min(beat_s, _POLL_S)))
        if beat_s is not None and time.monotonic() - self._beaten >= beat_s:
            self._beaten = time.monotonic()
            yield rows.beat(self.rank)
        return ready

    def abort(self, reason: str) -> None:
        if self.watch is not None:
            self.watch.abort(reason)

    def _open(self, batches: Iterator[pa.RecordBatch]) -> tuple[int, Listener, RankProcess]:
        """Starts the template, takes the rows meanwhile, forks the rank."""
        plan, stack = self.plan, self.stack
        threads = self.context.cpus()
        template = warm_template(plan, threads)
        tasks = len(self.context.getTaskInfos())
        if tasks != plan.size:
            raise LaunchFailed(f"Spark started {tasks} tasks for {plan.size} ranks")
        self.feed = FeedClient.connect(plan.feed, plan.token, self.rank)
        if self.feed is not None:
            stack.callback(self.feed.close)
        payload, taken = plan.payload.open(), 0
        fds: tuple[int, ...] = ()
        if plan.layout is not None:
            from .rank import with_shard  # needs more than a plain run does

            shard = self._pack(plan.layout, batches)
            taken, fds = shard.rows, tuple(shard.fds)
            payload = cloudpickle.dumps((with_shard, (payload, shard.description, plan.attempt), {}))
        for _ in batches:
            pass  # Spark uses a worker again only if it has read its input to the end
        listener = Listener.bind(plan.config)
        stack.callback(listener.close)
        own = replace(plan.config, shard_dir=_shard_dir(plan.config) or "")
        env = {**own.to_env(), **self._own_gpus(), **plan.env}
        held = [] if self.feed is None or not self.feed.connected else [self.feed.fileno()]
        follows = bool(plan.own_envs)
        process = template.fork(payload, fds=fds, held=held, env=env, threads=threads, env_follows=follows)
        for fd in fds:
            os.close(fd)
        stack.callback(process.close)
        stack.callback(process.kill, _GRACE_S)
        return taken, listener, process

    def _own_gpus(self) -> dict[str, str]:
        """What shows the rank the GPUs that Spark has given to this task, and no others; it has not started
        CUDA yet."""
        given = self.context.resources().get("gpu")
        if given is None:
            return {}
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        found = gpus_for(self.rank, visible, given.addresses, per_rank=self.plan.gpus or 1.0)
        if found.warning and self.rank == 0:
            self._tell([{"kind": "log", "line": f"hvd: {found.warning}"}])
        return {"CUDA_VISIBLE_DEVICES": found.mask}

    def _endpoint_of(self, process: RankProcess) -> Generator[pa.RecordBatch, None, str]:
        """Where the rank listens, once its template has imported its modules. Raises RankFailed."""
        while process.endpoint_or_none() is None:
            end = self._hear(process)
            if isinstance(end, Failed):
                raise RankFailed(end.failure)
            if process.endpoint_or_none() is None:
                yield from self._wait([process])
        return process.endpoint(0)

    def _pack(self, layout: train.Layout, batches: Iterator[pa.RecordBatch]) -> Any:
        from hvd_core.train.shard import ShardWriter, default_memory_bytes

        config = self.plan.config
        hosts = [info.address.rpartition(":")[0] for info in self.context.getTaskInfos()]
        here = hosts.count(hosts[self.rank])
        memory_nbytes = config.shard_memory_bytes or default_memory_bytes(here)
        writer = ShardWriter(layout, memory_bytes=memory_nbytes, directory=_shard_dir(config))
        self.stack.callback(writer.close)
        names = [column.name for column in layout.columns]
        for batch in batches:
            writer.write(pa.RecordBatch.from_arrays(batch.columns, names=names))
        return writer.finish()

    def _watch(self, listener: Listener, endpoints: list[str]) -> Group:
        """A Group of the supervisors, only to notice at once that one of them gave up."""
        patient = replace(self.plan.config, stall_warn_s=_FOREVER_S, stall_shutdown_s=0.0, timeline="")
        if self.plan.size == 1:
            watch = Group.solo()
        else:
            token = b"watch" + self.plan.token
            watch = Group.connect(listener, endpoints, rank=self.rank, token=token, config=patient)
        self.stack.callback(watch.close)
        return watch

    def _supervise(self, process: RankProcess) -> Iterator[pa.RecordBatch]:
        """Waits for the first of: the rank's end, a peer's abort, our parent's end. Yields how it ended."""
        assert self.watch is not None
        watch = self.watch
        parent = os.pidfd_open(os.getppid())
        self.stack.callback(os.close, parent)
        end: Result | Failed | None = None
        everyone: _Background | None = None
        while True:
            ready = yield from self._wait([parent, watch.fileno(), process if everyone is None else everyone])
            if everyone is None:
                end = self._hear(process)
                if isinstance(end, Failed):
                    yield self._failed(end)
                    return
                if isinstance(end, Result):
                    # A Group closes only after every supervisor has a result.
                    everyone = _Background(partial(watch.barrier, "done"))
            elif everyone in ready:
                break
            if parent in ready or watch.fileno() in ready:
                break
        if end is None:
            yield self._ended(process)
        elif isinstance(end, Result):
            yield from rows.result(self.rank, end.value)

    def _hear(self, process: RankProcess) -> Result | Failed | None:
        """Passes on what the rank said; returns its end when it has come."""
        end = None
        records: list[dict[str, Any]] = []
        for event in process.poll():
            if isinstance(event, Output):
                records.append({"kind": "output", "line": event.line, "stream": event.stream})
            elif isinstance(event, Report):
                records.append({**event.data, "kind": event.kind})
            else:
                end = event
        self._tell(records)
        return end

    def _tell(self, records: list[dict[str, Any]]) -> None:
        if self.feed is not None and self.feed.connected:
            own = {"rank": self.rank, "host": socket.gethostname()}
            self.feed.send([{**record, **own} for record in records])
            return
        for record in records:
            if record["kind"] in ("output", "log"):
                print(f"[{self.rank}@{socket.gethostname()}] {record['line']}", file=sys.stderr, flush=True)

    def _failed(self, end: Failed) -> pa.RecordBatch:
        """Our rank ended badly: tell the other supervisors, unless one of them is about to tell us why."""
        assert self.watch is not None
        what = end.failure.with_rank(self.rank)
        if what.echo:
            wait([self.watch.fileno()], _ECHO_WAIT_S)
        self.watch.abort(what.headline())
        self._tell([{"kind": "failure", "failure": what.to_json()}])
        return rows.failure(what, "rank", end.exception)

    def _ended(self, process: RankProcess) -> pa.RecordBatch:
        """Another rank failed, or Spark went away: our rank has to go."""
        assert self.watch is not None
        reason = self.watch.reason or "the Spark worker was told to stop"
        sources: list[Any] = [process]
        wait(sources, _GRACE_S)
        end = self._hear(process)
        if isinstance(end, Failed) and not end.failure.echo:
            return self._failed(end)
        if self.watch.reason is not None:  # others may have waited for it
            note_stacks([process])
        process.kill(_GRACE_S)
        end = self._hear(process)
        stacks = end.failure.traceback if isinstance(end, Failed) and end.failure.kind == "ended" else ""
        host = socket.gethostname()
        what = RankFailure(
            self.rank, "ended", message=reason, traceback=stacks, host=host, echo=True, at=time.time()
        )
        return rows.failure(what, "rank")


def _shard_dir(config: Config) -> str | None:
    """Where large shards go: as told, or to the executor's local disk. None: the system's directory."""
    local = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0]
    return config.shard_dir or (local if local and Path(local).is_dir() else None)


class _Background:
    """A call in a thread of its own; readable when it has ended."""

    def __init__(self, call: Callable[[], Any]):
        self._read, self._write = os.pipe()
        self._outcome: Any = None
        self._error: Exception | None = None
        threading.Thread(target=self._run, args=(call,), name="hvd-background", daemon=True).start()

    def fileno(self) -> int:
        return self._read

    def result(self) -> Any:
        """What the call returned; raises what it raised. Call when it has ended."""
        if self._error is not None:
            raise self._error
        return self._outcome

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            self._outcome = call()
        except Exception as error:  # noqa: BLE001  raised by result()
            self._error = error
        os.close(self._write)

    def __del__(self) -> None:
        os.close(self._read)


def describe(rank: int, error: Exception) -> RankFailure:
    """What the supervisor itself, or a rank that did not get as far as its endpoint, ran into."""
    what = failures.describe(error, rank)
    if isinstance(error, RankFailed):
        what = error.failure.with_rank(rank)
    if what.exc_type == ModuleNotFoundError.__name__:
        what = replace(what, message=f"{what.message} ({sys.executable})")
    return what


def _stage(what: RankFailure, process: RankProcess | None) -> str:
    """Where a task got to that has no endpoint: see `rows.failure`."""
    if what.exc_type == ModuleNotFoundError.__name__:
        return MISSING
    return "rows" if process is None else "rank"


# Kept between jobs: Spark uses a Python worker again, and a warm template forks a rank in 0.1 s. It dies with
# this process (PDEATHSIG).
_warm: tuple[tuple[Any, ...], Template] | None = None


def warm_template(plan: JobPlan, threads: int) -> Template:
    """This worker's template with the plan's modules and import path; returns before it is ready."""
    global _warm
    path = list(dict.fromkeys([*sys.path, *plan.sys_path]))
    key = (threads, plan.preload, *path)
    if _warm is not None and _warm[0] == key and _warm[1].alive():
        return _warm[1]
    if _warm is not None:
        _warm[1].close()
    _warm = (key, Template.start(plan.preload, thread_env(threads), path))
    return _warm[1]
