"""How ranks find each other that a foreign launcher has started: rank 0 collects their endpoints and hands
out the list, and a token for the Group.

Nothing is read of a connection, beyond frames of fixed sizes, before it has proved to be of this job: on one
host by its user (the kernel tells, SO_PEERCRED), between hosts by a secret (HMAC-SHA256, both ways). Every
message after that carries its own HMAC.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from .config import Config
from .errors import CollectiveTimeout, InvalidArgument
from .foreign import Place, place_in
from .group import Listener
from .world import World

_MAGIC = b"hvdmeet1"
_NONCE_NBYTES, _DIGEST_NBYTES = 16, 32
_MAX_NBYTES = 16 << 20  # the endpoints of some 40,000 ranks
#: A stranger that says nothing holds the others up for this long.
_PROOF_WITHIN_S = 2.0
_RETRY_S = 0.02
_LEAST_SECRET = 16
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def world_of_launcher() -> World | None:
    """This process's World if a foreign launcher has started it as one of several ranks; all of them call it
    at the same time. Raises `InvalidArgument` for what the launcher or our settings leave unclear,
    `CollectiveTimeout` when ranks do not come."""
    place = place_in()
    if place is None:
        return None
    config = Config.from_env()
    meeting = meeting_of(place, config)
    listener = Listener.bind(config)
    endpoints, token = meet(meeting, place.rank, place.size, listener.endpoint, config.connect_timeout_s)
    return World(place.rank, place.size, endpoints, token, listener)


def meeting_of(place: Place, config: Config) -> Meeting:
    """Where the ranks of `place`'s job meet."""
    if not config.job_token:
        if place.is_on_one_host:
            return OnThisHost(place.job)
        raise InvalidArgument(
            f"{place.launcher} has started {place.size} ranks, not all of them on this host as far as it "
            "says. They authenticate each other by a secret: set HVD_JOB_TOKEN to the same "
            f"{_LEAST_SECRET} or more characters for all of them"
        )
    if len(config.job_token) < _LEAST_SECRET:
        raise InvalidArgument(f"HVD_JOB_TOKEN must have at least {_LEAST_SECRET} characters")
    host, _, port = (config.rendezvous or place.address).rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise InvalidArgument(
            "set HVD_RENDEZVOUS=host:port, the same for all ranks: an address of rank 0's host and a port "
            f"that is free there ({place.launcher} names none)"
        )
    return ByToken(host.strip("[]"), int(port), config.job_token.encode())


class Refused(Exception):
    """The other end of a connection is not of this job."""


class Meeting(Protocol):
    """Where a job's ranks meet."""

    def listen(self) -> socket.socket: ...
    def connect(self, timeout_s: float) -> socket.socket: ...

    def prove(self, connection: socket.socket, is_rank_0: bool) -> bytes:
        """The key of the connection's messages. Raises `Refused`."""
        ...

    def token(self, salt: bytes) -> bytes:
        """The Group's, from what rank 0 sends in the open."""
        ...


