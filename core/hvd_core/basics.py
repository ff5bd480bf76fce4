"""The one default Group, behind Horovod's module functions. Framework-free; every adapter re-exports it.

Thread-safe. `init` and `shutdown` exclude each other; everything else only reads one reference.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from .errors import InvalidArgument, NotInitialized
from .process_sets import Names, ProcessSet, ProcessSets

if TYPE_CHECKING:
    from .group import Group
    from .world import World


class _Session:
    """From one `init` to its `shutdown`: the Group, its process sets, and the counters behind the names that
    users leave out.

    The counters live here so that they start anew with each Group: ranks that were in an earlier Group and
    ranks that were not still choose the same names.
    """

    def __init__(self, group: Group, world: World | None = None):
        self.group, self.world = group, world
        self.sets = ProcessSets(group)
        self._names = Names()
        self.next_name = self._names.next

    @property
    def joins(self) -> int:
        return self._names.joins

    def restart_names(self) -> None:
        self._names = Names(self._names.joins + 1)
        self.next_name = self._names.next

    def close(self) -> None:
        self.sets.close()
        self.group.close()


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
    without one the size is 1. A second call is a no-op; `init` after `shutdown` connects again.
    `process_sets`: a list of `ProcessSet`s or lists of ranks to add, the same on all ranks, or Horovod's
    "dynamic", which says that some may be added later and is not needed here. `comm` (MPI communicators and
    lists of ranks) is not supported and must be left out. Raises `PeerLost` or `CollectiveTimeout` when the
    others do not come.
    """
    global _session, _atexit_registered
    if comm is not None:
        raise InvalidArgument(
            "init(comm=...) is not supported: the ranks of a job are chosen by its launcher"
        )
    if isinstance(process_sets, str) and process_sets.lower() != "dynamic":
        raise InvalidArgument(
            f"init(process_sets={process_sets!r}): pass a list of process sets or 'dynamic'"
        )
    sets = [] if process_sets is None or isinstance(process_sets, str) else list(process_sets)
    with _lock:
        if _session is not None:
            return
        from . import rendezvous, world  # need the native module, which errors and pickling do not

        if not world.is_set():
            world.set_current(rendezvous.world_of_launcher())
        session = _Session(*world.connect())
        try:
            for ranks in sets:
                session.sets.add(ranks)
        except BaseException:
            session.close()
            raise
        _session = session
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
            session.close()


def replaces_ranks() -> bool:
    """Whether the launcher replaces lost ranks, so that `reconnect` is of use."""
    world = _current().world
    return world is not None and world.replaced_within_s > 0


def reconnect() -> None:
    """After the Group has died: leaves it, and connects anew when the launcher has replaced the ranks that
    were lost. The survivors call it together; who replaces a rank calls `init`. Raises LaunchFailed when
    nobody came in time."""
    global _session
    former = _current().world
    from . import world

    shutdown()
    connected = world.connect(after=former)  # outside the lock, so that the process can end meanwhile
    with _lock:
        _session = _Session(*connected)


def is_initialized() -> bool:
    """Whether `init` was called, and `shutdown` not since. Stays true when the Group has died."""
    return _session is not None


def default_group() -> Group:
    """The Group that `init` connected. Raises `NotInitialized`."""
    return _current().group


def next_name(kind: str, process_set: Any = None) -> str:
    """`kind.noname.N`: the name of a collective whose caller gave none. N counts the calls of this kind with
    this process set, so its ranks must leave names out in the same order."""
    return (process_set if isinstance(process_set, ProcessSet) else _current()).next_name(kind)


def joins() -> int:
    """How often all ranks have joined: names that were chosen before are to be chosen anew."""
    return _current().joins


def join() -> int:
    """`Group.join` of all ranks. The counters of `next_name` then start anew, since some ranks have made more
    calls than others."""
    session = _current()
    last = session.group.join()
    session.restart_names()
    return last


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
    """All ranks. Use the instance `global_process_set`."""

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
    if isinstance(process_set, ProcessSet):
        return process_set.group
    raise InvalidArgument(f"process_set={process_set!r} is no process set: pass what add_process_set returns")


def root_in(process_set: Any, root_rank: int) -> int:
    """A `root_rank=` argument, which is a rank of the whole job, as a rank of the Group of `process_set`."""
    return process_set.root(root_rank) if isinstance(process_set, ProcessSet) else root_rank


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Makes some ranks a process set, for `process_set=` arguments. Every rank of the job calls it with the
    same ranks, whether it is one of them or not, and waits for the others; sets are added and removed in one
    order on all. Raises `InvalidArgument` if there is a set of these ranks, `MismatchError` on all ranks if
    they were given others."""
    return _current().sets.add(process_set)


def remove_process_set(process_set: Any) -> bool:
    """Ends a process set: what is pending in it raises `GroupClosed`. Every rank of the job calls it, and
    waits for the others. False for `global_process_set` and what is not known, which stay as they are."""
    return _current().sets.remove(process_set)
