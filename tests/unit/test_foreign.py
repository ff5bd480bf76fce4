"""What foreign launchers say about a rank, and how ranks meet; ranks are threads here."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from typing import Any

import pytest

from hvd_core import Config, foreign
from hvd_core.errors import CollectiveTimeout, InvalidArgument
from hvd_core.foreign import Place
from hvd_core.rendezvous import ByToken, Meeting, OnThisHost, Refused, meet, meeting_of
from tests.ports import free_port

pytestmark = pytest.mark.timeout(30)

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "node-a", "MASTER_PORT": "29500", "LOCAL_WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-a-7@1", "PMIX_RANK": "1",
}  # fmt: skip
HYDRA = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "77", "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "1", "SLURM_NTASKS": "2", "PMI_RANK": "1",
}  # fmt: skip


def without(env: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in names}


@pytest.mark.parametrize(
    ("env", "rank", "size", "local_size", "address"),
    [
        (TORCHRUN, 3, 4, 2, ""),  # its agent listens there
        (without(TORCHRUN, "LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE"), 3, 4, None, "node-a:29500"),
        (OPEN_MPI, 1, 2, 2, ""),
        (OPEN_MPI | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "7"}, 1, 2, 2, "10.0.0.1:7"),
        (HYDRA, 0, 2, 2, ""),
        (SLURM, 1, 2, 2, ""),
        (SLURM | {"SLURM_STEP_NUM_NODES": "2"}, 1, 2, None, ""),
        (SLURM | TORCHRUN, 3, 4, 2, ""),
    ],
)
def test_places(env: dict[str, str], rank: int, size: int, local_size: int | None, address: str) -> None:
    place = foreign.place_in(env)
    assert place is not None
    assert (place.rank, place.size, place.local_size, place.address) == (rank, size, local_size, address)
    assert place.is_on_one_host == (size == local_size)


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"RANK": "1", "WORLD_SIZE": "2"},  # somebody's own variables
        TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"},
        without(SLURM, "SLURM_STEP_NUM_TASKS"),  # a batch script
        without(HYDRA, "PMI_SIZE"),
    ],
)
def test_no_place(env: dict[str, str]) -> None:
    assert foreign.place_in(env) is None


def test_what_makes_no_sense_is_named() -> None:
    with pytest.raises(InvalidArgument, match="RANK='one'"):
        foreign.place_in(TORCHRUN | {"RANK": "one"})
    with pytest.raises(InvalidArgument, match=r"Open MPI\) says rank 2 of 2"):
        foreign.place_in(OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "2"})
    # Every attempt of a job is a job.
    jobs = {foreign.place_in(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": n}).job for n in "01"}  # type: ignore[union-attr]
    assert len(jobs) == 2


def test_several_hosts_need_a_secret_and_an_address() -> None:
    place = Place("torchrun", 0, 4, 2, "job", "node-a:29500")
    with pytest.raises(InvalidArgument, match="HVD_JOB_TOKEN"):
        meeting_of(place, Config())
    with pytest.raises(InvalidArgument, match="16 characters"):
        meeting_of(place, Config(job_token="short"))
    secret = "0123456789abcdef"
    found = meeting_of(place, Config(job_token=secret))
    assert found == ByToken("node-a", 29500, secret.encode())
    assert secret not in repr((found, str(found), Config(job_token=secret)))
    assert meeting_of(place, Config(job_token=secret, rendezvous="[::1]:5")) == ByToken(
        "::1", 5, secret.encode()
    )
    with pytest.raises(InvalidArgument, match="HVD_RENDEZVOUS=host:port"):
        meeting_of(Place("srun", 0, 4, None, "job"), Config(job_token=secret))
    assert meeting_of(Place("torchrun", 0, 2, 2, "job"), Config()) == OnThisHost("job")


@pytest.fixture(params=["host", "token"])
def meeting(request: pytest.FixtureRequest) -> Iterator[Meeting]:
    if request.param == "host":
        yield OnThisHost(f"test {os.getpid()} {secrets.token_hex(8)}")
    else:
        yield ByToken("127.0.0.1", free_port(), b"0123456789abcdef")


def all_meet(meeting: Meeting, size: int, order: Any = None) -> list[Any]:
    with ThreadPoolExecutor(size) as threads:
        found = {
            rank: threads.submit(meet, meeting, rank, size, f"endpoint of {rank}", 20.0)
            for rank in (order or range(size))
        }
        return [found[rank].result() for rank in range(size)]


def test_all_get_the_list_and_one_token_also_again(meeting: Meeting) -> None:
    tokens = set()
    for order in ([0, 1, 2, 3], [3, 2, 1, 0]):
        results = all_meet(meeting, 4, order)
        assert {endpoints for endpoints, _ in results} == {tuple(f"endpoint of {rank}" for rank in range(4))}
        (token,) = {token for _, token in results}
        assert len(token) == 32
        tokens.add(token)
    assert len(tokens) == 2


def test_who_does_not_come_is_named(meeting: Meeting) -> None:
    with pytest.raises(CollectiveTimeout, match="ranks 1, 2 did not come to"):
        meet(meeting, 0, 3, "mine", 0.2)
    with pytest.raises(CollectiveTimeout, match="rank 2 did not meet the others at"):
        meet(meeting, 2, 3, "mine", 0.2)


@pytest.mark.parametrize("stray", [1, 2])
def test_ranks_of_jobs_of_other_sizes_are_told(meeting: Meeting, stray: int) -> None:
    """Also one that would complete the list."""
    with ThreadPoolExecutor(2) as threads:
        ranks = ((0, 2), (stray, 3))
        others = [threads.submit(meet, meeting, rank, size, "x", 20.0) for rank, size in ranks]
        for other in others:
            with pytest.raises(InvalidArgument, match=f"rank 0 was told of 2 ranks, and rank {stray} of 3"):
                other.result()


def connection_to(port: int) -> socket.socket:
    """As soon as somebody listens there."""
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), 5)
        except ConnectionRefusedError:
            os.sched_yield()


def all_of(connection: socket.socket) -> bytes:
    data = b""
    with suppress(ConnectionResetError):
        while part := connection.recv(4096):
            data += part
    return data


def test_strangers_learn_nothing_and_are_no_obstacle() -> None:
    """Garbage, silence, a closed connection, a wrong secret, a recorded proof, a stranger in the listener's
    place."""
    port = free_port()
    ours = ByToken("127.0.0.1", port, b"0123456789abcdef")
    theirs = ByToken("127.0.0.1", port, b"0123456789abcdeX")
    with ThreadPoolExecutor(4) as threads:
        rank_0 = threads.submit(meet, ours, 0, 2, "first", 20.0)
        with pytest.raises(CollectiveTimeout, match="did not meet the others"):
            meet(theirs, 1, 2, "wrong", 0.5)
        heard = []
        for said in (b"GET / HTTP/1.0\r\n\r\n" + bytes(64), b"", b"hvdmeet1" + bytes(48)):
            with connection_to(port) as stranger:
                stranger.sendall(said)
                stranger.shutdown(socket.SHUT_WR)
                heard.append(all_of(stranger))
        assert all(len(data) <= 24 + 32 for data in heard)
        assert not any(b"first" in data for data in heard)
        silent = connection_to(port)
        rank_1 = threads.submit(meet, ours, 1, 2, "second", 20.0)
        endpoints, token = rank_1.result()
        assert endpoints == ("first", "second")
        assert rank_0.result() == (endpoints, token)
        silent.close()
    with closing(theirs.listen()) as impostor, ThreadPoolExecutor(1) as threads:
        victim = threads.submit(meet, ours, 1, 2, "second", 0.5)
        connection, _ = impostor.accept()
        connection.settimeout(2)
        with closing(connection), pytest.raises((Refused, OSError)):
            theirs.prove(connection, is_rank_0=True)
        with pytest.raises(CollectiveTimeout):
            victim.result()


def test_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    meeting = OnThisHost(f"test {secrets.token_hex(8)}")
    with closing(meeting.listen()), closing(meeting.connect(1.0)) as connection:
        assert meeting.prove(connection, is_rank_0=False)
        uid = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: uid + 1)
        with pytest.raises(Refused):
            meeting.prove(connection, is_rank_0=False)
