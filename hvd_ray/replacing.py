"""Workers of Ray Train that are replaced one by one: the survivors keep their process."""

from __future__ import annotations

import secrets
from typing import Any

import ray
from ray.train.backend import Backend
from ray.train.v2._internal.execution.context import get_train_context
from ray.train.v2._internal.execution.worker_group import ReplicaGroup

from hvd_core.errors import LaunchFailed

from . import worker
from .places import Offer, visible_gpus

_ANSWERS_WITHIN_S = 30.0


class ReplacingBackend(Backend):
    """Runs in Ray Train's controller, where there is one of it.

    Ray calls `on_start` with all workers at first, and then, each time it has replaced a failed one, with the
    new worker alone. The new one and the survivors become a Group of the next generation. When several have
    failed, they are told so only when the last one has been replaced.
    """

    has_replica_groups = True
    #: Ray would share those of the new worker only.
    share_cuda_visible_devices = False

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        if isinstance(worker_group, ReplicaGroup):
            self._replaced(worker_group, backend_config)
        else:
            self._begin(worker_group, backend_config)

    def _begin(self, workers: Any, config: Any) -> None:
        self._all, self._token, self._generation = workers, secrets.token_bytes(32), 0
        offers = workers.execute(worker.listen, config.env, 0, config.start_timeout_s)
        self._shards = workers.execute_single(0, _shards)
        ray.get(self._tell(offers))

    def _replaced(self, new: Any, config: Any) -> None:
        rank = new.get_workers()[0].distributed_context.world_rank
        new.execute(worker.listen, config.env, rank, config.start_timeout_s)
        new.execute(_use_shards, self._shards)
        offers: list[Offer] = []
        calls = [one.execute_async(worker.standing) for one in self._all.get_workers()]
        for other, standing in enumerate(_answers(calls)):
            if standing is None or standing[1] == "failed":
                return  # Ray will replace it as well
            if standing[1] == "returned":
                raise LaunchFailed(f"rank {rank} cannot be replaced: rank {other} has returned already")
            offers.append(standing[0])
        self._generation += 1
        _answers(self._tell(offers))

    def _tell(self, offers: list[Offer]) -> list[Any]:
        visible = visible_gpus(offers)
        return [
            one.execute_async(worker.join, rank, offers, self._token, visible[rank], self._generation)
            for rank, one in enumerate(self._all.get_workers())
        ]


def _answers(calls: list[Any]) -> list[Any]:
    """None of a worker that has died: Ray hears of it, too."""
    found: list[Any] = []
    for call in calls:
        try:
            found.append(ray.get(call, timeout=_ANSWERS_WITHIN_S))
        except ray.exceptions.RayActorError:
            found.append(None)
        except ray.exceptions.GetTimeoutError:
            raise LaunchFailed(
                f"rank {len(found)} has not answered for {_ANSWERS_WITHIN_S:g} s, and so cannot go on with a "
                "worker that replaces another"
            ) from None
    return found


def _shards() -> Any:
    """On a worker: where `get_dataset_shard` finds its rows. Ray gives a replaced worker another one, which
    waits for rank 0 for ever, or has all rows."""
    return get_train_context().dataset_shard_provider


def _use_shards(shards: Any) -> None:
    get_train_context().dataset_shard_provider = shards
