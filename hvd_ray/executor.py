"""`RayExecutor`: ranks as actors, by Horovod's names and meanings."""

from __future__ import annotations

import contextlib
import pickle
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hvd_core.config import Config
from hvd_core.errors import InvalidArgument, NotEnoughSlots, RankFailed, RankFailure, first_cause
from hvd_core.launch import dumps
from hvd_core.train.trackers import tracking_env
from hvd_core.world import World

from . import actor, here
from .backend import refuse_unknown
from .failure import cause_of
from .places import Neighbours, visible_gpus
from .resources import require
from .resources import text as _text

#: An echo (a lost peer) is not the cause; that must be heard of within this time.
_CAUSE_WITHIN_S = 2.0
_LOOK_EVERY_S = 0.1
#: How long `shutdown` waits for processes of this machine to be gone; Ray ends those of others by itself.
_GONE_WITHIN_S = 10.0


@dataclass(frozen=True)
class Settings:
    """timeout_s: all ranks must have connected this long after the first. placement_group_timeout_s: how long
    to wait for the CPUs and GPUs of the workers."""

    timeout_s: float = 60.0
    placement_group_timeout_s: float = 100.0


def create_settings(
    timeout_s: float = 60.0, placement_group_timeout_s: float = 100.0, **unknown: Any
) -> Settings:
    """Settings for `RayExecutor`. Horovod's ssh_identity_file, ssh_str and nics mean nothing here: nothing
    logs in, and ranks find each other. A misspelt option raises InvalidArgument."""
    unknown = {n: v for n, v in unknown.items() if n not in ("ssh_identity_file", "ssh_str", "nics")}
    refuse_unknown(Settings, unknown)
    return Settings(timeout_s, placement_group_timeout_s)


