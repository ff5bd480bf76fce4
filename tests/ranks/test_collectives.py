"""Collectives of real processes against numpy and torch on the joined inputs."""

from __future__ import annotations

import hashlib
import itertools
import os
from functools import reduce
from typing import Any

import numpy as np
import pytest
import torch

import hvd_core
from hvd_core import Average, Config, Group, Max, Min, Product, Sum, World
from hvd_core.errors import CollectiveTimeout, InvalidArgument
from hvd_core.group import rows_of
from hvd_core.world import current

pytestmark = pytest.mark.timeout(90)

INTS = [np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32, np.uint64, np.int64]
FLOATS = [np.float16, np.float32, np.float64]
# Nothing, one, an odd number, several chunks (of 64 KiB below) and a tail.
COUNTS = [0, 1, 37, 100_003]
CONFIG = Config(chunk_bytes=64 << 10)


def _values(dtype: Any, count: int, rank: int) -> np.ndarray:
    """What `rank` puts in: every rank can compute everybody's."""
    values = np.random.default_rng([rank, count]).integers(1, 4, count)
    return (values / 4 if np.issubdtype(dtype, np.floating) else values).astype(dtype)


_UFUNC = {Sum: np.add, Min: np.minimum, Max: np.maximum, Product: np.multiply}


def _reduced(inputs: list[np.ndarray], op: int) -> np.ndarray:
    """Left to right in rank order, 16-bit floats in float32, the average divided once at the end."""
    dtype = inputs[0].dtype
    work = [x.astype(np.float32) for x in inputs] if dtype == np.float16 else inputs
    if op != Average:
        return reduce(_UFUNC[hvd_core.ReduceOp(op)], work).astype(dtype)
    total = reduce(np.add, work)
    size = len(inputs)
    return (total // size if np.issubdtype(dtype, np.integer) else total / total.dtype.type(size)).astype(
        dtype
    )


def _allreduce_matrix() -> list[str]:
    wrong = []
    with current().connect(CONFIG) as g:
        for dtype, op, count in itertools.product(INTS + FLOATS, [Average, Sum, Min, Max, Product], COUNTS):
            name = f"{np.dtype(dtype).name}.{op.name}.{count}"
            expected = _reduced([_values(dtype, count, rank) for rank in range(g.size)], op)
            mine = _values(dtype, count, g.rank)
            g.allreduce(mine, name=name, op=op)
            if mine.tobytes() != expected.tobytes():
                wrong.append(name)
            # A result elsewhere leaves the input alone; memory of the arena is reduced where it is.
            mine, out = _values(dtype, count, g.rank), np.empty(count, dtype)
            arena = g.empty(mine.nbytes)[: mine.nbytes].view(dtype)
            arena[:] = mine
            g.allreduce(mine, name=f"{name}.out", op=op, out=out)
            g.allreduce(arena, name=f"{name}.arena", op=op)
            if out.tobytes() != expected.tobytes() or arena.tobytes() != expected.tobytes():
                wrong.append(f"{name}.out or .arena")
            if mine.tobytes() != _values(dtype, count, g.rank).tobytes():
                wrong.append(f"{name}: input changed")
        for op, is_or in ((Sum, True), (Max, True), (Min, False), (Product, False)):
            flags = np.array([g.rank == 0, False, True])
            g.allreduce(flags, name=f"bool.{op.name}", op=op)
            if flags.tolist() != [is_or or g.size == 1, False, True]:
                wrong.append(f"bool.{op.name}")
    return wrong


@pytest.mark.parametrize("size", [1, 2, 3])
def test_allreduce_equals_numpy_for_all_dtypes_and_ops(size: int) -> None:
    assert hvd_core.run(_allreduce_matrix, num_proc=size) == [[]] * size


