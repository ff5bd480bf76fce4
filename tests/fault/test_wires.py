"""What ranks on several hosts see of each other's death, silence and leaving."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace

import pytest

from hvd_core import Config
from hvd_core.errors import CollectiveTimeout

from .calls import (
    abort,
    add,
    add_and_say_where,
    add_until_it_fails,
    close,
    wait_for_death,
    wait_in_vain,
)
from .ranks import Rank, bound_ranks, connect

pytestmark = pytest.mark.timeout(90)


@contextlib.contextmanager
def _ranks_on(*hosts: str, **settings: object) -> Iterator[list[Rank]]:
    """Connected ranks; `hosts[rank]` is a forced host."""
    configs = [replace(Config(host_id=host), **settings) for host in hosts]  # type: ignore[arg-type]
    with bound_ranks(len(hosts), configs) as ranks:
        answers = connect(ranks)
        assert not any(isinstance(answer, Exception) for answer in answers), answers
        yield ranks


@pytest.mark.parametrize("victim", [0, 2, 3])
@pytest.mark.parametrize("count", [16, 2_000_000])
def test_a_killed_rank_is_named_on_every_host(victim: int, count: int) -> None:
    with _ranks_on("a", "a", "b", "b") as ranks:
        for rank in ranks:
            rank.start(add_until_it_fails, count)
        assert not ranks[0].pipe.poll(0.3), "they were to be in the middle of it"
        killed_at = ranks[victim].kill()
        for rank in ranks:
            if rank is ranks[victim]:
                continue
            kind, text, at = rank.result()
            assert kind == "PeerLost", text
            assert f"lost rank {victim}" in text
            assert at - killed_at < 2


def test_death_is_told_to_hosts_that_are_no_neighbours() -> None:
    with _ranks_on("a", "b", "b", "c") as ranks:
        for rank in (ranks[0], ranks[3]):
            rank.start(wait_for_death)
        killed_at = ranks[2].kill()
        for rank in (ranks[0], ranks[3]):
            reason, at = rank.result()
            assert reason is not None
            assert "lost rank 2 (b)" in reason
            assert at - killed_at < 2


@pytest.mark.parametrize("stopped", [2, 3])
def test_silence_is_blamed_on_the_rank_that_is_silent(stopped: int) -> None:
    """Rank 2 leads its host: who is behind it is not heard either, and is not to blame."""
    with _ranks_on("a", "a", "b", "b", peer_timeout_s=3.0) as ranks:
        stopped_at = ranks[stopped].kill(signal.SIGSTOP)
        for rank in ranks:
            if rank is ranks[stopped]:
                continue
            rank.start(wait_in_vain, "x")
        for rank in ranks:
            if rank is ranks[stopped]:
                continue
            kind, text, at = rank.result()
            assert kind == "PeerLost", text
            assert f"lost rank {stopped} (b)" in text
            assert "peer_timeout_s" in text
            assert at - stopped_at < 10


@pytest.mark.parametrize("leaver", [0, 1, 2, 3])
def test_leaving_is_no_loss(leaver: int) -> None:
    with _ranks_on("a", "a", "b", "b") as ranks:
        for rank in ranks:
            rank.start(add)
        assert [rank.result() for rank in ranks] == [4] * 4
        ranks[leaver].call(close)
        stayers = [rank for rank in ranks if rank is not ranks[leaver]]
        for rank in stayers:
            rank.start(wait_in_vain, "y")
        for rank in stayers:
            kind, text, _ = rank.result()
            assert kind == "GroupClosed", text
            assert f"rank {leaver}" in text


def test_an_abort_reaches_every_host_in_100_ms() -> None:
    """Three tries, on machines that do other things."""
    taken: list[float] = []
    while len(taken) < 3 and min(taken, default=1.0) >= 0.1:
        with _ranks_on("a", "b", "b", "c") as ranks:
            waiting = (ranks[0], ranks[1], ranks[3])
            for rank in waiting:
                rank.start(wait_in_vain, "x")
            assert not ranks[0].pipe.poll(0.2)
            begin = time.monotonic()
            ranks[2].call(abort, "rank 2 raised ValueError: boom")
            results = [rank.result() for rank in waiting]
            assert all(one[:2] == ("Aborted", "rank 2 raised ValueError: boom") for one in results)
            taken.append(max(at for *_, at in results) - begin)
    assert min(taken) < 0.1, taken


def test_ranks_that_are_not_numbered_by_host_are_refused() -> None:
    with bound_ranks(3, [Config(host_id=host) for host in "aba"]) as ranks:
        for answer in connect(ranks):
            assert "number the ranks host by host" in str(answer)


# -- network namespaces: hosts that share nothing but a wire --------------------------------------------


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


def _can_make_namespaces() -> str:
    """Why not; empty if they can."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "needs root and iproute2"
    name = f"hvd-{uuid.uuid4().hex[:8]}"
    try:
        _ip("netns", "add", name)
        _ip("netns", "del", name)
    except subprocess.SubprocessError as error:
        return f"cannot make a network namespace: {error}"
    return ""


_NO_NAMESPACES = _can_make_namespaces()
namespaces = pytest.mark.skipif(bool(_NO_NAMESPACES), reason=_NO_NAMESPACES)


