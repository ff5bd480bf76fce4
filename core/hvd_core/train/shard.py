"""The rows of one rank, packed once into memory-mapped blocks from which batches are gathered.

One anonymous file for each block (a model input, a label, the weights, the validation marks), row-major. It
has no name, so nothing is left when the processes that hold it end, however they end.
"""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from .._native import gather_rows, hash_rows, sort_by_hash
from ..errors import DataError, StorageFull
from ..limits import free_memory
from .columns import Layout
from .pack import Packer

#: Only tells equal rows from different ones; any value serves as long as all runs use the same.
_HASH_SEED = 0x68766421
#: No room: on the disk, in the quota, in a file of that size, in memory.
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM})


@dataclass(frozen=True)
class ShardBlock:
    """One block as it lies in its file: rows of `shape` and numpy dtype `dtype`, end to end."""

    role: str
    name: str
    columns: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def from_json(cls, block: Mapping[str, Any]) -> ShardBlock:
        dtype, shape = block["dtype"] or "float32", tuple(block["shape"] or ())
        return cls(block["role"], block["name"], tuple(block["columns"]), dtype, shape)

    def __str__(self) -> str:
        """What became of the columns: "input x: a, b -> float32 (B, 2)"."""
        names = [*self.columns[:8], *([f"and {len(self.columns) - 8} more"] if len(self.columns) > 8 else [])]
        shape = ", ".join(map(str, ("B", *self.shape))) + ("" if self.shape else ",")
        return f"{self.role} {self.name}: {', '.join(names)} -> {self.dtype} ({shape})"

    @property
    def row_nbytes(self) -> int:
        return int(np.dtype(self.dtype).itemsize * np.prod(self.shape, dtype=np.int64))


@dataclass
class PackedShard:
    """A finished shard: one descriptor for each block, to be inherited by the rank; `close` drops this
    owner's."""

    fds: list[int]
    description: bytes
    rows: int
    #: Bytes of all blocks, and whether they went to a file because memory_bytes was passed.
    nbytes: int = 0
    spilled: bool = False

    def close(self) -> None:
        while self.fds:
            os.close(self.fds.pop())


def default_memory_bytes(ranks_on_host: int = 1) -> int:
    """Half of what this host, or a cgroup that we are in, has free, divided by the ranks that share it."""
    return free_memory() // 2 // max(1, ranks_on_host)


class BlockFiles:
    """Rows that are added block by block: in memory up to `memory_bytes`, above that in unlinked files in
    `directory` (None: the system's)."""

    def __init__(self, roles: Sequence[str], memory_bytes: int, directory: str | None):
        self._memory_bytes = memory_bytes
        self._directory = directory or tempfile.gettempdir()
        self.fds = [os.memfd_create(f"hvd-shard-{role}") for role in roles]
        self.spilled = False
        self.rows = 0
        self.nbytes = 0

    def write(self, arrays: Sequence[np.ndarray]) -> None:
        """The same number of rows for each block, C-contiguous. Raises StorageFull."""
        self.nbytes += sum(a.nbytes for a in arrays)
        try:
            if self.nbytes > self._memory_bytes and not self.spilled:
                self._spill()
            for fd, array in zip(self.fds, arrays, strict=True):
                _write(fd, array)
        except OSError as error:
            raise (self._full(error) if error.errno in _FULL else error) from error
        self.rows += len(arrays[0])

    def describe(self, blocks: Sequence[Mapping[str, Any]], nulls: Mapping[str, int]) -> bytes:
        """What `Shard.attach` needs beside the descriptors."""
        head = {"rows": self.rows, "blocks": blocks, "nulls": nulls, "spilled": self.spilled}
        return json.dumps(head).encode()

    def close(self) -> None:
        while self.fds:
            os.close(self.fds.pop())

    def _full(self, error: OSError) -> StorageFull:
        if self.nbytes <= self._memory_bytes:
            return StorageFull(
                f"{self.nbytes:,} bytes of rows do not fit into memory ({error.strerror}): lower "
                f"shard_memory_bytes (HVD_SHARD_MEMORY_BYTES, now {self._memory_bytes:,}) to use a disk"
            )
        free = shutil.disk_usage(self._directory).free
        return StorageFull(
            f"{self.nbytes:,} bytes of rows, and more to come, do not fit into {self._directory} "
            f"({error.strerror}, {free:,} bytes free): set shard_dir (HVD_SHARD_DIR) to a directory of a "
            "larger disk, or keep them in memory by a higher shard_memory_bytes (HVD_SHARD_MEMORY_BYTES, now "
            f"{self._memory_bytes:,})"
        )

    def _spill(self) -> None:
        for i, memory in enumerate(self.fds):
            with tempfile.TemporaryFile(dir=self._directory) as file:
                left, at = os.fstat(memory).st_size, 0
                while at < left:
                    at += os.sendfile(file.fileno(), memory, at, left - at)
                self.fds[i] = os.dup(file.fileno())
            os.close(memory)
        self.spilled = True


