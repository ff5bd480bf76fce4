"""Training on an Arrow table in this process, without a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from .columns import Layout, columns_of, plan_layout
from .loop import fit_shard
from .result import FitResult
from .shard import Shard, ShardWriter
from .spec import TrainSpec

if TYPE_CHECKING:
    from ..group import Group


def fit_local(
    spec: TrainSpec,
    table: pa.Table,
    group: Group | None = None,
    *,
    on_progress: Callable[[dict[str, Any]], None] | None = None,
) -> FitResult:
    """Every rank of `group` (None: this process alone) calls it with its own rows; tables have one schema.

    The spec is copied by pickle, as it would be on its way to a rank, so its model is not changed. Seeds the
    global random state of the framework, of `random` and of `numpy.random`.
    """
    import cloudpickle

    layout = plan_layout(columns_of(table.schema), spec)
    shard = shard_of(table, layout, memory_bytes=spec.shard_memory_bytes, directory=spec.shard_dir)
    copied = cloudpickle.loads(cloudpickle.dumps(spec))
    with spec.telling_failure():
        return fit_shard(copied, shard, group, on_progress=on_progress)


def shard_of(
    table: pa.Table, layout: Layout, *, memory_bytes: int | None = None, directory: str | None = None
) -> Shard:
    """The rows of a table as a shard of this process; for the rest see `ShardWriter`."""
    batches = table.select(layout.schema.names).to_batches()
    return shard_from(batches, layout, memory_bytes=memory_bytes, directory=directory)


def shard_from(
    batches: Iterable[pa.RecordBatch],
    layout: Layout,
    *,
    memory_bytes: int | None = None,
    directory: str | None = None,
) -> Shard:
    """The same of record batches that have the layout's columns."""
    writer = ShardWriter(layout, memory_bytes=memory_bytes, directory=directory)
    try:
        for batch in batches:
            writer.write(batch)
        packed = writer.finish()
    finally:
        writer.close()
    try:
        return Shard.attach(packed.fds, packed.description)
    finally:
        packed.close()