def _other_collectives() -> list[str]:
    wrong = []

    def check(name: str, ok: bool) -> None:
        if not ok:
            wrong.append(name)

    with current().connect(CONFIG) as g:
        for dtype in [np.bool_, *INTS, *FLOATS]:
            # Uneven first dimensions; rank 0 has none.
            shapes = [(rank * 7_001, 3) for rank in range(g.size)]
            inputs = [
                _values(dtype, rows * 3, rank).reshape(rows, 3) for rank, (rows, _) in enumerate(shapes)
            ]
            gathered = g.allgather(inputs[g.rank], name=f"gather.{np.dtype(dtype).name}")
            same = gathered.dtype == dtype and np.array_equal(gathered, np.concatenate(inputs))
            check(f"allgather {dtype}", same)
            for root in range(g.size):
                array = _values(dtype, 50_021, g.rank)
                out = np.empty_like(array)
                g.broadcast(array, root=root, name=f"broadcast.{np.dtype(dtype).name}.{root}", out=out)
                check(f"broadcast {dtype}", np.array_equal(out, _values(dtype, 50_021, root)))
                check(f"broadcast {dtype} in", np.array_equal(array, _values(dtype, 50_021, g.rank)))
            # Everybody has another number of rows for everybody; some have none.
            splits = [[(sender * 5 + to * 3) % 4 * 1_001 for to in range(g.size)] for sender in range(g.size)]
            rows = [
                _values(dtype, 2 * sum(mine), sender).reshape(-1, 2) for sender, mine in enumerate(splits)
            ]
            starts = [sum(splits[sender][: g.rank]) for sender in range(g.size)]
            expected = [rows[s][b : b + splits[s][g.rank]] for s, b in enumerate(starts)]
            came, counts = g.alltoall(rows[g.rank], splits=splits[g.rank], name=f"to.{np.dtype(dtype).name}")
            check(f"alltoall {dtype}", came.dtype == dtype and np.array_equal(came, np.concatenate(expected)))
            check(f"alltoall {dtype} rows", counts == [splits[s][g.rank] for s in range(g.size)])
        for dtype, op, count in itertools.product(INTS + FLOATS, [Average, Sum, Min, Max, Product], COUNTS):
            name = f"scatter.{np.dtype(dtype).name}.{op.name}.{count}"
            whole = _reduced([_values(dtype, count, rank) for rank in range(g.size)], op)
            rows = list(rows_of(count, g.rank, g.size))
            mine = _values(dtype, count, g.rank)
            part = g.reducescatter(mine, name=name, op=op)
            check(name, part.tobytes() == whole[rows].tobytes())
            check(f"{name}: input changed", mine.tobytes() == _values(dtype, count, g.rank).tobytes())
        equal, counts = g.alltoall(np.arange(2 * g.size) + 100 * g.rank, name="equal")
        check(
            "equal splits",
            equal.tolist() == [100 * s + 2 * g.rank + i for s in range(g.size) for i in (0, 1)],
        )
        check("equal splits rows", counts == [2] * g.size)
        by_rank = g.allgather_bytes(b"r" * g.rank, name="b")
        check("bytes by rank", by_rank == [b"r" * r for r in range(g.size)])
        last = g.size - 1
        said = g.broadcast_bytes(b"from the last" if g.rank == last else None, root=last, name="c")
        check("bytes of the root", said == b"from the last")
        scaled = np.full(5, 3.0)
        g.allreduce(scaled, name="scaled", prescale=0.5, postscale=10.0)
        check("scales", scaled.tolist() == [15.0 * g.size] * 5)
        halves = np.full(5, 3, np.int32)
        g.allreduce(halves, name="int scale", prescale=0.5)
        check("integer scales truncate", halves.tolist() == [g.size] * 5)
        check("a 0-d array", g.allreduce(np.array(2.0), name="0-d") == 2 * g.size)
        g.barrier()
        bf16 = [torch.linspace(-2, 3, 10_007).to(torch.bfloat16) * (rank + 1) for rank in range(g.size)]
        mine = bf16[g.rank].clone()
        g.allreduce(mine, name="bf16", op=Average)
        total = reduce(torch.add, [x.float() for x in bf16]) / g.size
        check("bf16 averages in float32", torch.equal(mine, total.to(torch.bfloat16)))
        part = torch.empty(len(rows := rows_of(10_007, g.rank, g.size)), dtype=torch.bfloat16)
        g.reducescatter(bf16[g.rank], name="bf16 scatter", op=Average, out=part)
        check("bf16 scatters what it averages", torch.equal(part, mine[rows.start : rows.stop]))
        check(
            "bf16 gathers",
            torch.equal(torch.from_dlpack(g.allgather(mine, name="bf16 g")), torch.cat([mine] * g.size)),
        )
    return wrong


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_other_collectives_equal_numpy(size: int) -> None:
    assert hvd_core.run(_other_collectives, num_proc=size) == [[]] * size


def _random_order() -> tuple[bool, int, int]:
    """Two hundred tensors, submitted in another order by every rank."""
    with current().connect() as g:
        arrays = {f"t{i}": np.full(i + 1, float(i * (g.rank + 1)), np.float32) for i in range(200)}
        names = sorted(arrays, key=lambda name: hash((name, g.rank)))
        handles = {name: g.allreduce_async(arrays[name], name=name) for name in names}
        factor = sum(rank + 1 for rank in range(g.size))
        right = True
        for i in range(200):
            right = right and np.array_equal(handles[f"t{i}"].wait(), np.full(i + 1, float(i * factor)))
        before = g.stats()["fused_batches"]
        group = [np.ones(1000, np.float32) for _ in range(200)]
        outs = g.grouped_allreduce_async(group, name="group").wait()
        right = right and all((out == g.size).all() for out in outs)
        return right, g.stats()["fused_batches"] - before, g.stats()["collectives"]


def test_ranks_submit_in_any_order_and_groups_are_fused() -> None:
    for right, batches, collectives in hvd_core.run(_random_order, num_proc=3):
        assert right
        assert batches == 1, "800 kB of one dtype are one fused batch"
        assert collectives == 201


