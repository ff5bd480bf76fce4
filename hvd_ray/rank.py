"""What each worker of an estimator runs: its rows into a shard, then the loop that Spark's ranks run too."""

from __future__ import annotations

import contextlib
import pickle
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray
import ray.train

from hvd_core import basics
from hvd_core.config import Config
from hvd_core.train import Layout, TrainSpec
from hvd_core.train.framework import framework_for
from hvd_core.train.local import shard_from
from hvd_core.train.loop import fit_shard
from hvd_core.train.resume import Attempt
from hvd_core.train.shard import Shard, default_memory_bytes

from .rows import Piece, table_of


def train(config: dict[str, Any]) -> tuple[str, bytes]:
    """The training function. config: "payload" (from `dumps`: spec, layout, run, keep), "pieces" by rank,
    "live" (a queue for progress), "attempt" (how many have failed). Rank 0 returns `FitResult.to_json()` and
    the weights."""
    spec, layout, run, keep = pickle.loads(config["payload"])[1]
    group = basics.default_group()
    shard = _shard(config["pieces"][group.rank], layout, spec, group.local_size)
    result = fit_shard(
        replace(spec, callbacks=(*spec.callbacks, _Reporter(framework_for(spec).weights_file)))
        if keep
        else spec,
        shard,
        group,
        on_progress=partial(_tell, config["live"]),
        attempt=Attempt(run, config["attempt"]),
    )
    return result.to_json(), result.weights


def _tell(live: Any, record: dict[str, Any]) -> None:
    with contextlib.suppress(Exception):  # the driver is not needed to train
        live.put(record)


def _shard(pieces: Sequence[Piece], layout: Layout, spec: TrainSpec, local_size: int) -> Shard:
    config = Config.from_env()
    memory_nbytes = spec.shard_memory_bytes or config.shard_memory_bytes or default_memory_bytes(local_size)
    return shard_from(
        _batches(pieces, layout),
        layout,
        memory_bytes=memory_nbytes,
        directory=spec.shard_dir or config.shard_dir or None,
    )


def _batches(pieces: Sequence[Piece], layout: Layout) -> Iterator[pa.RecordBatch]:
    for piece in pieces:
        table = table_of(ray.get(piece.block)).select(layout.schema.names).cast(layout.schema)
        yield from table.slice(piece.begin, piece.end - piece.begin).to_batches()


class _Reporter:
    """Tells Ray of each epoch, on all ranks since that is a barrier, with the weights of rank 0."""

    def __init__(self, weights_file: str):
        self._weights_file = weights_file

    def on_epoch_end(self, run: Any, logs: dict[str, Any]) -> None:
        metrics = {name: value for name, value in logs.items() if isinstance(value, (int, float))}
        if run.rank:
            ray.train.report(metrics)
            return
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, self._weights_file).write_bytes(run.weights())
            ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))
