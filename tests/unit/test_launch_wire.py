"""Frames and descriptors on a socket; the environment that goes through exec; thread and CPU counts."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from hvd_core.errors import InvalidArgument
from hvd_core.launch import local, wire
from hvd_core.launch.cpus import thread_env, threads_per_rank, usable_cpus
from hvd_core.launch.events import Assignment
from hvd_core.launch.template_process import exec_env

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def pair() -> Iterator[tuple[wire.Channel, wire.Channel]]:
    left, right = (wire.Channel(end) for end in socket.socketpair())
    yield left, right
    left.close()
    right.close()


def test_frames_arrive_whole(pair: tuple[wire.Channel, wire.Channel]) -> None:
    left, right = pair
    big = os.urandom(3_000_000)
    sender = threading.Thread(target=lambda: [left.send(b"A", b""), left.send(b"B", big)])
    sender.start()
    assert right.receive() == (b"A", b"", [])
    assert right.receive() == (b"B", big, [])
    sender.join()
    left.close()
    assert right.receive() is None


def test_a_cut_frame_is_none(pair: tuple[wire.Channel, wire.Channel]) -> None:
    left, right = pair
    left._socket.sendall(b"A" + (100).to_bytes(8, "little") + b"short")
    left.close()
    assert right.receive() is None


def test_descriptors_arrive_and_are_not_inherited(pair: tuple[wire.Channel, wire.Channel]) -> None:
    left, right = pair
    read, write = os.pipe()
    left.send(b"F", b"x", [write])
    frame = right.receive()
    assert frame is not None
    (got,) = frame[2]
    assert not os.get_inheritable(got)
    os.write(got, b"hello")
    assert os.read(read, 10) == b"hello"
    for fd in (read, write, got):
        os.close(fd)


@pytest.mark.parametrize("size", [1, 4, 9, 1000])
def test_frame_reader(size: int) -> None:
    frames = [(b"A", b""), (b"B", b"0123456789"), (b"C", b"x")]
    data = b"".join(kind + len(body).to_bytes(8, "little") + body for kind, body in frames)
    reader = wire.FrameReader()
    assert [f for i in range(0, len(data), size) for f in reader.feed(data[i : i + size])] == frames


def test_assignment_travels() -> None:
    place = Assignment(1, 2, ("a", "b"), os.urandom(32))
    assert Assignment.from_json(place.to_json()) == place


def test_what_goes_through_exec() -> None:
    small = {f"V{i}": "x" for i in range(3000)}
    env = {"HUGE": "x" * 200_000, "LD_LIBRARY_PATH": "/opt/" + "l" * 20_000, **small}
    chosen = exec_env(env)
    assert "HUGE" not in chosen
    assert chosen["LD_LIBRARY_PATH"] == env["LD_LIBRARY_PATH"]
    assert chosen.items() >= small.items()


def test_threads_per_rank() -> None:
    assert threads_per_rank(None, 2, {}, 8) == 4
    assert threads_per_rank(None, 3, {}, 2) == 1
    assert threads_per_rank(None, 2, {"OMP_NUM_THREADS": "5"}, 8) == 5
    assert threads_per_rank(None, 2, {"OMP_NUM_THREADS": "4,2"}, 8) == 4
    assert threads_per_rank(3, 2, {"OMP_NUM_THREADS": "5"}, 8) == 3
    assert thread_env(3)["OMP_NUM_THREADS"] == "3"
    assert 1 <= usable_cpus() <= (os.cpu_count() or 1)


@pytest.mark.parametrize("num_proc", [0, -1, True, 1.5, "2"])
def test_num_proc_is_checked(num_proc: object) -> None:
    with pytest.raises(InvalidArgument, match="num_proc"):
        local.run(len, num_proc=num_proc)  # type: ignore[arg-type]


@pytest.mark.parametrize("env", [{"A": 1}, {"A=B": "x"}, {"": "x"}, {"A": "x\0y"}])
def test_env_is_checked(env: dict[str, str]) -> None:
    with pytest.raises(InvalidArgument, match="env of rank 0"):
        local.run(len, num_proc=1, env=env)


def test_elsewhere_one_rank_runs_here_and_more_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local.sys, "platform", "darwin")
    assert local.run(os.getpid, num_proc=1) == [os.getpid()]
    with pytest.raises(InvalidArgument, match="Linux only"):
        local.run(os.getpid, num_proc=2)
