"""Rows of a Spark DataFrame into Ray's object store, by Spark's own tasks and without RayDP."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import ray
from ray.data import Dataset

from hvd_core.errors import RowsLost

from . import here


@ray.remote(num_cpus=0)
class _Holder:
    """Owns what Spark's tasks bring, so that it outlives them, and Spark."""

    def __init__(self) -> None:
        self._parts: dict[int, list[Any]] = {}

    def add(self, part: int, number: int, table: Any) -> None:
        """The next table of a part; number 0 begins it anew, when its task is tried again."""
        if number == 0:
            self._parts[part] = []
        self._parts[part].append(ray.put(table))

    def take(self) -> list[Any]:
        return [ref for part in sorted(self._parts) for ref in self._parts[part]]


def from_spark(frame: Any) -> Dataset:
    """The rows of a Spark DataFrame as a Ray Dataset, without RayDP and files; Spark may be stopped
    afterwards.

    One job of Spark, whose executors need `ray` and must run on nodes of its cluster. The rows stay in the
    object store as long as the Dataset returned here lives: keep it while others made of it are in use.
    Raises RowsLost.
    """
    context = ray.get_runtime_context()
    name, namespace, address = f"hvd-{secrets.token_hex(8)}", context.namespace, context.gcs_address
    holder: Any = _Holder.options(name=name, **here.options()).remote()  # type: ignore[attr-defined]
    ray.get(holder.take.remote())  # it can be found from now on
    schema = frame.limit(0).toArrow().schema

    def bring(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield _bring(batches, address, namespace, name)

    brought = frame.mapInArrow(bring, "rows long").collect()
    refs = ray.get(holder.take.remote())
    dataset = ray.data.from_arrow_refs(refs) if refs else ray.data.from_arrow(schema.empty_table())
    sent = sum(row["rows"] for row in brought)
    if dataset.count() != sent:
        raise RowsLost(f"Spark sent {sent} rows to Ray, {dataset.count()} have come")
    dataset._hvd_holder = holder  # type: ignore[attr-defined]
    return dataset


def _bring(batches: Iterator[pa.RecordBatch], address: str, namespace: str, name: str) -> pa.RecordBatch:
    """In a task of Spark, whose Python process may serve other jobs afterwards."""
    from pyspark import TaskContext

    context: Any = TaskContext.get()
    rows, holder = 0, None
    try:
        for number, batch in enumerate(batch for batch in batches if batch.num_rows):
            if holder is None:
                ray.init(address=address, namespace=namespace, log_to_driver=False, configure_logging=False)
                holder = ray.get_actor(name)
            ray.get(holder.add.remote(context.partitionId(), number, pa.Table.from_batches([batch])))
            rows += batch.num_rows
    finally:
        if holder is not None:
            ray.shutdown()
    return pa.RecordBatch.from_pydict({"rows": pa.array([rows], pa.int64())})
