"""Ranks that die, hang or fail in every way: the first cause arrives in time, and no process stays."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvd_core import basics, world
from hvd_core.errors import HorovodInternalError, HvdError, LaunchFailed, LaunchTimeout, PeerLost, RankFailed
from hvd_core.launch import Assignment, Template, dumps, events, report, run, thread_env
from hvd_core.launch.rank_process import RankProcess

from ..conftest import await_end, children

pytestmark = pytest.mark.timeout(60)

BOUND_S = 10.0


class _Pids(io.StringIO):
    """Takes the ranks' output; the ranks print their process ids."""

    def started(self) -> list[int]:
        return [int(line.split()[2]) for line in self.getvalue().splitlines() if " pid " in line]


def _say_pid() -> int:
    print("pid", os.getpid())
    return world.current().rank


def _failed(fn: Callable[..., Any], *args: Any, num_proc: int = 2, **options: Any) -> RankFailed:
    """Runs `fn`, which must fail in time and leave no rank."""
    output, began = _Pids(), time.monotonic()
    with pytest.raises(RankFailed) as raised:
        run(fn, args, num_proc=num_proc, output=output, **options)
    assert time.monotonic() - began < BOUND_S
    assert 1 <= len(output.started()) <= num_proc
    assert all(await_end(pid, time.monotonic()) for pid in output.started())
    assert len(str(raised.value).splitlines()) <= 60
    return raised.value


def _sleeps() -> None:
    time.sleep(120)


def _spins() -> None:
    while True:
        pass


def _is_stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _in_c_code() -> None:
    sum(range(1 << 60))


def _ignores_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(120)


def _allreduces() -> None:
    basics.default_group().allreduce(np.ones(1 << 20, np.float32), name="never")


def _raises_on_one(meanwhile: Callable[[], None]) -> None:
    rank = _say_pid()
    basics.init()
    basics.default_group().barrier()
    if rank == 1:
        raise ValueError("boom-42")  # here
    meanwhile()


@pytest.mark.parametrize(
    "meanwhile", [_sleeps, _spins, _is_stopped, _in_c_code, _ignores_sigterm, _allreduces]
)
def test_r20_one_rank_raises_while_the_other(meanwhile: Callable[[], None]) -> None:
    error = _failed(_raises_on_one, meanwhile)
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "boom-42" in text)
    assert str(error).splitlines()[0] == f"rank 1 raised ValueError: boom-42 ({__file__}:{line})"
    assert error.rank == 1
    assert type(error.__cause__) is ValueError
    assert error.__cause__.args == ("boom-42",)
    assert not error.retryable


def _one_waits_while(other: Callable[[], None]) -> None:
    """Rank 0 waits in an allreduce that rank 1 does not come to."""
    rank = _say_pid()
    basics.init()
    if rank == 1:
        other()
    _allreduces()


@pytest.mark.parametrize("other", [_sleeps, _in_c_code, _is_stopped])
def test_d1_who_is_waited_for_tells_where_it_is(other: Callable[[], None]) -> None:
    """Asleep, or in C code that holds the GIL: it takes part in nothing. Stopped: it is not heard of."""
    is_stopped = other is _is_stopped
    env = {"HVD_PEER_TIMEOUT_S" if is_stopped else "HVD_STALL_SHUTDOWN_S": "1"}
    error = _failed(_one_waits_while, other, env=env)
    headline, *rest = str(error).splitlines()
    assert headline.startswith(f"rank 0 raised {'PeerLost' if is_stopped else 'CollectiveTimeout'}: ")
    assert "rank 1" in headline
    at = rest.index("rank 1, when it was ended (most recent call first):")
    assert ("  it was stopped (SIGSTOP)" in rest) == is_stopped
    line = other.__code__.co_firstlineno + 1
    assert rest[at + 1 + is_stopped : at + 3 + is_stopped] == [
        f'  File "{__file__}", line {line} in {other.__name__}',
        f'  File "{__file__}", line {_one_waits_while.__code__.co_firstlineno + 5} in _one_waits_while',
    ]


def _undefined() -> None:
    _say_pid()
    print(undefined_name)  # type: ignore[name-defined]  # noqa: F821


def test_r20_all_ranks_raise() -> None:
    error = _failed(_undefined)
    assert "raised NameError" in str(error).splitlines()[0]
    assert str(error).splitlines()[-1].startswith("NameError: name 'undefined_name'")


def _dies_on_zero(how: Callable[[], None]) -> None:
    if _say_pid() == 0:
        sys.stdout.flush()
        how()
    time.sleep(120)


