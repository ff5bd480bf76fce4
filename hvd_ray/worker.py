"""What runs in a worker process of Ray: it listens, joins the others, and says how it ended."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import ray

from hvd_core import basics
from hvd_core.errors import PeerLost, RankFailed, RankFailure
from hvd_core.group import Listener
from hvd_core.launch import failure as failures
from hvd_core.launch.exits import Watched
from hvd_core.world import World, current, set_current

#: The attribute of an exception with records of how ranks ended, its own first; travels with the exception.
_RECORDS = "hvd_failures"
#: A connection ends a moment before its process.
_DEATH_WITHIN_S = 1.0


@dataclass(frozen=True)
class Offer:
    """What a worker says of itself before it has a rank. machine: alike for those to whom `pid` means the
    same process. gpus: those that Ray has given it."""

    endpoint: str
    node: str
    host: str
    machine: str
    pid: int
    gpus: tuple[str, ...]


def listen(env: Mapping[str, str]) -> Offer:
    """Binds where this rank can be reached."""
    os.environ.update(env)
    listener = Listener.bind()
    set_current(World(0, 0, (), b"", listener))
    context = ray.get_runtime_context()
    gpus = tuple(str(i) for i in context.get_accelerator_ids().get("GPU", []))
    return Offer(listener.endpoint, context.get_node_id(), socket.gethostname(), machine(), os.getpid(), gpus)


def join(rank: int, offers: Sequence[Offer], token: bytes) -> None:
    """After all have listened; from now on `hvd.init()` connects this rank with the others. offers: by
    rank."""
    set_current(World(rank, len(offers), tuple(o.endpoint for o in offers), token, current().listener))
    _neighbours.watch({r: offer for r, offer in enumerate(offers) if r != rank})


@contextlib.contextmanager
def in_group() -> Iterator[None]:
    """Around what a rank does: connected on the way in. When it fails, the others leave their collectives at
    once, and the exception carries a record of it."""
    try:
        basics.init()
        yield
    except BaseException as error:
        found = record(error)
        if not _travels(error):  # then Ray would only tell that the worker does not answer
            raise _carrying(RankFailed(found[0]), found) from None
        raise
    finally:
        basics.shutdown()


def _travels(error: BaseException) -> bool:
    try:
        pickle.loads(cloudpickle.dumps(error))
    except Exception:  # noqa: BLE001  whatever a user's class does
        return False
    return True


def machine() -> str:
    """This machine's present run, and the namespace of its process numbers."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not boot.exists():
        return f"{socket.gethostname()} {os.getpid()}"
    return f"{boot.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


class Neighbours:
    """Ranks on this machine, watched for how they end."""

    def __init__(self) -> None:
        self._watched: dict[int, Watched] = {}

    def watch(self, offers: Mapping[int, Offer]) -> None:
        """From now on these, and no others."""
        self.close()
        for rank, offer in offers.items():
            if offer.machine == machine():
                with contextlib.suppress(OSError):
                    self._watched[rank] = Watched(offer.pid)

    def deaths(self) -> list[RankFailure]:
        """Those that have ended, or do so within a second, as far as the kernel says how."""
        until = time.monotonic() + _DEATH_WITHIN_S
        found: list[RankFailure] = []
        while not found and self._watched and time.monotonic() < until:
            for rank, process in self._watched.items():
                code = process.exit_code(timeout_s=0.05)
                if code is not None:
                    found.append(_death(rank, code))
        return found

    def await_all(self, timeout_s: float) -> None:
        """Until they have ended."""
        until = time.monotonic() + timeout_s
        for process in self._watched.values():
            process.has_ended(until - time.monotonic())

    def close(self) -> None:
        for process in self._watched.values():
            process.close()
        self._watched.clear()


def _death(rank: int, code: int) -> RankFailure:
    host, now = socket.gethostname(), time.time()
    if code < 0:
        return RankFailure(rank, "signal", signal=-code, host=host, retryable=True, at=now)
    return RankFailure(rank, "exit", exit_status=code, host=host, at=now)


_neighbours = Neighbours()


def record(error: BaseException) -> list[RankFailure]:
    """Describes what this rank ran into, tells the other ranks, and attaches it to the exception; with the
    deaths of neighbours if that was the loss of a peer."""
    rank = current().rank
    if isinstance(error, SystemExit):
        own = failures.exit_failure(error, rank)
    else:
        own = failures.describe(error, rank)
    if basics.is_initialized() and not own.echo:
        with contextlib.suppress(Exception):
            basics.default_group().abort(own.headline())
    found = [own, *(_neighbours.deaths() if isinstance(error, PeerLost) else ())]
    _carrying(error, found)
    return found


def _carrying(error: BaseException, found: Sequence[RankFailure]) -> BaseException:
    with contextlib.suppress(Exception):  # a class with slots
        setattr(error, _RECORDS, [one.to_json() for one in found])
    return error


def recorded(error: BaseException) -> list[RankFailure]:
    """What `record` has attached."""
    return [RankFailure.from_json(text) for text in getattr(error, _RECORDS, [])]


def log(info: Any) -> None:
    """From a rank to the `callbacks` of the driver's `RayExecutor.run`, at once; any picklable value."""
    if _live is not None:
        _live.put(info)


_live: Any = None


def set_live(queue: Any) -> None:
    """Where `log` puts what it is given; None: nowhere."""
    global _live
    _live = queue
