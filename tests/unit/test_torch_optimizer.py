"""DistributedOptimizer over ranks that are threads. Oracle: plain torch on one process with the joined batch,
fp64."""

from __future__ import annotations

import copy
import pickle
import re
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hvd_core.torch as hvd
from hvd_core.errors import HvdError, InvalidArgument, MismatchError
from tests.unit.thread_ranks import calls, reductions, run_ranks

pytestmark = pytest.mark.timeout(60)

ROWS, FEATURES = 12, 5


seed_lock = threading.Lock()  # torch's seed is per process, our ranks are threads


def make_model() -> Any:
    with seed_lock:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(FEATURES, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1)]
    return torch.nn.Sequential(*layers).double()


def batch(step: int) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(ROWS, FEATURES, generator=generator, dtype=torch.float64)
    return x, torch.randn(ROWS, 1, generator=generator, dtype=torch.float64)


def mine(rank: int, size: int, step: int) -> tuple[Any, Any]:
    x, y = batch(step)
    return x[rank::size], y[rank::size]


def loss_of(model: Any, xy: tuple[Any, Any]) -> Any:
    return torch.nn.functional.mse_loss(model(xy[0]), xy[1])


def state(model: Any) -> list[Any]:
    return [p.detach().clone() for p in model.parameters()]


def close(model: Any, expected: list[Any]) -> bool:
    return all(
        torch.allclose(p, e, rtol=0, atol=1e-9) for p, e in zip(model.parameters(), expected, strict=True)
    )


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=4),
}


def train_plain(
    make_optimizer: Callable[[Any], Any], steps: int, closure: bool = False, clip: float | None = None
) -> list[Any]:
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    for step in range(steps):

        def evaluate(step: int = step) -> Any:
            optimizer.zero_grad()
            loss = loss_of(model, batch(step))
            loss.backward()
            return loss

        if closure:
            optimizer.step(evaluate)
            continue
        evaluate()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return state(model)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kind", list(OPTIMIZERS))
@pytest.mark.parametrize("set_to_none", [True, False])
def test_n_ranks_equal_one_on_the_joined_batch(size: int, kind: str, set_to_none: bool) -> None:
    closure = kind == "lbfgs"
    expected = train_plain(OPTIMIZERS[kind], 5, closure=closure)

    def body(rank: int) -> None:
        model = make_model()
        plain = OPTIMIZERS[kind](model.parameters())
        optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters())
        assert optimizer is plain
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        for step in range(5):

            def evaluate(step: int = step) -> Any:
                optimizer.zero_grad(set_to_none=set_to_none)
                loss = loss_of(model, mine(rank, size, step))
                loss.backward()
                return loss

            if closure:
                optimizer.step(evaluate)
            else:
                evaluate()
                optimizer.synchronize()
                optimizer.step()
            scheduler.step()
        assert close(model, expected)
        if size == 1:
            assert all(torch.equal(p, e) for p, e in zip(model.parameters(), expected, strict=True))
            assert calls() == []
        elif not closure:
            assert reductions() == 5

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_ranks(size, body)


def test_closure_returns_the_average_loss() -> None:
    expected = train_plain(OPTIMIZERS["sgd"], 1)

    def body(rank: int) -> None:
        model = make_model()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        joined = loss_of(model, batch(0)).item()

        def evaluate() -> Any:
            optimizer.zero_grad()
            loss = loss_of(model, mine(rank, 2, 0))
            loss.backward()
            return loss

        assert optimizer.step(closure=evaluate).item() == pytest.approx(joined, abs=1e-12)
        assert close(model, expected)
        optimizer.zero_grad()
        assert optimizer.step(lambda: float(rank)) == 0.5  # no backward anywhere
        assert close(model, expected)

    run_ranks(2, body)


def test_closures_of_a_rank_without_rows() -> None:
    """L-BFGS evaluates its closure several times; rank 1 contributes zeros to each."""
    oracle = make_model()
    plain = OPTIMIZERS["lbfgs"](oracle.parameters())

    def evaluate_oracle() -> Any:
        plain.zero_grad()
        loss = loss_of(oracle, batch(0)) / 2
        loss.backward()
        return loss

    plain.step(evaluate_oracle)

    def body(rank: int) -> None:
        model = make_model()
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS["lbfgs"](model.parameters()))

        def evaluate() -> Any:
            optimizer.zero_grad()
            if rank == 1:
                return 0.0
            loss = loss_of(model, batch(0))
            loss.backward()
            return loss

        optimizer.step(evaluate)
        assert close(model, state(oracle))

    run_ranks(2, body)


