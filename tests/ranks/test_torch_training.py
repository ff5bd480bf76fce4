"""What training scripts do with DistributedOptimizer, each on two ranks. Oracle: the same loop in plain torch
over the joined batch, fp64.

A loop is written once. `On` tells it whose rows it gets and what wraps the optimizer; alone, it gets all.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hvd_core
import hvd_core.torch as hvd

pytestmark = pytest.mark.timeout(150)

ROWS = 12


class On:
    """A rank of two, or plain torch (`rank` None)."""

    def __init__(self, rank: int | None):
        self.rank = rank

    def rows(self, x: Any) -> Any:
        return x if self.rank is None else x[self.rank :: 2]

    def wrap(self, optimizer: Any, **options: Any) -> Any:
        return optimizer if self.rank is None else hvd.DistributedOptimizer(optimizer, **options)

    def only_adds(self, optimizer: Any) -> Any:
        return contextlib.nullcontext() if self.rank is None else optimizer.no_sync()


def net(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1)).double()


def batch(step: int) -> Any:
    return torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def backward(model: Any, on: On, step: int) -> None:
    x = on.rows(batch(step))
    (model(x) - x.sum(dim=1, keepdim=True)).pow(2).mean().backward()


def values(*models: Any) -> list[Any]:
    return [p.detach() for model in models for p in model.parameters()]


# -- loops: (On) -> tensors to compare ---------------------------------------------------------------------


def words(on: On, step: int) -> Any:
    """In step 2 rank 0 has all and rank 1 none."""
    tokens = torch.randint(0, 9, (ROWS, 3), generator=torch.Generator().manual_seed(step))
    if step != 2:
        return on.rows(tokens)
    return tokens if on.rank != 1 else tokens[:0]


def sparse_gradients(on: On, optimizer_of: Any = torch.optim.SGD, **options: Any) -> list[Any]:
    """Two tables: the gradient of one is dense on rank 1 in step 3, the other has one in odd steps only."""
    torch.manual_seed(1)
    table, rare = (torch.nn.Embedding(9, 4, sparse=True).double() for _ in range(2))
    optimizer = on.wrap(optimizer_of([*table.parameters(), *rare.parameters()], lr=0.1), **options)
    for step in range(5):
        optimizer.zero_grad()
        tokens = words(on, step)
        if len(tokens):
            looked_up = table.weight[tokens] if (step, on.rank) == (3, 1) else table(tokens)
            looked_up = looked_up + (rare(tokens) if step % 2 else 0.0)
            (looked_up.pow(2).sum() * (1 if on.rank is None else 2) / ROWS).backward()
        if on.rank is not None:
            optimizer.synchronize()
            assert table.weight.grad.is_sparse
            assert step % 2 or rare.weight.grad is None
        optimizer.step()
    return values(table, rare)


def sparse_with_plain(on: On) -> list[Any]:
    """A sparse table under a dense head."""
    torch.manual_seed(2)
    table, head = torch.nn.EmbeddingBag(9, 4, sparse=True).double(), torch.nn.Linear(4, 1).double()
    optimizer = on.wrap(torch.optim.SGD([*table.parameters(), *head.parameters()], lr=0.1))
    for step in range(4):
        optimizer.zero_grad()
        head(table(words(on, 10 + step))).pow(2).mean().backward()
        optimizer.step()
    return values(table, head)


def is_global(model: Any) -> bool:
    """Whether both ranks have the same gradients."""
    first, second = hvd.allgather(model[0].weight.grad.sum().reshape(1)).tolist()
    return bool(first == second)


def local_passes(on: On) -> list[Any]:
    """Three passes a step, of which two only add; all gradients are global when the third returns."""
    model = net()
    optimizer = on.wrap(torch.optim.SGD(model.parameters(), lr=0.05))
    for step in range(4):
        optimizer.zero_grad()
        with on.only_adds(optimizer):
            for part in (1, 2):
                backward(model, on, 10 * step + part)
            assert on.rank is None or not is_global(model)
        backward(model, on, 10 * step)
        assert on.rank is None or is_global(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
    optimizer.zero_grad()
    with on.only_adds(optimizer):
        backward(model, on, 77)
    optimizer.step()  # reduces what nobody has
    return values(model)


def saved_and_loaded(on: On) -> list[Any]:
    """Wrapped with a state that it keeps, saved, and gone on with in new objects."""
    model = net()
    first = torch.optim.AdamW(model.parameters(), lr=0.02)
    for p in model.parameters():  # all ranks alike, before they are ranks
        p.grad = torch.ones_like(p)
    first.step()
    optimizer = on.wrap(first)
    assert optimizer is first and len(optimizer.state) == 4
    for step in range(6):
        if step == 3:
            file = io.BytesIO()
            torch.save([model.state_dict(), optimizer.state_dict()], file)
            file.seek(0)
            weights, state = torch.load(file, weights_only=True)
            model = net(seed=5)
            optimizer = on.wrap(torch.optim.AdamW(model.parameters(), lr=0.5))
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)
        optimizer.zero_grad()
        backward(model, on, step)
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())  # and into itself, between steps
    backward(model, on, 6)
    optimizer.step()
    return values(model)


def scheduled(on: On) -> list[Any]:
    model = net()
    optimizer = on.wrap(torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5))
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], milestones=[3])
    for step in range(7):
        optimizer.zero_grad()
        backward(model, on, step)
        optimizer.step()
        schedule.step()
    return values(model)


def changing_passes(on: On) -> list[Any]:
    model = net()
    optimizer = on.wrap(torch.optim.Adam(model.parameters(), lr=0.01), backward_passes_per_step=2)
    for step, passes in enumerate([2, 2, 2, 3, 3, 1]):
        if on.rank is not None and step in (3, 5):
            optimizer.set_backward_passes_per_step(passes)
        optimizer.zero_grad()
        for part in range(passes):
            backward(model, on, 10 * step + part)
        if on.rank is not None:
            assert optimizer._hvd._reduced
        optimizer.step()
    return values(model)


def compiled(on: On) -> list[Any]:
    model = net()
    optimizer = on.wrap(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    fast = torch.compile(model, backend="aot_eager")
    for step in range(4):
        optimizer.zero_grad()
        backward(fast, on, step)
        optimizer.step()
    return values(model)


def two_optimizers(on: On) -> list[Any]:
    """Over parts of one model, with steps of their own; the second accumulates."""
    model = net()
    body = on.wrap(torch.optim.SGD(model[0].parameters(), lr=0.1))
    head = on.wrap(torch.optim.Adam(model[2].parameters(), lr=0.01), backward_passes_per_step=2)
    for step in range(6):
        body.zero_grad()
        backward(model, on, step)
        body.step()
        if step % 2:
            head.step()
            head.zero_grad()
    return values(model)


def searched(on: On) -> list[Any]:
    """L-BFGS evaluates its closure several times and looks at the loss."""
    model = net()
    optimizer = on.wrap(
        torch.optim.LBFGS(model.parameters(), lr=0.3, max_iter=5, line_search_fn="strong_wolfe")
    )

    def evaluate() -> Any:
        optimizer.zero_grad()
        x = on.rows(batch(3))
        loss = (model(x) - x.sum(dim=1, keepdim=True)).pow(2).mean()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(evaluate)
    return values(model)


LOOPS: dict[str, Callable[[On], list[Any]]] = {
    "sparse": sparse_gradients,
    "sparse Adam": lambda on: sparse_gradients(on, torch.optim.SparseAdam),
    "sparse with predivide": lambda on: sparse_gradients(
        on, **({} if on.rank is None else {"gradient_predivide_factor": 4.0})
    ),
    "sparse with plain": sparse_with_plain,
    "no_sync": local_passes,
    "saved": saved_and_loaded,
    "scheduled": scheduled,
    "passes": changing_passes,
    "compiled": compiled,
    "two optimizers": two_optimizers,
    "searched": searched,
}


# -- on the ranks ------------------------------------------------------------------------------------------


class Eighths:
    """Somebody's own compression: rounds to eighths, as int16."""

    @staticmethod
    def compress(tensor: Any) -> Any:
        return (tensor * 8).round().to(torch.int16), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor.to(ctx) / 8


