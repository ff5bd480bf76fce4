"""Whatever ranks submit in whatever order: what agrees is reduced, what does not is said, nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hvd_core import Average, Group, Max, Min, Sum
from hvd_core.errors import MismatchError

from .connected import Ranks, connected

pytestmark = pytest.mark.timeout(120)

SIZES = [1, 2, 4]
OPS = {"sum": Sum, "average": Average, "min": Min, "max": Max}
DTYPES = ["float32", "float64", "int32"]

#: Groups live longer than one example, and under load one takes as long as it takes.
many = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
_names = count()


@pytest.fixture(scope="module", params=SIZES, ids=lambda size: f"{size} ranks")
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with connected(request.param) as connected_ranks:
        yield connected_ranks


@dataclass(frozen=True)
class Signature:
    dtype: str
    shape: tuple[int, ...]
    op: str


signatures = st.builds(
    Signature,
    st.sampled_from(DTYPES),
    st.one_of(
        st.lists(st.integers(0, 40), max_size=3).map(tuple),
        st.sampled_from([(11,), (12,), (13,), (4096,), (4097,), (30_000,)]),  # where the ways of doing it end
    ),
    st.sampled_from(sorted(OPS)),
)


@dataclass(frozen=True)
class Tensor:
    """What the ranks submit under one name: the same, or one of them something else."""

    usual: Signature
    other: Signature
    odd_rank: int | None
    in_arena: bool

    def of(self, rank: int) -> Signature:
        return self.other if rank == self.odd_rank else self.usual

    def agrees(self) -> bool:
        return self.odd_rank is None or self.usual == self.other


def tensors(size: int) -> st.SearchStrategy[Tensor]:
    odd = st.one_of(st.none(), st.none(), st.integers(0, size - 1)) if size > 1 else st.none()
    return st.builds(Tensor, signatures, signatures, odd, st.booleans())


@st.composite
def rounds(draw: Any, size: int) -> tuple[list[Tensor], list[list[int]], int]:
    """Tensors, the order of every rank, and how often all of it comes: again it goes by number."""
    chosen = draw(st.lists(tensors(size), min_size=1, max_size=8))
    orders = [draw(st.permutations(range(len(chosen)))) for _ in range(size)]
    return chosen, orders, draw(st.integers(1, 3))


def value(signature: Signature, rank: int, index: int) -> np.ndarray:
    n = int(np.prod(signature.shape, dtype=int))
    return ((np.arange(n) % 7 + 1) * (rank + 1) + index).astype(signature.dtype).reshape(signature.shape)


def expected(tensor: Tensor, size: int, index: int) -> np.ndarray:
    parts = [value(tensor.usual, rank, index) for rank in range(size)]
    combine = {"min": np.minimum, "max": np.maximum}.get(tensor.usual.op, np.add)
    result = np.asarray(reduce(combine, parts))
    if tensor.usual.op == "average":
        result = np.asarray(result // size if tensor.usual.dtype == "int32" else result / size)
    return result.astype(tensor.usual.dtype, copy=False)


def submit_all(
    group: Group, prefix: str, chosen: list[Tensor], order: list[int]
) -> list[np.ndarray | MismatchError]:
    """What came of each tensor."""
    handles: dict[int, Any] = {}
    for index in order:
        mine = chosen[index].of(group.rank)
        array = value(mine, group.rank, index)
        if chosen[index].in_arena and array.nbytes > 0:
            place = group.empty(array.nbytes)[: array.nbytes].view(mine.dtype).reshape(mine.shape)
            place[...] = array
            array = place
        handles[index] = group.allreduce_async(array, name=f"{prefix}.{index}", op=OPS[mine.op])
    results: list[np.ndarray | MismatchError] = []
    for index in range(len(chosen)):
        try:
            results.append(handles[index].wait(20))
        except MismatchError as error:
            results.append(error)
    return results


def complaint(tensor: Tensor, name: str) -> str:
    """Ranks are compared with rank 0."""
    rank = tensor.odd_rank or 1
    theirs, first = tensor.of(rank), tensor.of(0)
    for what, here, there in (
        ("reduction", theirs.op, first.op),
        ("dtype", theirs.dtype, first.dtype),
        ("shape", theirs.shape, first.shape),
    ):
        if here != there:
            return f"{name}: rank {rank} has {what} {here}, rank 0 has {there}"
    raise AssertionError("they agree")


@many
@given(data=st.data())
def test_what_agrees_is_reduced_and_what_does_not_is_named(ranks: Ranks, data: st.DataObject) -> None:
    size = len(ranks.groups)
    chosen, orders, times = data.draw(rounds(size))
    prefix = f"x{next(_names)}"
    for _ in range(times):
        results = ranks.on_every(lambda group: submit_all(group, prefix, chosen, orders[group.rank]))
        for index, tensor in enumerate(chosen):
            of_ranks = [result[index] for result in results]
            if tensor.agrees():
                right = expected(tensor, size, index)
                for got in of_ranks:
                    assert isinstance(got, np.ndarray), got
                    np.testing.assert_array_equal(got, right, strict=True)
                continue
            for got in of_ranks:
                assert isinstance(got, MismatchError)
                assert str(got) == complaint(tensor, f"{prefix}.{index}")
    # The ranks did the same work in the same batches.
    done = ranks.on_every(lambda group: (group.barrier(), group.stats())[1])
    for key in ("collectives", "fused_batches"):
        assert len({stats[key] for stats in done}) == 1, done


@st.composite
def steps_of_a_plan(draw: Any, size: int) -> tuple[list[int], int, int, list[list[list[int]]]]:
    """Counts, the limits of batches, and for each step what every rank hands over, in its order."""
    counts = draw(st.lists(st.one_of(st.integers(0, 300), st.just(70_000)), min_size=1, max_size=10))
    limits = draw(st.integers(64, 100_000)), draw(st.integers(64, 1_000_000))
    members = range(len(counts))
    full = st.permutations(members)
    some = st.lists(st.sampled_from(members), unique=True)
    steps = draw(st.lists(st.tuples(*[st.one_of(full, some)] * size).map(list), min_size=1, max_size=5))
    return counts, *limits, steps


def run_steps(
    group: Group, name: str, counts: list[int], first: int, limit: int, steps: list[list[list[int]]]
) -> None:
    members = [(f"m{i}", "float32", (n,)) for i, n in enumerate(counts)]
    plan = group.plan(members, name=name, op=Sum, first_bytes=first, batch_bytes=limit)
    assert plan is not None
    for number, step in enumerate(steps):
        arrays: dict[int, np.ndarray] = {}
        plan.begin()
        for member in step[group.rank]:
            arrays[member] = np.full(counts[member], group.rank + member + number, np.float32)
            plan.ready(member, arrays[member].ctypes.data)
        while needs := plan.end(0):
            for member in needs:
                assert member not in arrays
                arrays[member] = np.zeros(counts[member], np.float32)
                plan.supply(member, arrays[member].ctypes.data)
        for member, n in enumerate(counts):
            owners = [rank for rank in range(group.size) if member in step[rank]]
            assert (member in arrays) == bool(owners)
            if owners:
                total = sum(rank + member + number for rank in owners)
                np.testing.assert_array_equal(arrays[member], np.full(n, total, np.float32))


@many
@given(data=st.data())
def test_steps_of_a_plan_lose_nothing_whatever_is_missing_where(ranks: Ranks, data: st.DataObject) -> None:
    counts, first, limit, steps = data.draw(steps_of_a_plan(len(ranks.groups)))
    name = f"plan{next(_names)}"
    ranks.on_every(lambda group: run_steps(group, name, counts, first, limit, steps))
