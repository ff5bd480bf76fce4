"""`hvd_spark.run`: results, lines, and every way in which ranks end badly."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import hvd_spark
from hvd_core.errors import JobCancelled
from hvd_spark import (
    InvalidArgument,
    NotEnoughSlots,
    NotPicklable,
    PreflightError,
    RankFailed,
    launcher,
    session,
)
from hvd_spark.feed import FeedServer

from . import jobs

#: From the failure to the exception at the driver.
LIMIT_S = 10.0


def failed(fn: Any, *args: Any) -> RankFailed:
    start = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        hvd_spark.run(fn, args, num_proc=2)
    took = time.monotonic() - start
    assert took < LIMIT_S, f"{took:.1f} s until the driver knew"
    return caught.value


def assert_gone(directory: Path, count: int = 2) -> None:
    found = jobs.pids(directory)
    assert len(found) == count
    assert all(jobs.ended(pid, 0.5) for pid in found.values())


@pytest.fixture(scope="module", autouse=True)
def warm(spark: Any) -> None:
    """Times below are those of a session in use: the workers and their templates are there."""
    hvd_spark.run(jobs.reduce_rank, num_proc=2)


def test_results_by_rank_and_lines(spark: Any, capfd: Any) -> None:
    got = hvd_spark.run(jobs.greet, ("hello",), {"end": "?"}, num_proc=2)
    assert got == ["hello 0/2?", "hello 1/2?"]
    lines = capfd.readouterr().out.splitlines()
    assert {"[0] hello from 0", "[1] hello from 1"} <= set(lines)


def test_collectives_and_one_rank(spark: Any) -> None:
    assert hvd_spark.run(jobs.reduce_rank, num_proc=2) == [3.0, 3.0]
    assert hvd_spark.run(jobs.reduce_rank, num_proc=1) == [1.0]
    assert hvd_spark.run(jobs.reduce_rank) == [3.0, 3.0], "num_proc: all slots"


def test_large_results_come_in_chunks(spark: Any) -> None:
    got = hvd_spark.run(lambda n: bytes(range(256)) * n, (12_000,), num_proc=2)
    assert got == [bytes(range(256)) * 12_000] * 2


def test_pandas_is_not_needed(spark: Any, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert hvd_spark.run(jobs.reduce_rank, num_proc=2) == [3.0, 3.0]


def test_a_rank_has_the_threads_of_its_task(spark: Any) -> None:
    assert hvd_spark.run(os.getenv, ("OMP_NUM_THREADS",), num_proc=2) == ["1", "1"]


class ColourAtUnpickling:
    """Becomes what `COLOUR` is where it is unpickled, as a module sees it that is imported then."""

    def __reduce__(self) -> Any:
        return os.getenv, ("COLOUR",)


def colours(early: str | None) -> tuple[Any, ...]:
    return early, os.environ["COLOUR"], os.environ["SHADE"], os.environ["OMP_NUM_THREADS"]


def test_b13_environment_by_rank(spark: Any) -> None:
    def env(rank: int) -> dict[str, str]:
        own = {"OMP_NUM_THREADS": "3"} if rank == 1 else {}
        return {"COLOUR": ("red", "blue")[rank], "SHADE": "dark", **own}

    want = [("red", "red", "dark", "1"), ("blue", "blue", "dark", "3")]
    assert hvd_spark.run(colours, (ColourAtUnpickling(),), num_proc=2, env=env) == want
    assert hvd_spark.run(os.getenv, ("COLOUR",), num_proc=2) == [None, None], "of that job only"
    runner = hvd_spark.HorovodRunner(np=2, env=lambda rank: {"COLOUR": f"{rank}"})
    assert runner.run(os.getenv, key="COLOUR") == "0"
    local = hvd_spark.run(os.getenv, ("COLOUR",), num_proc=2, env=env, local_mode=True)
    assert local == ["red", "blue"]


def test_what_does_not_unpickle_is_told_with_an_environment_by_rank(spark: Any) -> None:
    """The function arrives after the ranks have found each other."""
    start = time.monotonic()
    with pytest.raises(RankFailed, match=r"rank [01] raised TypeError: str expected, not int"):
        hvd_spark.run(len, (Unbuildable(),), num_proc=2, env=lambda rank: {"COLOUR": str(rank)})
    assert time.monotonic() - start < LIMIT_S


class Unbuildable:
    def __reduce__(self) -> Any:
        return os.getenv, (3,)


def test_environment_of_ranks(spark: Any) -> None:
    assert hvd_spark.run(os.getenv, ("COLOUR",), num_proc=2, env={"COLOUR": "red"}) == ["red", "red"]
    with pytest.raises(InvalidArgument, match=r"env of rank 1 is 'blue', not \{name: string\}"):
        hvd_spark.run(os.getenv, ("COLOUR",), num_proc=2, env=lambda rank: {} if rank == 0 else "blue")  # type: ignore[arg-type, return-value]
    with pytest.raises(InvalidArgument, match="'COLOUR': 3 is not"):
        hvd_spark.run(os.getenv, ("COLOUR",), num_proc=2, env={"COLOUR": 3})  # type: ignore[dict-item]


@pytest.mark.parametrize("args", [5, "ab", {"n": 1}])
def test_arguments_that_are_no_sequence(spark: Any, args: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"args=\(x,\)"):
        hvd_spark.run(abs, args, num_proc=1)


@pytest.mark.parametrize("others", ["sleep", "allreduce", "compute"])
def test_r20_one_rank_raises(spark: Any, tmp_path: Path, others: str) -> None:
    token = f"token-{os.urandom(4).hex()}"
    error = failed(jobs.raise_on_one, str(tmp_path), token, others)
    lines = str(error).splitlines()
    assert lines[0].startswith(f"rank 1 raised ValueError: {token}")
    assert f"{jobs.__file__}:" in lines[0]
    assert len(lines) <= 60
    assert "py4j" not in str(error)
    assert isinstance(error.__cause__, ValueError)
    assert error.rank == 1
    assert_gone(tmp_path)


def test_r20_undefined_name_on_all_ranks(spark: Any, tmp_path: Path) -> None:
    error = failed(jobs.undefined_name, str(tmp_path))
    assert "raised NameError: name 'this_name_does_not_exist'" in str(error).splitlines()[0]
    assert_gone(tmp_path)


@pytest.mark.parametrize("when", ["before", "between", "inside"])
def test_r21_exit_without_a_word(spark: Any, tmp_path: Path, when: str) -> None:
    error = failed(jobs.exit_hard, str(tmp_path), when)
    assert str(error).splitlines()[0] == "rank 0 exited with status 86"
    assert error.failure.exit_status == 86
    assert_gone(tmp_path)
    assert hvd_spark.run(jobs.reduce_rank, num_proc=2) == [3.0, 3.0]


def test_r21_killed_from_outside(spark: Any, tmp_path: Path) -> None:
    with jobs.on_word(tmp_path / "word", lambda pid: os.kill(int(pid), signal.SIGKILL)):
        error = failed(jobs.wait_to_be_killed, str(tmp_path), str(tmp_path / "word"))
    assert str(error).splitlines()[0] == "rank 0 was killed by signal 9"
    assert_gone(tmp_path)
    assert hvd_spark.run(jobs.reduce_rank, num_proc=2) == [3.0, 3.0]


def test_the_python_worker_is_killed(spark: Any, tmp_path: Path) -> None:
    error = failed(jobs.kill_worker, str(tmp_path))
    assert str(error).splitlines()[0] == "rank 1 is lost"
    assert "Python worker exited unexpectedly" in str(error)
    assert not [line for line in str(error).splitlines() if line.lstrip().startswith("at ")], "no JVM stack"
    assert_gone(tmp_path)
    assert hvd_spark.run(jobs.reduce_rank, num_proc=2) == [3.0, 3.0]


def test_idle_timeout_of_spark_does_not_end_a_quiet_rank(spark: Any) -> None:
    seconds, kill = (
        f"spark.sql.execution.pyspark.udf.{k}" for k in ("idleTimeoutSeconds", "killOnIdleTimeout")
    )
    spark.conf.set(seconds, "3s")
    spark.conf.set(kill, "true")
    try:
        assert hvd_spark.run(jobs.sleep_by_rank, (5.0,), num_proc=2) == [0, 1]
    finally:
        spark.conf.unset(seconds)
        spark.conf.unset(kill)


def test_more_ranks_than_slots(spark: Any) -> None:
    start = time.monotonic()
    with pytest.raises(NotEnoughSlots, match=r"(?s)4 ranks.*has 2.*num_proc"):
        hvd_spark.run(jobs.reduce_rank, num_proc=4)
    assert time.monotonic() - start < LIMIT_S
    assert hvd_spark.run(jobs.reduce_rank, num_proc=2) == [3.0, 3.0]


def test_cancelled_by_its_job_group(spark: Any, tmp_path: Path) -> None:
    """As from the UI; the group is the one that the user's thread was in."""
    context = spark.sparkContext
    context.setJobGroup("mine", "of the user")
    try:
        with jobs.on_word(tmp_path / "word", lambda _: context.cancelJobGroup("mine")):
            with pytest.raises(JobCancelled, match="cancelled job group mine"):
                hvd_spark.run(jobs.sleep_and_say, (str(tmp_path), str(tmp_path / "word")), num_proc=2)
        assert_gone(tmp_path)
    finally:
        context.setLocalProperty("spark.jobGroup.id", None)
    assert hvd_spark.run(jobs.reduce_rank, num_proc=2) == [3.0, 3.0]