def own_gradients(rank: int) -> list[Any]:
    generator = torch.Generator().manual_seed(50 + rank)
    return [torch.randn(n, generator=generator) * 100 for n in (3, 1000)]


def compressed(compression: Any, **options: Any) -> list[Any]:
    params = [torch.nn.Parameter(torch.zeros_like(g)) for g in own_gradients(0)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), compression=compression, **options)
    for _ in range(2):
        optimizer.zero_grad()
        sum((p * g).sum() for p, g in zip(params, own_gradients(hvd.rank()), strict=True)).backward()
        optimizer.step()
    return [p.grad for p in params]


def accumulation_overlaps() -> list[bool]:
    """Whether gradients were handed over during each pass of the last step, seen from within it."""
    seen: list[bool] = []
    model = net()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), backward_passes_per_step=2
    )
    for step in range(3):
        optimizer.zero_grad()
        seen.clear()
        for part in range(2):
            x = On(hvd.rank()).rows(batch(step + part))
            hidden = model[:2](x)
            hidden.register_hook(
                lambda _: seen.append(optimizer._hvd._planned is not None and optimizer._hvd._planned.is_open)
            )
            model[2](hidden).sum().backward()
        optimizer.step()
    return seen


def all_loops() -> Any:
    torch.set_num_threads(1)
    hvd.init()
    on = On(hvd.rank())
    loops = {name: loop(on) for name, loop in LOOPS.items()}
    wires = {
        "none": compressed(hvd.Compression.none),
        "fp16": compressed(hvd.Compression.fp16),
        "bf16": compressed(hvd.Compression.bf16, gradient_predivide_factor=2.0),
        "eighths": compressed(Eighths, op=hvd.Sum),
    }
    return loops, wires, accumulation_overlaps()


