"""How many CPUs this process may use, and how a rank's thread pools are told."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ..limits import cpu_quota

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "TF_NUM_INTRAOP_THREADS",
    "TF_NUM_INTEROP_THREADS",
)


def thread_env(threads: int) -> dict[str, str]:
    """The environment that gives a process `threads` compute threads."""
    return dict.fromkeys(THREAD_VARIABLES, str(threads))


def usable_cpus() -> int:
    """CPUs in the affinity mask, or fewer when a cgroup quota allows less; at least 1."""
    try:
        allowed = len(os.sched_getaffinity(0))
    except AttributeError:
        allowed = os.cpu_count() or 1
    quota = cpu_quota()
    return max(1, allowed if quota is None else min(allowed, int(quota)))


def threads_per_rank(cpus_per_rank: int | None, num_proc: int, environ: Mapping[str, str], cpus: int) -> int:
    """Compute threads of one rank: what was asked for, else OMP_NUM_THREADS, else an equal share of
    `cpus`."""
    if cpus_per_rank is not None:
        return cpus_per_rank
    asked = environ.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    return max(1, cpus // num_proc)
