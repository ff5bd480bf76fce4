"""Large values in parts, as they arrive from the executors: read once from front to back, freed meanwhile."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterable
from typing import Any


class PartsReader:
    """A binary file over parts. Takes them over: each is let go as soon as it was read."""

    def __init__(self, parts: Iterable[bytes | bytearray]):
        self._parts = deque(parts)
        self._at = 0  # in the first part

    def readinto(self, buffer: Any) -> int:
        """Fills the buffer as far as there are bytes."""
        into, have = memoryview(buffer).cast("B"), 0
        while have < len(into) and self._parts:
            part = self._parts[0]
            taken = min(len(into) - have, len(part) - self._at)
            into[have : have + taken] = memoryview(part)[self._at : self._at + taken]
            have += taken
            self._at += taken
            if self._at == len(part):
                self._parts.popleft()
                self._at = 0
        return have

    def read(self, nbytes: int = -1) -> bytes:
        left = sum(map(len, self._parts)) - self._at
        data = bytearray(left if nbytes < 0 else min(nbytes, left))
        self.readinto(data)
        return bytes(data)

    def readline(self) -> bytes:
        """What a pickle of protocol 0 would need; ours have none."""
        raise pickle.UnpicklingError("a pickle in parts has no lines")


def unpickled(parts: Iterable[bytes | bytearray]) -> Any:
    return pickle.load(PartsReader(parts))
