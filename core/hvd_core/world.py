"""`World`: what a launcher tells a rank about its job, and how the rank connects."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import PurePath

from .config import Config
from .errors import Aborted, CollectiveTimeout, LaunchFailed, PeerLost
from .group import Group, Listener


@dataclass
class World:
    """A rank's place in its job. `endpoints` are in rank order; `token` is the job's secret.

    Where the launcher replaces lost ranks, `replaced_within_s` says for how long a rank waits to hear of it,
    and `generation` how often it has happened; the token stays. Until the launcher has told who the ranks
    are, there are no endpoints.
    """

    rank: int = 0
    size: int = 1
    endpoints: tuple[str, ...] = ("solo",)
    token: bytes = b""
    listener: Listener | None = None
    generation: int = 0
    replaced_within_s: float = 0.0
    _connects: int = field(default=0, repr=False)

    def connect(self, config: Config | None = None) -> Group:
        """A Group of all ranks; every rank calls it as often as the others. See `Group.connect`."""
        config = config or Config.from_env()  # a bad setting here must not put this rank's count off
        count, self._connects = self._connects, self._connects + 1
        number = f"{self.generation}.{count}" if self.generation else str(count)
        if config.timeline_path and number != "0":  # the first Group's timeline is kept
            path = PurePath(config.timeline)
            config = replace(config, timeline=str(path.with_name(f"{path.stem}.{number}{path.suffix}")))
        epoch = (self.generation << 32) + count
        return Group.connect(
            self.listener, self.endpoints, rank=self.rank, token=self.token, epoch=epoch, config=config
        )

    def connect_again(self) -> None:
        """The next `connect` repeats the last one, which has failed here."""
        self._connects -= 1

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


_changed = threading.Condition()
_current: World | None = None


def current() -> World:
    """The World of this process: what its launcher said, otherwise one rank."""
    return _current if _current is not None else World()


def is_set() -> bool:
    """Whether a launcher has said something."""
    return _current is not None


def set_current(world: World | None) -> None:
    """For launchers, before the rank's function runs, and when a lost rank has been replaced; from any
    thread."""
    global _current
    with _changed:
        _current = world
        _changed.notify_all()


def connect(after: World | None = None) -> tuple[Group, World]:
    """Connects the ranks of the present World, or of the first one later than `after`, whose Group has died.

    Where the launcher replaces lost ranks this waits until it has told who the ranks are, and begins again
    when one is lost meanwhile. Raises LaunchFailed when it has not told for `replaced_within_s`, otherwise
    what `World.connect` raises.
    """
    until = time.monotonic() + current().replaced_within_s
    while True:
        world = _told(after, until)
        try:
            return world.connect(), world
        except (PeerLost, Aborted, CollectiveTimeout):
            if time.monotonic() >= until:
                raise
            world.connect_again()


def _told(after: World | None, until: float) -> World:
    def is_told() -> bool:
        world = current()
        return bool(world.endpoints) and (after is None or world.generation > after.generation)

    with _changed:
        if not _changed.wait_for(is_told, max(0.0, until - time.monotonic())):
            raise LaunchFailed(
                f"rank {current().rank} was not told within {current().replaced_within_s:g} s who the ranks "
                "are: no lost rank was replaced"
            )
        return current()
