"""What this process may have of CPUs and memory: the limits of its control groups, version 1 or 2, and of the
machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_MEMBERSHIP = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")


def cpu_quota(membership: Path = _MEMBERSHIP, mount: Path = _MOUNT) -> float | None:
    """The smallest CPU quota (in CPUs) of our cgroup and of those around it; None: no limit."""
    return min(
        (quota for group in _groups("cpu", membership, mount) for quota in _quota_of(group)), default=None
    )


def free_memory(membership: Path = _MEMBERSHIP, mount: Path = _MOUNT) -> int:
    """Bytes that this process can still use: what the machine has available, or less where our cgroup or one
    around it is nearer to its limit. File pages that the kernel would give back count as free."""
    rooms = [room for group in _groups("memory", membership, mount) for room in _room_in(group)]
    return max(0, min([_available(), *rooms]))


def _groups(controller: str, membership: Path, mount: Path) -> Iterator[Path]:
    """Our cgroup and those around it, up to the root of `mount`.

    In a container the path in `membership` may be the host's and not exist below `mount`; the root of
    `mount` is then our own cgroup.
    """
    with contextlib.suppress(OSError):
        for line in membership.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            root = mount / controller if controllers else mount
            here = root / path.lstrip("/")
            for group in (here, *here.parents):
                yield group
                if group == root:
                    break


def _quota_of(group: Path) -> list[float]:
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text().strip()
            period = (group / "cpu.cfs_period_us").read_text().strip()
        return [int(quota) / int(period)] if quota not in ("max", "-1") else []
    except (OSError, ValueError):
        return []


def _room_in(group: Path) -> list[int]:
    names = ("memory.max", "memory.current", "inactive_file")
    if not (group / names[0]).exists():
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    limit, used, reclaimable = names
    try:
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return [int((group / limit).read_text()) - int((group / used).read_text()) + int(stat[reclaimable])]
    except (OSError, ValueError, KeyError):  # "max" is no number
        return []


def _available() -> int:
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
