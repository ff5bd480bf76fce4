"""Ranks as threads: a Group whose collectives numpy performs, to test adapters without processes.

`run_ranks(size, fn)` calls `fn(rank)` in `size` threads, each with its own default Group, and returns the
results by rank or raises the first failure. `calls` of a Group lists the names that its rank submitted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from hvd_core import basics
from hvd_core.errors import Aborted, CollectiveTimeout, InvalidArgument, MismatchError
from hvd_core.group import ReduceOp

WAIT_S = 20.0


class _Collective:
    def __init__(self) -> None:
        self.arrived: dict[int, tuple[Any, list[Any], list[Any]]] = {}
        self.results: dict[int, Any] = {}
        self.error: Exception | None = None
        self.done = False


class _Hub:
    def __init__(self, size: int):
        self.size = size
        self.changed = threading.Condition()
        self.in_flight: dict[str, _Collective] = {}
        self.reason: str | None = None


class FakeHandle:
    def __init__(self, hub: _Hub, name: str, rank: int, collective: _Collective):
        self._hub, self._name, self._rank, self._collective = hub, name, rank, collective

    def done(self) -> bool:
        return self._collective.done

    def wait(self, timeout_s: float | None = None) -> Any:
        hub, mine = self._hub, self._collective
        with hub.changed:
            if not hub.changed.wait_for(lambda: mine.done or hub.reason is not None, timeout_s or WAIT_S):
                missing = sorted(set(range(hub.size)) - set(mine.arrived))
                raise CollectiveTimeout(f"{self._name}: rank {missing} did not submit it")
        if mine.error is not None:
            raise type(mine.error)(str(mine.error))
        if not mine.done:
            raise Aborted(str(hub.reason))
        return mine.results[self._rank]


class FakeGroup:
    local_rank = property(lambda self: self.rank)
    local_size = property(lambda self: self.size)
    cross_rank, cross_size = 0, 1

    def __init__(self, hub: _Hub, rank: int):
        self.hub, self.rank, self.size = hub, rank, hub.size
        self.calls: list[str] = []

    def _submit(
        self, name: str, what: tuple[Any, ...], arrays: list[Any], outs: list[Any], names: Any = None
    ) -> FakeHandle:
        hub = self.hub
        self.calls.append(name)
        for array in [*arrays, *outs]:
            if isinstance(array, torch.Tensor):
                assert array.is_contiguous()
                assert array.device.type == "cpu"
                assert not array.requires_grad
            elif isinstance(array, np.ndarray):
                assert array.flags.c_contiguous
        with hub.changed:
            collective = hub.in_flight.setdefault(name, _Collective())
            if self.rank in collective.arrived:
                raise InvalidArgument(f"{name} is in flight already")
            collective.arrived[self.rank] = (what, arrays, outs)
            if len(collective.arrived) == hub.size:
                del hub.in_flight[name]
                try:
                    _perform(name, names or [name], collective, hub.size)
                except Exception as error:  # noqa: BLE001 (raised on every rank)
                    collective.error = error
                collective.done = True
                hub.changed.notify_all()
        return FakeHandle(hub, name, self.rank, collective)

    def grouped_allreduce_async(
        self,
        arrays: Any,
        *,
        name: str,
        op: int = ReduceOp.Sum,
        prescale: float = 1.0,
        postscale: float = 1.0,
        outs: Any = None,
        names: Any = None,
    ) -> FakeHandle:
        arrays = list(arrays)
        names = names or [f"{name}_{i}of{len(arrays)}" for i in range(len(arrays))]
        what = ("allreduce", int(op), prescale, postscale)
        return self._submit(name, what, arrays, arrays if outs is None else list(outs), names)

    def allreduce_async(self, array: Any, *, name: str, out: Any = None, **scaling: Any) -> FakeHandle:
        return self.grouped_allreduce_async(
            [array], name=name, outs=[array if out is None else out], **scaling
        )

    def allreduce(self, array: Any, **kwargs: Any) -> Any:
        self.allreduce_async(array, **kwargs).wait()
        return array

    def allgather_async(self, array: Any, *, name: str) -> FakeHandle:
        return self._submit(name, ("allgather",), [array], [])

    def allgather(self, array: Any, *, name: str) -> Any:
        return self.allgather_async(array, name=name).wait()

    def broadcast_async(self, array: Any, *, root: int, name: str, out: Any = None) -> FakeHandle:
        return self._submit(name, ("broadcast", root), [array], [array if out is None else out])

    def allgather_bytes(self, data: bytes, *, name: str) -> list[bytes]:
        return self._submit(name, ("bytes",), [data], []).wait()

    def broadcast_bytes(self, data: bytes | None, *, root: int, name: str) -> bytes:
        assert (data is not None) == (root == self.rank)
        return self._submit(name, ("bytes", root), [data], []).wait()[root]

    def barrier(self, name: str = "barrier") -> None:
        self._submit(name, ("barrier",), [], []).wait()

    def abort(self, reason: str) -> None:
        with self.hub.changed:
            self.hub.reason = reason
            self.hub.changed.notify_all()

    def close(self) -> None:
        pass


def _signature(arrays: list[Any], rows_free: bool) -> list[Any]:
    return [(str(a.dtype), tuple(a.shape)[1:] if rows_free else tuple(a.shape)) for a in arrays]


def _perform(name: str, names: Any, collective: _Collective, size: int) -> None:
    what, arrays_0, _ = collective.arrived[0]
    kind = what[0]
    for rank in range(size):
        theirs, arrays, _ = collective.arrived[rank]
        if theirs != what or len(arrays) != len(arrays_0):
            raise MismatchError(f"{name}: rank {rank} has {theirs}, rank 0 has {what}")
        if kind not in ("bytes", "barrier"):
            members = zip(
                _signature(arrays, kind == "allgather"),
                _signature(arrays_0, kind == "allgather"),
                strict=True,
            )
            for i, (mine, zero) in enumerate(members):
                if mine != zero:
                    raise MismatchError(f"{names[i]}: rank {rank} has {mine}, rank 0 has {zero}")
    everyone = range(size)
    columns = [[collective.arrived[r][1][i] for r in everyone] for i in range(len(arrays_0))]
    if kind == "allreduce":
        reduced = [_reduce(column, *what[1:]) for column in columns]
        for r in everyone:
            for out, value in zip(collective.arrived[r][2], reduced, strict=True):
                _assign(out, value)
            collective.results[r] = collective.arrived[r][2]
    elif kind == "broadcast":
        value = torch.as_tensor(columns[0][what[1]]).clone()
        for r in everyone:
            _assign(collective.arrived[r][2][0], value)
            collective.results[r] = collective.arrived[r][2][0]
    elif kind == "allgather":
        gathered = np.concatenate([np.asarray(array) for array in columns[0]])
        collective.results = {r: gathered.copy() for r in everyone}
    elif kind == "bytes":
        collective.results = {r: list(columns[0]) for r in everyone}
    else:
        collective.results = dict.fromkeys(everyone)


def _reduce(column: list[Any], op: int, prescale: float, postscale: float) -> torch.Tensor:
    tensors = [torch.as_tensor(array) for array in column]
    exact = (
        torch.float64
        if tensors[0].is_floating_point() or (prescale, postscale) != (1.0, 1.0)
        else torch.int64
    )
    stacked = torch.stack([tensor.to(exact) * (prescale if prescale != 1.0 else 1) for tensor in tensors])
    if op in (ReduceOp.Sum, ReduceOp.Average):
        total = stacked.sum(0)
        if op == ReduceOp.Average:
            mode = None if exact == torch.float64 else "trunc"
            total = torch.div(total, len(column), rounding_mode=mode)
    else:
        total = {ReduceOp.Min: stacked.amin, ReduceOp.Max: stacked.amax, ReduceOp.Product: stacked.prod}[
            ReduceOp(op)
        ](0)
    return (total * postscale if postscale != 1.0 else total).to(tensors[0].dtype)


def _assign(out: Any, value: torch.Tensor) -> None:
    if isinstance(out, torch.Tensor):
        out.data.view(-1)[...] = value.reshape(-1)
    else:
        out[...] = value.numpy()


_mine = threading.local()


@contextmanager
def threads_as_ranks() -> Iterator[None]:
    """While open, the default Group is that of the calling thread."""
    original = basics._current
    basics._current = lambda: _mine.session
    try:
        yield
    finally:
        basics._current = original


def run_ranks(size: int, fn: Callable[[int], Any]) -> list[Any]:
    hub = _Hub(size)
    results: list[Any] = [None] * size
    failures: list[BaseException] = []

    def rank_main(rank: int) -> None:
        _mine.session = basics._Session(FakeGroup(hub, rank))  # type: ignore[arg-type]
        try:
            results[rank] = fn(rank)
        except BaseException as error:  # noqa: BLE001 (raised by the caller's thread)
            failures.append(error)
            _mine.session.group.abort(f"rank {rank} raised {error!r}")

    with threads_as_ranks():
        threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]
    return results


def calls() -> list[str]:
    """Names that this rank has submitted so far."""
    return _mine.session.group.calls