@contextlib.contextmanager
def _wired_hosts(count: int) -> Iterator[list[str]]:
    """Namespaces "hosts" on one bridge, which is in a namespace of its own. Each host also has an interface
    with the same address as everybody's, as docker0 is, and `wire0`, which is its way to the others."""
    tag = uuid.uuid4().hex[:6]
    switch, hosts = f"hvd-{tag}-s", [f"hvd-{tag}-{i}" for i in range(count)]
    try:
        for name in (switch, *hosts):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", switch, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge0", "up")
        for i, host in enumerate(hosts):
            # Before the wire, so that an endpoint names its address first.
            _ip("-n", host, "link", "add", "docker0", "type", "bridge")
            _ip("-n", host, "addr", "add", "172.17.0.1/16", "dev", "docker0")
            _ip("-n", host, "link", "set", "docker0", "up")
            _ip(
                "-n",
                host,
                "link",
                "add",
                "wire0",
                "type",
                "veth",
                "peer",
                "name",
                f"port{i}",
                "netns",
                switch,
            )
            _ip("-n", host, "addr", "add", f"10.77.0.{i + 1}/24", "dev", "wire0")
            _ip("-n", host, "link", "set", "wire0", "up")
            _ip("-n", switch, "link", "set", f"port{i}", "master", "bridge0", "up")
        yield hosts
    finally:
        for name in (switch, *hosts):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=20)


@contextlib.contextmanager
def _ranks_in(namespaces: list[str], **settings: object) -> Iterator[list[Rank]]:
    config = replace(Config(), **settings)  # type: ignore[arg-type]
    prefixes = [("ip", "netns", "exec", name) for name in namespaces]
    with bound_ranks(len(namespaces), [config] * len(namespaces), prefixes) as ranks:
        answers = connect(ranks)
        assert not any(isinstance(answer, Exception) for answer in answers), answers
        yield ranks


@namespaces
@pytest.mark.parametrize("layout", [(1, 1), (2, 2), (3, 1), (1, 2, 1), (1, 1, 1, 1)], ids=str)
def test_hosts_that_share_a_wire_add_up_and_miss_a_dead_rank(layout: tuple[int, ...]) -> None:
    with _wired_hosts(len(layout)) as hosts:
        places = [host for host, ranks in zip(hosts, layout, strict=True) for _ in range(ranks)]
        with _ranks_in(places) as ranks:
            for count in (1000, 1_000_000):
                for rank in ranks:
                    rank.start(add, f"x{count}", count)
                assert [rank.result() for rank in ranks] == [len(ranks)] * len(ranks)
            for rank in ranks[:-1]:
                rank.start(wait_in_vain, "y")
            killed_at = ranks[-1].kill()
            for rank in ranks[:-1]:
                kind, text, at = rank.result()
                assert (kind, at - killed_at < 2) == ("PeerLost", True), text
                assert f"lost rank {len(ranks) - 1}" in text


@namespaces
def test_one_host_id_on_hosts_that_share_nothing_joins_nobody(capfd: pytest.CaptureFixture[str]) -> None:
    with _wired_hosts(2) as hosts, _ranks_in([hosts[0], hosts[0], hosts[1]], host_id="me") as ranks:
        for rank in ranks:
            rank.start(add_and_say_where)
        assert [rank.result() for rank in ranks] == [(3, 0, 2, 2), (3, 0, 2, 2), (3, 1, 2, 1)]
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("hvd: ")]
    assert "ranks 0 and 2 have HVD_HOST_ID=me but no network namespace in common" in line


@namespaces
def test_containers_that_share_a_network_namespace_share_memory(capfd: pytest.CaptureFixture[str]) -> None:
    """Whatever else they have of their own: mounts, IPC, host name, processes."""
    container = ("unshare", "--mount", "--ipc", "--uts", "--pid", "--fork", "--kill-child")
    with bound_ranks(2, [Config(host_id="me")] * 2, [container, container]) as ranks:
        assert connect(ranks) == [0, 0]
        for rank in ranks:
            rank.start(add_and_say_where)
        assert [rank.result() for rank in ranks] == [(2, 0, 1, 2)] * 2
    assert "hvd: " not in capfd.readouterr().err


@namespaces
@pytest.mark.parametrize("count", [16, 1_000_000])
def test_an_unplugged_wire_is_a_lost_rank_in_time(count: int) -> None:
    with _wired_hosts(2) as hosts, _ranks_in([hosts[0]] * 2 + [hosts[1]], peer_timeout_s=3.0) as ranks:
        for rank in ranks:
            rank.start(add_until_it_fails, count)
        assert not ranks[0].pipe.poll(0.3), "they were to be in the middle of it"
        _ip("-n", hosts[1], "link", "set", "wire0", "down")
        for rank, lost in zip(ranks, (2, 2, 0), strict=True):
            kind, text, _ = rank.result(timeout_s=15)
            assert kind == "PeerLost", text
            assert f"lost rank {lost} (10.77.0.{2 if lost else 1})" in text


@namespaces
def test_a_host_without_a_way_there_is_named_in_time() -> None:
    with _wired_hosts(2) as hosts:
        _ip("-n", hosts[1], "link", "set", "wire0", "down")
        prefixes = [("ip", "netns", "exec", name) for name in hosts]
        with bound_ranks(2, [Config(connect_timeout_s=2)] * 2, prefixes) as ranks:
            for other, answer in zip((1, 0), connect(ranks), strict=True):
                assert isinstance(answer, CollectiveTimeout)
                assert f"rank {other}" in str(answer)
