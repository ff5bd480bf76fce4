"""A picture of the job for people."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass

import torch

from .. import basics, world
from ..config import Config
from ..objects import allgather_object


@dataclass(frozen=True)
class _Place:
    host: str
    cross_rank: int
    local_rank: int
    pid: int
    device: str
    threads: int


def summary() -> str:
    """Which ranks are where, on what they compute, and how they talk to each other; several lines.

    Every rank calls it; the text is the same on all.
    """
    group = basics.default_group()
    place = _Place(
        platform.node(),
        group.cross_rank,
        group.local_rank,
        os.getpid(),
        _device(group.local_rank),
        torch.get_num_threads(),
    )
    places = allgather_object(place)
    layout = world.current().ranks_by_host()
    lines = [f"{group.size} ranks on {len(layout)} hosts: {' + '.join(map(str, layout))}"]
    lines += [
        f"rank {rank}: host {p.cross_rank} ({p.host}), local rank {p.local_rank}, pid {p.pid}, {p.device}, "
        f"threads {p.threads}"
        for rank, p in enumerate(places)
    ]
    return "\n".join([*lines, *_paths(layout)])


def _device(local_rank: int) -> str:
    if not torch.cuda.is_available():
        return "cpu"
    return f"cuda:{local_rank % torch.cuda.device_count()}, reduced on the host through pinned memory"


def _paths(layout: list[int]) -> list[str]:
    """How the data goes, and what decided it."""
    config, lines = Config.from_env(), []
    if sum(layout) == 1:
        return ["one rank: nothing to send"]
    if max(layout) > 1:
        lines.append("within a host: shared memory, as its ranks reach each other's Unix sockets")
    if len(layout) > 1:
        lines.append(
            f"between hosts: TCP, ring_streams={config.ring_streams} connections for each slice to either "
            f"neighbour, by {config.interface or 'the interface that the routing table names'}; fp32 sums "
            f"travel as {config.wire_dtype or 'fp32'}"
        )
    return lines
