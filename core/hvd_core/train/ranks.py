"""The few collectives the training loop needs; without a Group, or with one rank, they cost nothing."""

from __future__ import annotations

import platform
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from ..errors import InvalidArgument, NotInitialized

if TYPE_CHECKING:
    from ..group import Group


class Ranks:
    """All ranks call each method at the same time, with the same name and sizes."""

    def __init__(self, group: Group | None):
        self.group = group
        self.rank = 0 if group is None else group.rank
        self.size = 1 if group is None else group.size
        if self.size > 1:
            from .. import basics

            try:
                default = basics.default_group()
            except NotInitialized:
                default = None
            if default is not group:
                raise InvalidArgument(
                    "training needs the default Group: pass hvd_core.basics.default_group()"
                )

    def sum(self, values: np.ndarray, name: str) -> np.ndarray:
        """Element-wise sum over ranks, in place. float64 or integers."""
        if self.group is not None and self.size > 1:
            self.group.allreduce(values, name=f"train.{name}")
        return values

    def gather(self, data: bytes, name: str) -> list[bytes]:
        """Every rank's bytes, by rank."""
        if self.group is None or self.size == 1:
            return [data]
        return self.group.allgather_bytes(data, name=f"train.{name}")

    def deal(self, rows: np.ndarray, counts: list[int], name: str) -> np.ndarray:
        """The first counts[0] of `rows` go to rank 0, the next counts[1] to rank 1, ...; what came from all
        ranks, in rank order. Numbers of rows may differ between ranks, their shape and dtype not."""
        if self.group is None or self.size == 1:
            return rows
        received: np.ndarray = self.group.alltoall(rows, splits=counts, name=f"train.{name}")[0]
        return received

    def broadcast(self, data: bytes | None, root: int, name: str) -> bytes:
        """Root's bytes, on every rank."""
        if self.group is None or self.size == 1:
            return data or b""
        return self.group.broadcast_bytes(data, root=root, name=f"train.{name}")

    def long_phase(self, name: str, timeout_s: float) -> AbstractContextManager[None]:
        """Around what only this rank does while the others wait; see `Group.long_phase`."""
        return nullcontext() if self.group is None else self.group.long_phase(name, timeout_s)


def places_of(ranks: Ranks) -> list[str]:
    """A line for each host: which ranks are there, and on what they compute. Every rank calls it."""
    hosts = [data.decode() for data in ranks.gather(platform.node().encode(), "places")]
    lines = []
    for host, places in groupby(range(ranks.size), lambda rank: hosts[rank]):
        first, *more = places
        who = f"ranks {first} to {more[-1]}" if more else f"rank {first}"
        lines.append(f"{who} on {host} (cpu)")
    return lines
