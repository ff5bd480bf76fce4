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


class _SessionOfThread:
    """In the place of the one session of a process."""

    @property
    def group(self) -> Group:
        return _mine.session.group

    @property
    def sets(self) -> Any:
        return _mine.session.sets

    @property
    def joins(self) -> int:
        return _mine.session.joins

    def restart_names(self) -> None:
        _mine.session.restart_names()

    def next_name(self, kind: str) -> str:
        return _mine.session.next_name(kind)


@contextmanager
def _default_group_by_thread() -> Iterator[None]:
    original = basics._session
    basics._session = _SessionOfThread()  # type: ignore[assignment]
    try:
        yield
    finally:
        basics._session = original


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

    def _call(self, method: str, name: str, *args: Any) -> Any:
        self._names.append(name)
        result = getattr(self._native, method)(*args)
        if result is NotImplemented:  # another call follows
            self._names.pop()
        return result

    def run(self, op: int, name: str, *rest: Any) -> Any:
        return self._call("run", name, op, name, *rest)

    def run_tensor(self, op: int, name: str, *rest: Any) -> Any:
        return self._call("run_tensor", name, op, name, *rest)

    def start(self, owner: Any, op: int, name: str, *rest: Any) -> Any:
        return self._call("start", name, owner, op, name, *rest)

    def start_tensor(self, owner: Any, op: int, name: str, *rest: Any) -> Any:
        return self._call("start_tensor", name, owner, op, name, *rest)

    def start_group(self, owner: Any, op: int, name: str, *rest: Any) -> Any:
        return self._call("start_group", name, owner, op, name, *rest)

    def start_tensors(self, owner: Any, op: int, name: str, *rest: Any) -> Any:
        return self._call("start_tensors", name, owner, op, name, *rest)


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
