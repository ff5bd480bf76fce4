"""What barrier tasks yield: one schema for results, failures, row counts and signs of life."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from hvd_core.errors import RankFailure

DDL = "rank int, kind string, data binary"
SCHEMA = pa.schema([("rank", pa.int32()), ("kind", pa.string()), ("data", pa.binary())])

#: Spark Connect takes Arrow messages up to 4 MiB.
CHUNK_NBYTES = 1 << 20
#: The kind of rows that mean nothing.
BEAT = "beat"
#: A Python worker's output buffer.
_BUFFER_NBYTES = int(os.environ.get("SPARK_BUFFER_SIZE", 65536))


def batch(rank: int, kind: str, data: bytes = b"") -> pa.RecordBatch:
    """One row. Spark matches columns by position and checks no types, so the schema is always given."""
    return pa.RecordBatch.from_arrays(
        [pa.array([rank], pa.int32()), pa.array([kind], pa.string()), pa.array([data], pa.binary())],
        schema=SCHEMA,
    )


def beat(rank: int) -> pa.RecordBatch:
    """A sign of life, for Spark's idle timeout; so large that the worker's output buffer does not keep it."""
    return batch(rank, BEAT, b"\0" * _BUFFER_NBYTES)


def failure(what: RankFailure, stage: str, exception: bytes = b"") -> pa.RecordBatch:
    """stage: "rows" while the shard was made, "missing" if a module was not there, "rank" from the rank's
    start on. exception: pickled."""
    return batch(what.rank, f"failure/{stage}", what.to_json().encode() + b"\n" + exception)


def ingested(rank: int, rows: int, data: dict[str, Any]) -> pa.RecordBatch:
    """How many rows this rank took from Spark."""
    return batch(rank, "rows", json.dumps({"rows": rows, **data}).encode())


def result(rank: int, value: bytes) -> Iterator[pa.RecordBatch]:
    """The rank's result in chunks; at least one, also when it is empty."""
    for start in range(0, max(1, len(value)), CHUNK_NBYTES):
        yield batch(rank, "result", value[start : start + CHUNK_NBYTES])


@dataclass(frozen=True)
class Failure:
    """A failure row: how the rank ended, at which stage, and its pickled exception if there is one."""

    what: RankFailure
    stage: str
    exception: bytes = b""


@dataclass
class Collected:
    """What a job's rows say, by final rank. results: in parts, as they came."""

    results: dict[int, list[bytes]] = field(default_factory=dict)
    rows: dict[int, int] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)


def read(collected: Iterable[Any]) -> Collected:
    """Reads `(rank, kind, data)` rows; those of one rank are in the order they were yielded."""
    out = Collected()
    for rank, kind, data in collected:
        if kind == "result":
            out.results.setdefault(rank, []).append(data)
        elif kind == "rows":
            out.rows[rank] = json.loads(bytes(data))["rows"]
        elif kind.startswith("failure/"):
            text, _, exception = bytes(data).partition(b"\n")
            what = RankFailure.from_json(text.decode()).with_rank(rank)
            out.failures.append(Failure(what, kind.partition("/")[2], exception))
    return out
