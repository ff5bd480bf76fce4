"""Ranks that are forced onto several hosts (HVD_HOST_ID): numpy's results and one host's bits, over TCP."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import hvd_core
import hvd_core.torch as hvd
from hvd_core import Average, Config, Max, Min, Product, Sum
from hvd_core.errors import RankFailed
from hvd_core.group import rows_of
from hvd_core.world import current
from tests.ranks.rounding import through

pytestmark = pytest.mark.timeout(120)

LAYOUTS = [(2, 2), (3, 1), (1, 3), (1, 1, 2), (1, 1, 1, 1)]
# None, one, a small message, several chunks with a tail, several staging windows of 64 KiB.
COUNTS = [0, 1, 1_001, 50_003, 300_007]


def _run(layout: tuple[int, ...], fn: Any, *args: Any, **settings: str) -> list[Any]:
    hosts = [f"host{h}" for h, ranks in enumerate(layout) for _ in range(ranks)]

    def env(rank: int) -> dict[str, str]:
        return {"HVD_HOST_ID": hosts[rank], **settings}

    return hvd_core.run(fn, args, num_proc=len(hosts), env=env, timeout_s=90)


def _values(dtype: Any, count: int, rank: int) -> np.ndarray:
    """Of many magnitudes, so that another order of additions gives other bits."""
    rng = np.random.default_rng([rank, count])
    if np.issubdtype(dtype, np.integer):
        return rng.integers(-100, 100, count).astype(dtype)
    return (rng.standard_normal(count) * 2.0 ** rng.integers(-4, 5, count)).astype(dtype)


COMBINE = {Sum: np.add, Average: np.add, Min: np.minimum, Max: np.maximum, Product: np.multiply}


def _oracle(dtype: Any, count: int, size: int, op: Any) -> np.ndarray:
    """In rank order; an average is divided once."""
    total = functools.reduce(COMBINE[op], [_values(dtype, count, rank) for rank in range(size)])
    return total / dtype(size) if op == Average else total


def _everything() -> tuple[tuple[int, ...], str]:
    """Where this rank is, and a hash of the results of all collectives."""
    world = current()
    seen = hashlib.sha256()
    with world.connect(Config.from_env()) as group:
        for dtype in (np.float32, np.float16, np.float64, np.int32):
            for op in (Sum, Average, Min, Max, Product):
                for count in COUNTS:
                    values = _values(dtype, count, world.rank)
                    with np.errstate(all="ignore"):
                        ordinary = np.empty_like(values)
                        group.allreduce(
                            values, out=ordinary, name=f"ordinary.{dtype.__name__}.{op}.{count}", op=op
                        )
                        arena = group.empty(values.nbytes).view(dtype)
                        arena[:] = values
                        group.allreduce(arena, name=f"arena.{dtype.__name__}.{op}.{count}", op=op)
                        if dtype in (np.float32, np.float64):
                            assert ordinary.tobytes() == _oracle(dtype, count, world.size, op).tobytes()
                    assert ordinary.tobytes() == arena.tobytes()
                    seen.update(ordinary.tobytes())
        for count in COUNTS:
            for root in range(world.size):
                values = _values(np.float32, count, world.rank)
                group.broadcast(values, root=root, name=f"broadcast.{count}.{root}")
                assert values.tobytes() == _values(np.float32, count, root).tobytes()
            rows = [_values(np.float32, count * r, r) for r in range(world.size)]
            gathered = group.allgather(rows[world.rank], name=f"allgather.{count}")
            assert np.asarray(gathered).tobytes() == np.concatenate(rows).tobytes()
        for count in COUNTS:
            values = _values(np.float32, count, world.rank)
            part = group.reducescatter(values, name=f"reducescatter.{count}", op=Average)
            rows = rows_of(count, world.rank, world.size)
            whole = _oracle(np.float32, count, world.size, Average)
            assert part.tobytes() == whole[rows.start : rows.stop].tobytes()
            ranks = range(world.size)
            splits = [[count // (1 + (2 * s + to) % 5) for to in ranks] for s in ranks]
            sent = [_values(np.float32, sum(mine), s) for s, mine in enumerate(splits)]
            came, counts = group.alltoall(sent[world.rank], splits=splits[world.rank], name=f"all.{count}")
            mine = [(sum(splits[s][: world.rank]), splits[s][world.rank]) for s in ranks]
            assert counts == [n for _, n in mine]
            expected = [sent[s][begin : begin + n] for s, (begin, n) in enumerate(mine)]
            assert came.tobytes() == np.concatenate(expected).tobytes()
        together = [np.full(n, world.rank + n, np.float32) for n in (1, 70_000, 0, 5, 300_000)]
        group.grouped_allreduce_async(together, name="group").wait()
        for array in together:
            assert (array == sum(rank + array.size for rank in range(world.size))).all()
        by_rank = group.allgather_bytes(b"r" * world.rank, name="bytes")
        assert by_rank == [b"r" * rank for rank in range(world.size)]
        group.barrier()
        native = group._native
        where = (native.cross_rank, native.cross_size, native.local_rank, native.local_size)
    return where, seen.hexdigest()


@functools.cache
def _on_one_host() -> str:
    (digest,) = {digest for _, digest in _run((4,), _everything, HVD_CHUNK_BYTES="65536")}
    return str(digest)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_bits_of_one_host(layout: tuple[int, ...]) -> None:
    results = _run(layout, _everything, HVD_CHUNK_BYTES="65536")
    expected = [(h, len(layout), r, ranks) for h, ranks in enumerate(layout) for r in range(ranks)]
    assert [where for where, _ in results] == expected
    assert {digest for _, digest in results} == {_on_one_host()}


def _sums(count: int, wires: list[str]) -> list[bytes]:
    """Of the values of all ranks; for each wire, and again by a plan."""
    world = current()
    sums = []
    for wire in wires:
        with world.connect(replace(Config.from_env(), wire_dtype=wire)) as group:
            values = _values(np.float32, count, world.rank)
            planned = values.copy()
            group.allreduce(values, name="x", op=Sum)
            plan = group.plan([("x", "float32", (count,))], name="plan", op=Sum, batch_bytes=1 << 17)
            assert plan is not None
            plan.begin()
            plan.ready(0, planned.ctypes.data)
            assert plan.end(0) == []
            plan.leave()
            sums += [values.tobytes(), planned.tobytes()]
    return sums


@pytest.mark.parametrize("layout", [(1, 1), (1, 2, 1)])
def test_a_narrow_wire_rounds_alike_on_all_ranks(layout: tuple[int, ...]) -> None:
    count, expected = 100_000, []
    for wire in ("bf16", "fp16"):
        ranks = iter(_values(np.float32, count, rank) for rank in range(sum(layout)))
        total = functools.reduce(np.add, [next(ranks) for _ in range(layout[0])])
        for here in layout[1:]:  # each host sends what it has
            total = functools.reduce(np.add, [next(ranks) for _ in range(here)], through(wire, total))
        expected += [through(wire, total).tobytes()] * 2
    assert _run(layout, _sums, count, ["bf16", "fp16"]) == [expected] * sum(layout)


def _disagree() -> None:
    _sums(100_000, [["", "fp16"][current().rank]])


def test_ranks_that_disagree_about_the_wire_are_told() -> None:
    with pytest.raises(RankFailed, match="HVD_WIRE_DTYPE must be the same on all ranks"):
        _run((1, 1), _disagree)


def _place() -> list[int]:
    hvd.init()
    return [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()]


def test_ranks_know_their_place() -> None:
    assert _run((3, 1), _place) == [
        [0, 4, 0, 3, 0, 2],
        [1, 4, 1, 3, 0, 2],
        [2, 4, 2, 3, 0, 2],
        [3, 4, 0, 1, 1, 2],
    ]


def _reconnect() -> list[float]:
    sums = []
    for _ in range(10):
        with current().connect(Config.from_env()) as group:
            sums.append(float(group.allreduce(np.ones(4), name="x", op=Sum)[0]))
    return sums


def test_hosts_part_and_meet_again() -> None:
    assert _run((2, 1, 2), _reconnect) == [[5.0] * 10] * 5
