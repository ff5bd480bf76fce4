"""Batches gathered ahead of the step, by one thread, into buffers that are used again and again."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

import numpy as np

from .framework import Batch
from .shard import Shard


@dataclass(frozen=True)
class Request:
    """One batch to gather: row numbers of the shard (int64, may be empty) and the rows all ranks use in
    this step."""

    step: int
    index: np.ndarray
    global_rows: int


class Batches:
    """Iterator over the batches of `requests`, in order. A batch is valid until the next one is asked for.

    Memory: `prefetch + 1` sets of buffers of `largest` rows. Use as a context manager: leaving it ends the
    thread, also in the middle. What the thread raises (or `requests`) is raised by the next `next()`.
    `wait_s`: seconds the consumer has waited for batches that were not ready.
    """

    def __init__(self, shard: Shard, requests: Iterator[Request], *, largest: int, prefetch: int = 2):
        self.wait_s = 0.0
        self._shard = shard
        self._requests = requests
        self._inputs, self._labels = shard.of_role("input"), shard.of_role("label")
        self._weights = shard.of_role("weight")
        self._which = [*self._inputs, *self._labels, *self._weights]
        self._free: queue.SimpleQueue[list[np.ndarray] | None] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[tuple[Batch, list[np.ndarray]] | BaseException | None] = (
            queue.SimpleQueue()
        )
        for _ in range(prefetch + 1):
            blocks = [shard.blocks[i] for i in self._which]
            self._free.put([np.empty((largest, *b.shape), b.dtype) for b in blocks])
        self._in_use: list[np.ndarray] | None = None
        self._thread = threading.Thread(target=self._work, name="hvd-prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Batch:
        if self._in_use is not None:
            self._free.put(self._in_use)
            self._in_use = None
        start = time.perf_counter()
        item = self._ready.get()
        self.wait_s += time.perf_counter() - start
        if item is None or isinstance(item, BaseException):
            self._ready.put(None)
            if item is None:
                raise StopIteration
            raise item
        batch, self._in_use = item
        return batch

    def close(self) -> None:
        """Ends the thread and waits for it. May be called twice."""
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
                self._ready.put((self._gather(request, buffers), buffers))
            self._ready.put(None)
        except BaseException as error:  # noqa: BLE001 - it is raised where the batches are used
            self._ready.put(error)

    def _gather(self, request: Request, buffers: list[np.ndarray]) -> Batch:
        rows = len(request.index)
        views = [b[:rows] for b in buffers]
        self._shard.gather(request.index, views, self._which)
        n, m = len(self._inputs), len(self._inputs) + len(self._labels)
        return Batch(
            inputs=views[:n],
            labels=views[n:m],
            weight=views[m] if self._weights else None,
            rows=rows,
            global_rows=request.global_rows,
            step=request.step,
        )
