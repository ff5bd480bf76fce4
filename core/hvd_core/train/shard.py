"""Rows packed once into memory-mapped blocks, and batches gathered from them."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from .columns import Layout


@dataclass(frozen=True)
class PackedShard:
    """A finished shard: descriptors (to be inherited by the rank, then closed by the owner), how to read them."""

    fds: list[int]
    description: bytes
    rows: int

    def close(self) -> None:
        """Closes the descriptors; the rows are gone once nobody has them mapped."""


class ShardWriter:
    """Packs record batches with `layout.schema`. Memory up to `memory_bytes`, above that an unlinked file in
    `directory`. Raises DataError (nulls, ragged rows) naming the column."""

    def __init__(self, layout: Layout, *, memory_bytes: int | None = None, directory: str | None = None):
        raise NotImplementedError

    def write(self, batch: pa.RecordBatch) -> None: ...

    def finish(self) -> PackedShard:
        raise NotImplementedError

    def close(self) -> None:
        """Drops everything written so far."""


class Shard:
    rows: int
    fingerprint: str

    @classmethod
    def attach(cls, fds: list[int], description: bytes) -> Shard:
        raise NotImplementedError
