"""`join`: for ranks that have less data than others."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from .. import basics
from .distributor import plans_in


def join(device: int = -1) -> int:
    """Says that this rank has no more data, and waits until all ranks have said so; returns the rank that did
    last. Meanwhile the others' collectives over all ranks do without it (see `Group.join`), and so do their
    `DistributedOptimizer`s: gradients of this rank count as zero, and its parameters stay as they are, so
    that afterwards those of the last rank are to be broadcast. `device` is there for Horovod's sake."""
    group = basics.default_group()
    plans = plans_in(group)
    if not plans:
        return basics.join()
    # One thread for each, because another rank may step its optimizers in any order.
    with ThreadPoolExecutor(len(plans), "hvd.join") as threads:
        steps = [threads.submit(plan.stand_in) for plan in plans]
        try:
            last = basics.join()
        except BaseException as error:  # the threads end only with the Group
            group.abort(f"rank {group.rank} left join: {error!r}")
            raise
        for step in steps:
            step.result()
    return last
