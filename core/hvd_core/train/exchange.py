"""Rows exchanged between ranks by their hash, so that who trains on what depends on the rows alone: on no
engine, partitioning or host.

In the order of their hashes rank r gets the r-th of `size` equal parts.
"""

from __future__ import annotations

import numpy as np

from ..config import Config
from .agree import compare_shards
from .ranks import Ranks
from .shard import BlockFiles, Shard, default_memory_bytes, describe_blocks
from .spec import TrainSpec

#: Rows are counted by the first bits of their hash; only those near a boundary are looked at one by one.
_BITS = 16
#: What a rank sends in one round.
_ROUND_BYTES = 4 << 20


def deal_by_hash(spec: TrainSpec, shard: Shard, ranks: Ranks) -> None:
    """Puts this rank's part of all rows in the place of the rows of `shard`; every rank calls it. Until it
    returns both are kept. Does nothing the second time."""
    if ranks.size == 1 or shard.is_dealt:
        return
    _, blocks = compare_shards(shard, ranks)
    own = Shard(shard.rows, blocks, shard.maps, shard.nulls)
    on_host = 1 if ranks.group is None else ranks.group.local_size
    config = Config.from_env()
    memory_bytes = spec.shard_memory_bytes or config.shard_memory_bytes or default_memory_bytes(on_host)
    files = BlockFiles([b.role for b in blocks], memory_bytes, spec.shard_dir or config.shard_dir)
    try:
        exchange_rows(own, destinations(own, ranks), ranks, files)
        shard.become(Shard.attach(files.fds, files.describe(describe_blocks(blocks), shard.nulls)))
    finally:
        files.close()


def destinations(shard: Shard, ranks: Ranks) -> np.ndarray:
    """For each row of this rank the rank it belongs to, int64. Of equal rows any may go anywhere."""
    hashes = shard.row_hashes()
    bins = (hashes[:, 0] >> np.uint64(64 - _BITS)).astype(np.int64)
    counts = ranks.sum(np.bincount(bins, minlength=1 << _BITS).astype(np.int64), "hash_bins")
    before = np.concatenate([[0], np.cumsum(counts)])
    total = int(before[-1])
    bounds = np.array([-(-r * total // ranks.size) for r in range(1, ranks.size)], np.int64)
    targets = np.searchsorted(bounds, before[bins], side="right")
    is_split = np.zeros(1 << _BITS, bool)
    inner = bounds[bounds < total]  # fewer rows than ranks: the last parts are empty
    is_split[np.searchsorted(before, inner, side="right") - 1] = True
    near = np.flatnonzero(is_split[bins])
    near = near[np.lexsort((hashes[near, 1], hashes[near, 0]))]
    own, first, repeats = _runs(hashes[near])
    starts = _starts(own, repeats, before, ranks)
    occurrence = np.arange(len(near)) - np.repeat(first, repeats)
    targets[near] = np.searchsorted(bounds, np.repeat(starts, repeats) + occurrence, side="right")
    return np.asarray(targets, np.int64)


def _runs(hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of sorted hashes: the distinct ones, where each begins, how often it comes."""
    is_first = np.ones(len(hashes), bool)
    is_first[1:] = (hashes[1:] != hashes[:-1]).any(axis=1)
    first = np.flatnonzero(is_first)
    return hashes[first], first, np.diff(np.append(first, len(hashes)))


def _starts(own: np.ndarray, repeats: np.ndarray, before: np.ndarray, ranks: Ranks) -> np.ndarray:
    """Where in the order of all ranks' rows this rank's copies of each of its distinct hashes begin."""
    data = np.concatenate([own, repeats.astype(np.uint64)[:, None]], axis=1)
    parts = [np.frombuffer(d, np.uint64).reshape(-1, 3) for d in ranks.gather(data.tobytes(), "near_bounds")]
    rank = np.repeat(np.arange(len(parts)), [len(p) for p in parts])
    every = np.concatenate(parts)
    order = np.lexsort((rank, every[:, 1], every[:, 0]))
    every, rank = every[order], rank[order]
    bins = (every[:, 0] >> np.uint64(64 - _BITS)).astype(np.int64)
    count = every[:, 2].astype(np.int64)
    running = np.cumsum(count) - count
    first_of_bin = running[np.searchsorted(bins, bins)] if len(bins) else running
    starts: np.ndarray = (before[bins] + running - first_of_bin)[rank == ranks.rank]
    return starts


def exchange_rows(shard: Shard, targets: np.ndarray, ranks: Ranks, files: BlockFiles) -> None:
    """Adds to `files` the rows of all ranks whose target is this one, in rounds of 4 MiB a rank."""
    row_nbytes = sum(b.row_nbytes for b in shard.blocks)
    step = max(1, _ROUND_BYTES // row_nbytes)
    own_rounds = np.zeros(ranks.size, np.int64)
    own_rounds[ranks.rank] = -(-shard.rows // step)
    for i in range(int(ranks.sum(own_rounds, "exchange_rounds").max())):
        here = np.arange(i * step, min((i + 1) * step, shard.rows))
        index = here[np.argsort(targets[here], kind="stable")]
        counts = np.bincount(targets[index], minlength=ranks.size)
        received = []
        for b, block in enumerate(shard.blocks):
            rows = np.empty((len(index), block.row_nbytes), np.uint8)
            shard.gather(index, [rows], [b])
            received.append(ranks.deal(rows, counts.tolist(), f"exchange.{b}"))
        if len(received[0]):
            files.write(received)