@dataclass(frozen=True)
class OnThisHost:
    """An abstract Unix socket; all ranks are of one user."""

    job: str

    def _address(self) -> str:
        digest = hashlib.sha256(f"{os.getuid()} {self.job}".encode()).hexdigest()
        return f"\0hvd-meet-{digest[:32]}"

    def listen(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(self._address())
            listener.listen(1024)
        except OSError:
            listener.close()
            raise
        return listener

    def connect(self, timeout_s: float) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(timeout_s)
        try:
            connection.connect(self._address())
        except OSError:
            connection.close()
            raise
        return connection

    def prove(self, connection: socket.socket, is_rank_0: bool) -> bytes:
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", credentials)[1] != os.getuid():
            raise Refused
        return hashlib.sha256(self.job.encode()).digest()

    def token(self, salt: bytes) -> bytes:
        return salt  # nobody else hears it

    def __str__(self) -> str:
        return f"the Unix socket of job {self.job!r}"


@dataclass(frozen=True)
class ByToken:
    """A TCP port of rank 0's host; all ranks know a secret."""

    host: str
    port: int
    secret: bytes = field(repr=False)

    def listen(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        address = self.host if self.host in _LOOPBACK else ""  # which may be known here by another name
        return socket.create_server((address, self.port), family=family, backlog=1024)

    def connect(self, timeout_s: float) -> socket.socket:
        return socket.create_connection((self.host, self.port), timeout_s)

    def prove(self, connection: socket.socket, is_rank_0: bool) -> bytes:
        mine, size = secrets.token_bytes(_NONCE_NBYTES), len(_MAGIC) + _NONCE_NBYTES
        connection.sendall(_MAGIC + mine)
        hello = _read(connection, size)
        if not hello.startswith(_MAGIC):
            raise Refused
        theirs = hello[len(_MAGIC) :]
        nonces = mine + theirs if is_rank_0 else theirs + mine
        roles = (b"rank 0", b"other") if is_rank_0 else (b"other", b"rank 0")
        connection.sendall(_digest(self.secret, roles[0] + nonces))
        if not hmac.compare_digest(
            _read(connection, _DIGEST_NBYTES), _digest(self.secret, roles[1] + nonces)
        ):
            raise Refused
        return _digest(self.secret, b"key" + nonces)

    def token(self, salt: bytes) -> bytes:
        return _digest(self.secret, b"group" + salt)

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def meet(
    meeting: Meeting, rank: int, size: int, endpoint: str, timeout_s: float
) -> tuple[tuple[str, ...], bytes]:
    """All ranks' endpoints, in rank order, and their token. Every rank calls it at the same time. Raises
    `CollectiveTimeout`, naming the ranks that did not come."""
    deadline = time.monotonic() + timeout_s
    if rank == 0:
        answer = _host(meeting, size, endpoint, deadline)
    else:
        answer = _visit(meeting, {"rank": rank, "size": size, "endpoint": endpoint}, deadline)
    if "error" in answer:
        raise InvalidArgument(answer["error"])
    return tuple(answer["endpoints"]), meeting.token(bytes.fromhex(answer["salt"]))


def _host(meeting: Meeting, size: int, endpoint: str, deadline: float) -> dict[str, Any]:
    """What all ranks are told."""
    visitors: dict[int, tuple[socket.socket, bytes]] = {}
    addresses: dict[int, str] = {}
    with _listen(meeting, deadline) as listener, ExitStack() as open_connections:
        while len(visitors) < size - 1:
            listener.settimeout(_left(deadline))
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                raise CollectiveTimeout(_missing(meeting, size, visitors)) from None
            open_connections.enter_context(connection)
            connection.settimeout(_PROOF_WITHIN_S)
            try:
                key = meeting.prove(connection, is_rank_0=True)
                said = _receive(connection, key)
            except (Refused, OSError):
                connection.close()
                continue
            if said["size"] != size or not 0 < said["rank"] < size:
                error = (
                    f"rank 0 was told of {size} ranks, and rank {said['rank']} of {said['size']}: are two "
                    f"jobs meeting at {meeting}?"
                )
                _tell([(connection, key), *visitors.values()], {"error": error})
                return {"error": error}
            addresses[said["rank"]] = said["endpoint"]
            visitors[said["rank"]] = connection, key  # who came twice lives once
        endpoints = [endpoint, *(addresses[rank] for rank in range(1, size))]
        answer = {"endpoints": endpoints, "salt": secrets.token_hex(32)}
        _tell(visitors.values(), answer)
    return answer


def _tell(visitors: Iterable[tuple[socket.socket, bytes]], answer: dict[str, Any]) -> None:
    for connection, key in visitors:
        with suppress(OSError):  # its Group will say that it is not there
            _send(connection, key, answer)


def _listen(meeting: Meeting, deadline: float) -> socket.socket:
    """What a job of the same name has left may be in the way for a moment."""
    while True:
        try:
            return meeting.listen()
        except OSError as error:
            if _left(deadline) <= _RETRY_S:
                raise CollectiveTimeout(f"rank 0 cannot listen at {meeting}: {error}") from None
            time.sleep(_RETRY_S)


def _visit(meeting: Meeting, message: dict[str, Any], deadline: float) -> dict[str, Any]:
    """Until rank 0 is there: the launcher starts ranks in any order."""
    why = "nobody listens there"
    while (left := _left(deadline)) > _RETRY_S:
        try:
            with meeting.connect(left) as connection:
                connection.settimeout(_left(deadline))
                key = meeting.prove(connection, is_rank_0=False)
                _send(connection, key, message)
                answer = _receive(connection, key)
                if "endpoints" in answer or "error" in answer:
                    return answer
                raise Refused  # our own message, sent back to us
        except Refused:
            why = "who listens there is not of this job"
        except TimeoutError:
            why = "not all ranks have come"
        except OSError as error:
            why = str(error)
        time.sleep(_RETRY_S)
    raise CollectiveTimeout(
        f"rank {message['rank']} did not meet the others at {meeting} (connect_timeout_s): {why}"
    )


def _missing(meeting: Meeting, size: int, visitors: dict[int, Any]) -> str:
    missing = [rank for rank in range(1, size) if rank not in visitors]
    names = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    return f"rank{'s' if len(missing) > 1 else ''} {names} did not come to {meeting} (connect_timeout_s)"


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())


def _digest(key: bytes, data: bytes) -> bytes:
    return hmac.digest(key, data, "sha256")


def _send(connection: socket.socket, key: bytes, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    connection.sendall(struct.pack("!I", len(data)) + data + _digest(key, data))


def _receive(connection: socket.socket, key: bytes) -> dict[str, Any]:
    (nbytes,) = struct.unpack("!I", _read(connection, 4))
    if nbytes > _MAX_NBYTES:
        raise Refused
    data = _read(connection, nbytes)
    if not hmac.compare_digest(_read(connection, _DIGEST_NBYTES), _digest(key, data)):
        raise Refused
    message: dict[str, Any] = json.loads(data)
    return message


def _read(connection: socket.socket, nbytes: int) -> bytes:
    parts, patience = [], connection.gettimeout()
    deadline = time.monotonic() + (patience or 0.0)  # for all of it, also where it comes byte by byte
    while nbytes:
        if patience is not None:
            connection.settimeout(_left(deadline))
        part = connection.recv(min(nbytes, 1 << 16))
        if not part:
            raise ConnectionError("the connection was closed")
        parts.append(part)
        nbytes -= len(part)
    connection.settimeout(patience)
    return b"".join(parts)
