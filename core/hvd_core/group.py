"""`Group`: the ranks of a job as one of them sees them, and the collectives between them.

Every collective has a name. It runs as soon as all ranks have submitted that name, in any order; shapes,
dtypes and operations must then agree. Arrays are anything contiguous in CPU memory with the buffer protocol
or DLPack: numpy arrays, detached torch tensors. Dtypes: bool, (u)int8..64, float16, bfloat16, float32,
float64.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np

from . import _native
from .config import Config
from .errors import GroupClosed, HorovodInternalError, HvdError, InvalidArgument, MismatchError
from .limits import cpu_quota, free_memory


class ReduceOp(IntEnum):
    """How an allreduce combines the ranks' values; the numbers are Horovod's."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


Average, Sum, Adasum, Min, Max, Product = ReduceOp

# core/src/scheduler/request.h: enum Op
ALLREDUCE, ALLGATHER, BROADCAST, BARRIER, _PLAN, ALLTOALL, REDUCESCATTER = range(7)

Handle = _native.Handle


def rows_of(rows: int, rank: int, size: int) -> range:
    """Which of so many rows `rank` of `size` gets in a reducescatter: as many as the others, and the first
    ranks one more where that does not come out even."""
    each, more = divmod(rows, size)
    begin = rank * each + min(rank, more)
    return range(begin, begin + each + (rank < more))


class Listener:
    """The sockets where a rank can be reached, bound before anyone is told and open until `close()`.

    One listener serves any number of Groups one after another.
    """

    def __init__(self, native: _native.Listener):
        self._native: _native.Listener | None = native

    @classmethod
    def bind(cls, config: Config | None = None) -> Listener:
        """Binds a TCP socket (port chosen by the kernel) and an abstract Unix socket.

        Raises `InvalidArgument` if `config.interface` names no interface of this host.
        """
        config = config or Config.from_env()
        return cls(_native.Listener.bind(config.host_id, config.interface))

    @property
    def native(self) -> _native.Listener:
        if self._native is None:
            raise InvalidArgument("the listener is closed")
        return self._native

    @property
    def endpoint(self) -> str:
        """What the other ranks need to connect: one line of text, nothing secret in it."""
        return self.native.endpoint

    @property
    def dropped(self) -> int:
        """Connections that could not prove to belong to the job."""
        return self.native.dropped

    def close(self) -> None:
        self._native = None


@dataclass(frozen=True)
class _Meeting:
    """How the ranks of a Group met."""

    listener: Listener | None
    endpoints: tuple[str, ...]
    token: bytes
    epoch: int
    config: Config

    def of(self, ranks: Sequence[int], number: int) -> _Meeting:
        """Of some of them, for the `number`-th time: under an epoch that no other Group has."""
        key = f"{self.epoch} {number}".encode()
        epoch = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
        endpoints = tuple(self.endpoints[rank] for rank in ranks)
        config = replace(self.config, timeline="")  # has one writer
        return replace(self, endpoints=endpoints, epoch=epoch, config=config)