def _dies_in_collectives(when: str) -> None:
    rank = _say_pid()
    basics.init()
    group = basics.default_group()
    for step in range(10):
        if rank == 0 and step == 5 and when == "between":
            os._exit(86)
        handle = group.allreduce_async(np.ones(4 << 20, np.float32), name=f"step{step}")
        if rank == 0 and step == 5 and when == "inside":
            os._exit(86)
        handle.wait()


@pytest.mark.parametrize("when", ["between", "inside"])
def test_r21_death_among_collectives(when: str) -> None:
    error = _failed(_dies_in_collectives, when)
    assert str(error).splitlines()[0] == "rank 0 exited with status 86"


def _aborts_for_the_peer() -> None:
    rank = _say_pid()
    basics.init()
    if rank == 1:
        raise ValueError("boom-42")
    try:
        _allreduces()
    except HorovodInternalError as error:
        print("peer saw:", error)
        raise


def test_peers_hear_why_at_once() -> None:
    output = io.StringIO()
    with pytest.raises(RankFailed, match="boom-42"):
        run(_aborts_for_the_peer, num_proc=2, output=output)
    said = [line for line in output.getvalue().splitlines() if "peer saw" in line]
    assert "rank 1 raised ValueError: boom-42" in said[0]


def _crashes() -> None:
    print("last words", file=sys.stderr)
    signal.raise_signal(signal.SIGSEGV)


@pytest.mark.parametrize(
    ("how", "kind", "status", "number", "said"),
    [
        (lambda: os._exit(86), "exit", 86, None, "rank 0 exited with status 86"),
        (lambda: os._exit(0), "exit", 0, None, "before its function returned"),
        (lambda: sys.exit(3), "exit", 3, None, "rank 0 exited with status 3"),
        (lambda: sys.exit("no data"), "exit", 1, None, "no data"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "signal", None, 9, "rank 0 was killed by signal 9"),
        (_crashes, "signal", None, 11, "last words"),
    ],
)
def test_r21_hard_death(
    how: Callable[[], None], kind: str, status: int | None, number: int | None, said: str
) -> None:
    error = _failed(_dies_on_zero, how)
    assert said in str(error)
    assert (error.rank, error.failure.kind) == (0, kind)
    assert (error.failure.exit_status, error.failure.signal) == (status, number)
    assert error.retryable == (number == signal.SIGKILL)


def test_r21_killed_from_outside() -> None:
    output = _Pids()

    def kill_first() -> None:
        while not output.started():
            event.wait(0.01)
        os.kill(output.started()[0], signal.SIGKILL)

    event = threading.Event()
    killer = threading.Thread(target=kill_first)
    killer.start()
    with pytest.raises(RankFailed, match="was killed by signal 9"):
        run(_dies_on_zero, (_sleeps,), num_proc=2, output=output)
    killer.join()


def _echo_then_death() -> None:
    if _say_pid() == 0:
        raise PeerLost("lost rank 1")
    time.sleep(0.3)
    os._exit(86)


def test_an_echo_waits_for_the_cause() -> None:
    error = _failed(_echo_then_death)
    assert str(error) == "rank 1 exited with status 86"


def _only_an_echo() -> None:
    if _say_pid() == 0:
        raise PeerLost("lost rank 1")
    time.sleep(120)


def test_an_echo_alone_is_shown_in_the_end() -> None:
    error = _failed(_only_an_echo)
    assert str(error).startswith("rank 0 raised PeerLost: lost rank 1")
    assert error.retryable


class _NeedsTwo(Exception):
    def __init__(self, a: int, b: int):
        super().__init__(f"{a} and {b}")


def _raises_what_cannot_be_rebuilt() -> None:
    _say_pid()
    raise _NeedsTwo(1, 2)


def test_an_exception_that_cannot_be_rebuilt() -> None:
    error = _failed(_raises_what_cannot_be_rebuilt)
    assert "_NeedsTwo: 1 and 2" in str(error)
    assert error.__cause__ is None


def _returns_a_lock() -> dict[str, Any]:
    _say_pid()
    return {"lock": threading.Lock()} if world.current().rank == 1 else {}


def test_a_result_that_does_not_pickle() -> None:
    error = _failed(_returns_a_lock)
    assert str(error).startswith(
        "rank 1 raised NotPicklable: _returns_a_lock returned, but its result['lock']"
    )
    assert __file__ in str(error)


class _OnlyThere:
    def __reduce__(self) -> Any:
        return _rebuild, (os.getpid(),)


def _rebuild(pid: int) -> int:
    if pid != os.getpid():
        raise ImportError("cannot be rebuilt")
    return pid


