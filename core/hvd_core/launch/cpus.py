"""How many CPUs this process may use, and how a rank's thread pools are told."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
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
    quota = cgroup_quota(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    return max(1, allowed if quota is None else min(allowed, int(quota)))


def cgroup_quota(membership: Path, mount: Path) -> float | None:
    """The smallest CPU quota (in CPUs) between our cgroup and the root of `mount`; None: no limit.

    Reads version 2 (`cpu.max`) and version 1 (`cpu.cfs_quota_us`). In a container the path in `membership`
    may be the host's and not exist below `mount`; the root of `mount` is then our own cgroup.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    quotas: list[float] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root = mount
        elif "cpu" in controllers.split(","):
            root = mount / "cpu"
        else:
            continue
        here = root / path.lstrip("/")
        for directory in (here, *here.parents):
            quotas += _quota_of(directory)
            if directory == root:
                break
    return min(quotas, default=None)


def _quota_of(directory: Path) -> list[float]:
    try:
        if (directory / "cpu.max").exists():
            quota, period = (directory / "cpu.max").read_text().split()
        else:
            quota = (directory / "cpu.cfs_quota_us").read_text().strip()
            period = (directory / "cpu.cfs_period_us").read_text().strip()
        return [int(quota) / int(period)] if quota not in ("max", "-1") else []
    except (OSError, ValueError):
        return []


def threads_per_rank(cpus_per_rank: int | None, num_proc: int, environ: Mapping[str, str], cpus: int) -> int:
    """Compute threads of one rank: what was asked for, else OMP_NUM_THREADS, else an equal share of
    `cpus`."""
    if cpus_per_rank is not None:
        return cpus_per_rank
    asked = environ.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    return max(1, cpus // num_proc)