class Branches(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with seed_lock:
            torch.manual_seed(3)
            self.stem, self.a, self.b, self.never = (torch.nn.Linear(4, 4).double() for _ in range(4))

    def forward(self, x: Any, which: str) -> Any:
        return getattr(self, which)(self.stem(x).tanh())


def test_parameters_used_on_some_ranks_only() -> None:
    x = torch.linspace(-1, 1, 8, dtype=torch.float64).reshape(2, 4)
    oracle = Branches()
    ((oracle(x, "a").sum() + oracle(x * 2, "b").pow(2).sum()) / 2).backward()

    def body(rank: int) -> None:
        model = Branches()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
        )
        (model(x, "a").sum() if rank == 0 else model(x * 2, "b").pow(2).sum()).backward()
        for (name, p), q in zip(model.named_parameters(), oracle.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None) == name.startswith("never"), name
            assert p.grad is None or torch.allclose(p.grad, q.grad, rtol=0, atol=1e-12), name
        optimizer.step()

    run_ranks(2, body)


def test_two_optimizers_whose_gradients_come_crosswise_or_not_at_all() -> None:
    x = torch.linspace(-1, 1, 8, dtype=torch.float64).reshape(2, 4)

    def body(rank: int) -> list[Any]:
        a, b = (torch.nn.Linear(4, 4).double() for _ in range(2))
        hvd.broadcast_parameters([*a.parameters(), *b.parameters()], 0)
        opt_a, opt_b = (hvd.DistributedOptimizer(torch.optim.SGD(m.parameters(), lr=0.1)) for m in (a, b))
        for step in range(4):
            opt_a.zero_grad()
            opt_b.zero_grad()
            if step < 2:
                (b(a(x)) if rank == 0 else a(b(x))).sum().backward()
            elif step == 2:
                (a(b(x)) if rank == 0 else b(x)).sum().backward()  # rank 1: nothing for opt_a
            elif rank == 0:
                (a(x) + b(x)).sum().backward()  # rank 1: no backward
            opt_a.step()
            opt_b.step()
        return state(a) + state(b)

    first, second = run_ranks(2, body)
    assert all(torch.equal(p, q) for p, q in zip(first, second, strict=True))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_rank_without_rows_joins_also_after_a_skipped_step(set_to_none: bool) -> None:
    def body(rank: int) -> None:
        model, oracle = make_model(), make_model()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        plain = torch.optim.SGD(oracle.parameters(), lr=0.1)
        for step, (has_rows, steps) in enumerate([(True, True), (False, True), (True, False), (False, True)]):
            optimizer.zero_grad(set_to_none=set_to_none)
            plain.zero_grad()
            loss = loss_of(oracle, mine(0, 2, step))
            if has_rows:
                loss = loss + loss_of(oracle, mine(1, 2, step))
            (loss / 2).backward()
            if rank == 0 or has_rows:
                loss_of(model, mine(rank, 2, step)).backward()
            else:
                optimizer.synchronize()
            if steps:
                optimizer.step()
                plain.step()
            for p, q in zip(model.parameters(), oracle.parameters(), strict=True):
                assert torch.allclose(p.grad, q.grad, rtol=0, atol=1e-12)
        assert close(model, state(oracle))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_ranks(2, body)


