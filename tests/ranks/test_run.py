"""`run`: results by rank, output, environment, and nothing left behind."""

from __future__ import annotations

import io
import os
import random
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvd_core import world
from hvd_core.errors import NotPicklable, RankFailed
from hvd_core.launch import run

from ..conftest import children

pytestmark = pytest.mark.timeout(90)


def _script(code: str, *, stdin: bool, tmp_path: Path, env: dict[str, str] | None = None) -> str:
    """What a driver prints that is a script, or that is typed into `python -`."""
    code = textwrap.dedent(code)
    (tmp_path / "job.py").write_text(code)
    command = [sys.executable, "-"] if stdin else [sys.executable, "job.py"]
    done = subprocess.run(
        command,
        input=code if stdin else None,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | (env or {}),
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _place(factor: int, *, offset: int = 0) -> tuple[int, int, int]:
    here = world.current()
    return here.rank * factor + offset, here.size, os.getpid()


def test_results_come_by_rank() -> None:
    results = run(_place, (10,), {"offset": 1}, num_proc=3)
    assert [value for value, _, _ in results] == [1, 11, 21]
    assert {size for _, size, _ in results} == {3}
    assert len({pid for _, _, pid in results} | {os.getpid()}) == 4


def _sums() -> tuple[float, int, int]:
    with world.current().connect() as group:
        total = group.allreduce(np.full(100_000, group.rank + 1.0), name="x")
        return float(total[-1]), group.local_rank, group.local_size


@pytest.mark.parametrize("num_proc", [1, 2, 3])
def test_ranks_compute_together(num_proc: int) -> None:
    expected = sum(range(1, num_proc + 1))
    assert run(_sums, num_proc=num_proc) == [(expected, rank, num_proc) for rank in range(num_proc)]


def test_one_rank_is_a_process_too() -> None:
    ((value, size, pid),) = run(_place, (10,), num_proc=1)
    assert (value, size) == (0, 1)
    assert pid != os.getpid()


def test_again_and_again_leaves_nothing() -> None:
    run(_place, (1,), num_proc=2)
    before = (len(os.listdir("/proc/self/fd")), threading.enumerate(), children())
    for num_proc in (2, 1, 2):
        run(_place, (1,), num_proc=num_proc)
    with pytest.raises(RankFailed):
        run(_fails_on_one, num_proc=2)
    with pytest.raises(NotPicklable):
        run(_place, (threading.Lock(),), num_proc=2)
    run(_place, (1,), num_proc=2)
    assert (len(os.listdir("/proc/self/fd")), threading.enumerate(), children()) == before


def _fails_on_one() -> None:
    if world.current().rank == 1:
        raise ValueError


def test_from_a_thread_two_at_a_time() -> None:
    results: dict[int, list[Any]] = {}

    def job(number: int) -> None:
        results[number] = run(_place, (number,), num_proc=2)

    threads = [threading.Thread(target=job, args=(number,)) for number in (3, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {number: [r[0] for r in got] for number, got in results.items()} == {3: [0, 3], 5: [0, 5]}


DRIVER = """
    import dataclasses
    import beside
    from hvd_core.launch import run

    @dataclasses.dataclass
    class Point:
        x: int

    def job(a):
        from hvd_core.world import current
        print("here")
        return Point(beside.double(a) + current().rank)

    got = run(job, (4,), num_proc=2)
    print([p.x for p in got], all(isinstance(p, Point) for p in got))
"""


@pytest.mark.parametrize("stdin", [False, True])
def test_a_driver_without_a_main_guard(stdin: bool, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("def double(x): return 2 * x")
    out = _script(DRIVER, stdin=stdin, tmp_path=tmp_path).splitlines()
    assert sorted(out[:2]) == ["[0] here", "[1] here"]
    assert out[2:] == ["[8, 9] True"]


def _prints() -> None:
    rank = world.current().rank
    for number in range(200):
        print(f"line {number} of {rank}", "x" * 500)
    os.write(1, b"binary \xff\x00\n")
    os.write(1, b"\r1%\r2%\r3%\n")
    print("y" * 3_000_000)
    print("to stderr", file=sys.stderr)
    sys.stdout.write("no end")


def test_a_driver_without_standard_streams(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(
        "import os, hvd_core\n"
        "ranks = hvd_core.run(os.getpid, num_proc=2)\n"
        "open('done', 'w').write(str(len(ranks)))\n"
    )
    closed = 'exec "$0" job.py <&- >&- 2>&-'
    subprocess.run(["sh", "-c", closed, sys.executable], cwd=tmp_path, timeout=60, check=True)
    assert (tmp_path / "done").read_text() == "2"


def test_a_path_in_sys_path_is_no_obstacle(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])
    assert run(_sys_path_end, num_proc=1) == [str(tmp_path)]


def _sys_path_end() -> str:
    return sys.path[-1]


def test_output_line_by_line_with_the_rank() -> None:
    file = io.StringIO()
    run(_prints, num_proc=2, output=file)
    lines = file.getvalue().splitlines()
    for rank in (0, 1):
        mine = [line[4:] for line in lines if line.startswith(f"[{rank}] ")]
        assert mine[:200] == [f"line {number} of {rank} {'x' * 500}" for number in range(200)]
        rest = mine[200:]
        assert rest.pop(rest.index("to stderr"))
        assert rest[0] == "binary \\xff\x00"
        assert rest[-3:] == ["3%", "y" * 3_000_000, "no end"]
    assert {line[:4] for line in lines} == {"[0] ", "[1] "}


def test_output_goes_to_our_own_streams(capsys: pytest.CaptureFixture[str]) -> None:
    def speaks() -> None:
        print("out é")
        print("err", file=sys.stderr)

    run(speaks, num_proc=1)
    said = capsys.readouterr()
    assert (said.out, said.err) == ("[0] out é\n", "[0] err\n")


def test_a_stream_that_cannot_write_a_character() -> None:
    raw = io.BytesIO()
    ascii_only = io.TextIOWrapper(raw, "ascii")
    run(lambda: print("é"), num_proc=1, output=ascii_only)
    assert raw.getvalue() == b"[0] \\xe9\n"


def test_environment_by_rank(tmp_path: Path) -> None:
    code = """
        import os
        AT_IMPORT = os.environ["WHO"]
    """
    (tmp_path / "reads_env.py").write_text(textwrap.dedent(code))
    driver = """
        import os
        os.environ["WHO"] = "driver"
        os.environ["HUGE"] = "h" * 200_000
        for i in range(3000):
            os.environ[f"SMALL_{i}"] = "s"
        import reads_env
        from hvd_core.launch import run

        def job():
            env = os.environ
            return reads_env.AT_IMPORT, len(env["HUGE"]), env["SMALL_2999"], len(env["BIG"])

        print(run(job, num_proc=2, env=lambda rank: {"WHO": f"rank{rank}", "BIG": "b" * 300_000}))
    """
    out = _script(driver, stdin=False, tmp_path=tmp_path)
    assert out.strip() == "[('rank0', 200000, 's', 300000), ('rank1', 200000, 's', 300000)]"


def _threads() -> tuple[set[str], int, int]:
    import torch

    told = {os.environ[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TF_NUM_INTEROP_THREADS")}
    return told, torch.get_num_threads(), torch.get_num_interop_threads()


@pytest.mark.parametrize("preloaded", [False, True])
def test_threads(preloaded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    if not preloaded:
        monkeypatch.setattr("hvd_core.launch.local.PRELOAD", ())
    ((told, within, between),) = run(_threads, num_proc=1, cpus_per_rank=2, env={"OMP_NUM_THREADS": "1"})
    assert (told, within) == ({"1"}, 1)
    assert between == 1 or not preloaded  # torch has no variable for these


def _random() -> tuple[float, float]:
    return random.random(), float(np.random.rand())


def test_ranks_have_different_random_numbers() -> None:
    (a, x), (b, y) = run(_random, num_proc=2)
    assert a != b
    assert x != y


def test_large_arguments_and_results() -> None:
    data = os.urandom(1 << 20) * 100
    with pytest.warns(UserWarning, match="when pickled"):
        (back,) = run(bytes, (data,), num_proc=1)
    assert back == data


def test_sys_exit_without_a_status_is_a_return() -> None:
    assert run(sys.exit, num_proc=2) == [None, None]


def test_stdin_is_empty_and_argv_is_the_drivers() -> None:
    assert run(lambda: (sys.stdin.read(), sys.argv), num_proc=1) == [("", sys.argv)]


def test_a_run_in_a_rank() -> None:
    assert run(lambda: run(_place, (7,), num_proc=2)[1][0], num_proc=1) == [7]


def _forks() -> int:
    pid = os.fork()
    if pid == 0:
        return 1  # comes back from the function in the wrong process
    os.waitpid(pid, 0)
    return 0


def _leaves_things_open(directory: str) -> None:
    import atexit
    import ctypes
    import sys

    sys.left_open = open(f"{directory}/text", "w"), open(f"{directory}/bytes", "wb")  # noqa: SIM115
    sys.left_open[0].write("text")
    sys.left_open[1].write(b"bytes")
    atexit.register(lambda: Path(f"{directory}/atexit").write_text("atexit"))

    def late() -> None:
        threading.main_thread().join()
        Path(f"{directory}/thread").write_text("thread")

    threading.Thread(target=late).start()
    ctypes.CDLL(None).printf(b"said by C\n")


def test_what_a_rank_leaves_open_is_written(tmp_path: Path) -> None:
    out = io.StringIO()
    run(_leaves_things_open, (str(tmp_path),), num_proc=1, output=out)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {
        name: name for name in ("text", "bytes", "atexit", "thread")
    }
    assert "said by C" in out.getvalue()


def test_a_process_that_the_function_forks_is_not_the_rank() -> None:
    assert run(_forks, num_proc=1) == [0]