class Group:
    """The ranks of a job. Make it with `connect` or `solo`; usable from any thread of the process that did.

    After a rank is lost or has aborted, the Group is dead: everything pending and everything later raises the
    same error, `fileno()` becomes readable, and a new Group can be connected. A `MismatchError` does not kill
    it.
    """

    def __init__(self, native: _native.Group, meeting: _Meeting):
        self._native = native
        self._meeting = meeting
        self._splits = itertools.count()
        self._pid = os.getpid()
        self._closed = False
        self.rank: int = native.rank
        self.size: int = native.size
        #: Among the ranks of this host, and the host among the hosts.
        self.local_rank: int = native.local_rank
        self.local_size: int = native.local_size
        self.cross_rank: int = native.cross_rank
        self.cross_size: int = native.cross_size

    @classmethod
    def connect(
        cls,
        listener: Listener | None,
        endpoints: Sequence[str],
        *,
        rank: int,
        token: bytes,
        epoch: int = 0,
        config: Config | None = None,
    ) -> Group:
        """Connects the ranks whose `Listener.endpoint`s are `endpoints`, in rank order; this one is `rank`.

        All ranks call it at the same time, with the same `endpoints`, `token` (the job's secret, not empty)
        and `epoch` (to be counted up for each further Group over the same listeners). With one endpoint,
        `listener` may be None.

        The endpoints also say who is on which host; ranks of one host must have neighbouring numbers
        (`World.arrange`). They use shared memory among them; hosts talk TCP, over any address of an endpoint
        that answers. Ctrl-C gets through.

        Raises `CollectiveTimeout` naming the ranks that did not come within `config.connect_timeout_s`,
        `InvalidArgument` for a wrong token or ranks that are not numbered host by host, `PeerLost` if one
        dies meanwhile.
        """
        config = config or Config.from_env()
        return cls._connect(_Meeting(listener, tuple(endpoints), token, epoch, config), rank, "")

    @classmethod
    def _connect(cls, meeting: _Meeting, rank: int, note: str) -> Group:
        """`note` goes behind every error of the Group."""
        listener, config = meeting.listener, meeting.config
        if config.kernels:
            _native.use_kernels(config.kernels)
        if len(meeting.endpoints) > 1:
            _check_room(8 * config.chunk_bytes, f"chunk_bytes={config.chunk_bytes} (HVD_CHUNK_BYTES)")
        native = _native.Group.connect(
            listener.native if listener is not None else None,
            list(meeting.endpoints),
            rank,
            meeting.token,
            meeting.epoch,
            config.fusion_bytes,
            config.chunk_bytes,
            config.connect_timeout_s,
            config.peer_timeout_s,
            config.stall_warn_s,
            config.stall_shutdown_s,
            config.ring_streams,
            config.wire_dtype,
            config.timeline_path,
            config.timeline_mark_cycles != 0,
            cpu_quota() or 0.0,
            note,
        )
        return cls(native, meeting)

    @classmethod
    def solo(cls, config: Config | None = None) -> Group:
        """A Group of this process alone."""
        return cls.connect(None, ["solo"], rank=0, token=b"", config=config)

    def split(self, ranks: Sequence[int]) -> Group | None:
        """A Group of some ranks of this one, in the order of their numbers; None on the others. Every rank of
        this Group calls it with the same ranks and waits for the others. The new Group is as independent as
        any: it counts its ranks from 0, also in errors, and is to be closed by itself.

        Raises `MismatchError` on all ranks if they were given other ranks, and on all what kept one of them
        from connecting.
        """
        members = sorted(set(ranks))
        if not members or members[0] < 0 or members[-1] >= self.size:
            raise InvalidArgument(f"split({list(ranks)}): pass ranks of this Group, 0 to {self.size - 1}")
        number = next(self._splits)
        texts = self.allgather_bytes(repr(members).encode(), name=f"split.{number}.ranks")
        for rank, text in enumerate(texts):
            if text != texts[0]:
                raise MismatchError(
                    f"split: rank {rank} has the ranks {text.decode()}, rank 0 has {texts[0].decode()}"
                )
        part: Group | None = None
        failure: HvdError | None = None
        if self.rank in members:
            note = f" (in a set of ranks, counted from 0: they are {', '.join(map(str, members))} of all)"
            try:
                meeting = self._meeting.of(members, number)
                part = self._connect(meeting, members.index(self.rank), note)
            except HvdError as error:
                failure = error
        # A listener serves one set after the other.
        ends = self.allgather_bytes(str(failure or "").encode(), name=f"split.{number}.end")
        for rank, text in enumerate(ends):
            if not text:
                continue
            if part is not None:
                part.close()
            raise failure or HorovodInternalError(f"split: rank {rank} did not connect: {text.decode()}")
        return part

    # -- collectives -----------------------------------------------------------------------------------------

    def allreduce_async(
        self,
        array: Any,
        *,
        name: str,
        op: ReduceOp = ReduceOp.Sum,
        prescale: float = 1.0,
        postscale: float = 1.0,
        out: Any = None,
    ) -> Handle:
        """Starts `out = postscale * op over ranks(prescale * array)`; in place in `array` if `out` is None.

        Average divides the sum once by `size`; integers truncate toward zero. bool: Sum and Max are "or", Min
        and Product are "and", Average is refused. The result has the same bits on every rank. Its handle
        gives `out`.
        """
        result = array if out is None else out
        return self._native.start(self, ALLREDUCE, name, array, result, op, prescale, postscale, 0)

    def grouped_allreduce_async(
        self,
        arrays: Sequence[Any],
        *,
        name: str,
        op: ReduceOp = ReduceOp.Sum,
        prescale: float = 1.0,
        postscale: float = 1.0,
        outs: Sequence[Any] | None = None,
        names: Sequence[str] | None = None,
    ) -> Handle:
        """`allreduce_async` of several arrays under one name; they complete together. `names` are theirs in
        errors."""
        inputs = list(arrays)
        results = inputs if outs is None else list(outs)
        members = None if names is None else list(names)
        return self._native.start_group(
            self, ALLREDUCE, name, members, inputs, results, op, prescale, postscale, 0
        )

    def allgather_async(self, array: Any, *, name: str) -> Handle:
        """Starts joining the ranks' arrays along the first dimension, in rank order; first dimensions may
        differ, all others must agree, and there must be one. The handle gives a numpy array (for bfloat16: an
        object with `__dlpack__`)."""
        return self._native.start(self, ALLGATHER, name, array, None, ReduceOp.Sum, 1.0, 1.0, 0)

    def broadcast_async(self, array: Any, *, root: int, name: str, out: Any = None) -> Handle:
        """Starts copying `array` of rank `root` to all ranks: into `out`, or into `array` if that is None."""
        result = array if out is None else out
        return self._native.start(self, BROADCAST, name, array, result, ReduceOp.Sum, 1.0, 1.0, root)

    def alltoall_async(self, array: Any, *, splits: Sequence[int] | None = None, name: str) -> Handle:
        """Starts sending each rank its part of `array`'s rows: the first `splits[0]` to rank 0, the next
        `splits[1]` to rank 1, and so on; as many to each without `splits`. Numbers of rows may differ between
        ranks, the other dimensions must agree. The handle gives the rows that came, in rank order, as
        `allgather_async` gives them, and a list of how many came from each rank.

        Raises `InvalidArgument` unless there is a split for each rank and they add up to the rows there are.
        """
        return self._native.start_alltoall(self, name, array, None if splits is None else list(splits))

    def reducescatter_async(
        self,
        array: Any,
        *,
        name: str,
        op: ReduceOp = ReduceOp.Sum,
        prescale: float = 1.0,
        postscale: float = 1.0,
        out: Any = None,
    ) -> Handle:
        """Starts an `allreduce_async` of which this rank gets its rows only: `rows_of(len(array), rank,
        size)`, the same bits. Its handle gives `out`, which is made if None (only for a numpy `array`) and
        must not overlap `array`."""
        result = self._share_of(array, name, out)
        return self._native.start(self, REDUCESCATTER, name, array, result, op, prescale, postscale, 0)

    def barrier(self, name: str = "barrier", timeout_s: float | None = None) -> None:
        """Returns once all ranks have called it."""
        self._native.barrier(name, timeout_s)

    def join(self, timeout_s: float | None = None) -> int:
        """Says that this rank has nothing more for the others, and returns once all ranks have called it: the
        rank that did so last. Until then the others' collectives do without it: it counts as zeros in a
        reduction, whose averages are still divided by `size`, as no rows in an allgather and alltoall, and
        takes what a broadcast or a reducescatter gives it without anybody's seeing it. A broadcast whose root
        has joined raises `MismatchError`. Not for plans."""
        return self._native.join(timeout_s)

    # A blocking call runs on the caller's thread, so it is more than start and wait.

    def allreduce(
        self,
        array: Any,
        *,
        name: str,
        op: ReduceOp = ReduceOp.Sum,
        prescale: float = 1.0,
        postscale: float = 1.0,
        out: Any = None,
        timeout_s: float | None = None,
    ) -> Any:
        """`allreduce_async(array, ...).wait(timeout_s)`."""
        result = array if out is None else out
        return self._native.run(ALLREDUCE, name, array, result, op, prescale, postscale, 0, timeout_s)

    def allgather(self, array: Any, *, name: str, timeout_s: float | None = None) -> Any:
        """`allgather_async(array, name=name).wait(timeout_s)`."""
        return self._native.run(ALLGATHER, name, array, None, ReduceOp.Sum, 1.0, 1.0, 0, timeout_s)

    def alltoall(
        self,
        array: Any,
        *,
        splits: Sequence[int] | None = None,
        name: str,
        timeout_s: float | None = None,
    ) -> tuple[Any, list[int]]:
        """`alltoall_async(array, splits=splits, name=name).wait(timeout_s)`."""
        received: tuple[Any, list[int]] = self.alltoall_async(array, splits=splits, name=name).wait(timeout_s)
        return received

    def reducescatter(
        self,
        array: Any,
        *,
        name: str,
        op: ReduceOp = ReduceOp.Sum,
        prescale: float = 1.0,
        postscale: float = 1.0,
        out: Any = None,
        timeout_s: float | None = None,
    ) -> Any:
        """`reducescatter_async(array, ...).wait(timeout_s)`."""
        result = self._share_of(array, name, out)
        return self._native.run(REDUCESCATTER, name, array, result, op, prescale, postscale, 0, timeout_s)

    def _share_of(self, array: Any, name: str, out: Any) -> Any:
        if out is not None:
            arrays = isinstance(array, np.ndarray) and isinstance(out, np.ndarray)
            if arrays and np.may_share_memory(array, out):
                raise InvalidArgument(f"{name}: out= of a reducescatter must not overlap its input")
            return out
        if not isinstance(array, np.ndarray):
            raise InvalidArgument(f"{name}: pass out= for what is not a numpy array")
        if array.ndim == 0:
            raise InvalidArgument(f"{name}: reducescatter needs at least one dimension")
        return np.empty((len(rows_of(len(array), self.rank, self.size)), *array.shape[1:]), array.dtype)

    def broadcast(
        self, array: Any, *, root: int, name: str, out: Any = None, timeout_s: float | None = None
    ) -> Any:
        """`broadcast_async(array, root=root, name=name, out=out).wait(timeout_s)`."""
        result = array if out is None else out
        return self._native.run(BROADCAST, name, array, result, ReduceOp.Sum, 1.0, 1.0, root, timeout_s)

    def allgather_bytes(self, data: bytes, *, name: str) -> list[bytes]:
        """The `data` of every rank, by rank."""
        sizes = self.allgather(np.array([len(data)], np.int64), name=f"{name}.sizes")
        joined = self.allgather(np.frombuffer(data, np.uint8), name=name)
        ends = np.cumsum(sizes)
        return [joined[end - size : end].tobytes() for end, size in zip(ends, sizes, strict=True)]

    def broadcast_bytes(self, data: bytes | None, *, root: int, name: str) -> bytes:
        """The `data` of rank `root`; the others' is ignored."""
        if self.rank == root and data is None:
            raise InvalidArgument(f"{name}: rank {root} is the root and has no data")
        mine = data if self.rank == root and data is not None else b""
        size = self.broadcast(np.array([len(mine)], np.int64), root=root, name=f"{name}.size")
        array = (
            np.frombuffer(mine, np.uint8).copy() if self.rank == root else np.empty(int(size[0]), np.uint8)
        )
        return bytes(self.broadcast(array, root=root, name=name).tobytes())

    def empty(self, nbytes: int) -> np.ndarray:
        """New memory, (nbytes,) uint8, that an in-place allreduce works on directly on every rank of the
        host, without copies. Outlives the Group. Raises `InvalidArgument` if there is not so much free."""
        self._check()
        _check_room(nbytes, "Group.empty")
        return self._native.empty(nbytes)

    def plan(
        self,
        tensors: Sequence[tuple[str, str, Sequence[int]]],
        *,
        name: str,
        op: ReduceOp = ReduceOp.Sum,
        prescale: float = 1.0,
        postscale: float = 1.0,
        first_bytes: int = 1 << 20,
        batch_bytes: int = 4 << 20,
    ) -> _native.Plan | None:
        """A plan for an allreduce, in place, of tensors that come back every step: (name, dtype as numpy
        spells it, shape) each. All ranks call it with the same; raises `MismatchError` if they do not. None,
        on all ranks, where a plan is not possible: between hosts there is one at a time, so the one before
        must have been dropped on all ranks.

        Fused batches follow the given order; the first one holds `first_bytes` at most, the others
        `batch_bytes`. Each rank stages up to 8 MiB for the others of its host in shared memory, or one
        batch if that is larger; raises `InvalidArgument` if there is not so much free.

        All ranks then make the same steps, without messages and on the calling thread: `begin()`, any
        `ready(i, address)` (of contiguous CPU memory that stays as it is until the step has ended; never
        waits, in any order), `decline(i)` (not in this step, on no rank), then `end(flags)`, which waits. It
        returns the members that only other ranks have, which count as zero here: give zeros for each with
        `supply(i, address)` and call it again, until it returns none. A member that no rank has stays out.
        `flags_of_any` and `flags_of_all` then join the flags of the ranks; `declined` lists what some rank
        has declined.
        """
        self._check()
        members = [(member, dtype, list(shape)) for member, dtype, shape in tensors]
        nbytes = _native.plan_nbytes(self._native, members, first_bytes, batch_bytes)
        _check_room(nbytes, f"plan {name!r}, batch_bytes={batch_bytes}")
        return _native.make_plan(
            self._native, name, members, int(op), prescale, postscale, first_bytes, batch_bytes
        )

    # -- life ------------------------------------------------------------------------------------------------

    def abort(self, reason: str) -> None:
        """Kills the Group on all ranks: whatever waits raises `Aborted(reason)` within 100 ms. No effect on a
        dead one. May be called by any rank and any thread."""
        self._native.abort(reason)

    def close(self) -> None:
        """Leaves the Group; idempotent, waits for no peer's calls (see `basics.shutdown` for what it may
        take). What is still pending here raises
        `GroupClosed`, and so does a collective of another rank that needs this one."""
        if not self._closed and self._pid == os.getpid():
            self._closed = True
            self._native.close()

    @property
    def reason(self) -> str | None:
        """Why the Group is dead; None while it lives."""
        try:
            self._native.check()
        except HorovodInternalError as error:
            return str(error)
        return None

    def check(self) -> None:
        """Raises what killed the Group, if it is dead."""
        self._check()
        self._native.check()

    def fileno(self) -> int:
        """A descriptor that becomes readable when the Group is dead; for select and poll."""
        return int(self._native.fileno())

    def stats(self) -> dict[str, Any]:
        """Counters since `connect`: `collectives` completed, `fused_batches` run, `nbytes` of this rank's
        tensors, `work_s` seconds spent in the batches (waiting for peers in them included)."""
        return self._native.stats()

    @contextlib.contextmanager
    def long_phase(self, name: str, timeout_s: float) -> Iterator[None]:
        """Declares that this rank now does something long, such as a checkpoint, which the others may rightly
        wait for: for at most `timeout_s` seconds no stall ends the Group (`stall_shutdown_s`), and warnings
        name the phase. May be nested. On any rank, no other need take part."""
        self._check()
        self._native.begin_phase(name, timeout_s)
        try:
            yield
        finally:
            if not self._closed:
                self._native.end_phase()

    def start_timeline(self, path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
        """Rank 0: begins to write what all ranks do to `path`, in the Trace Event Format of Perfetto and
        chrome://tracing; on other ranks a no-op, so that all may call it. `mark_cycles` also marks when the
        ranks agreed on something to do.

        Raises `InvalidArgument` if the file cannot be written or a timeline is being written already.
        """
        self._check()
        self._native.start_timeline(os.fspath(path), mark_cycles)

    def stop_timeline(self) -> None:
        """Rank 0: ends the timeline; its file is then complete. Nothing on other ranks, or without one."""
        if not self._closed:
            self._native.stop_timeline()

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        # Before a garbage collection frees the arrays of a Group and its handles: its thread writes to them.
        self.close()

    def _check(self) -> None:
        if self._pid != os.getpid():
            raise InvalidArgument(
                "this Group belongs to the process that this one was forked from; connect a new one"
            )
        if self._closed:
            raise GroupClosed("the Group is closed")


#: Less is taken without looking.
_LOOK_FROM_BYTES = 4 << 20


def _check_room(nbytes: int, what: str) -> None:
    """The kernel does not refuse shared memory above a limit: it kills the process."""
    if nbytes >= _LOOK_FROM_BYTES and nbytes > (free := free_memory()):
        raise InvalidArgument(
            f"{what}: {nbytes:,} bytes of shared memory, and {free:,} are free here (of the machine, or "
            "up to the memory limit of a cgroup)"
        )
