"""The actor that is a rank: made by `RayExecutor`, which talks to it."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray

from hvd_core.errors import RankFailed, RankFailure, first_cause
from hvd_core.launch.pickling import dumps_result

from . import worker
from .places import Offer


@dataclass(frozen=True)
class Failed:
    """A call did not return. exception: pickled, empty where it does not pickle."""

    failures: tuple[RankFailure, ...]
    exception: bytes


@ray.remote(max_restarts=0, max_task_retries=0)
class Rank:
    """Methods that run the user's functions return the pickled result or Failed, and do not raise."""

    def __init__(self, live: Any):
        worker.set_live(live)
        self._executable: Any = None

    def listen(self) -> Offer:
        return worker.listen({})

    def join(self, rank: int, offers: Sequence[Offer], token: bytes, gpus: str | None) -> None:
        worker.join(rank, offers, token, gpus)

    def make(self, payload: bytes) -> bytes | Failed:
        """payload: from `dumps(executable_cls, args, kwargs)`."""
        return self._answer(payload, (), keep=True)

    def call(self, payload: bytes, with_executable: bool) -> bytes | Failed:
        """payload: from `dumps(fn, args, kwargs)`; with_executable: it goes before args."""
        return self._answer(payload, (self._executable,) if with_executable else ())

    def value(self, payload: bytes) -> Any:
        """`call` that returns the value itself, or raises RankFailed."""
        found = self._answer(payload, ())
        if isinstance(found, Failed):
            raise RankFailed(first_cause(found.failures))
        return pickle.loads(found)

    def _answer(self, payload: bytes, first: tuple[Any, ...], keep: bool = False) -> bytes | Failed:
        try:
            fn, args, kwargs = pickle.loads(payload)
            result = fn(*first, *args, **kwargs)
            if keep:
                self._executable, result = result, None
            return dumps_result(fn, result)
        except BaseException as error:  # noqa: BLE001  whatever it was, the driver must hear of it
            found = tuple(worker.record(error))
            try:
                return Failed(found, dumps_result(type(error), error))
            except Exception:  # noqa: BLE001  its record says enough
                return Failed(found, b"")
