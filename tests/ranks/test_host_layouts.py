"""Collectives of real processes on several hosts: HVD_HOST_ID parts them, TCP on loopback joins them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import reduce

import numpy as np
import pytest

import hvd_core
import hvd_core.torch as hvd
from hvd_core import Average, Config, Max, Sum
from hvd_core.world import current

pytestmark = pytest.mark.timeout(120)

#: Ranks per host.
LAYOUTS = [(4,), (2, 2), (3, 1), (1, 3), (1, 1, 1, 1)]


def _hosts(layout: tuple[int, ...]) -> list[str]:
    return [f"host-{host}" for host, ranks in enumerate(layout) for _ in range(ranks)]


def _on(layout: tuple[int, ...], fn: Callable, *args: object) -> list:
    hosts = _hosts(layout)
    return hvd_core.run(
        fn, args, num_proc=len(hosts), env=lambda rank: {"HVD_HOST_ID": hosts[rank]}, timeout_s=100
    )


def _values(dtype: type, count: int, rank: int) -> np.ndarray:
    """What `rank` puts in: every rank can compute everybody's."""
    return np.random.default_rng([rank, count]).integers(-9, 9, count).astype(dtype) / dtype(4)


def _place() -> list[int]:
    hvd.init()
    return [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()]


def test_ranks_know_their_place() -> None:
    assert _on((3, 1), _place) == [
        [0, 4, 0, 3, 0, 2],
        [1, 4, 1, 3, 0, 2],
        [2, 4, 2, 3, 0, 2],
        [3, 4, 0, 1, 1, 2],
    ]


def _all_collectives() -> list[str]:
    wrong = []

    def check(name: str, ok: bool) -> None:
        if not ok:
            wrong.append(name)

    with current().connect(Config.from_env()) as g:
        for dtype in (np.float32, np.float64):
            # Nothing, inline, small, several chunks and a tail.
            for count in (0, 1, 1000, 100_003, 1_500_001):
                inputs = [_values(dtype, count, rank) for rank in range(g.size)]
                for op, ufunc in ((Sum, np.add), (Average, np.add), (Max, np.maximum)):
                    expected = reduce(ufunc, inputs)
                    if op == Average:
                        expected = expected / dtype(g.size)
                    name = f"{np.dtype(dtype).name}.{op.name}.{count}"
                    mine, out = inputs[g.rank].copy(), np.empty(count, dtype)
                    arena = g.empty(mine.nbytes)[: mine.nbytes].view(dtype)
                    arena[:] = mine
                    handles = [
                        g.allreduce_async(mine, name=name, op=op, out=out),
                        g.allreduce_async(arena, name=f"{name}.arena", op=op),
                    ]
                    for handle in handles:
                        check(name, handle.wait().tobytes() == expected.tobytes())
                    check(f"{name}: input", mine.tobytes() == inputs[g.rank].tobytes())
        group = [np.full(n, float(g.rank + n), np.float32) for n in (1, 70_000, 0, 5, 300_000)]
        g.grouped_allreduce_async(group, name="group", op=Sum).wait()
        expected = [sum(rank + n for rank in range(g.size)) for n in (1, 70_000, 0, 5, 300_000)]
        check("group", all((a == e).all() for a, e in zip(group, expected, strict=True)))
        for rows in (3, 5_001):
            parts = [_values(np.float64, rank * rows * 2, rank).reshape(-1, 2) for rank in range(g.size)]
            gathered = g.allgather(parts[g.rank], name=f"gather.{rows}")
            check(f"allgather {rows}", np.array_equal(gathered, np.concatenate(parts)))
        for root in range(g.size):
            for count in (1, 50_021, 800_000):
                array = _values(np.float32, count, g.rank)
                g.broadcast(array, root=root, name=f"broadcast.{root}.{count}")
                check(f"broadcast {root} {count}", np.array_equal(array, _values(np.float32, count, root)))
        by_rank = g.allgather_bytes(b"r" * g.rank, name="b")
        check("bytes by rank", by_rank == [b"r" * r for r in range(g.size)])
        g.barrier()
    return wrong


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_collectives_equal_numpy(layout: tuple[int, ...]) -> None:
    assert _on(layout, _all_collectives) == [[]] * sum(layout)


def _hash() -> str:
    digest = hashlib.sha256()
    with current().connect() as g:
        for i, dtype in enumerate([np.float32, np.float16, np.float64]):
            for count in (7, 3_001, 400_001):
                values = np.random.default_rng([i, g.rank, count]).standard_normal(count).astype(dtype)
                g.allreduce(values, name=f"{i}.{count}", op=Average)
                digest.update(values.tobytes())
    return digest.hexdigest()


def test_the_layout_does_not_change_a_bit() -> None:
    hashes = {digest for layout in LAYOUTS for digest in _on(layout, _hash)}
    assert len(hashes) == 1


def _reconnect() -> list[float]:
    sums = []
    for _ in range(10):
        with current().connect(Config.from_env()) as g:
            sums.append(float(g.allreduce(np.ones(4), name="x", op=Sum)[0]))
    return sums


def test_hosts_part_and_meet_again() -> None:
    assert _on((2, 1, 2), _reconnect) == [[5.0] * 10] * 5
