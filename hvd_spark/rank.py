"""What runs in a rank process of Spark, around the user's function or the training loop."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import cloudpickle

from hvd_core import basics
from hvd_core.launch import report
from hvd_core.train import TrainSpec
from hvd_core.train.loop import fit_shard
from hvd_core.train.shard import Shard


def with_shard(payload: bytes, description: bytes, *, fds: list[int]) -> Any:
    """Unpickles (fn, args, kwargs) and calls it with the shard that the supervisor packed."""
    fn, args, kwargs = pickle.loads(payload)
    shard = Shard.attach(fds, description)
    for fd in fds:  # an open one would keep the rows when the shard does not need them any more
        os.close(fd)
    return fn(*args, shard=shard, **kwargs)


def train(spec: TrainSpec, changes: Sequence[Mapping[str, Any]], *, shard: Shard) -> list[bytes]:
    """Trains one model for each of `changes`, what it has other than `spec`; every rank calls it. The
    `FitResult`s as bytes on rank 0, nothing on the others."""
    # Training changes the model it is given, so that each further one needs it as it was.
    untouched = cloudpickle.dumps(spec) if len(changes) > 1 else b""
    basics.init()
    group = basics.default_group()
    results = []
    for i, change in enumerate(changes):
        fresh = pickle.loads(untouched) if i else spec
        result = fit_shard(
            replace(fresh, **change), shard, group, on_progress=lambda data: report("progress", data)
        )
        if group.rank == 0:
            results.append(result.to_bytes())
    basics.shutdown()
    return results


def unpickled(value: bytes) -> list[bytes]:
    """What `train` returned, as the driver gets it."""
    data: list[bytes] = pickle.loads(value)
    return data
