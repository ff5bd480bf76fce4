"""Batches gathered into buffers that are used again and again: large ones ahead of the step, by a thread,
small ones many at once."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Iterator
from itertools import islice
from types import TracebackType

import numpy as np

from .framework import Batch
from .order import Request
from .shard import Shard

#: Smaller batches are gathered faster than one thread can hand them to another, unless they have to be read
#: from a file.
_WORTH_A_THREAD_NBYTES = 1 << 20
#: So much of small batches is gathered by one call: rows leave nothing else in the caches, so the interpreter
#: that asks for a few of them at a time is as slow as they are.
_AT_ONCE_NBYTES, _AT_ONCE = 2 << 20, 64
#: Where torch's own tensors begin. Elsewhere a step is slower, and its last bits may be others.
_ALIGN_NBYTES = 64

_Buffers = list[np.ndarray]


class Batches:
    """Iterator over the batches of `requests`, in order. A batch is valid until the next one is asked for.

    Memory: `prefetch + 1` sets of buffers of `largest` rows; where batches are so small that no thread
    gathers them ahead one set of 2 MB at most, and `requests` are asked for ahead. Use as a context manager:
    leaving it ends the thread, also in the middle. What gathering (or `requests`) raises is raised by the
    next `next()`.
    `wait_s`: seconds the consumer has waited for batches that were not ready.
    """

    def __init__(self, shard: Shard, requests: Iterator[Request], *, largest: int, prefetch: int = 2):
        self.wait_s = 0.0
        self._shard = shard
        self._requests = requests
        self._inputs, self._labels = shard.of_role("input"), shard.of_role("label")
        self._weights = shard.of_role("weight")
        self._which = [*self._inputs, *self._labels, *self._weights]
        blocks = [shard.blocks[i] for i in self._which]
        # So many rows apart batches begin at aligned addresses.
        whole = max((_ALIGN_NBYTES // math.gcd(_ALIGN_NBYTES, b.row_nbytes) for b in blocks), default=1)
        self._apart = -(-largest // whole) * whole
        nbytes = self._apart * sum(b.row_nbytes for b in blocks)
        is_ahead = shard.spilled or nbytes >= _WORTH_A_THREAD_NBYTES
        self._at_once = 1 if is_ahead else min(max(1, _AT_ONCE_NBYTES // max(1, nbytes)), _AT_ONCE)
        sets = [
            [_aligned((self._at_once * self._apart, *b.shape), b.dtype) for b in blocks]
            for _ in range(prefetch + 1 if is_ahead else 1)
        ]
        self._in_use: _Buffers | None = None
        self._small = self._gathered(sets[0])
        self._thread: threading.Thread | None = None
        if is_ahead:
            self._free: queue.SimpleQueue[_Buffers | None] = queue.SimpleQueue()
            self._ready: queue.SimpleQueue[tuple[Batch, _Buffers] | BaseException | None] = (
                queue.SimpleQueue()
            )
            for buffers in sets:
                self._free.put(buffers)
            self._thread = threading.Thread(target=self._work, name="hvd-prefetch", daemon=True)
            self._thread.start()

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Batch:
        start = time.perf_counter()
        try:
            return next(self._small) if self._thread is None else self._next_ready()
        finally:
            self.wait_s += time.perf_counter() - start

    def _next_ready(self) -> Batch:
        if self._in_use is not None:
            self._free.put(self._in_use)
            self._in_use = None
        item = self._ready.get()
        if item is None or isinstance(item, BaseException):
            self._ready.put(None)
            if item is None:
                raise StopIteration
            raise item
        batch, self._in_use = item
        return batch

    def close(self) -> None:
        """Ends the thread and waits for it. May be called twice."""
        if self._thread is not None:
            self._free.put(None)
            self._thread.join()

    def __enter__(self) -> Batches:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _work(self) -> None:
        try:
            for request in self._requests:
                buffers = self._free.get()
                if buffers is None:
                    return
                self._shard.gather(request.index, [b[: len(request.index)] for b in buffers], self._which)
                self._ready.put((self._batch(request, buffers, 0), buffers))
            self._ready.put(None)
        except BaseException as error:  # noqa: BLE001 - it is raised where the batches are used
            self._ready.put(error)

    def _gathered(self, buffers: _Buffers) -> Iterator[Batch]:
        """All batches, `_at_once` of them by one call; then the error of `requests`, if it had one."""
        failed: Exception | None = None
        while failed is None:
            group: list[Request] = []
            try:
                group.extend(islice(self._requests, self._at_once))  # keeps those before an error
            except Exception as error:  # noqa: BLE001 - raised after the batches before it
                failed = error
            if not group:
                break
            if any(len(request.index) for request in group):
                index = np.zeros((len(group), self._apart), np.int64)  # row 0 between two batches
                for own, request in zip(index, group, strict=True):
                    own[: len(request.index)] = request.index
                self._shard.gather(index.reshape(-1), [b[: index.size] for b in buffers], self._which)
            for i, request in enumerate(group):
                yield self._batch(request, buffers, i * self._apart)
        if failed is not None:
            raise failed

    def _batch(self, request: Request, buffers: _Buffers, begin: int) -> Batch:
        """Its rows are in the buffers from row `begin`."""
        rows = len(request.index)
        views = [b[begin : begin + rows] for b in buffers]
        n, m = len(self._inputs), len(self._inputs) + len(self._labels)
        return Batch(
            inputs=views[:n],
            labels=views[n:m],
            weight=views[m] if self._weights else None,
            rows=rows,
            global_rows=request.global_rows,
            step=request.step,
        )


def _aligned(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(nbytes + _ALIGN_NBYTES, np.uint8)
    begin = -memory.ctypes.data % _ALIGN_NBYTES
    return memory[begin : begin + nbytes].view(dtype).reshape(shape)
