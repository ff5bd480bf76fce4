"""Where the workers are: what each says of itself, which GPUs they see, how those of one machine end."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvd_core.errors import RankFailure
from hvd_core.launch.exits import Watched

#: A connection ends a moment before its process.
_DEATH_WITHIN_S = 1.0


@dataclass(frozen=True)
class Offer:
    """What a worker says of itself before it has a rank. machine: alike for those to whom `pid` means the
    same process. gpus: those that Ray has given it."""

    endpoint: str
    node: str
    host: str
    address: str
    machine: str
    pid: int
    gpus: tuple[str, ...]

    @property
    def where(self) -> str:
        """The node, for an error text."""
        return node_text(self.address, self.host, self.node)


def node_text(address: str, host: str, node: str) -> str:
    return f"{address} ({host}, id {node})"


def machine() -> str:
    """This machine's present run, and the namespace of its process numbers."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not boot.exists():
        return f"{socket.gethostname()} {os.getpid()}"
    return f"{boot.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


def visible_gpus(offers: Sequence[Offer]) -> list[str | None]:
    """What CUDA_VISIBLE_DEVICES becomes, by rank: all GPUs of the node's workers, so that a rank's own is
    number `local_rank` and its neighbours' can be reached; where they share GPUs, or have several each, only
    its own. None: Ray gives none, leave it as it is."""
    found: list[str | None] = []
    for offer in offers:
        together = [gpu for other in offers if other.node == offer.node for gpu in other.gpus]
        alone = all(len(other.gpus) == 1 for other in offers if other.node == offer.node)
        shown = together if alone and len(set(together)) == len(together) else list(offer.gpus)
        found.append(",".join(shown) if offer.gpus else None)
    return found


class Neighbours:
    """Ranks on this machine, watched for how they end. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: dict[int, Watched] = {}
        self._where: dict[int, str] = {}

    def watch(self, offers: Mapping[int, Offer]) -> None:
        """From now on these, and no others."""
        self.close()
        with self._lock:
            self._where = {rank: offer.where for rank, offer in offers.items()}
            for rank, offer in offers.items():
                if offer.machine == machine():
                    with contextlib.suppress(OSError):
                        self._watched[rank] = Watched(offer.pid)

    def deaths(self) -> list[RankFailure]:
        """Those that have ended, or do so within a second, as far as the kernel says how."""
        until = time.monotonic() + _DEATH_WITHIN_S
        found: list[RankFailure] = []
        with self._lock:
            while not found and self._watched and time.monotonic() < until:
                for rank, process in self._watched.items():
                    code = process.exit_code(timeout_s=0.05)
                    if code is not None:
                        found.append(_death(rank, code, self._where[rank]))
        return found

    def where(self, rank: int) -> str:
        """The node of a rank, also of one that has ended; "" of those that are not known."""
        return self._where.get(rank, "")

    def await_all(self, timeout_s: float) -> None:
        """Until they have ended."""
        until = time.monotonic() + timeout_s
        for process in self._watched.values():
            process.has_ended(until - time.monotonic())

    def close(self) -> None:
        with self._lock:
            for process in self._watched.values():
                process.close()
            self._watched.clear()


def _death(rank: int, code: int, where: str) -> RankFailure:
    host, now = socket.gethostname(), time.time()
    if code < 0:
        return RankFailure(rank, "signal", signal=-code, host=host, node=where, retryable=True, at=now)
    return RankFailure(rank, "exit", exit_status=code, host=host, node=where, at=now)
