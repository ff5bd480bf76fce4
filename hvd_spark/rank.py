"""What runs in a rank process of Spark, around the user's function or the training loop."""

from __future__ import annotations

import pickle
from typing import Any

from hvd_core import basics
from hvd_core.launch import report
from hvd_core.train import TrainSpec
from hvd_core.train.loop import fit_shard
from hvd_core.train.shard import Shard


def with_shard(payload: bytes, description: bytes, *, fds: list[int]) -> Any:
    """Unpickles (fn, args, kwargs) and calls it with the shard that the supervisor packed."""
    fn, args, kwargs = pickle.loads(payload)
    return fn(*args, shard=Shard.attach(fds, description), **kwargs)


def train(spec: TrainSpec, *, shard: Shard) -> bytes:
    """Trains; every rank calls it. The `FitResult` as bytes on rank 0, b"" on the others."""
    basics.init()
    group = basics.default_group()
    result = fit_shard(spec, shard, group, on_progress=lambda data: report("progress", data))
    basics.shutdown()
    return result.to_bytes() if group.rank == 0 else b""


def unpickled(value: bytes) -> bytes:
    """What `train` returned, as the driver gets it."""
    data: bytes = pickle.loads(value)
    return data