@pytest.mark.parametrize("count_restarts", [False, True])
def test_r29_accumulation_that_does_not_divide_the_epoch(count_restarts: bool) -> None:
    """26 batches, 8 passes a step. Steps by a running count: exactly one reduction each. By a count that
    restarts with the epoch, two passes are left over and come on top: same numbers as plain torch, one
    warning."""

    def steps_after(epoch: int, i: int) -> bool:
        return ((i if count_restarts else epoch * 26 + i) + 1) % 8 == 0

    oracle = make_model()
    plain = torch.optim.SGD(oracle.parameters(), lr=0.01)
    for epoch in range(2):
        for i in range(26):
            loss_of(oracle, batch(i)).backward()
            if steps_after(epoch, i):
                plain.step()
                plain.zero_grad()
    expected = state(oracle)

    def body(rank: int) -> None:
        model = make_model()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.01), backward_passes_per_step=8
        )
        for epoch in range(2):
            for i in range(26):
                loss_of(model, mine(rank, 2, i)).backward()
                if steps_after(epoch, i):
                    optimizer.step()
                    optimizer.zero_grad()
        assert close(model, expected)
        if not count_restarts:
            assert reductions() == 6

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(2, body)
    assert len(caught) == (2 if count_restarts else 0)  # one per rank
    assert all("backward_passes_per_step=8" in str(w.message) for w in caught)


def test_one_backward_too_many_is_reduced_again_with_one_warning() -> None:
    oracle = make_model()
    (loss_of(oracle, batch(0)) + loss_of(oracle, batch(1))).backward()

    def body(rank: int) -> None:
        model = make_model()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        loss_of(model, mine(rank, 2, 0)).backward()
        loss_of(model, mine(rank, 2, 1)).backward()
        for p, q in zip(model.parameters(), oracle.parameters(), strict=True):
            assert torch.allclose(p.grad, q.grad, rtol=0, atol=1e-12)
        loss_of(model, mine(rank, 2, 1)).backward()
        optimizer.step()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(2, body)
    assert len(caught) == 2  # one per rank
    assert all("backward_passes_per_step=1" in str(w.message) for w in caught)


def test_one_backward_too_many_is_refused_for_sums() -> None:
    def body(rank: int) -> None:
        model = make_model()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=hvd.Sum)
        loss_of(model, mine(rank, 2, 0)).backward()
        with pytest.raises(InvalidArgument, match="op=Sum the first ones would be counted") as kept:
            loss_of(model, mine(rank, 2, 1)).backward()
        optimizer.zero_grad()
        for set_to_none in (True, False, True):  # a skipped step is not a second pass
            before = reductions()
            loss_of(model, mine(rank, 2, 1)).backward()
            assert reductions() - before == 1
            optimizer.zero_grad(set_to_none=set_to_none)
        assert kept.value.__traceback__ is not None  # which kept the failed pass alive

    run_ranks(2, body)


@pytest.mark.parametrize("manual", ["plain", "horovod"])
def test_r32_clipping_between_backward_and_step(manual: str) -> None:
    expected = train_plain(OPTIMIZERS["momentum"], 5, clip=0.1)

    def body(rank: int) -> None:
        model = make_model()
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS["momentum"](model.parameters()), model.named_parameters()
        )
        for step in range(5):
            optimizer.zero_grad()
            loss_of(model, mine(rank, 2, step)).backward()
            if manual == "plain":
                assert torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1) > 0.1
                optimizer.step()
            else:
                optimizer.synchronize()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                with optimizer.skip_synchronize():
                    optimizer.step()
        assert close(model, expected)
        assert reductions() == 5

    run_ranks(2, body)


def test_grad_scaler_agrees_when_one_rank_overflows() -> None:
    def body(rank: int) -> list[Any]:
        model = make_model().float()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
        before = state(model)
        for step in range(3):
            optimizer.zero_grad()
            x, y = (t.float() for t in mine(rank, 2, step))
            if step == 1 and rank == 1:
                x = x * float("inf")
            scaler.scale(loss_of(model, (x, y))).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            if step == 1:
                assert scaler.get_scale() == 2.0
        assert reductions() == 3
        assert not torch.equal(before[0], state(model)[0])
        assert all(p.isfinite().all() for p in model.parameters())
        return state(model)

    first, second = run_ranks(2, body)
    assert all(torch.equal(p, q) for p, q in zip(first, second, strict=True))