def test_out_of_memory_in_a_rank(spark: Any, tmp_path: Path) -> None:
    error = failed(jobs.use_up_memory, str(tmp_path))
    assert "rank 1 raised " in str(error) and "MemoryError" in str(error).splitlines()[0]
    assert isinstance(error.__cause__, MemoryError) and not error.retryable
    assert_gone(tmp_path)


@pytest.fixture
def lacking(spark: Any, tmp_path: Path, monkeypatch: Any) -> Any:
    """lacking(name): the executors' Python has no module of that name; `python -c` has, so only the tasks can
    find out."""

    def hide(name: str) -> str:
        (tmp_path / "sitecustomize.py").write_text(f"""
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {name!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hidden())
""")
        wrapper = tmp_path / "python3"
        wrapper.write_text(
            f"""#!/bin/sh
if [ "$1" = -m ]; then export PYTHONPATH={tmp_path}:$PYTHONPATH; fi
exec {sys.executable} "$@"
"""
        )
        wrapper.chmod(0o755)
        monkeypatch.setattr(spark.sparkContext, "pythonExec", str(wrapper))
        return socket.gethostname()

    return hide


@pytest.mark.parametrize("name", ["hvd_spark", "hvd_core", "cloudpickle"])
def test_hvd_missing_on_the_executors(spark: Any, lacking: Any, name: str) -> None:
    host, start = lacking(name), time.monotonic()
    with pytest.raises(PreflightError) as caught:
        hvd_spark.run(jobs.reduce_rank, num_proc=2)
    assert time.monotonic() - start < 15
    assert f"No module named '{name}" in str(caught.value)
    assert sys.executable in str(caught.value) and f" on {host}:" in str(caught.value)


