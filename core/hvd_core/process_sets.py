"""Process sets: collectives among some of the ranks. Framework-free; adapters re-export `ProcessSet`."""

from __future__ import annotations

import itertools
import operator
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from .errors import InvalidArgument

if TYPE_CHECKING:
    from .group import Group


class Names:
    """Of collectives whose callers give none: `kind.noname.N`, where N counts the calls of this kind. For one
    set of ranks, since only they count alike; after a join `kind.noname.N.joins`, counted anew."""

    def __init__(self, joins: int = 0) -> None:
        self.joins = joins
        self._counters: dict[str, Iterator[int]] = defaultdict(itertools.count)
        self._lock = threading.Lock()

    def next(self, kind: str) -> str:
        with self._lock:
            name = f"{kind}.noname.{next(self._counters[kind])}"
        return f"{name}.{self.joins}" if self.joins else name


class ProcessSet:
    """Some of the ranks, for `process_set=` arguments, once `add_process_set` or `init(process_sets=...)` has
    made it known on all ranks. `ranks` are sorted; `process_set_id` is None before and after."""

    def __init__(self, ranks_or_comm: Iterable[int]):
        try:
            ranks = sorted(operator.index(rank) for rank in ranks_or_comm)
        except TypeError:
            raise InvalidArgument(f"ProcessSet({ranks_or_comm!r}): pass a list of ranks") from None
        if not ranks or len(set(ranks)) < len(ranks):
            raise InvalidArgument(f"ProcessSet({ranks_or_comm!r}): pass one rank or more, each once")
        self.ranks: list[int] = ranks
        self.process_set_id: int | None = None
        self._group: Group | None = None
        self._names = Names()

    def size(self) -> int | None:
        """Number of ranks in it; None while it is not added, as below."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """This process among its ranks; None if it is not one of them."""
        return None if self._group is None else self._group.rank

    def included(self) -> bool | None:
        """Whether this process is one of its ranks."""
        return None if self.process_set_id is None else self._group is not None

    @property
    def group(self) -> Group:
        """Its Group. Raises `InvalidArgument` on ranks that have none."""
        if self._group is not None:
            return self._group
        if self.process_set_id is None:
            raise InvalidArgument(f"{self} is not known: call hvd.add_process_set(...) on every rank first")
        raise InvalidArgument(f"this rank is not in {self}; only its ranks may call collectives with it")

    def next_name(self, kind: str) -> str:
        return self._names.next(kind)

    def root(self, rank: int) -> int:
        """Who that rank of the job is among the ranks of this set."""
        if rank not in self.ranks:
            raise InvalidArgument(f"root_rank={rank} is not in {self}; it is a rank of the whole job")
        return self.ranks.index(rank)

    def __repr__(self) -> str:
        return f"ProcessSet({self.ranks})"


class ProcessSets:
    """The process sets of a job, which all ranks add and remove in the same order. Owned by a session."""

    def __init__(self, group: Group):
        self._group = group
        self._known: list[ProcessSet] = []
        self._numbers = itertools.count(1)  # 0 is all ranks

    def add(self, ranks: ProcessSet | Iterable[int]) -> ProcessSet:
        process_set = ranks if isinstance(ranks, ProcessSet) else ProcessSet(ranks)
        everybody = list(range(self._group.size))
        if outside := [rank for rank in process_set.ranks if rank not in everybody]:
            raise InvalidArgument(f"{process_set}: {outside[0]} is not a rank, there are {len(everybody)}")
        same = [known for known in self._known if known.ranks == process_set.ranks]
        if same or process_set.ranks == everybody:
            raise InvalidArgument(
                f"{process_set}: there is a process set of these ranks already; use "
                + ("that one" if same else "global_process_set")
            )
        process_set._group = self._group.split(process_set.ranks)
        process_set._names = Names()
        process_set.process_set_id = next(self._numbers)
        self._known.append(process_set)
        return process_set

    def remove(self, process_set: Any) -> bool:
        if process_set not in self._known:
            return False
        self._group.barrier(f"remove_process_set.{process_set.process_set_id}")
        self._known.remove(process_set)
        self._forget(process_set)
        return True

    def close(self) -> None:
        for process_set in self._known:
            self._forget(process_set)
        self._known.clear()

    @staticmethod
    def _forget(process_set: ProcessSet) -> None:
        group, process_set._group = process_set._group, None
        process_set.process_set_id = None
        if group is not None:
            group.close()