@pytest.fixture(scope="module")
def on_ranks() -> Any:
    return hvd_core.run(all_loops, num_proc=2, timeout_s=120)


@pytest.mark.parametrize("name", list(LOOPS))
def test_two_ranks_train_as_one_on_the_joined_batch(on_ranks: Any, name: str) -> None:
    expected = LOOPS[name](On(None))
    (first, _, _), (second, _, _) = on_ranks
    for mine, other, oracle in zip(first[name], second[name], expected, strict=True):
        assert torch.equal(mine, other)
        assert torch.allclose(mine, oracle, rtol=0, atol=1e-9)


def test_gradients_on_a_narrow_wire(on_ranks: Any) -> None:
    def sums(through: Callable[[Any], Any]) -> list[Any]:
        return [through(a) + through(b) for a, b in zip(*map(own_gradients, (0, 1)), strict=True)]

    expected = {
        "none": [s / 2 for s in sums(lambda g: g)],
        "fp16": [(s / 2).half().float() for s in sums(lambda g: g.half().float())],
        "bf16": [(s / 2).bfloat16().float() for s in sums(lambda g: g.bfloat16().float())],
        "eighths": sums(lambda g: (g * 8).round() / 8),
    }
    for _, wires, _ in on_ranks:
        for name, oracle in expected.items():
            for found, value in zip(wires[name], oracle, strict=True):
                assert torch.equal(found, value), name


def test_the_last_of_several_passes_overlaps(on_ranks: Any) -> None:
    assert [seen for _, _, seen in on_ranks] == [[False, True]] * 2