def test_a_module_of_the_function_is_missing_on_the_executors(
    spark: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """It is found, by the name of the host, before any rank has run a line."""
    (tmp_path / "only_here.py").write_text("def fn(path):\n    open(path, 'w').close()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import only_here  # type: ignore[import-not-found]

    monkeypatch.setattr(session, "import_path", lambda spark: ())
    with pytest.raises(PreflightError, match=r"No module named 'only_here'.* on ") as caught:
        hvd_spark.run(only_here.fn, (str(tmp_path / "ran"),), num_proc=2)
    assert socket.gethostname() in str(caught.value) and "addPyFile" in str(caught.value)
    assert not (tmp_path / "ran").exists()


class Writer:
    """Like a TensorBoard writer: holds a thread's lock."""

    def __init__(self) -> None:
        self.guard = threading.Lock()


def test_r22_what_does_not_pickle_is_named(spark: Any, job_count: Any, tmp_path: Path) -> None:
    my_lock, my_writer = threading.Lock(), Writer()
    before = job_count()
    with open(tmp_path / "log", "w") as my_file:
        for name, thing in {
            "my_lock": my_lock,
            "my_file": my_file,
            "my_writer": my_writer,
            "my_spark": spark,
        }.items():
            # A function of its own for each, which uses the variable under its name.
            namespace: dict[str, Any] = {name: thing}
            exec(f"def use(): return {name}", namespace)
            namespace["use"].__module__ = "__main__"
            with pytest.raises(NotPicklable, match=name):
                hvd_spark.run(namespace["use"], num_proc=2)
    assert job_count() == before


def test_r22_what_must_pickle(spark: Any) -> None:
    class Local:
        def __init__(self, n: int):
            self.n = n

    def use(counts: dict[int, int], *, make: Any) -> int:
        return make(sum(counts.values())).n + Local(1).n

    assert hvd_spark.run(use, ({1: 2, 3: 4},), {"make": lambda n: Local(n * 10)}, num_proc=2) == [61, 61]


def children() -> set[int]:
    return {int(p) for t in Path("/proc/self/task").iterdir() for p in (t / "children").read_text().split()}


def sockets() -> int:
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            count += os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
    return count


def test_r24_again_and_again_in_one_session(spark: Any, tmp_path: Path) -> None:
    def counts() -> tuple[set[str], int, set[int]]:
        return (
            {t.name for t in threading.enumerate() if not t.name.startswith("Thread-")},
            sockets(),
            children(),
        )

    assert hvd_spark.run(jobs.reduce_rank, num_proc=2) == [3.0, 3.0]
    before = counts()
    assert hvd_spark.run(jobs.reduce_rank, num_proc=2) == [3.0, 3.0]
    with pytest.raises(RankFailed, match="NameError"):
        hvd_spark.run(jobs.undefined_name, (str(tmp_path),), num_proc=2)
    assert hvd_spark.run(jobs.reduce_rank, num_proc=2) == [3.0, 3.0]

    asleep = tmp_path / "asleep"
    asleep.mkdir()
    with jobs.on_word(tmp_path / "word", lambda _: os.kill(os.getpid(), signal.SIGINT)):
        with pytest.raises(KeyboardInterrupt):
            hvd_spark.run(jobs.sleep_and_say, (str(asleep), str(tmp_path / "word")), num_proc=2)
    assert_gone(asleep)
    assert hvd_spark.run(jobs.reduce_rank, num_proc=1) == [1.0]
    assert hvd_spark.run(jobs.reduce_rank, num_proc=2) == [3.0, 3.0]
    after = counts()
    assert after[0] == before[0]
    assert after[1] <= before[1]
    assert after[2] == before[2]


def test_stray_bytes_on_our_ports(spark: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """Strangers talk to the feed and to the ranks' listeners while a job starts; it goes on undisturbed."""
    servers: list[FeedServer] = []

    class Seen(FeedServer):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            servers.append(self)

    monkeypatch.setattr(launcher, "FeedServer", Seen)
    there, back = tmp_path / "there", tmp_path / "back"
    os.mkfifo(back)
    poked: list[tuple[str, int]] = []

    def poke(endpoints: str) -> None:
        addresses = {servers[0].address, *tcp_addresses(endpoints)}
        for address in addresses:
            for garbage in (b"GET / HTTP/1.0\r\n\r\n", os.urandom(4096), b""):
                with socket.create_connection(address, 5) as sock:
                    sock.sendall(garbage)
                poked.append(address)
        jobs.say(str(back), "go on")

    with jobs.on_word(there, poke):
        assert hvd_spark.run(jobs.endpoints_then_reduce, (str(there), str(back)), num_proc=2) == [3.0, 3.0]
    assert len(set(poked)) >= 2, "the feed, and at least one listener"


def tcp_addresses(endpoints: str) -> set[tuple[str, int]]:
    """host:port pairs out of the ranks' endpoint strings."""
    import re

    return {(host, int(port)) for host, port in re.findall(r"(\d+\.\d+\.\d+\.\d+):(\d+)", endpoints)}


def test_r19_busy_slots(spark: Any, capfd: Any, tmp_path: Path) -> None:
    """Another job holds both slots until the test lets go of them."""
    fifo = tmp_path / "hold"
    os.mkfifo(fifo)

    def hold(_: int) -> None:
        with open(fifo) as pipe:
            pipe.read()

    holder = threading.Thread(target=lambda: spark.sparkContext.parallelize(range(2), 2).foreach(hold))
    holder.start()
    pipe = open(fifo, "w")  # noqa: SIM115  opens once a task has opened it
    started = time.monotonic()
    try:
        gave_up = []

        def wait_too() -> None:
            with pytest.raises(NotEnoughSlots):
                hvd_spark.run(jobs.greet, ("hello",), num_proc=2, start_timeout_s=6)
            gave_up.append(time.monotonic() - started)

        other = session.thread(spark, wait_too)  # two that wait must not keep each other waiting
        other.start()
        with pytest.raises(NotEnoughSlots, match=r"waited \d+ s for 2 slots.*start_timeout_s=6"):
            hvd_spark.run(jobs.greet, ("hello",), num_proc=2, start_timeout_s=6)
        assert time.monotonic() - started < 15
        other.join(30)
        assert len(gave_up) == 1 and gave_up[0] < 20
        assert "waiting for 2 slots" in capfd.readouterr().err
    finally:
        pipe.close()
        holder.join(30)
    assert hvd_spark.run(jobs.reduce_rank, num_proc=2) == [3.0, 3.0]