@pytest.mark.parametrize("clone", [copy.deepcopy, copy.copy, lambda o: pickle.loads(pickle.dumps(o))])
def test_a_copied_optimizer_refuses_to_step_until_wrapped(clone: Callable[[Any], Any]) -> None:
    def body(rank: int) -> None:
        model = make_model()
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS["adam"](model.parameters()))
        loss_of(model, mine(rank, 2, 0)).backward()
        optimizer.step()
        twin = clone(optimizer)
        assert type(twin) is torch.optim.Adam
        for _ in range(2):
            with pytest.raises(InvalidArgument, match="Adam is a copy of a DistributedOptimizer"):
                twin.step()
        optimizer.step()
        hvd.DistributedOptimizer(twin).step()
        with pytest.raises(InvalidArgument, match="distributed already"):
            hvd.DistributedOptimizer(optimizer)
        again = OPTIMIZERS["adam"](model.parameters())
        again.load_state_dict(optimizer.state_dict())  # plain torch: nothing of ours in it
        again.step()
        copy.deepcopy(model), pickle.loads(pickle.dumps(model))

    run_ranks(2, body)


def test_parameters_frozen_unfrozen_and_added_later() -> None:
    def train(model: Any, wrap: Callable[[Any], Any], xy: Callable[[int], Any]) -> list[Any]:
        first, _, last = model
        for p in last.parameters():
            p.requires_grad_(False)
        optimizer = wrap(torch.optim.SGD(last.parameters(), lr=0.1))
        for step in range(4):
            if step == 1:
                for p in last.parameters():
                    p.requires_grad_(True)
                for p in first.parameters():
                    p.requires_grad_(False)
            if step == 2:
                for p in first.parameters():
                    p.requires_grad_(True)
                optimizer.add_param_group({"params": list(first.parameters()), "lr": 0.05})
            optimizer.zero_grad()
            loss_of(model, xy(step)).backward()
            if step != 2:
                torch.nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 0.05)
            optimizer.step()
        return state(model)

    expected = train(make_model(), lambda optimizer: optimizer, batch)

    def body(rank: int) -> None:
        model = make_model()
        train(model, hvd.DistributedOptimizer, lambda step: mine(rank, 2, step))
        assert close(model, expected)

    run_ranks(2, body)


def test_a_replaced_parameter_takes_no_part() -> None:
    def body(rank: int) -> None:
        old, new = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([old], lr=1.0))
        optimizer.param_groups[0]["params"][0] = new
        optimizer.step()
        before = reductions()
        (old * rank).sum().backward()
        assert reductions() == before
        (new * rank).sum().backward()
        assert new.grad.tolist() == [0.5, 0.5]
        assert reductions() == before + 1

    run_ranks(2, body)


def test_options_of_the_reduction() -> None:
    def grads(rank: int, **options: Any) -> Any:
        p = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
        hvd.DistributedOptimizer(optimizer := torch.optim.SGD([p], lr=0.1), **options)
        (p * torch.tensor([1.0, 2.0, 4.0]) * (rank + 1)).sum().backward()
        assert optimizer is not None  # alive until here
        return p.grad.tolist()

    def body(rank: int) -> None:
        assert grads(rank) == [1.5, 3.0, 6.0]
        assert grads(rank, op=hvd.Sum) == [3.0, 6.0, 12.0]
        assert grads(rank, op=hvd.Min) == [1.0, 2.0, 4.0]
        assert grads(rank, op=hvd.Max) == [2.0, 4.0, 8.0]
        assert grads(rank, gradient_predivide_factor=2.0) == [1.5, 3.0, 6.0]
        for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
            assert grads(rank, compression=compression) == [1.5, 3.0, 6.0]
        assert grads(rank, groups=2) == [1.5, 3.0, 6.0]

    run_ranks(2, body)


def test_gradients_that_are_no_plain_buffers() -> None:
    def body(rank: int) -> None:
        conv = torch.nn.Conv2d(2, 3, 3).double().to(memory_format=torch.channels_last)
        with torch.no_grad():
            conv.weight.fill_(0.5), conv.bias.zero_()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(conv.parameters(), lr=0.1))
        x = (
            torch.arange(2 * 2 * 5 * 5, dtype=torch.float64)
            .reshape(2, 2, 5, 5)
            .to(memory_format=torch.channels_last)
        )
        oracle = copy.deepcopy(conv)
        oracle(x).pow(2).mean().backward()
        assert not oracle.weight.grad.is_contiguous()
        if rank == 1:  # the other layout on this rank
            conv.weight.data = conv.weight.data.contiguous()
        conv(x[rank : rank + 1].contiguous() if rank else x[:1]).pow(2).mean().backward()
        assert torch.allclose(conv.weight.grad, oracle.weight.grad, rtol=1e-12)
        optimizer.step()
        p = torch.nn.Parameter(torch.ones(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=0.1))
        (p**2 * (rank + 1)).sum().backward(create_graph=True)  # a gradient with a graph
        assert p.grad.tolist() == [3.0, 3.0]
        p.grad = None  # breaks the cycle that torch warns of

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_ranks(2, body)