def _hash_of_sums(fusion_bytes: int, chunk_bytes: int, kernels: str, in_arena: bool) -> str:
    config = Config(fusion_bytes=fusion_bytes, chunk_bytes=chunk_bytes, kernels=kernels)
    with current().connect(config) as g:
        arrays = []
        for i, dtype in enumerate([np.float32, np.float16, np.float64] * 5):
            values = np.random.default_rng([i, g.rank]).standard_normal(10_001 * (i + 1)).astype(dtype)
            place = g.empty(values.nbytes)[: values.nbytes].view(dtype) if in_arena else np.empty_like(values)
            place[:] = values
            arrays.append(place)
        handles = [g.allreduce_async(a, name=f"a{i}", op=Average) for i, a in enumerate(arrays)]
        digest = hashlib.sha256()
        for handle in handles:
            digest.update(handle.wait().tobytes())
        return digest.hexdigest()


def _hashes() -> list[str]:
    cases = [
        (8 << 20, 256 << 10, "", False),
        (0, 4096, "", False),
        (1 << 30, 64 << 10, "baseline", False),
        (100_000, 256 << 10, "", True),
    ]
    return [_hash_of_sums(*case) for case in cases]


def test_fusion_chunks_kernels_and_place_do_not_change_a_bit() -> None:
    by_rank = hvd_core.run(_hashes, num_proc=3)
    assert len({digest for hashes in by_rank for digest in hashes}) == 1


def _bad_arguments() -> list[str]:
    texts = []
    with current().connect() as g:
        big = np.ones((100, 100), np.float32)
        frozen = np.ones(3)
        frozen.flags.writeable = False
        bad = [
            lambda: g.allreduce(big[:, ::2], name="strided"),
            lambda: g.allreduce(frozen, name="read only"),
            lambda: g.allreduce(np.ones(3, np.complex64), name="complex"),
            lambda: g.allreduce("text", name="no array"),
            lambda: g.allreduce(np.ones(3, bool), name="mean of bools", op=Average),
            lambda: g.broadcast(np.ones(3), root=7, name="root"),
            lambda: g.allgather(np.array(1.0), name="scalar"),
            lambda: g.allreduce(np.ones(3), name="other out", out=np.ones(4)),
            lambda: g.reducescatter(big, name="own out", out=big[:50]),
        ]
        for call in bad:
            try:
                call()
            except InvalidArgument as error:
                texts.append(str(error))
        if g.rank == 0:
            handle = g.allreduce_async(np.ones(3), name="twice")
            with pytest.raises(InvalidArgument, match="'twice'"):
                g.allreduce_async(np.ones(3), name="twice")
            with pytest.raises(CollectiveTimeout, match="'twice'"):
                handle.wait(timeout_s=0.01)
            g.barrier("go")
            handle.wait()
        else:
            g.barrier("go")
            g.allreduce(np.ones(3), name="twice")
    return texts


def test_bad_arguments_are_found_on_their_rank_and_nothing_else_happens() -> None:
    for texts in hvd_core.run(_bad_arguments, num_proc=2):
        assert len(texts) == 9, texts
        names = [
            "strided",
            "read only",
            "complex",
            "no array",
            "mean of bools",
            "root 7",
            "scalar",
            "other out",
            "own out",
        ]
        for text, name in zip(texts, names, strict=True):
            assert name in text


def _reconnect() -> list[float]:
    sums = []
    for _ in range(5):
        with current().connect() as g:
            sums.append(float(g.allreduce(np.ones(4), name="x", op=Sum)[0]))
    return sums


def test_a_process_connects_again_and_again() -> None:
    assert hvd_core.run(_reconnect, num_proc=2) == [[2.0] * 5] * 2


def test_a_world_of_one_needs_no_launcher() -> None:
    with World().connect() as g, Group.solo() as h:
        assert (g.rank, g.size, h.size) == (0, 1, 1)
        assert g.allreduce(np.ones(3), name="x", op=Average).tolist() == [1, 1, 1]


def test_ranks_of_one_host_are_neighbours() -> None:
    def endpoint(host: str, index: int) -> str:
        return f"hvd1;host={host};unix=u{index};tcp=10.0.0.1:{1000 + index}"

    hosts = ["b", "a", "b", "c", "a", "b"]
    assert World.arrange([endpoint(host, i) for i, host in enumerate(hosts)]) == [0, 2, 5, 1, 4, 3]


def _idle_share() -> float:
    with current().connect() as g:
        g.barrier("start")
        begin = os.times()
        with pytest.raises(CollectiveTimeout):
            g.allreduce_async(np.ones(1), name=f"never {g.rank}").wait(1.0)
        end = os.times()
        g.barrier("end")
        return (end.user + end.system - begin.user - begin.system) / (end.elapsed - begin.elapsed)


def test_waiting_costs_less_than_a_fiftieth_of_a_core() -> None:
    assert max(hvd_core.run(_idle_share, num_proc=2)) < 0.02
