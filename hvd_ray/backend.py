"""How the workers of Ray Train become ranks: they listen, hear of each other, and connect when they train."""

from __future__ import annotations

import copy
import inspect
import secrets
from collections.abc import Mapping
from typing import Any

import ray
from ray.train.backend import Backend, BackendConfig

from hvd_core.config import Config
from hvd_core.errors import InvalidArgument, no_such

from . import worker


class HorovodConfig(BackendConfig):
    """How the ranks of a `HorovodTrainer` connect.

    timeout_s: all ranks must have connected this long after the first. start_timeout_s: how long to wait
    while others use the CPUs or GPUs that the workers need. env: names and strings set in each worker before
    it connects, such as HVD_TIMELINE. A misspelt option raises InvalidArgument.

    replace_workers: when a worker fails only that one is replaced, `max_failures` times in all, and the
    others keep their process: for loops in `hvd.elastic.run`, which wait `start_timeout_s` for it at most.
    """

    def __init__(
        self,
        timeout_s: float = 60.0,
        start_timeout_s: float = 600.0,
        env: Mapping[str, str] | None = None,
        replace_workers: bool = False,
        **unknown: Any,
    ):
        refuse_unknown(type(self), unknown)
        self.timeout_s, self.start_timeout_s = float(timeout_s), float(start_timeout_s)
        self.replace_workers = replace_workers
        self.env = {**Config(connect_timeout_s=self.timeout_s).to_env(), **dict(env or {})}

    def with_env(self, more: Mapping[str, str]) -> HorovodConfig:
        """A copy in which workers have these too, where `env` does not say otherwise."""
        found = copy.copy(self)
        found.env = {**more, **self.env}
        return found

    @property
    def backend_cls(self) -> type[Backend]:
        if self.replace_workers:
            from .replacing import ReplacingBackend  # of Ray's insides

            return ReplacingBackend
        return HorovodBackend

    @property
    def train_func_context(self) -> Any:
        return worker.in_group

    def to_dict(self) -> dict[str, Any]:
        names = ("timeout_s", "start_timeout_s", "replace_workers")
        return {name: getattr(self, name) for name in names}


class HorovodBackend(Backend):
    """Runs in Ray Train's controller."""

    #: A rank sees all GPUs that the workers of its node have; its own is number `hvd.local_rank()`.
    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Ray numbers the workers node by node, as a Group wants its ranks."""
        offers = worker_group.execute(worker.listen, backend_config.env)
        token = secrets.token_bytes(32)
        ray.get(
            [
                worker_group.execute_single_async(rank, worker.join, rank, offers, token)
                for rank in range(len(offers))
            ]
        )


def refuse_unknown(cls: type, unknown: Mapping[str, Any]) -> None:
    """Raises InvalidArgument that names the option closest to each unknown one."""
    known = [name for name in inspect.signature(cls).parameters if name != "unknown"]
    for name in unknown:
        raise InvalidArgument(no_such(cls.__name__, "option", name, known))