def _returns_what_only_rebuilds_there() -> Any:
    _say_pid()
    return _OnlyThere() if world.current().rank == 1 else None


def test_a_result_that_does_not_unpickle() -> None:
    error = _failed(_returns_what_only_rebuilds_there)
    assert "rank 1" in str(error)
    assert "cannot be rebuilt" in str(error)


class _FailsToLoad:
    def __reduce__(self) -> Any:
        return _rebuild, (os.getpid(),)


def test_an_argument_that_does_not_unpickle_in_the_rank() -> None:
    with pytest.raises(RankFailed, match="raised ImportError: cannot be rebuilt"):
        run(_sleeps, (_FailsToLoad(),), num_proc=2)


def test_timeout_names_who_was_not_done() -> None:
    began = time.monotonic()
    with pytest.raises(LaunchTimeout, match="rank 1 was not done after 8 s") as raised:
        run(_one_is_slow, num_proc=2, timeout_s=8)  # rank 0 imports within it, also on a busy machine
    assert isinstance(raised.value, TimeoutError)
    assert f'  File "{__file__}", line {_one_is_slow.__code__.co_firstlineno + 2} in _one_is_slow' in str(
        raised.value
    )
    assert time.monotonic() - began < 8 + BOUND_S


def _one_is_slow() -> None:
    if world.current().rank == 1:
        time.sleep(120)


def _hangs_at_exit() -> int:
    threading.Thread(target=_sleeps).start()  # not a daemon: the interpreter waits for it
    return 5


def test_a_rank_that_hangs_in_exit_is_killed_and_its_result_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvd_core.launch.rank_process.EXIT_GRACE_S", 0.5)
    output = io.StringIO()
    assert run(_hangs_at_exit, num_proc=2, output=output) == [5, 5]
    assert output.getvalue().count("did not exit within 0.5 s") == 2


def _closes_everything() -> None:
    _say_pid()
    os.closerange(3, 1000)
    time.sleep(120)


def test_a_rank_that_closes_its_channel_and_lives_on() -> None:
    error = _failed(_closes_everything, num_proc=1)
    assert "closed its channel without a result" in str(error)
    assert not error.retryable


def _leaves_a_process() -> int:
    child = subprocess.Popen(["sleep", "120"])
    print("pid", child.pid)
    return child.pid


def test_what_a_rank_leaves_running_is_ended() -> None:
    (pid,) = run(_leaves_a_process, num_proc=1)
    assert await_end(pid, time.monotonic() + 1.0)


DRIVER = """
    import os, sys, time
    from hvd_core.launch import run

    def job():
        print("pid", os.getpid())
        print("pid", os.getppid())
        time.sleep(120)

    try:
        run(job, num_proc=2)
    except KeyboardInterrupt:
        print("interrupted", time.time(), flush=True)
"""


