"""Many ranks on few CPUs: start, 100 allreduces of 1 MiB, one killed; 128 ranks as threads of one process.

python benchmarks/ranks.py [--quick]
"""

from __future__ import annotations

import math
import os
import resource
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import report
import side_by_side
from side_by_side import Ranks

import hvd_core
from hvd_core import basics
from hvd_core.errors import HvdError

MIB = 1 << 20
VIRTUAL_PER_HOST = 16
KILLED = 1
#: Stands for ranks that did not connect: not met, and still a number for JSON.
NEVER_S = 1e9


def work(calls: int) -> dict[str, float]:
    """What a rank saw: when it was connected, its descriptors and threads, and how long the calls took."""
    basics.init()
    group = basics.default_group()
    group.barrier()
    connected = time.monotonic()
    array = np.empty(MIB // 4, np.float32)
    for call in range(calls):
        array.fill(group.rank + call % 3)
        group.allreduce(array, name="megabyte")
        assert array[0] == array[-1] == sum(range(group.size)) + group.size * (call % 3)
    took = time.monotonic() - connected
    descriptors, threads = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    group.barrier("counted")
    return {"connected": connected, "took_s": took, "descriptors": descriptors, "threads": threads}


def start_and_work(size: int, calls: int) -> dict[str, Any]:
    begin = time.monotonic()
    saw = hvd_core.run(work, (calls,), num_proc=size, timeout_s=300)
    return {
        "what": "processes, allreduce of 1 MiB",
        "ranks": size,
        "start_s": max(one["connected"] for one in saw) - begin,
        "calls": calls,
        "calls_s": max(one["took_s"] for one in saw),
        "descriptors": max(one["descriptors"] for one in saw),
        "threads": max(one["threads"] for one in saw),
        "noticed_s": None,
    }


def be_killed(ranks: Ranks, folder: str) -> None:
    """Rank KILLED dies between two allreduces. The others write when they noticed and what they read."""
    group = ranks.connect_hvd()
    array = np.ones(MIB // 4, np.float32)
    for call in range(1000):
        if ranks.rank == KILLED and call == 5:
            Path(folder, "killed").write_text(repr(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            group.allreduce(array, name="until the end")
        except HvdError as error:
            Path(folder, str(ranks.rank)).write_text(f"{time.monotonic()!r} {error}")
            return


def kill_one(size: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        side_by_side.run(be_killed, size=size, mpi=False, dies=KILLED, folder=folder)
        killed = float(Path(folder, "killed").read_text())
        texts = {rank: Path(folder, str(rank)).read_text() for rank in range(size) if rank != KILLED}
    wrong = [text for text in texts.values() if f"rank {KILLED}" not in text]
    if wrong:
        raise AssertionError(f"{len(wrong)} survivors name somebody else: {wrong[0]}")
    noticed = max(float(text.split()[0]) for text in texts.values()) - killed
    return {"what": f"rank {KILLED} killed", "ranks": size, "noticed_s": noticed}


def virtual(size: int) -> dict[str, Any]:
    """All ranks as threads of this process, on pretended hosts of VIRTUAL_PER_HOST ranks."""
    configs = [hvd_core.Config(host_id=f"virtual-{rank // VIRTUAL_PER_HOST}") for rank in range(size)]
    listeners = [hvd_core.Listener.bind(config) for config in configs]
    endpoints = [listener.endpoint for listener in listeners]
    groups: list[Any] = [None] * size
    before = len(os.listdir("/proc/self/fd"))
    calls = 10

    def connect(rank: int) -> None:
        groups[rank] = hvd_core.Group.connect(
            listeners[rank], endpoints, rank=rank, token=b"virtual", config=configs[rank]
        )
        groups[rank].barrier()

    def negotiate(rank: int) -> None:
        for call in range(calls):
            array = np.full(100, rank, np.float32)
            groups[rank].allreduce(array, name=f"call.{call}")
            assert array[0] == array[-1] == size * (size - 1) // 2

    start_s = on_threads(connect, size)
    descriptors = (len(os.listdir("/proc/self/fd")) - before) // size
    calls_s = on_threads(negotiate, size)
    for group in groups:
        group.close()
    return {
        "what": f"threads, {VIRTUAL_PER_HOST} a host, new names",
        "ranks": size,
        "start_s": start_s,
        "calls": calls,
        "calls_s": calls_s,
        "descriptors": descriptors,
    }


def on_threads(function: Callable[[int], None], size: int) -> float:
    """Seconds until all have returned. Raises the first exception."""
    failures: list[Exception] = []

    def body(rank: int) -> None:
        try:
            function(rank)
        except Exception as error:  # noqa: BLE001  raised below
            failures.append(error)

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(size)]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    if failures:
        raise failures[0]
    if any(thread.is_alive() for thread in threads):
        raise TimeoutError(f"{size} ranks are not done after 120 s")
    return time.monotonic() - begin


def main() -> None:
    options = report.arguments(__doc__).parse_args()
    figure = report.Figure("ranks", "many ranks on few CPUs", options.quick)
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    few, many, all_virtual = (2, 4, 32) if options.quick else (8, 32, 128)
    load = side_by_side.Load()
    rows = [start_and_work(size, 100 if size == many else 10) for size in (few, many)]
    rows += [kill_one(many)]
    try:
        rows += [virtual(all_virtual)]
    except HvdError as error:
        figure.notes.append(f"{all_virtual} virtual ranks: {error}")
    figure.saw_load(*load.taken_by_others())
    figure.rows = [{key: row.get(key) for key in rows[0]} for row in rows]
    # A link to each peer of the host, its process and its segments; nothing else grows.
    per_peer = (rows[1]["descriptors"] - rows[0]["descriptors"]) / (many - few)
    figure.targets = [
        report.Target(f"seconds until {many} ranks are connected", rows[1]["start_s"], 20, at_most=True),
        report.Target(f"seconds until {many - 1} survivors noticed", rows[2]["noticed_s"], 0.5, at_most=True),
        report.Target("descriptors per further local peer", per_peer, 4, at_most=True),
        report.Target("further threads with more ranks", rows[1]["threads"] - rows[0]["threads"], 0, True),
    ]
    what = f"seconds to connect {all_virtual} virtual ranks"
    virtual_s = rows[3]["start_s"] if len(rows) > 3 else math.inf
    figure.targets.append(report.Target(what, min(virtual_s, NEVER_S), 20, at_most=True))
    figure.publish()


if __name__ == "__main__":
    main()