def test_sparse_gradients() -> None:
    def body(rank: int) -> None:
        table = torch.nn.Embedding(6, 2, sparse=True).double()
        with torch.no_grad():
            table.weight.fill_(1.0)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(table.parameters(), lr=0.1), [("emb.weight", table.weight)], op=hvd.Max
        )
        with pytest.raises(InvalidArgument, match=r"gradient of emb\.weight: .*Average or Sum, not Max"):
            (table(torch.tensor([0, 3])).sum() if rank == 0 else table.weight.sum()).backward()
        table = copy.deepcopy(table)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SparseAdam(table.parameters(), lr=0.1), sparse_as_dense=True
        )
        used = torch.tensor([0, 3, 3]) if rank == 0 else torch.tensor([3, 5])
        table(used).sum().backward()
        assert table.weight.grad.is_sparse
        assert table.weight.grad.to_dense()[:, 0].tolist() == [0.5, 0.0, 0.0, 1.5, 0.0, 0.5]
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            table(used).sum().backward()  # rank 1 has none and joins in step
        optimizer.step()
        assert table.weight.grad.is_sparse
        assert table.weight.grad.to_dense()[3].tolist() == [1.0, 1.0]

    run_ranks(2, body)


def test_a_failed_backward_leaves_no_trace() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            raise ZeroDivisionError("in the user's backward")

    def body(rank: int) -> None:
        model = make_model()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        x, y = mine(rank, 2, 0)
        kept = None
        try:
            first = Fails.apply(model[0](x))
            torch.nn.functional.mse_loss(model[2](first.tanh()), y).backward()
        except ZeroDivisionError as error:
            kept = error
        assert kept is not None
        assert calls() == []
        assert model[2].weight.grad is not None
        optimizer.zero_grad()
        loss_of(model, (x, y)).backward()
        assert reductions() == 1
        optimizer.step()

    run_ranks(2, body)


def test_reentrant_checkpointing_gives_the_same_gradients() -> None:
    from torch.utils.checkpoint import checkpoint

    oracle = make_model()
    loss_of(oracle, batch(0)).backward()

    # Else a recomputation sets the global generator while the other thread makes its model.
    options = {"use_reentrant": True, "preserve_rng_state": False}

    def body(rank: int) -> None:
        for whole in (False, True):
            model = make_model()
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            x, y = mine(rank, 2, 0)
            x.requires_grad_(True)
            hidden = checkpoint(lambda x, model=model: model[1](model[0](x)), x, **options)
            out = checkpoint(model[2], hidden, **options) if whole else model[2](hidden)
            before = reductions()
            torch.nn.functional.mse_loss(out, y).backward()
            assert whole or reductions() - before == 1
            optimizer.synchronize()
            for p, q in zip(model.parameters(), oracle.parameters(), strict=True):
                assert torch.allclose(p.grad, q.grad, rtol=0, atol=1e-12)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_ranks(2, body)


def test_gradients_set_by_hand_are_reduced_in_step() -> None:
    def body(rank: int) -> None:
        p = torch.nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0))
        p.grad = torch.full((2,), float(rank))
        with optimizer.skip_synchronize():
            optimizer.step()
        assert p.tolist() == [-float(rank)] * 2
        optimizer.step()
        assert p.grad.tolist() == [0.5, 0.5]

    run_ranks(2, body)


def test_a_dropped_optimizer_takes_its_hooks_along() -> None:
    def body(rank: int) -> None:
        model = make_model()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        gone = weakref.ref(optimizer)
        del optimizer
        assert gone() is None
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
        loss_of(model, mine(rank, 2, 0)).backward()
        assert calls() == []

    run_ranks(2, body)