def _driver(tmp_path: Path, **options: Any) -> tuple[subprocess.Popen[str], list[int]]:
    """A driver in another process, and its ranks and template."""
    (tmp_path / "driver.py").write_text(textwrap.dedent(DRIVER))
    process = subprocess.Popen(
        [sys.executable, "-u", "driver.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True, **options
    )
    assert process.stdout is not None
    pids = [int(process.stdout.readline().split()[2]) for _ in range(4)]
    assert len(set(pids)) == 3
    return process, pids


def test_killed_launcher(tmp_path: Path) -> None:
    process, pids = _driver(tmp_path)
    process.kill()
    process.wait()
    process.communicate()
    deadline = time.monotonic() + 5.0
    assert all(await_end(pid, deadline) for pid in pids)


def test_ctrl_c_ends_the_ranks_within_a_second(tmp_path: Path) -> None:
    process, pids = _driver(tmp_path, start_new_session=True)
    began = time.time()
    os.killpg(process.pid, signal.SIGINT)  # as the terminal does
    out, _ = process.communicate(timeout=BOUND_S)
    assert all(await_end(pid, time.monotonic()) for pid in pids)
    (word, at) = out.split()
    assert word == "interrupted"
    assert float(at) - began < 1.0
    assert process.returncode == 0


def test_r24_interrupted_in_this_process_and_then_again() -> None:
    def state() -> tuple[int, list[threading.Thread], dict[int, str]]:
        return len(os.listdir("/proc/self/fd")), threading.enumerate(), children()

    def interrupt() -> None:
        while len(output.started()) < 2:
            pause.wait(0.01)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    run(_say_pid, num_proc=2)
    before = state()
    output, pause = _Pids(), threading.Event()
    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        run(_dies_on_zero, (_sleeps,), num_proc=2, output=output)
    interrupter.join()
    assert all(await_end(pid, time.monotonic()) for pid in output.started())
    assert state() == before
    assert run(_say_pid, num_proc=1) == [0]
    assert run(_say_pid, num_proc=2) == [0, 1]
    assert state() == before


# -- Template and RankProcess as other launchers use them --


@pytest.fixture
def template() -> Iterator[Template]:
    with Template.start(env=thread_env(1)) as started:
        yield started


def _place_one(rank: RankProcess) -> None:
    rank.assign(Assignment(0, 1, (rank.endpoint(30.0),), bytes(32)))


def _until_the_end(rank: RankProcess) -> list[events.Event]:
    from multiprocessing.connection import wait

    got: list[events.Event] = []
    deadline = time.monotonic() + 30.0
    while not rank.finished:
        assert time.monotonic() < deadline
        wait([rank], 1.0)
        got += rank.poll()
    rank.close()
    return got


def _reports_and_reads(fds: list[int], *, factor: int) -> int:
    report("progress", {"step": 1, "loss": 0.5})
    print("a line")
    with open(fds[0], "rb") as file:
        return factor * int(file.read())


def test_descriptors_reports_and_reuse(template: Template, tmp_path: Path) -> None:
    import pickle

    (tmp_path / "shard").write_text("21")
    for factor in (2, 3):
        with open(tmp_path / "shard", "rb") as file:
            rank = template.fork(dumps(_reports_and_reads, (), {"factor": factor}), fds=[file.fileno()])
        _place_one(rank)
        *before, last = _until_the_end(rank)
        assert isinstance(last, events.Result)
        assert pickle.loads(last.value) == 21 * factor
        assert events.Report("progress", {"step": 1, "loss": 0.5}) in before
        assert events.Output("a line", "stdout") in before
    assert template.alive()


def test_report_outside_a_rank_does_nothing() -> None:
    report("progress", {"step": 1})


def test_a_killed_rank_is_ended_not_the_cause(template: Template) -> None:
    rank = template.fork(dumps(_ignores_sigterm))
    _place_one(rank)
    rank.kill()
    rank.kill()
    assert await_end(rank.pid, time.monotonic())
    (last,) = _until_the_end(rank)
    assert isinstance(last, events.Failed)
    assert last.failure.kind == "ended"


def test_a_rank_that_fails_before_it_listens(template: Template) -> None:
    rank = template.fork(dumps(_sleeps, (_FailsToLoad(),)))
    with pytest.raises(RankFailed, match="cannot be rebuilt"):
        rank.endpoint(30.0)
    rank.close()


def test_a_rank_that_does_not_listen_in_time(template: Template) -> None:
    rank = template.fork(dumps(_sleeps, (_Slow(),)))
    with pytest.raises(LaunchTimeout):
        rank.endpoint(0.5)
    rank.kill()
    rank.close()


class _Slow:
    def __reduce__(self) -> Any:
        return time.sleep, (120,)


def test_a_template_that_dies_takes_its_ranks_and_is_named(template: Template) -> None:
    rank = template.fork(dumps(_sleeps))
    _place_one(rank)
    pid = rank.pid
    os.kill(template._process.pid, signal.SIGKILL)
    (last,) = _until_the_end(rank)
    assert await_end(pid, time.monotonic() + 2.0)
    assert isinstance(last, events.Failed)
    assert last.failure.kind == "lost"
    assert "ended with status -9" in last.failure.message
    assert not template.alive()
    with pytest.raises(LaunchFailed, match="ended with status -9"):
        template.fork(dumps(_sleeps))


def test_closing_the_template_ends_its_ranks() -> None:
    with Template.start() as template:
        rank = template.fork(dumps(_sleeps))
        _place_one(rank)
        pid = rank.pid
    assert await_end(pid, time.monotonic() + 1.0)
    rank.close()


def test_an_interpreter_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(LaunchFailed, match="ended with status 1"):
        run(_sleeps, num_proc=1)
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(LaunchFailed, match="/nonexistent/python") as raised:
        run(_sleeps, num_proc=1)
    assert isinstance(raised.value, HvdError)


def test_a_template_that_still_imports_is_closed_at_once(tmp_path: Path) -> None:
    (tmp_path / "imports_long.py").write_text("import time\ntime.sleep(120)\n")
    began = time.monotonic()
    template = Template.start(["imports_long"], sys_path=[str(tmp_path), *sys.path])
    rank = template.fork(dumps(_sleeps))
    rank.kill()
    template.close()
    rank.close()
    assert time.monotonic() - began < 3.0