class ShardWriter:
    """Packs record batches of `layout.schema` as they arrive. Not thread-safe.

    memory_bytes, directory: as in `BlockFiles`; None: `default_memory_bytes()`. `write` and `finish` raise
    DataError naming the column; the writer is then to be closed.
    """

    def __init__(self, layout: Layout, *, memory_bytes: int | None = None, directory: str | None = None):
        self._packer = Packer(layout)
        limit = default_memory_bytes() if memory_bytes is None else memory_bytes
        self._files = BlockFiles([b.role for b in layout.blocks], limit, directory)

    @property
    def rows(self) -> int:
        return self._files.rows

    @property
    def nbytes(self) -> int:
        return self._files.nbytes

    def write(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows:
            self._files.write(self._packer.pack(batch))

    def finish(self) -> PackedShard:
        """The shard; the writer is used up."""
        self._packer.check()
        blocks = [
            {"role": block.role, "name": block.name, "columns": block.columns, "dtype": dtype, "shape": shape}
            for block, dtype, shape in zip(
                self._packer.blocks, self._packer.dtypes, self._packer.shapes, strict=True
            )
        ]
        files = self._files
        description = files.describe(blocks, self._packer.nulls)
        fds, files.fds = files.fds, []
        return PackedShard(fds, description, files.rows, files.nbytes, files.spilled)

    def close(self) -> None:
        """Drops everything written, unless `finish` has handed it on. May be called twice."""
        self._files.close()


def _write(fd: int, array: np.ndarray) -> None:
    data = array.reshape(-1).view(np.uint8).data
    while data.nbytes:
        data = data[os.write(fd, data) :]


def describe_blocks(blocks: Sequence[ShardBlock]) -> list[dict[str, Any]]:
    """As JSON has them."""
    return [{**asdict(b), "columns": list(b.columns), "shape": list(b.shape)} for b in blocks]


class Shard:
    """The rows of this rank, mapped read-only. Any number of processes may attach the same descriptors.

    blocks: inputs, labels, weight, validation, as in the layout. An empty shard has blocks without shapes.
    """

    def __init__(
        self,
        rows: int,
        blocks: Sequence[ShardBlock],
        maps: Sequence[np.ndarray],
        nulls: Mapping[str, int] | None = None,
        spilled: bool = False,
    ):
        self.rows = rows
        #: The rows are in a file, so that using one may have to wait for a disk.
        self.spilled = spilled
        #: By column, those that null_value has replaced.
        self.nulls = dict(nulls or {})
        self.blocks = tuple(blocks)
        self.maps = tuple(maps)
        #: Its rows are those that this rank got of all ranks' (`exchange.deal_by_hash`).
        self.is_dealt = False
        self._hashes: np.ndarray | None = None

    @classmethod
    def attach(cls, fds: Sequence[int], description: bytes) -> Shard:
        """The descriptors can be closed afterwards."""
        head = json.loads(description)
        rows = int(head["rows"])
        blocks = [ShardBlock.from_json(b) for b in head["blocks"]]
        if not rows:
            return cls(0, blocks, [np.empty(0, np.uint8) for _ in blocks])
        maps = []
        for fd, block in zip(fds, blocks, strict=True):
            nbytes = rows * block.row_nbytes
            if os.fstat(fd).st_size != nbytes:
                raise DataError(
                    f"shard block {block.name!r} has {os.fstat(fd).st_size} bytes instead of {nbytes}"
                )
            maps.append(np.frombuffer(mmap.mmap(fd, nbytes, prot=mmap.PROT_READ), np.uint8))
        return cls(rows, blocks, maps, head["nulls"], head["spilled"])

    def become(self, dealt: Shard) -> None:
        """Takes the rows of `dealt`. The old ones are unmapped, whoever holds this shard, once no array over
        them is in use."""
        self.rows, self.blocks, self.maps, self.spilled = dealt.rows, dealt.blocks, dealt.maps, dealt.spilled
        self.nulls, self._hashes, self.is_dealt = dealt.nulls, None, True

    def of_role(self, role: str) -> list[int]:
        """Indices of the blocks with this role."""
        return [i for i, b in enumerate(self.blocks) if b.role == role]

    def block(self, i: int) -> np.ndarray:
        """Block i as a read-only array (rows, *shape) over the mapping."""
        b = self.blocks[i]
        return self.maps[i].view(b.dtype).reshape(self.rows, *b.shape)

    def gather(self, index: np.ndarray, out: Sequence[np.ndarray], which: Sequence[int]) -> None:
        """Rows `index` (int64) of the blocks `which` into the C-contiguous arrays `out`, of len(index) rows
        each."""
        for i, target in zip(which, out, strict=True):
            if len(index):
                gather_rows(self.maps[i], self.blocks[i].row_nbytes, index, target.reshape(-1).view(np.uint8))

    def sorted_order(self) -> np.ndarray:
        """Row numbers in the order of a 128-bit hash of each row: the same however the rows arrived.
        int64."""
        return sort_by_hash(self.row_hashes())

    def fingerprint(self, order: np.ndarray | None) -> str:
        """Equal for equal rows in the same order: `sorted_order()`, or None for the order of arrival."""
        hashes = self.row_hashes() if order is None else self.row_hashes()[order]
        return hashlib.sha256(np.ascontiguousarray(hashes).tobytes()).hexdigest()[:32]

    def row_hashes(self) -> np.ndarray:
        """(rows, 2) uint64: of all the blocks of each row."""
        if self._hashes is None:
            if not self.rows:
                return np.empty((0, 2), np.uint64)
            blocks = [(m, b.row_nbytes) for m, b in zip(self.maps, self.blocks, strict=True)]
            self._hashes = hash_rows(blocks, self.rows, _HASH_SEED)
        return self._hashes
