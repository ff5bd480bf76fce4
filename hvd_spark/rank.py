"""What runs in a rank process of Spark, around the user's function or the training loop."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle
import numpy as np

from hvd_core import basics
from hvd_core.launch import report
from hvd_core.train import TrainSpec
from hvd_core.train.loop import fit_shard
from hvd_core.train.resume import Attempt
from hvd_core.train.shard import Shard

from .rows import CHUNK_NBYTES


def with_shard(payload: bytes, description: bytes, attempt: int, *, fds: list[int]) -> Any:
    """Unpickles (fn, args, kwargs) and calls it with the shard that the supervisor packed."""
    fn, args, kwargs = pickle.loads(payload)
    shard = Shard.attach(fds, description)
    for fd in fds:  # an open one would keep the rows when the shard does not need them any more
        os.close(fd)
    return fn(*args, shard=shard, attempt=attempt, **kwargs)


@dataclass(frozen=True)
class Portion:
    """What comes back of one model: `FitResult.to_json()`, and its weights in parts."""

    about: str
    weights: list[bytes]


def train(
    spec: TrainSpec,
    changes: Sequence[Mapping[str, Any]],
    run: str,
    most_nbytes: int,
    *,
    shard: Shard,
    attempt: int,
) -> list[Portion]:
    """Trains one model for each of `changes`, what it has other than `spec`; every rank calls it. Stops when
    the weights of the next one would make more than `most_nbytes` together. Rank 0 returns one portion for
    each, the others nothing. run: names this job in its checkpoints, over all attempts."""
    # Training changes the model it is given, so that each further one needs it as it was.
    untouched = cloudpickle.dumps(spec) if len(changes) > 1 else b""
    basics.init()
    group = basics.default_group()
    portions: list[Portion] = []
    nbytes = largest = 0
    for i, change in enumerate(changes):
        if nbytes + largest > most_nbytes:
            break
        fresh = pickle.loads(untouched) if i else spec
        result = fit_shard(
            replace(fresh, **change),
            shard,
            group,
            on_progress=lambda data: report("progress", data),
            attempt=Attempt(run, attempt),
        )
        size = len(result.weights)
        if group.size > 1:
            size = int(group.allreduce(np.array([size], np.int64), name="hvd.weights_nbytes")[0])
        nbytes, largest = nbytes + size, max(largest, size)
        if group.rank == 0:
            weights = memoryview(result.weights)
            parts = [bytes(weights[at : at + CHUNK_NBYTES]) for at in range(0, size, CHUNK_NBYTES)]
            portions.append(Portion(result.to_json(), parts))
    basics.shutdown()
    return portions
