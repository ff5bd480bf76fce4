"""Training that outlives lost ranks: a state in memory, and a loop that goes on from it. Framework-free.

    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=0)

    @hvd.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, 10):
            ...                                      # collectives
            state.commit()

    train(state)

When a rank is lost and the launcher replaces it (`HorovodConfig(replace_workers=True)` on Ray), the
survivors keep their process: they go back to their last commit, connect with the new rank, and call the
function again; the new rank gets the state of a survivor.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import numpy as np

from . import basics
from .errors import Aborted, InvalidArgument, LaunchFailed, PeerLost
from .objects import broadcast_object

_Result = TypeVar("_Result")


class State(Protocol):
    """What `run` needs of a state."""

    def sync(self) -> None:
        """Makes the state alike on all ranks, which call it together."""

    def restore(self) -> None:
        """Back to what the last `commit` or `sync` has kept."""

    def on_reset(self) -> None:
        """The ranks have connected anew."""


class Part(Protocol):
    """Something in a state that knows how to keep, take back and pass on what it holds."""

    def save(self) -> None: ...

    def restore(self) -> None: ...

    def sync(self, root: int) -> None:
        """Takes over the content of rank `root`. All ranks call it together."""


class ObjectState:
    """Named values, which are its attributes: `ObjectState(epoch=0, best=None).epoch += 1`.

    `commit` keeps a deep copy in this process; all ranks should commit after the same steps. parts: by name,
    what is kept in another way than by copies.
    """

    def __init__(self, *, parts: Mapping[str, Part] | None = None, **values: Any):
        for name in (*values, *(parts or {})):
            if name.startswith("_") or hasattr(type(self), name):
                raise InvalidArgument(f"{name!r} cannot be the name of a value in a {type(self).__name__}")
        self._names, self._parts = tuple(values), dict(parts or {})
        self._callbacks: list[Callable[[], None]] = []
        #: How many commits and syncs it has been through: of two states the higher one is further.
        self._version = 0
        vars(self).update(values)
        self.save()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{type(self).__name__} has no {name!r}: give it a value when you make it")

    def save(self) -> None:
        self._kept = copy.deepcopy({name: getattr(self, name) for name in self._names})
        for part in self._parts.values():
            part.save()

    def commit(self) -> None:
        """Keeps the state as it is now. Costs a copy of it; what happened since the last commit is what a
        lost rank costs."""
        self.save()
        self._version += 1

    def restore(self) -> None:
        vars(self).update(copy.deepcopy(self._kept))
        for part in self._parts.values():
            part.restore()

    def sync(self) -> None:
        """All ranks take over the state of one that has come furthest, the lowest of them; in the beginning
        that is rank 0."""
        group = basics.default_group()
        mine = np.array([self._version], np.int64)
        versions = group.allgather(mine, name=basics.next_name("elastic.versions"))
        root = int(np.argmax(versions))
        values = {name: getattr(self, name) for name in self._names}
        vars(self).update(broadcast_object(values, root, basics.next_name("elastic.values")))
        for part in self._parts.values():
            part.sync(root)
        self.save()
        self._version = int(versions.max()) + 1  # above that of a rank that starts

    def reset(self) -> None:
        """For those who override it; called before the callbacks."""

    def on_reset(self) -> None:
        self.reset()
        for callback in self._callbacks:
            callback()

    def register_reset_callbacks(self, callbacks: list[Callable[[], None]]) -> None:
        """Called without arguments when the ranks have connected anew, before the state is made alike."""
        self._callbacks += callbacks


def run(func: Callable[..., _Result]) -> Callable[..., _Result]:
    """Decorator of a function `func(state, ...)` that all ranks call: makes the state alike, then calls it.

    When a rank is lost, or ends itself by an error, and the launcher replaces it, the others restore the
    state and call the function again, with the new rank. It returns when it has on all ranks. Every
    collective since the last commit is repeated, so what needs all ranks (`prepare_data`) belongs inside;
    gradients that had not been applied are dropped. Other errors are raised, and so is the loss
    where the launcher does not replace ranks.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> _Result:
        while True:
            try:
                state.sync()
                result = func(state, *args, **kwargs)
                basics.default_group().barrier(basics.next_name("elastic.end"))
                return result
            except (PeerLost, Aborted) as error:
                if not basics.replaces_ranks():
                    raise
                lost = error.with_traceback(None)  # or it would keep what the failed attempt holds
            print(
                f"hvd: rank {basics.rank()}: {lost}; waiting for who replaces it", file=sys.stderr, flush=True
            )
            state.restore()
            try:
                basics.reconnect()
            except LaunchFailed as error:
                raise error from lost
            state.on_reset()

    return wrapper
