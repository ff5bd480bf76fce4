"""Any function on N ranks of a Spark cluster."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import hvd_core
from hvd_core.errors import InvalidArgument
from hvd_core.launch import Env, dumps, envs_of
from hvd_core.train.trackers import tracking_env

from . import preflight, session
from .launcher import JobSpec, launch
from .parcel import Parcel
from .parts import unpickled

#: Worth importing once before ranks are forked; of the frameworks those that the driver has loaded.
_PRELOAD = ("hvd_core.basics", "hvd_core.world", "hvd_core.launch")
_FRAMEWORKS = {"torch": "hvd_core.torch"}


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    env: Env = None,
    verbose: int = 1,
    printed: bool = True,
    start_timeout_s: float = 600.0,
    local_mode: bool = False,
) -> list[Any]:
    """Calls `fn(*args, **kwargs)` on `num_proc` ranks at the same time; returns their results by rank.

    Inside `fn`, `hvd_core.torch.init()` connects the ranks. num_proc: default is all slots of the cluster.
    env: changes to the ranks' environment, {name: string} or `env(rank)`, called here; visible before
    anything of the user is imported there. start_timeout_s: how long to wait while other jobs hold the
    slots. local_mode: all ranks on the driver's machine, without Spark; num_proc must be given.
    Lines that ranks print appear here as "[rank] line"; with printed=False only those of
    `hvd_core.log_to_driver`. Raises NotEnoughSlots, NotPicklable and InvalidArgument before anything is
    launched, RankFailed with the first cause. A KeyboardInterrupt ends the ranks.
    """
    if local_mode:
        if num_proc is None:
            raise InvalidArgument("local_mode needs num_proc: the driver has no slots to count")

        def own(rank: int) -> dict[str, str]:
            return {**tracking_env(), **((env(rank) if callable(env) else env) or {})}

        return hvd_core.run(fn, args, kwargs, num_proc=num_proc, env=own, printed=printed)
    payload = dumps(fn, args, kwargs)
    spark = session.current()
    size = preflight.check_cluster(spark, num_proc)
    envs = envs_of(size, env)
    spec = JobSpec(
        size,
        Parcel.of(spark, payload),
        f"hvd: {getattr(fn, '__qualname__', 'function')} on {size} ranks",
        preload=(*_PRELOAD, *(adapter for name, adapter in _FRAMEWORKS.items() if name in sys.modules)),
        envs=envs,
        verbose=verbose,
        printed=printed,
        start_timeout_s=start_timeout_s,
    )
    outcome = launch(spark.range(0, size, 1, size), spec)
    return [unpickled(parts) for parts in outcome.results]
