"""`World`: what a launcher tells a rank about its job, and how the rank connects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import PurePath

from .config import Config
from .group import Group, Listener


@dataclass
class World:
    """A rank's place in its job. `endpoints` are in rank order; `token` is the job's secret."""

    rank: int = 0
    size: int = 1
    endpoints: tuple[str, ...] = ("solo",)
    token: bytes = b""
    listener: Listener | None = None
    _epoch: int = field(default=0, repr=False)

    def connect(self, config: Config | None = None) -> Group:
        """A Group of all ranks; every rank calls it as often as the others. See `Group.connect`."""
        config = config or Config.from_env()  # a bad setting here must not put this rank's count off
        epoch, self._epoch = self._epoch, self._epoch + 1
        if config.timeline and epoch > 0:  # the first Group's timeline is kept
            path = PurePath(config.timeline)
            config = replace(config, timeline=str(path.with_name(f"{path.stem}.{epoch}{path.suffix}")))
        return Group.connect(
            self.listener, self.endpoints, rank=self.rank, token=self.token, epoch=epoch, config=config
        )

    def ranks_by_host(self) -> list[int]:
        """How many ranks each host has; hosts in the order of their ranks."""
        return [len(list(ranks)) for _, ranks in groupby(self.endpoints, _host_of)]

    @staticmethod
    def arrange(endpoints: Sequence[str]) -> list[int]:
        """The order in which ranks are numbered: `order[rank]` is an index into `endpoints`. Ranks of one
        host get neighbouring numbers; hosts and their ranks stay in the order of first appearance. Pure, so
        every rank that sees the same endpoints finds the same order."""
        hosts: dict[str, list[int]] = {}
        for index, endpoint in enumerate(endpoints):
            hosts.setdefault(_host_of(endpoint), []).append(index)
        return [index for indices in hosts.values() for index in indices]


def _host_of(endpoint: str) -> str:
    """The second field, `host=<key>` or `forced=<id>@<key>` (core/src/transport/endpoint.h)."""
    fields = endpoint.split(";")
    return fields[1] if len(fields) > 1 else endpoint


_current: World | None = None


def current() -> World:
    """The World of this process: what its launcher said, otherwise one rank."""
    return _current if _current is not None else World()


def is_set() -> bool:
    """Whether a launcher has said something."""
    return _current is not None


def set_current(world: World | None) -> None:
    """For launchers, before the rank's function runs."""
    global _current
    _current = world