def test_errors_name_the_parameter_and_the_rank() -> None:
    def body(rank: int) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4 + rank, 1))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
        )
        x = torch.ones(2, 3)
        with pytest.raises(MismatchError, match=r"gradient of 1\.weight: rank 1 has .*5.*rank 0 has .*4"):
            model[1](torch.nn.functional.pad(model[0](x), (0, rank))).sum().backward()
        other = torch.optim.SGD([torch.nn.Parameter(torch.ones(1)) for _ in range(1 + rank)], lr=0.1)
        hvd.DistributedOptimizer(other)
        with pytest.raises(HvdError, match="has_gradient"):
            other.step()
        del optimizer

    run_ranks(2, body)


def test_bad_arguments() -> None:
    def body(rank: int) -> None:
        model = make_model()
        params = list(model.named_parameters())
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        for kwargs, text in [
            ({"named_parameters": [*params, params[0]]}, "found twice: 0.weight"),
            ({"named_parameters": params[1:]}, r"1 of the optimizer's 4 parameters.*\(7, 5\)"),
            ({"named_parameters": [p for _, p in params]}, "sequence of tuples"),
            ({"backward_passes_per_step": 0}, "backward_passes_per_step"),
            ({"op": hvd.Adasum}, "Adasum"),
            ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "op=Average only"),
            ({"groups": -1}, "groups"),
            ({"groups": ["a"]}, "groups"),
            ({"process_set": [0]}, "process_set"),
        ]:
            with pytest.raises(ValueError, match=text):
                hvd.DistributedOptimizer(sgd, **kwargs)
        with pytest.raises(ValueError, match="Optimizer, got Sequential"):
            hvd.DistributedOptimizer(model)
        optimizer = hvd.DistributedOptimizer(sgd, params)
        with pytest.raises(ValueError, match="positive integer"):
            optimizer.set_backward_passes_per_step(0)
        assert [optimizer._parameter_names[p] for p in model.parameters()] == [name for name, _ in params]
        two_groups = torch.optim.SGD([{"params": [p]} for p in model.parameters()], lr=0.1)
        names = hvd.DistributedOptimizer(two_groups)._parameter_names.values()
        assert len(set(names)) == 4
        assert calls() == []

    run_ranks(2, body)


def test_a_parameter_belongs_to_the_optimizer_made_last() -> None:
    def rank_main(rank: int) -> tuple[str, str, bool]:
        model = make_model()
        first = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
        loss_of(model, mine(rank, 2, 0)).backward()
        first.step()
        second = hvd.DistributedOptimizer(torch.optim.SGD(model[2].parameters(), 0.1))
        one_hook = all(len(p._post_accumulate_grad_hooks) == 1 for p in model.parameters())
        with pytest.raises(InvalidArgument) as refused:
            loss_of(model, mine(rank, 2, 0)).backward()
        with pytest.raises(InvalidArgument) as refused_again:
            first.step()
        del second
        return str(refused.value), str(refused_again.value), one_hook

    for refused, again, one_hook in run_ranks(2, rank_main):
        assert re.match(r"parameter 2\.(weight|bias) of shape .* belongs to another Distributed", refused)
        assert again == refused
        assert one_hook


def test_an_optimizer_made_again_takes_over() -> None:
    """As when a notebook's cell runs a second time: the old one is still there while the new one is made."""

    def train(model: Any, wrap: Callable[[Any], Any], xy: Callable[[int], Any]) -> list[Any]:
        old = wrap(torch.optim.SGD(model.parameters(), lr=0.1))
        loss_of(model, xy(0)).backward()
        old.step()
        old.zero_grad()
        new = wrap(torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(1, 4):
            new.zero_grad()
            loss_of(model, xy(step)).backward()
            new.step()
        assert old is not new
        return state(model)

    expected = train(make_model(), lambda optimizer: optimizer, batch)

    def body(rank: int) -> None:
        model = make_model()
        train(model, hvd.DistributedOptimizer, lambda step: mine(rank, 2, step))
        assert close(model, expected)

    run_ranks(2, body)
