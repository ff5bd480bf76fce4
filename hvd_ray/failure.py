"""Of what Ray reports about its workers, the first cause, as the other launchers raise it."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

from ray.exceptions import RayActorError, RayTaskError
from ray.train import WorkerGroupError

from hvd_core.errors import RankFailed, RankFailure, first_cause

from .places import node_text
from .worker import recorded


class WorkerFailed(RankFailed, WorkerGroupError):
    """What `HorovodTrainer.fit` raises when a worker failed: a `RankFailed` with the first cause, and a
    `ray.train.WorkerGroupError` for code that knows Ray Train. worker_failures: rank to exception."""

    def __init__(self, failure: RankFailure, worker_failures: Mapping[int, Any], attempts: int = 1):
        RankFailed.__init__(self, failure, attempts)
        self.worker_failures = dict(worker_failures)

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.failure, self.worker_failures, self.attempts))


def worker_failed(error: WorkerGroupError, attempts: int = 1) -> WorkerFailed:
    """The same, with the first cause as its text."""
    cause = cause_of(error.worker_failures)
    raised = WorkerFailed(cause, error.worker_failures, attempts)
    original = error.worker_failures.get(cause.rank)
    raised.__cause__ = original if isinstance(original, BaseException) else None
    return raised


def cause_of(errors: Mapping[int, Any]) -> RankFailure:
    """errors: what Ray raised for some ranks. What the survivors saw of a death says more than Ray does."""
    found: list[RankFailure] = []
    for rank, error in errors.items():
        found += _records(error) or [_described(error, rank)]
    return first_cause(found)


def _records(error: BaseException) -> list[RankFailure]:
    inner = error.cause if isinstance(error, RayTaskError) and error.cause is not None else error
    return recorded(inner) or recorded(error)


def _described(error: BaseException, rank: int) -> RankFailure:
    """Of a worker that could not say anything itself."""
    chain = _chain(error)
    node, now = _node("\n".join(map(str, chain))), time.time()
    died = next((one for one in chain if isinstance(one, RayActorError)), None)
    if died is None:
        words = str(error).strip().splitlines() or [""]
        return RankFailure(
            rank, "exception", exc_type=type(error).__name__, message=words[-1], node=node, at=now
        )
    return RankFailure(rank, "lost", traceback=_death(str(died)), node=node, retryable=True, at=now)


def _node(text: str) -> str:
    """As Ray Train writes of a worker that does not answer; "" elsewhere."""
    found = [re.search(rf"\b{name}='([^']*)'", text) for name in ("node_ip", "hostname", "node_id")]
    known = [match[1] for match in found if match is not None]
    return node_text(*known) if len(known) == len(found) else ""


def _chain(error: BaseException) -> list[BaseException]:
    """With what Ray wraps around it."""
    found = [error]
    for name in ("health_check_failure", "__cause__", "cause"):
        inner = getattr(error, name, None)
        if isinstance(inner, BaseException) and inner is not error:
            found += _chain(inner)
    return found


def _death(text: str) -> str:
    """Ray's words, less what it lists as possible reasons."""
    lines = [line.strip() for line in text.partition(" Some common causes")[0].splitlines() if line.strip()]
    return "\n".join(lines[:12])
