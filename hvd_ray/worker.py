"""What runs in a worker process of Ray: it listens, joins the others, and says how it ended."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle
import ray

from hvd_core import basics
from hvd_core.errors import PeerLost, RankFailed, RankFailure
from hvd_core.group import Listener
from hvd_core.launch import failure as failures
from hvd_core.world import World, current, set_current

from .places import Neighbours, Offer, machine

#: The attribute of an exception with records of how ranks ended, its own first; travels with the exception.
_RECORDS = "hvd_failures"


@dataclass
class _Life:
    """Of this worker, since `listen`."""

    offer: Offer | None = None
    ended: str = ""


_life = _Life()


def listen(env: Mapping[str, str], rank: int = 0, replaced_within_s: float = 0.0) -> Offer:
    """Binds where this rank can be reached. rank: if it is known. replaced_within_s: see `World`."""
    os.environ.update(env)
    listener = Listener.bind()
    set_current(World(rank, 0, (), b"", listener, replaced_within_s=replaced_within_s))
    context = ray.get_runtime_context()
    _life.ended = ""
    _life.offer = Offer(
        listener.endpoint,
        context.get_node_id(),
        socket.gethostname(),
        ray.util.get_node_ip_address(),  # type: ignore[no-untyped-call]
        machine(),
        os.getpid(),
        tuple(str(i) for i in context.get_accelerator_ids().get("GPU", [])),
    )
    return _life.offer


def join(
    rank: int, offers: Sequence[Offer], token: bytes, gpus: str | None = None, generation: int = 0
) -> None:
    """After all have listened; from now on `hvd.init()` connects this rank with the others. Again, with a
    higher generation, when some were replaced. offers: by rank. gpus: for CUDA_VISIBLE_DEVICES; nothing of
    the user has been imported when it is set."""
    if gpus is not None and not current().endpoints:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus
    _neighbours.watch({r: offer for r, offer in enumerate(offers) if r != rank})
    endpoints = tuple(offer.endpoint for offer in offers)
    now = current()
    set_current(World(rank, len(offers), endpoints, token, now.listener, generation, now.replaced_within_s))


def standing() -> tuple[Offer | None, str]:
    """This worker's offer, and how its training function has ended: "", "returned" or "failed"."""
    return _life.offer, _life.ended


@contextlib.contextmanager
def in_group() -> Iterator[None]:
    """Around what a rank does: connected on the way in. When it fails, the others leave their collectives at
    once, and the exception carries a record of it."""
    try:
        basics.init()
        yield
        _life.ended = "returned"
    except BaseException as error:
        _life.ended = "failed"
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


_neighbours = Neighbours()


def record(error: BaseException) -> list[RankFailure]:
    """Describes what this rank ran into, tells the other ranks, and attaches it to the exception; with the
    deaths of neighbours if that was the loss of a peer."""
    rank = current().rank
    if isinstance(error, SystemExit):
        own = failures.exit_failure(error, rank)
    else:
        own = failures.describe(error, rank)
    own = replace(own, node=_life.offer.where if _life.offer else "")
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
