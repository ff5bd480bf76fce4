"""Framing on the inherited sockets and pipes between a supervisor, its template and its ranks.

A frame is one kind byte, a length of 8 bytes (little endian) and that many bytes. Descriptors travel with the
kind byte of a frame (SCM_RIGHTS). Both ends are processes of one program and one user, on one machine.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable, Sequence

_HEADER = struct.Struct("<cQ")
_MAX_FDS = 250  # the kernel passes at most 253 descriptors with one message

# supervisor -> template
SETUP = b"S"  # json: environment, sys.path, working directory, modules to import
FORK = b"F"  # json: environment, threads; descriptors: see template.py
# rank -> supervisor
ENDPOINT = b"E"  # text
REPORT = b"R"  # json
VALUE = b"V"  # pickled result
EXCEPTION = b"X"  # pickled exception; before its FAILURE
FAILURE = b"B"  # json of a RankFailure
# supervisor -> rank
ASSIGN = b"A"  # json of an Assignment


class Channel:
    """One end of a stream socket, blocking, for whole frames. Sending is thread-safe, receiving is not."""

    def __init__(self, sock: socket.socket):
        self._socket = sock
        self._sending = threading.Lock()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, kind: bytes, data: bytes, fds: Sequence[int] = ()) -> None:
        """Raises OSError when the other end is gone."""
        if len(fds) > _MAX_FDS:
            raise ValueError(f"{len(fds)} descriptors in one message; at most {_MAX_FDS}")
        with self._sending:
            header = _HEADER.pack(kind, len(data))
            if fds:
                sent = socket.send_fds(self._socket, [header], list(fds))
                header = header[sent:]
            self._socket.sendall(header)
            self._socket.sendall(data)

    def receive(self) -> tuple[bytes, bytes, list[int]] | None:
        """The next frame and its descriptors; None when the other end is gone, also in mid-frame."""
        try:
            start, fds, _, _ = socket.recv_fds(self._socket, _HEADER.size, _MAX_FDS)
            for fd in fds:
                os.set_inheritable(fd, False)
            header = start + self._exactly(_HEADER.size - len(start)) if start else b""
            if len(header) < _HEADER.size:
                return None
            kind, nbytes = _HEADER.unpack(header)
            data = self._exactly(nbytes)
            return (kind, bytes(data), fds) if len(data) == nbytes else None
        except ConnectionError:
            return None

    def _exactly(self, nbytes: int) -> bytearray:
        data = bytearray(nbytes)
        view, have = memoryview(data), 0
        while have < nbytes:
            got = self._socket.recv_into(view[have:])
            if not got:
                return bytearray()
            have += got
        return data

    def receive_available(self, limit: int) -> tuple[bytes, bool]:
        """For a `FrameReader`: see `drain`."""
        return drain(lambda nbytes: self._socket.recv(nbytes, socket.MSG_DONTWAIT), limit)

    def close(self) -> None:
        self._socket.close()


class FrameReader:
    """Takes whole frames out of a stream that arrives in pieces."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, piece: bytes) -> list[tuple[bytes, bytes]]:
        """Adds `piece`; returns the frames that are now complete."""
        self._data += piece
        frames = []
        while len(self._data) >= _HEADER.size:
            kind, nbytes = _HEADER.unpack_from(self._data)
            end = _HEADER.size + nbytes
            if len(self._data) < end:
                break
            with memoryview(self._data) as view:
                frames.append((kind, bytes(view[_HEADER.size : end])))
            del self._data[:end]
        return frames


def drain(read: Callable[[int], bytes], limit: int) -> tuple[bytes, bool]:
    """Calls a `read` that never blocks until it is empty or gave about `limit` bytes; True: its writers are
    gone."""
    pieces: list[bytes] = []
    room = limit
    while room > 0:
        try:
            piece = read(min(room, 1 << 18))
        except BlockingIOError:
            return b"".join(pieces), False
        except OSError:  # a reset socket: its writer was killed
            return b"".join(pieces), True
        if not piece:
            return b"".join(pieces), True
        pieces.append(piece)
        room -= len(piece)
    return b"".join(pieces), False
