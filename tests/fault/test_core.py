"""What the core does when a rank dies, stops, leaves, aborts, disagrees, or is not one of ours."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvd_core import Config, Group, Listener
from hvd_core.errors import CollectiveTimeout, InvalidArgument, PeerLost

from .calls import (
    abort,
    add,
    add_after_a_long_phase,
    add_again_after_death,
    add_in_the_part_until_it_fails,
    add_until_it_fails,
    close,
    disagree,
    fork_a_child,
    fork_a_child_that_stays,
    gather_more_than_memory,
    hold_the_gil_then_add,
    is_done_within,
    repeat_until_it_fails,
    split,
    start_adding,
    wait_for_ctrl_c,
    wait_for_death,
    wait_in_vain,
)
from .ranks import bound_ranks, connect, connected_ranks

pytestmark = pytest.mark.timeout(60)


# -- death ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [16, 4_000_000])
def test_a_killed_rank_is_noticed_by_all_within_half_a_second(count: int) -> None:
    with connected_ranks(3) as ranks:
        for rank in ranks:
            rank.start(add_until_it_fails, count)
        assert not ranks[0].pipe.poll(0.3), "they were to be in the middle of it"
        killed_at = ranks[1].kill()
        for survivor in (ranks[0], ranks[2]):
            kind, text, at = survivor.result()
            assert kind == "PeerLost"
            assert "rank 1" in text
            assert at - killed_at < 0.5


@pytest.mark.parametrize("form", ["alltoall", "reducescatter"])
def test_a_rank_killed_in_what_gives_each_rank_something_else(form: str) -> None:
    with connected_ranks(3) as ranks:
        for rank in ranks:
            rank.start(repeat_until_it_fails, form, 300_000)
        assert not ranks[0].pipe.poll(0.3), "they were to be in the middle of it"
        killed_at = ranks[1].kill()
        for survivor in (ranks[0], ranks[2]):
            kind, text, at = survivor.result()
            assert kind == "PeerLost"
            assert "rank 1" in text
            assert at - killed_at < 0.5


def test_a_rank_killed_in_a_set_is_noticed_there_and_outside() -> None:
    with connected_ranks(3) as ranks:
        for rank in ranks:
            rank.start(split, [0, 2])
        assert [rank.result() for rank in ranks] == [True, False, True]
        for rank in (ranks[0], ranks[2]):
            rank.start(add_in_the_part_until_it_fails, 1_000_000)
        ranks[1].start(wait_for_death)
        assert not ranks[0].pipe.poll(0.3), "they were to be in the middle of it"
        killed_at = ranks[2].kill()
        kind, text, at = ranks[0].result()
        assert kind == "PeerLost"
        assert "lost rank 1" in text
        assert "counted from 0: they are 0, 2 of all" in text
        assert at - killed_at < 0.5
        reason, at = ranks[1].result()
        assert "lost rank 2" in str(reason)
        assert at - killed_at < 0.5


def test_death_is_noticed_without_a_collective_and_stays() -> None:
    with connected_ranks(2) as ranks:
        ranks[1].start(wait_for_death)
        killed_at = ranks[0].kill()
        reason, at = ranks[1].result()
        assert reason is not None
        assert "rank 0" in reason
        assert at - killed_at < 0.5
        assert isinstance(ranks[1].call(add_again_after_death), PeerLost)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_death_is_noticed_although_a_child_of_the_rank_keeps_its_connections() -> None:
    with connected_ranks(2) as ranks:
        child = ranks[0].call(fork_a_child)
        try:
            ranks[1].start(wait_for_death)
            killed_at = ranks[0].kill()
            reason, at = ranks[1].result()
        finally:
            os.kill(child, signal.SIGKILL)
        assert reason is not None
        assert "rank 0" in reason
        assert at - killed_at < 0.5


def test_a_child_that_holds_its_sockets_does_not_hide_a_death() -> None:
    with connected_ranks(3) as ranks:
        child = ranks[1].call(fork_a_child_that_stays)
        try:
            for survivor in (ranks[0], ranks[2]):
                survivor.start(wait_in_vain, "y")
            killed_at = ranks[1].kill()
            for survivor in (ranks[0], ranks[2]):
                kind, text, at = survivor.result()
                assert kind == "PeerLost"
                assert "rank 1" in text
                assert at - killed_at < 0.5
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_stopped_rank_is_reported_as_stopped() -> None:
    with connected_ranks(2, peer_timeout_s=1.0) as ranks:
        stopped_at = ranks[1].kill(signal.SIGSTOP)
        kind, text, at = ranks[0].call(wait_in_vain, "y")
        assert kind == "PeerLost"
        assert "rank 1" in text
        assert "stopped" in text
        assert "peer_timeout_s" in text
        assert at - stopped_at < 3
        ranks[1].kill(signal.SIGCONT)
        kind, text, _ = ranks[1].call(wait_in_vain, "y")
        assert kind == "PeerLost"
        assert "rank 0 gave up on rank 1: no byte" in text


def test_a_rank_that_computes_is_not_taken_for_dead() -> None:
    with connected_ranks(2, peer_timeout_s=0.5) as ranks:
        ranks[1].start(add)
        ranks[0].start(hold_the_gil_then_add, 1.5)
        assert ranks[0].result() == 2
        assert ranks[1].result() == 2


def test_what_is_submitted_while_a_peer_is_waited_for_is_not_forgotten() -> None:
    with connected_ranks(2) as ranks:
        for rank in (ranks[1], ranks[0]):
            rank.call(start_adding, "large", 50_000_000)
        ranks[0].kill(signal.SIGSTOP)
        assert not ranks[1].call(is_done_within, "large", 0.1), "rank 1 was to be in the middle of it"
        ranks[1].call(start_adding, "y", 10)
        assert not ranks[1].call(is_done_within, "y", 0.1)
        ranks[0].kill(signal.SIGCONT)
        ranks[0].call(start_adding, "y", 10)
        for rank in ranks:
            assert rank.call(is_done_within, "large", 15)
            assert rank.call(is_done_within, "y", 5)


# -- abort, close, stall, mismatch ----------------------------------------------------------------------


def test_abort_reaches_every_wait_in_100_ms() -> None:
    with connected_ranks(3) as ranks:
        ranks[1].start(wait_in_vain, "y")
        ranks[2].start(wait_for_death)
        assert not ranks[1].pipe.poll(0.2)
        aborted_at = ranks[0].call(abort, "rank 0 raised ValueError: boom")
        kind, text, at = ranks[1].result()
        assert (kind, text) == ("Aborted", "rank 0 raised ValueError: boom")
        assert at - aborted_at < 0.1
        reason, at = ranks[2].result()
        assert reason == "rank 0 raised ValueError: boom"
        assert at - aborted_at < 0.1


@pytest.mark.parametrize("leaver", [0, 1])
def test_a_rank_that_leaves_ends_what_needs_it(leaver: int) -> None:
    with connected_ranks(2) as ranks:
        stayer = ranks[1 - leaver]
        stayer.start(wait_in_vain, "y")
        ranks[leaver].call(close)
        kind, text, _ = stayer.result()
        assert kind == "GroupClosed"
        assert f"rank {leaver}" in text
        assert "'y'" in text


def test_a_stall_names_ranks_and_tensors_then_ends() -> None:
    with connected_ranks(2, stall_warn_s=0.2, stall_shutdown_s=1.0) as ranks:
        ranks[0].start(wait_in_vain, "mine")
        ranks[1].start(wait_in_vain, "yours")
        for rank in ranks:
            kind, text, _ = rank.result()
            assert kind == "CollectiveTimeout"
            assert "stall_shutdown_s" in text
            assert "rank 0" in text
            assert "rank 1" in text
            assert "'mine'" in text
            assert "'yours'" in text


def test_a_declared_phase_is_no_stall() -> None:
    with connected_ranks(2, stall_warn_s=0.2, stall_shutdown_s=0.6) as ranks:
        for phased in (1, 0):
            waits = ranks[1 - phased]
            waits.start(wait_in_vain, f"x{phased}")
            assert ranks[phased].call(add_after_a_long_phase, f"x{phased}", 1.5, 30.0) == ("", "")
            assert waits.result()[:2] == ("", "")


def test_a_declared_phase_that_takes_too_long_is_a_stall() -> None:
    with connected_ranks(2, stall_warn_s=0.2, stall_shutdown_s=0.6) as ranks:
        ranks[0].start(wait_in_vain, "x")
        began_at = time.monotonic()
        kind, text = ranks[1].call(add_after_a_long_phase, "x", 15.0, 0.7)
        assert kind == "CollectiveTimeout"
        assert "rank 1 is in 'checkpoint'" in text
        assert "'x'" in text
        assert 1.3 <= time.monotonic() - began_at < 8
        assert ranks[0].result()[:2] == (kind, text)


def test_a_mismatch_reaches_all_and_the_group_lives_on() -> None:
    with connected_ranks(2) as ranks:
        for rank in ranks:
            rank.start(disagree)
        texts = [rank.result() for rank in ranks]
        assert texts == ["grad/fc1.weight: rank 1 has shape (12,), rank 0 has (10,)"] * 2
        for rank in ranks:
            rank.start(add)
        assert [rank.result() for rank in ranks] == [2, 2]


def test_a_result_without_memory_is_an_error_on_all_ranks() -> None:
    with connected_ranks(2) as ranks:
        for rank in ranks:
            rank.start(gather_more_than_memory)
        for rank in ranks:
            text = rank.result()
            assert "no memory for the 3221225472 bytes of allgather 'rows'" in text


# -- strangers ------------------------------------------------------------------------------------------


def _addresses(endpoint: str) -> tuple[int, str]:
    fields = dict(field.split("=", 1) for field in endpoint.split(";")[1:])
    return int(fields["tcp"].rpartition(":")[2]), "\0" + fields["unix"]


def test_strangers_are_dropped_and_counted_and_the_job_goes_on() -> None:
    with bound_ranks(2, [Config(), Config()]) as ranks:
        port, name = _addresses(ranks[0].endpoint)
        strangers = []
        for junk in (b"", b"GET / HTTP/1.1\r\n\r\n" * 10, os.urandom(4096), b"hvdrank\n" + b"\xff" * 40):
            for family, address in ((socket.AF_INET, ("127.0.0.1", port)), (socket.AF_UNIX, name)):
                stranger = socket.socket(family, socket.SOCK_STREAM)
                stranger.connect(address)
                stranger.sendall(junk)
                if junk:
                    strangers.append(stranger)
                else:
                    stranger.close()
        dropped, others = connect(ranks)
        assert isinstance(dropped, int), dropped
        assert dropped >= 7
        assert others == 0
        for rank in ranks:
            rank.start(add)
        assert [rank.result() for rank in ranks] == [2, 2]
        for stranger in strangers:
            stranger.close()


def test_descriptors_of_strangers_are_closed() -> None:
    here, nobody = Listener.bind(), Listener.bind()
    _, name = _addresses(here.endpoint)
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stranger.connect(name)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        socket.send_fds(stranger, [b"1234"], [0, 1])
    with pytest.raises(CollectiveTimeout):
        Group.connect(
            here, [here.endpoint, nobody.endpoint], rank=0, token=b"t", config=Config(connect_timeout_s=0.2)
        )
    stranger.close()
    assert len(os.listdir("/proc/self/fd")) < before


def test_a_wrong_token_is_refused_by_name() -> None:
    with bound_ranks(2, [Config(connect_timeout_s=2)] * 2) as ranks:
        acceptor, connector = connect(ranks, [b"right", b"wrong"])
        assert isinstance(connector, InvalidArgument)
        assert "token" in str(connector)
        assert isinstance(acceptor, CollectiveTimeout)
        assert "rank 1" in str(acceptor)


def test_a_rank_that_does_not_come_is_named() -> None:
    here, nobody = Listener.bind(), Listener.bind()
    endpoints = [nobody.endpoint, here.endpoint]
    with pytest.raises(CollectiveTimeout, match="rank 0"):
        Group.connect(here, endpoints, rank=1, token=b"t", config=Config(connect_timeout_s=0.3))


def test_a_wrong_interface_lists_the_right_ones() -> None:
    with pytest.raises(InvalidArgument, match=r"no network interface 'nope0'.*\blo\b"):
        Listener.bind(Config(interface="nope0"))


# -- nothing is left ------------------------------------------------------------------------------------


def test_ranks_that_connect_and_leave_at_once_do_not_disturb_each_other() -> None:
    listeners = [Listener.bind() for _ in range(4)]
    endpoints = [listener.endpoint for listener in listeners]
    errors: list[Exception] = []

    def rank(index: int) -> None:
        try:
            for epoch in range(100):
                Group.connect(
                    listeners[index],
                    endpoints,
                    rank=index,
                    token=b"t",
                    epoch=epoch,
                    config=Config(connect_timeout_s=5),
                ).close()
        except Exception as error:  # noqa: BLE001 - shown by the test
            errors.append(error)

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def _pair_of_groups(epoch: int, listeners: list[Listener]) -> list[float]:
    """Two ranks as threads of this process connect, add and close."""
    sums: list[Any] = [None, None]

    def rank(index: int) -> None:
        endpoints = [listener.endpoint for listener in listeners]
        with Group.connect(listeners[index], endpoints, rank=index, token=b"t", epoch=epoch) as group:
            sums[index] = add(group, count=300_000)

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sums


def _footprint() -> tuple[int, int, int]:
    """Threads, descriptors and shared mappings of this process."""
    mappings = Path("/proc/self/maps").read_text().count("memfd:hvd")
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), mappings


def _more(before: tuple[int, ...], after: tuple[int, ...]) -> list[str]:
    kinds = zip(("threads", "descriptors", "mappings"), before, after, strict=True)
    return [f"{name}: {was} -> {now}" for name, was, now in kinds if now > was]


def test_ten_groups_one_after_another_leave_nothing() -> None:
    listeners = [Listener.bind(), Listener.bind()]
    assert _pair_of_groups(0, listeners) == [2, 2]
    before = _footprint()
    for epoch in range(1, 11):
        assert _pair_of_groups(epoch, listeners) == [2, 2]
    # A joined thread stays in /proc for a moment, before as after.
    deadline = time.monotonic() + 5
    while (left := _more(before, _footprint())) and time.monotonic() < deadline:
        os.sched_yield()
    assert not left


def test_a_forked_group_refuses_to_work() -> None:
    group = Group.solo()
    read, write = os.pipe()
    handle = group.allreduce_async(np.ones(3), name="before")
    pid = os.fork()
    if pid == 0:
        try:
            for use in (lambda: add(group), handle.wait):
                try:
                    use()
                except InvalidArgument as error:
                    os.write(write, str(error).encode())
            del use, handle, group  # ends nothing of the parent's and waits for nothing
            gc.collect()
            os.write(write, b"END")
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    said = os.read(read, 1000)
    assert said.count(b"forked") == 2
    assert said.endswith(b"END")
    assert handle.wait().sum() == 3
    os.close(read)
    os.close(write)
    assert add(group) == 1
    group.close()


def test_for_ever_is_a_deadline_too() -> None:
    ever = float("inf")
    config = Config(connect_timeout_s=ever, peer_timeout_s=ever, stall_shutdown_s=ever)
    with connected_ranks(2, **vars(config)) as ranks:
        ranks[0].start(wait_in_vain, "x", ever)
        assert not ranks[0].pipe.poll(0.2)
        ranks[1].call(abort, "enough")
        assert ranks[0].result()[:2] == ("Aborted", "enough")


@pytest.mark.parametrize("name", ["", "x" * 5000])
def test_a_name_has_a_length(name: str) -> None:
    with Group.solo() as group, pytest.raises(InvalidArgument, match="name"):
        add(group, name)


@pytest.mark.parametrize("closing", ["", "import atexit; atexit.register(lambda: groups[0].close())"])
def test_a_daemon_thread_that_waits_does_not_spoil_the_exit(closing: str) -> None:
    script = """
import threading
import numpy as np
from hvd_core import Group, Listener
here, there = Listener.bind(), Listener.bind()
ends = [here.endpoint, there.endpoint]
groups = []
connect = lambda own, rank: groups.append(Group.connect(own, ends, rank=rank, token=b"t"))
other = threading.Thread(target=connect, args=(there, 1))
other.start()
connect(here, 0)
other.join()
submitted = threading.Event()
def wait():
    handle = groups[0].allreduce_async(np.ones(3), name="x")
    submitted.set()
    handle.wait()
threading.Thread(target=wait, daemon=True).start()
submitted.wait()
"""
    for _ in range(5):
        command = [sys.executable, "-c", script + closing]
        done = subprocess.run(command, capture_output=True, timeout=20, check=False)
        assert done.returncode == 0, done.stderr


def test_ctrl_c_ends_a_wait() -> None:
    with connected_ranks(2) as ranks:
        ranks[1].start(wait_for_ctrl_c)
        assert not ranks[1].pipe.poll(0.3)
        sent_at = ranks[1].kill(signal.SIGINT)
        assert ranks[1].result() - sent_at < 1
