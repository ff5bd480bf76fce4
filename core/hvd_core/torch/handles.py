"""The int handles that `*_async` functions return, and what hides behind them.

A table, because Horovod's handles are ints. It keeps the tensors of a collective alive until `synchronize`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..errors import InvalidArgument


class Pending(Protocol):
    """What is behind a handle: a native one, which gives the caller's result, or `Joined`."""

    def done(self) -> bool: ...
    def wait(self) -> Any: ...


class Joined:
    """Several collectives as one; `finish` makes the caller's result from theirs."""

    def __init__(self, parts: Sequence[Pending], finish: Callable[[list[Any]], Any]):
        self._parts, self._finish = parts, finish

    def done(self) -> bool:
        return all(part.done() for part in self._parts)

    def wait(self) -> Any:
        results = []
        failure: Exception | None = None
        for part in self._parts:
            try:
                results.append(part.wait())
            except Exception as error:  # noqa: BLE001 (the first is raised, after all have ended)
                failure = failure or error
        if failure is not None:
            raise failure
        return self._finish(results)


_numbers = itertools.count()
_pending: dict[int, Pending] = {}


def register(pending: Pending) -> int:
    """A new handle for what was submitted."""
    number = next(_numbers)
    _pending[number] = pending
    return number


def _find(handle: int) -> Pending:
    try:
        return _pending[handle]
    except (KeyError, TypeError):
        raise InvalidArgument(
            f"handle {handle!r} was never given out, or has been synchronized already"
        ) from None


def synchronize(handle: int) -> Any:
    """Waits for an asynchronous collective and returns its result; the handle is used up.

    Raises `MismatchError` when ranks submitted different things under one name, another
    `HorovodInternalError` when a rank is lost, `InvalidArgument` (a `ValueError`) for an unknown handle.
    Ctrl-C interrupts the wait and leaves the handle valid.
    """
    # Once for every tensor, with what it needs cold in the cache: no function of ours in between.
    try:
        pending = _pending[handle]
    except (KeyError, TypeError):
        pending = _find(handle)
    try:
        result = pending.wait()
    except Exception:
        del _pending[handle]
        raise
    del _pending[handle]
    return result


def poll(handle: int) -> bool:
    """Whether `synchronize(handle)` would return at once. Raises `InvalidArgument` for an unknown handle."""
    return _find(handle).done()