class RayExecutor:
    """Ranks of a Ray cluster that stay alive between calls, one in each actor.

        with RayExecutor(num_workers=2) as executor:
            losses = executor.run(train, args=[config])       # by rank

    num_workers: ranks wherever they fit, close together. Or num_hosts and num_workers_per_host: so many
    on each of so many nodes. cpus_per_worker, use_gpu, gpus_per_worker (fractions share one): what each
    reserves. env_vars: set in each worker before anything of the user is imported.
    use_current_placement_group: inside a placement group the workers are placed in it. In a function that
    runs on the workers `hvd.init()` connects them. When a rank fails, RankFailed is raised with the first
    cause and all workers are ended: `start()` begins anew.
    """

    create_settings = staticmethod(create_settings)

    def __init__(
        self,
        settings: Settings | None = None,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int = 1,
        cpus_per_worker: float = 1,
        use_gpu: bool = False,
        gpus_per_worker: float | None = None,
        use_current_placement_group: bool = True,
        env_vars: Mapping[str, str] | None = None,
        **unknown: Any,
    ):
        for name in ("min_workers", "max_workers", "reset_limit", "cooldown_range", "elastic_timeout"):
            if unknown.pop(name, None) is not None:
                raise InvalidArgument(f"{name}: elastic executors are not supported yet")
        unknown.pop("override_discovery", None)
        refuse_unknown(type(self), unknown)
        if (num_workers is None) == (num_hosts is None):
            raise InvalidArgument("give exactly one of num_workers and num_hosts")
        for name, count in {
            "num_workers": num_workers,
            "num_hosts": num_hosts,
            "num_workers_per_host": num_workers_per_host,
        }.items():
            if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
                raise InvalidArgument(f"{name} must be a whole number of at least 1, not {count!r}")
        if gpus_per_worker is not None and not use_gpu:
            raise InvalidArgument("gpus_per_worker needs use_gpu=True")
        self._settings = settings or Settings()
        self._hosts, self._per_host = (
            (1, num_workers) if num_hosts is None else (num_hosts, num_workers_per_host)
        )
        self._spread = num_hosts is not None
        self._need = {"CPU": float(cpus_per_worker)}
        if use_gpu:
            self._need["GPU"] = float(1 if gpus_per_worker is None else gpus_per_worker)
        self._inside = use_current_placement_group
        self._env = dict(env_vars or {})
        self._workers: list[Any] = []
        self._own_group: PlacementGroup | None = None
        self._queue: Any = None
        self._deaths = Neighbours()

    @property
    def num_workers(self) -> int:
        return int(self._hosts * (self._per_host or 1))

    def start(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """Starts the workers; with `executable_cls` each makes one, for `execute`. Raises NotEnoughSlots when
        the cluster is too small, and after `placement_group_timeout_s` when others use it."""
        if self._workers:
            raise InvalidArgument("the executor has been started: shutdown() ends its workers")
        if not ray.is_initialized():
            ray.init()
        try:
            self._start({**self._env, **(extra_env_vars or {})})
            if executable_cls is not None:
                made = dumps(executable_cls, list(executable_args or []), executable_kwargs)
                self._finish([worker.make.remote(made) for worker in self._workers])
        except BaseException:
            self.shutdown()
            raise

    def _start(self, env: dict[str, str]) -> None:
        group, bundles = self._place()
        self._queue = here.queue()
        env = {**tracking_env(), **Config(connect_timeout_s=self._settings.timeout_s).to_env(), **env}
        for bundle in bundles:
            options = actor.Rank.options(  # type: ignore[attr-defined]
                num_cpus=self._need["CPU"],
                num_gpus=self._need.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle),
                runtime_env={"env_vars": env},
            )
            self._workers.append(options.remote(self._queue))
        offers = self._opened([worker.listen.remote() for worker in self._workers])
        order = World.arrange([offer.endpoint for offer in offers])
        self._workers = [self._workers[i] for i in order]
        offers = [offers[i] for i in order]
        self._deaths.watch(dict(enumerate(offers)))
        token, visible = secrets.token_bytes(32), visible_gpus(offers)
        self._opened([w.join.remote(r, offers, token, visible[r]) for r, w in enumerate(self._workers)])

    def _opened(self, calls: Sequence[Any]) -> list[Any]:
        """Answers of all workers, which may still wait for their CPUs."""
        timeout_s = self._settings.placement_group_timeout_s
        _, waiting = ray.wait(list(calls), num_returns=len(calls), timeout=timeout_s)
        if waiting:
            raise NotEnoughSlots(
                f"{len(waiting)} of {len(calls)} workers have not started within {timeout_s:g} s "
                f"(placement_group_timeout_s): there is no room for {_text(self._need)} each"
            )
        answers = {}
        for rank, call in enumerate(calls):
            try:
                answers[rank] = ray.get(call)
            except ray.exceptions.RayError as error:
                raise RankFailed(cause_of({rank: error})) from error
        return list(answers.values())

    def _place(self) -> tuple[PlacementGroup, list[int]]:
        """Where the workers go, and the bundle of each; -1 is any."""
        current = ray.util.get_current_placement_group() if self._inside else None
        if current is not None:
            return current, [-1] * self.num_workers
        timeout_s = self._settings.placement_group_timeout_s
        per_bundle = self._per_host if self._spread else 1
        bundle = {name: amount * (per_bundle or 1) for name, amount in self._need.items() if amount}
        bundles = self._hosts if self._spread else self.num_workers
        require(bundle, bundles, timeout_s=timeout_s, apart=self._spread, knob="placement_group_timeout_s")
        group = placement_group([bundle] * bundles, strategy="STRICT_SPREAD" if self._spread else "PACK")
        self._own_group = group
        if not group.wait(timeout_s):
            raise NotEnoughSlots(
                f"Ray has not placed {bundles} bundles of {bundle} within {timeout_s:g} s "
                "(placement_group_timeout_s)"
            )
        return group, [i for i in range(bundles) for _ in range(per_bundle or 1)]

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callable[[Any], None]] | None = None,
    ) -> list[Any]:
        """`fn(*args, **kwargs)` on every rank at the same time; results by rank. callbacks: called here, one
        after the other, with what ranks give to `hvd_ray.log`, while they run."""
        return self._finish(self._calls(dumps(fn, args or (), kwargs), False), callbacks)

    def run_remote(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """`run` that does not wait: references to the results, by rank; `ray.get` of one raises what its rank
        raised, as RankFailed."""
        payload = ray.put(dumps(fn, args or (), kwargs))
        return [worker.value.remote(payload) for worker in self._started()]

    def execute(
        self, fn: Callable[[Any], Any], callbacks: Sequence[Callable[[Any], None]] | None = None
    ) -> list[Any]:
        """`fn(executable)` on every rank, with what `start(executable_cls=...)` has made there (or None)."""
        return self._finish(self._calls(dumps(fn), True), callbacks)

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """`fn(executable)` on rank 0 only."""
        return self._finish(self._calls(dumps(fn), True, ranks=1))[0]

    def _started(self) -> list[Any]:
        if not self._workers:
            raise InvalidArgument("the executor has no workers: call start() first")
        return self._workers

    def _calls(self, payload: bytes, with_executable: bool, ranks: int | None = None) -> list[Any]:
        sent = ray.put(payload)
        return [worker.call.remote(sent, with_executable) for worker in self._started()[:ranks]]

    def _finish(
        self, calls: Sequence[Any], callbacks: Sequence[Callable[[Any], None]] | None = None
    ) -> list[Any]:
        """Results by rank; at the first cause of a failure all workers are ended, and it is raised."""
        ranks = {ref: rank for rank, ref in enumerate(calls)}
        waiting, ended = list(calls), _Ended(self._deaths)
        results: dict[int, Any] = {}
        try:
            while waiting and not ended.is_clear():
                done, waiting = ray.wait(waiting, timeout=_LOOK_EVERY_S)
                for ref in done:
                    ended.take(ranks[ref], ref, results)
                self._pass_on(callbacks or ())
        except BaseException:  # a Ctrl-C, or a callback
            self.shutdown()
            raise
        if ended.failures:
            self.shutdown()
            raise ended.error() from ended.cause()
        return [results[rank] for rank in range(len(calls))]

    def _pass_on(self, callbacks: Sequence[Callable[[Any], None]]) -> None:
        for info in here.drained(self._queue):
            for callback in callbacks:
                callback(info)

    def shutdown(self) -> None:
        """Ends the workers and gives back what they reserved. May be called twice."""
        workers, self._workers = self._workers, []
        for worker in workers:
            with contextlib.suppress(Exception):
                ray.kill(worker)
        if self._queue is not None:
            with contextlib.suppress(Exception):
                self._queue.shutdown(force=True)
            self._queue = None
        self._deaths.await_all(_GONE_WITHIN_S)
        self._deaths.close()
        group, self._own_group = self._own_group, None
        if group is not None:
            with contextlib.suppress(Exception):
                remove_placement_group(group)

    def __enter__(self) -> RayExecutor:
        if not self._workers:
            self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()


class _Ended:
    """How the calls of some ranks went wrong."""

    def __init__(self, deaths: Neighbours):
        self.failures: list[RankFailure] = []
        self._exceptions: dict[int, bytes] = {}
        self._deaths = deaths
        self._since = float("inf")

    def take(self, rank: int, ref: Any, results: dict[int, Any]) -> None:
        """What the rank's call came to: into `results`, or kept here."""
        try:
            answer = ray.get(ref)
        except ray.exceptions.RayError as error:
            self.failures += [*self._deaths.deaths(), cause_of({rank: error})]
        else:
            if not isinstance(answer, actor.Failed):
                results[rank] = pickle.loads(answer)
                return
            self.failures += answer.failures
            self._exceptions[rank] = answer.exception
        self._since = min(self._since, time.monotonic())

    def is_clear(self) -> bool:
        """Whether the first cause is known, or will not be any more."""
        if not self.failures:
            return False
        return not first_cause(self.failures).echo or time.monotonic() - self._since > _CAUSE_WITHIN_S

    def error(self) -> RankFailed:
        found = first_cause(self.failures)
        return RankFailed(replace(found, node=found.node or self._deaths.where(found.rank)))

    def cause(self) -> BaseException | None:
        """The rank's own exception, where it can be unpickled here."""
        with contextlib.suppress(Exception):
            return pickle.loads(self._exceptions[first_cause(self.failures).rank])
        return None
