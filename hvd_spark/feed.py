"""Progress and the ranks' lines, from the supervisors to the driver: one socket, one way, best effort.

Nothing depends on it. A supervisor tries once for a second; without the feed its lines go to the executor's
log. The driver sends 16 random bytes to whoever connects and reads exactly one fixed frame in return; only
after its HMAC under the job's token is right does it parse anything, and then JSON lines, never pickles.

A rank holds its supervisor's socket too, without using it: when the driver reads its end, both are gone.

    driver → supervisor   challenge: 16 bytes
    supervisor → driver   "HVDFEED1", partition (u32, big-endian), HMAC-SHA256(token, all before it)
    supervisor → driver   JSON objects, one a line
"""

from __future__ import annotations

import hmac
import json
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Address = tuple[str, int]

_MAGIC = b"HVDFEED1"
_CHALLENGE_NBYTES = 16
_FRAME_NBYTES = len(_MAGIC) + 4 + 32
#: Longer lines are not ours.
_LINE_NBYTES = 4 << 20
#: A stranger has this long for its frame, and so many may be waiting at once.
_PATIENCE_S = 2.0
_STRANGERS = 32
#: What a supervisor keeps for a driver that does not read; beyond it lines are dropped, never waited for.
_BACKLOG_NBYTES = 1 << 20


def _frame(token: bytes, challenge: bytes, partition: int) -> bytes:
    head = _MAGIC + struct.pack(">I", partition)
    return head + hmac.digest(token, challenge + head, "sha256")


@dataclass
class _Peer:
    challenge: bytes
    since: float
    known: bool = False
    data: bytearray = field(default_factory=bytearray)


class FeedServer:
    """The driver's end. Not thread-safe: made, read and closed by the thread that waits for the job.

    host: the address that the supervisors are told. Listens there only if `local`, else on every interface.
    """

    def __init__(self, token: bytes, host: str, *, local: bool):
        self._token = token
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        anywhere = "::" if family == socket.AF_INET6 else "0.0.0.0"
        self._listener = socket.create_server((host if local else anywhere, 0), family=family)
        self._listener.setblocking(False)
        self.address: Address = (host, self._listener.getsockname()[1])
        self.dropped = 0
        #: A supervisor has come: the job has its slots.
        self.heard = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._peers: dict[socket.socket, _Peer] = {}

    def read(self, timeout_s: float, wake_fd: int | None = None) -> list[dict[str, Any]]:
        """Records that have arrived; waits up to `timeout_s` for the first, or until `wake_fd` is
        readable."""
        if wake_fd is not None:
            self._selector.register(wake_fd, selectors.EVENT_READ)
        try:
            ready = self._selector.select(timeout_s)
        finally:
            if wake_fd is not None:
                self._selector.unregister(wake_fd)
        records: list[dict[str, Any]] = []
        for key, _ in ready:
            if key.fileobj is self._listener:
                self._accept()
            elif isinstance(key.fileobj, socket.socket):
                records += self._receive(key.fileobj)
        for sock, peer in list(self._peers.items()):
            if not peer.known and time.monotonic() - peer.since > _PATIENCE_S:
                self._drop(sock, stray=True)
        return records

    def drain(self, timeout_s: float) -> list[dict[str, Any]]:
        """What is still on its way after the job ended: until every supervisor and its rank are gone."""
        records: list[dict[str, Any]] = []
        deadline = time.monotonic() + timeout_s
        while any(peer.known for peer in self._peers.values()) and time.monotonic() < deadline:
            records += self.read(deadline - time.monotonic())
        return records

    def close(self) -> None:
        for sock in [*self._peers, self._listener]:
            sock.close()
        self._peers.clear()
        self._selector.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        strangers = [other for other, peer in self._peers.items() if not peer.known]
        if len(strangers) >= _STRANGERS:
            self._drop(strangers[0], stray=True)
        sock.setblocking(False)
        peer = _Peer(secrets.token_bytes(_CHALLENGE_NBYTES), time.monotonic())
        self._peers[sock] = peer
        self._selector.register(sock, selectors.EVENT_READ)
        try:
            sock.send(peer.challenge)
        except OSError:
            self._drop(sock, stray=True)

    def _receive(self, sock: socket.socket) -> list[dict[str, Any]]:
        peer = self._peers[sock]
        try:
            data = sock.recv(65536 if peer.known else _FRAME_NBYTES - len(peer.data))
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self._drop(sock, stray=not peer.known)
            return []
        peer.data += data
        if not peer.known:
            if len(peer.data) == _FRAME_NBYTES:
                partition = struct.unpack_from(">I", peer.data, len(_MAGIC))[0]
                if not hmac.compare_digest(peer.data, _frame(self._token, peer.challenge, partition)):
                    self._drop(sock, stray=True)
                    return []
                peer.known = self.heard = True
                peer.data.clear()
            return []
        *lines, rest = peer.data.split(b"\n")
        peer.data = bytearray(rest)
        try:
            records = [json.loads(line) for line in lines]
        except ValueError:
            records = [None]
        if len(rest) > _LINE_NBYTES or not all(isinstance(record, dict) for record in records):
            self._drop(sock, stray=True)
            return []
        return records

    def _drop(self, sock: socket.socket, *, stray: bool) -> None:
        self.dropped += stray
        self._selector.unregister(sock)
        del self._peers[sock]
        sock.close()


class FeedClient:
    """A supervisor's end. Never blocks and never raises once connected."""

    def __init__(self, sock: socket.socket):
        self._sock: socket.socket | None = sock
        self._backlog = bytearray()
        self.lost = 0

    @classmethod
    def connect(
        cls, address: Address | None, token: bytes, partition: int, timeout_s: float = 1.0
    ) -> FeedClient | None:
        """One try. None when there is no driver to reach."""
        if address is None:
            return None
        deadline = time.monotonic() + timeout_s
        sock = None
        try:
            sock = socket.create_connection(address, timeout_s)
            challenge = b""
            while len(challenge) < _CHALLENGE_NBYTES:
                sock.settimeout(max(0.001, deadline - time.monotonic()))
                data = sock.recv(_CHALLENGE_NBYTES - len(challenge))
                if not data:
                    raise ConnectionError("closed before the challenge")
                challenge += data
            sock.sendall(_frame(token, challenge, partition))
            sock.setblocking(False)
        except OSError:
            if sock is not None:
                sock.close()
            return None
        return cls(sock)

    @property
    def connected(self) -> bool:
        return self._sock is not None

    def fileno(self) -> int:
        """-1 when the driver has hung up."""
        return -1 if self._sock is None else self._sock.fileno()

    def send(self, records: Sequence[dict[str, Any]]) -> None:
        """Queues the records and sends what the socket takes now."""
        for record in records:
            line = json.dumps(record, default=str).encode() + b"\n"
            if len(self._backlog) + len(line) > _BACKLOG_NBYTES:
                self.lost += 1
            else:
                self._backlog += line
        self.flush()

    def flush(self) -> None:
        while self._backlog and self._sock is not None:
            try:
                sent = self._sock.send(self._backlog)
            except BlockingIOError:
                return
            except OSError:
                self._hang_up()
                return
            del self._backlog[:sent]

    def close(self, timeout_s: float = 1.0) -> None:
        """Gives the driver up to `timeout_s` to take the rest."""
        if self._sock is None:
            return
        try:
            self._sock.settimeout(timeout_s)
            self._sock.sendall(self._backlog)
        except OSError:
            pass
        self._hang_up()

    def _hang_up(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None
