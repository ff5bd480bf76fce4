"""Any function on N ranks of a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from hvd_core.errors import InvalidArgument
from hvd_core.launch import dumps

from .executor import RayExecutor, Settings


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    env: Mapping[str, str] | None = None,
    *,
    cpus_per_rank: float = 1,
    use_gpu: bool = False,
    start_timeout_s: float = 600.0,
    callbacks: Sequence[Callable[[Any], None]] | None = None,
) -> list[Any]:
    """Calls `fn(*args, **kwargs)` on `num_proc` ranks at the same time; returns their results by rank.

    Inside `fn`, `hvd_core.torch.init()` connects the ranks. num_proc: default is as many as fit by CPUs (by
    GPUs with use_gpu). env: names and strings set for each rank. start_timeout_s: how long to wait
    while others use the CPUs. callbacks: see `RayExecutor.run`. Raises NotEnoughSlots, NotPicklable and
    InvalidArgument before anything is launched, RankFailed with the first cause. A KeyboardInterrupt ends the
    ranks; nothing is left behind, whichever way this ends.
    """
    dumps(fn, args, kwargs)  # what does not pickle is found before anything is started
    if not ray.is_initialized():
        ray.init()
    if num_proc is None:
        whole: Any = ray.cluster_resources()  # type: ignore[no-untyped-call]
        num_proc = int(whole.get("GPU", 0)) if use_gpu else int(whole.get("CPU", 0) // cpus_per_rank)
        if num_proc < 1:
            raise InvalidArgument("num_proc: the cluster has nothing to count ranks by; give a number")
    executor = RayExecutor(
        Settings(placement_group_timeout_s=start_timeout_s),
        num_workers=num_proc,
        cpus_per_worker=cpus_per_rank,
        use_gpu=use_gpu,
        env_vars=env,
        use_current_placement_group=False,
    )
    with executor:
        return executor.run(fn, args, kwargs, callbacks)
