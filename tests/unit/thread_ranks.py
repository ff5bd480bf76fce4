"""Ranks as threads of one process, each with its own Group: adapters on the real core, without processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hvd_core import basics
from hvd_core.group import Group

from .connected import connected

_mine = threading.local()


@contextmanager
def _default_group_by_thread() -> Iterator[None]:
    original = basics._current
    basics._current = lambda: _mine.session
    try:
        yield
    finally:
        basics._current = original


def run_ranks(size: int, fn: Callable[[int], Any]) -> list[Any]:
    """Calls `fn(rank)` in `size` threads, and returns the results by rank or raises the first failure."""
    failures: list[BaseException] = []

    def rank_main(group: Group) -> Any:
        _mine.session = basics._Session(group)
        _mine.calls = _record_calls(group)
        try:
            result = fn(group.rank)
            group.barrier("end")  # nobody leaves while others compute
        except BaseException as error:  # noqa: BLE001 (raised by the caller's thread)
            failures.append(error)
            group.abort(f"rank {group.rank} raised {error!r}")
            return None
        return result

    with _default_group_by_thread(), connected(size) as ranks:
        results = ranks.on_every(rank_main)
    if failures:
        raise failures[0]
    return results


def _record_calls(group: Group) -> list[str]:
    names: list[str] = []
    native = group._native
    make_plan = group.plan

    def recorded_plan(tensors: Any, *, name: str, **options: Any) -> Any:
        group._native = native
        plan = make_plan(tensors, name=name, **options)
        group._native = recorded
        assert plan is not None
        return _RecordedPlan(plan, name, names)

    recorded: Any = _RecordedNative(native, names)
    group._native = recorded
    group.plan = recorded_plan  # type: ignore[method-assign]
    return names


class _RecordedNative:
    def __init__(self, native: Any, names: list[str]):
        self._native, self._names = native, names

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._native, attribute)

    def run(self, op: int, name: str, *rest: Any) -> Any:
        self._names.append(name)
        return self._native.run(op, name, *rest)

    def start(self, owner: Any, op: int, name: str, *rest: Any) -> Any:
        self._names.append(name)
        return self._native.start(owner, op, name, *rest)

    def start_group(self, owner: Any, op: int, name: str, *rest: Any) -> Any:
        self._names.append(name)
        return self._native.start_group(owner, op, name, *rest)


class _RecordedPlan:
    def __init__(self, plan: Any, name: str, names: list[str]):
        self._plan, self._name, self._names = plan, name, names

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._plan, attribute)

    def end(self, flags: int) -> list[int]:
        needs: list[int] = self._plan.end(flags)
        if not needs:
            self._names.append(f"{self._name}.step")
        return needs


def calls() -> list[str]:
    """Names of the collectives that this rank has submitted so far, steps of plans among them."""
    return _mine.calls


def reductions() -> int:
    """How many times this rank has reduced an optimizer's gradients."""
    return sum(name.endswith((".has_gradient", ".step")) for name in calls())
