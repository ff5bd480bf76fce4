"""The one default Group, behind Horovod's module functions. Framework-free; every adapter re-exports it.

Thread-safe. `init` and `shutdown` exclude each other; everything else only reads one reference.
"""

from __future__ import annotations

import atexit
import itertools
import os
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from .errors import InvalidArgument, NotInitialized

if TYPE_CHECKING:
    from .group import Group


class _Session:
    """From one `init` to its `shutdown`: the Group, and the counters behind the names that users leave out.

    The counters live here so that they start anew with each Group: ranks that were in an earlier Group and
    ranks that were not still choose the same names.
    """

    def __init__(self, group: Group):
        self.group = group
        self._counters: dict[str, Iterator[int]] = defaultdict(itertools.count)
        self._lock = threading.Lock()

    def next_name(self, kind: str) -> str:
        with self._lock:
            return f"{kind}.noname.{next(self._counters[kind])}"


_lock = threading.RLock()
_session: _Session | None = None
_atexit_registered = False


def _current() -> _Session:
    session = _session
    if session is None:
        raise NotInitialized("hvd has not been initialized; call hvd.init() first")
    return session


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Connects this process to the other ranks of the job; blocks until all of them have called it.

    The launcher (`hvd_core.run`, `HorovodEstimator`, torchrun, mpirun, srun, ...) has said who they are;
    without one the size is 1. A second call is a no-op; `init` after `shutdown` connects again. `comm` (MPI
    communicators and lists of ranks) and `process_sets` are not supported and must be left out. Raises
    `PeerLost` or `CollectiveTimeout` when the others do not come.
    """
    global _session, _atexit_registered
    if comm is not None:
        raise InvalidArgument(
            "init(comm=...) is not supported: the ranks of a job are chosen by its launcher"
        )
    if process_sets is not None and (isinstance(process_sets, str) or list(process_sets)):
        raise InvalidArgument(
            "init(process_sets=...) is not supported yet: all collectives run over all ranks"
        )
    with _lock:
        if _session is not None:
            return
        from . import rendezvous, world  # need the native module, which errors and pickling do not

        if not world.is_set():
            world.set_current(rendezvous.world_of_launcher())
        _session = _Session(world.current().connect())
        if not _atexit_registered:
            atexit.register(shutdown)
            _atexit_registered = True


def shutdown() -> None:
    """Leaves the job. Idempotent; waits for no rank's calls, only half a second at most for a farewell to go
    out, and on rank 0 a second for the end of a timeline. What others still had in flight with this rank
    fails there."""
    global _session
    with _lock:
        session, _session = _session, None
        if session is not None:
            session.group.close()


def is_initialized() -> bool:
    """Whether `init` was called, and `shutdown` not since. Stays true when the Group has died."""
    return _session is not None


def default_group() -> Group:
    """The Group that `init` connected. Raises `NotInitialized`."""
    return _current().group


def next_name(kind: str) -> str:
    """`kind.noname.N`: the name of a collective whose caller gave none. N counts the calls of this kind since
    `init`, so ranks must leave names out in the same order."""
    return _current().next_name(kind)


def rank() -> int:
    """This process, 0 to `size() - 1`. Raises `NotInitialized`, as do all functions below."""
    return default_group().rank


def size() -> int:
    """Number of ranks."""
    return default_group().size


def local_rank() -> int:
    """This process among the ranks of its host."""
    return default_group().local_rank


def local_size() -> int:
    """Number of ranks on this host."""
    return default_group().local_size


def cross_rank() -> int:
    """This host among the hosts."""
    return default_group().cross_rank


def cross_size() -> int:
    """Number of hosts."""
    return default_group().cross_size


def is_homogeneous() -> bool:
    """Whether all hosts have the same number of ranks."""
    default_group()
    from . import world

    return len(set(world.current().ranks_by_host())) == 1


def long_phase(name: str, timeout_s: float) -> AbstractContextManager[None]:
    """`with long_phase("checkpoint", timeout_s=300):` around what only some ranks do while the others wait in
    a collective; see `Group.long_phase`."""
    return default_group().long_phase(name, timeout_s)


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Rank 0 begins to write a timeline of all ranks to `file_path`; see `Group.start_timeline`. Other ranks
    may call it too, which does nothing."""
    default_group().start_timeline(file_path, mark_cycles)


def stop_timeline() -> None:
    """Ends the timeline that `start_timeline` or HVD_TIMELINE began."""
    default_group().stop_timeline()


class GlobalProcessSet:
    """All ranks: the only process set there is so far. Use the instance `global_process_set`."""

    process_set_id = 0

    @property
    def ranks(self) -> list[int]:
        return list(range(size()))

    def size(self) -> int:
        return size()

    def rank(self) -> int:
        return rank()

    def included(self) -> bool:
        return True

    def __repr__(self) -> str:
        return "global_process_set"


global_process_set = GlobalProcessSet()


def group_of(process_set: Any) -> Group:
    """The Group behind a `process_set=` argument."""
    session = _session
    if session is not None and process_set is global_process_set:
        return session.group  # nearly always
    if process_set is global_process_set or process_set is None or isinstance(process_set, GlobalProcessSet):
        return _current().group
    raise InvalidArgument(
        f"process_set={process_set!r} is not supported yet: pass global_process_set or leave it out"
    )
