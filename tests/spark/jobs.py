"""Functions that the tests run on ranks, and how a test waits for them without sleeping."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np


def place() -> tuple[int, int]:
    from hvd_core import world

    here = world.current()
    return here.rank, here.size


def say(fifo: str, text: str) -> None:
    """Writes a line to a named pipe that the test reads."""
    with open(fifo, "w") as pipe:
        pipe.write(text + "\n")


def own_pid(directory: str) -> int:
    """Leaves the pid of this rank in `directory`; returns the rank."""
    rank, _ = place()
    (Path(directory) / f"pid{rank}").write_text(str(os.getpid()))
    return rank


def pids(directory: Path) -> dict[int, int]:
    return {int(path.name[3:]): int(path.read_text()) for path in directory.glob("pid*")}


def ended(pid: int, timeout_s: float = 5.0) -> bool:
    """Whether the process ends within the time."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], timeout_s)[0])
    finally:
        os.close(fd)


@contextmanager
def on_word(fifo: Path, act: Callable[[str], Any]) -> Iterator[None]:
    """Calls `act(line)` in a thread for the first line that comes out of the pipe."""
    os.mkfifo(fifo)

    def listen() -> None:
        with open(fifo) as pipe:
            act(pipe.readline().strip())

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    try:
        yield
    finally:
        if thread.is_alive():
            # Nobody has spoken: open the other end, so that the thread ends.
            with open(fifo, "w") as pipe:
                pipe.write("\n")
        thread.join(10)


def greet(word: str, *, end: str = "!") -> str:
    rank, size = place()
    print(f"{word} from {rank}")
    return f"{word} {rank}/{size}{end}"


def reduce_rank() -> float:
    """1 + 2 + ... + size, by an allreduce."""
    from hvd_core import basics

    basics.init()
    got = basics.default_group().allreduce(np.array([basics.rank() + 1.0]), name="sum")
    return float(got[0])


def raise_on_one(directory: str, token: str, others: str) -> None:
    """Rank 1 raises ValueError(token) after a second; the others sleep, reduce or compute meanwhile."""
    from hvd_core import basics

    rank = own_pid(directory)
    basics.init()
    if rank == 1:
        time.sleep(1)
        raise ValueError(token)
    if others == "sleep":
        time.sleep(120)
    elif others == "allreduce":
        basics.default_group().allreduce(np.ones(1000), name="never")
    while True:
        pass


def undefined_name(directory: str) -> None:
    own_pid(directory)
    this_name_does_not_exist  # type: ignore[name-defined]  # noqa: B018, F821


def exit_hard(directory: str, when: str) -> None:
    """Rank 0 leaves with status 86: before the first collective, between two, or inside a large one."""
    from hvd_core import basics

    rank = own_pid(directory)
    if rank == 0 and when == "before":
        os._exit(86)
    basics.init()
    group = basics.default_group()
    group.allreduce(np.ones(10), name="first")
    if rank == 0 and when == "between":
        os._exit(86)
    handle = group.allreduce_async(np.ones(32 << 20, np.float32), name="large")
    if rank == 0:
        os._exit(86)
    handle.wait()
    group.allreduce(np.ones(10), name="second")


def wait_to_be_killed(directory: str, fifo: str) -> None:
    """Rank 0 says its pid; all ranks then wait in an allreduce that rank 0 never joins."""
    from hvd_core import basics

    rank = own_pid(directory)
    basics.init()
    if rank == 0:
        say(fifo, str(os.getpid()))
        time.sleep(120)
    basics.default_group().allreduce(np.ones(10), name="never")


def sleep_and_say(directory: str, fifo: str) -> None:
    """All ranks sleep; rank 0 says so."""
    rank = own_pid(directory)
    if rank == 0:
        say(fifo, "asleep")
    time.sleep(120)


def endpoints_then_reduce(there: str, back: str) -> float:
    """Rank 0 says where the ranks listen and waits for an answer before the ranks connect."""
    from hvd_core import world

    if world.current().rank == 0:
        say(there, " ".join(world.current().endpoints))
        with open(back) as pipe:
            pipe.readline()
    return reduce_rank()


def sleep_by_rank(seconds: float) -> int:
    """Rank 0 is done at once, rank 1 later."""
    rank, _ = place()
    time.sleep(rank * seconds)
    return rank


def kill_worker(directory: str) -> None:
    """Rank 1 kills the Python worker that watches over it: the parent of its template."""
    rank = own_pid(directory)
    if rank == 1:
        stat = Path(f"/proc/{os.getppid()}/stat").read_text()
        os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)
    time.sleep(120)


def end_executor() -> None:
    """SIGKILL for the JVM above this rank."""
    pid = os.getpid()
    while Path(f"/proc/{pid}/comm").read_text().strip() != "java":
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(pid, signal.SIGKILL)


def kill_executor(directory: str) -> None:
    """Rank 1 kills the executor that it runs in."""
    rank = own_pid(directory)
    if rank == 1:
        end_executor()
    time.sleep(120)


def see_gpus() -> dict[str, Any]:
    """Which GPUs this rank is shown, before it has imported torch, and who is with it."""
    import sys

    early = "torch" in sys.modules
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    from hvd_core import basics

    basics.init()
    group = basics.default_group()
    executor = os.stat("/proc/self/cwd").st_ino  # each has a working directory of its own
    return {
        "mask": mask,
        "early": early,
        "executor": executor,
        "rank": group.rank,
        "local": [basics.local_rank(), basics.local_size(), basics.cross_size()],
        "sum": float(group.allreduce(np.array([group.rank + 1.0]), name="sum")[0]),
    }


def use_up_memory(directory: str) -> None:
    """Rank 1 wants more memory than its limit lets it have."""
    import resource

    rank = own_pid(directory)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
        np.ones(16 << 30, np.uint8)
    time.sleep(120)
