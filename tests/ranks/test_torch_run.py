"""hvd_core.torch in processes: what scripts do with it. Oracle: plain torch on one process with the joined
batch, fp64.

The cases of one rank function share the processes, as each start costs seconds. What needs no process of its
own is in tests/unit/test_torch_*.py.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hvd_core
import hvd_core.torch as hvd
from hvd_core import basics
from hvd_core.errors import InvalidArgument, NotInitialized, RankFailed

pytestmark = pytest.mark.timeout(120)

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
}
STEPS, ROWS = 20, 24


class Net(torch.nn.Module):
    """An embedding, a branch that only some batches use, and a part that none uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(5, 8)
        self.body = torch.nn.Sequential(torch.nn.Linear(12, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
        self.extra = torch.nn.Linear(12, 1)
        self.unused = torch.nn.Linear(3, 3)
        self.double()

    def forward(self, index: Any, x: Any, extra: bool) -> Any:
        both = torch.cat([self.embedding(index), x], dim=1)
        return self.body(both) + (self.extra(both) if extra else 0.0)


def batch(step: int) -> tuple[Any, Any, Any]:
    generator = torch.Generator().manual_seed(step)
    index = torch.randint(0, 5, (ROWS,), generator=generator)
    x, y = (torch.randn(ROWS, n, generator=generator, dtype=torch.float64) for n in (4, 1))
    return index, x, y


def losses(model: Any, step: int, rank: int, size: int) -> Any:
    """Per row; uses `extra` on odd ranks only, in every third step."""
    index, x, y = (t[rank::size] for t in batch(step))
    return (model(index, x, extra=step % 3 == 0 and rank % 2 == 1) - y) ** 2


def train(make_optimizer: Callable[[Any], Any], distributed: bool, steps: int = STEPS) -> tuple[Any, Any]:
    """Two ranks, or their joined batch on one. With clipping, so that all must see global gradients after
    backward."""
    model = Net()
    optimizer = make_optimizer(model.parameters())
    if distributed:
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    for step in range(steps):
        optimizer.zero_grad()
        if distributed:
            loss = losses(model, step, hvd.rank(), hvd.size()).mean()
        else:
            loss = torch.cat([losses(model, step, rank, 2) for rank in (0, 1)]).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return model.state_dict(), optimizer.state_dict()["state"]


def train_on_ranks() -> list[dict[str, Any]]:
    """Twice, in two Groups."""
    torch.set_num_threads(1)
    results = []
    for _ in range(2):
        hvd.init()
        results.append({name: train(make, distributed=True) for name, make in OPTIMIZERS.items()})
        hvd.shutdown()
    return results


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, (dict, list, tuple)):
        pairs = zip(a.values(), b.values(), strict=True) if isinstance(a, dict) else zip(a, b, strict=True)
        return len(a) == len(b) and all(same(x, y) for x, y in pairs)
    return bool(a == b)


def test_two_ranks_equal_one_on_the_joined_batch_and_each_other() -> None:
    (first, again), others = hvd_core.run(train_on_ranks, num_proc=2)
    assert same([first, again], others)
    assert same(first, again)
    for name, make_optimizer in OPTIMIZERS.items():
        expected, _ = train(make_optimizer, distributed=False)
        for key, value in first[name][0].items():
            assert torch.allclose(value, expected[key], rtol=0, atol=1e-9), f"{name}: {key}"


def test_r33_one_rank_equals_plain_training_bit_for_bit() -> None:
    hvd.init()  # no launcher: one rank
    assert (hvd.rank(), hvd.size()) == (0, 1)
    model, plain = Net(), Net()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=0.01), backward_passes_per_step=2
    )
    oracle = torch.optim.Adam(plain.parameters(), lr=0.01)
    for step in range(50):
        for net, opt in ((model, optimizer), (plain, oracle)):
            opt.zero_grad()
            losses(net, step, 0, 1).mean().backward()
            opt.step()
    optimizer.synchronize()
    copy.deepcopy(optimizer).step()  # with one rank a copy is as good; it steps copies of the parameters
    hvd.shutdown()
    assert same(optimizer.state_dict(), oracle.state_dict())
    assert same(model.state_dict(), plain.state_dict())


def r29_left_over_gradients_and_one_reduction_per_step() -> None:
    """26 batches an epoch, a step every 8th backward, 2 epochs."""
    model, plain = Net(), Net()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), backward_passes_per_step=8
    )
    oracle = torch.optim.SGD(plain.parameters(), lr=0.01)
    before = basics.default_group().stats()["collectives"]
    for passes in range(1, 53):
        losses(model, passes % 26, hvd.rank(), 2).mean().backward()
        torch.cat([losses(plain, passes % 26, rank, 2) for rank in (0, 1)]).mean().backward()
        if passes % 8 == 0:
            for opt in (optimizer, oracle):
                opt.step()
                opt.zero_grad()
    made = basics.default_group().stats()["collectives"] - before
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=0, atol=1e-9)
    # The four passes left over are this rank's own, as in plain torch.
    mine = Net()
    mine.load_state_dict(model.state_dict())
    for passes in range(49, 53):
        losses(mine, passes % 26, hvd.rank(), 2).mean().backward()
    for p, q in zip(model.parameters(), mine.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        assert p.grad is None or torch.allclose(p.grad, q.grad, rtol=0, atol=1e-12)
    assert made == 4  # the first step: a bitmap, a group, the order of arrival, the plan; then nothing


def mixed_use() -> None:
    """Everything else in one go; asserts on the ranks."""
    with pytest.raises(NotInitialized):
        hvd.rank()
    for _ in range(20):
        hvd.init()
        hvd.init()
        assert hvd.size() == hvd.local_size() == 2
        assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
        assert hvd.allreduce(torch.tensor(float(hvd.rank()))).item() == 0.5
        hvd.shutdown()
        hvd.shutdown()
    assert not hvd.is_initialized()
    hvd.init()
    rank = hvd.rank()

    sent = hvd.broadcast_object({"big": b"x" * (20 << 20), "rank": rank}, root_rank=1)
    assert sent["rank"] == 1
    assert len(sent["big"]) == 20 << 20
    assert [o["rank"] for o in hvd.allgather_object({"rank": rank, "pad": b"y" * rank})] == [0, 1]

    model = Net()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(rank)
    hvd.broadcast_parameters(model.named_parameters(), root_rank=0)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), Net().parameters(), strict=True))

    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(InvalidArgument, match="is a copy of a DistributedOptimizer"):
        copy.deepcopy(optimizer).step()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = copy.deepcopy(model.state_dict())
    for step in range(2):
        optimizer.zero_grad()
        loss = losses(model, step, rank, 2).mean()
        scaler.scale(loss * float("inf") if step == 0 and rank == 1 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 4.0
        assert same(before, model.state_dict()) == (step == 0)

    # The loss a closure returns is everybody's.
    optimizer.zero_grad()
    assert optimizer.step(lambda: torch.tensor(float(rank))).item() == 0.5

    # A rank without rows: zeros from it, and the same gradients on both.
    optimizer.zero_grad()
    if rank == 0:
        losses(model, 5, 0, 1).mean().backward()
    else:
        optimizer.synchronize()
    norms = hvd.allgather(torch.stack([p.grad.norm() for p in model.body.parameters()]))
    assert torch.equal(norms[:4], norms[4:])
    assert norms.min() > 0


def mixed_use_quietly() -> None:
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mixed_use()
        r29_left_over_gradients_and_one_reduction_per_step()


def test_r29_and_mixed_use() -> None:
    hvd_core.run(mixed_use_quietly, num_proc=2)


def differ() -> None:
    hvd.init()
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1 + hvd.rank()))
    hvd.DistributedOptimizer(
        optimizer := torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()


def test_an_error_names_parameter_rank_and_both_shapes() -> None:
    with pytest.raises(
        RankFailed, match=r"gradient of 1\.weight: rank 1 has .*\(2, 4\).*rank 0 has .*\(1, 4\)"
    ) as caught:
        hvd_core.run(differ, num_proc=2)
    assert caught.value.failure.exc_type.endswith("MismatchError")
    assert not caught.value.retryable


def sentences(step: int, rank: int) -> Any:
    """Token numbers (4, length): another length on every rank and in every step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    length = 3 + 5 * rank + 2 * step
    return torch.randint(0, 11, (4, length), generator=generator)


def reader() -> Any:
    torch.manual_seed(0)
    return torch.nn.ModuleList(
        [torch.nn.Embedding(11, 6), torch.nn.GRU(6, 5, batch_first=True), torch.nn.Linear(5, 1)]
    ).double()


def read(net: Any, tokens: Any) -> Any:
    embedding, layer, head = net
    return head(layer(embedding(tokens))[0].mean(dim=1)).square().mean()


def read_together() -> list[Any]:
    hvd.init()
    net = reader()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.5), net.named_parameters())
    for step in range(5):
        optimizer.zero_grad()
        read(net, sentences(step, hvd.rank())).backward()
        optimizer.step()
    return [parameter.detach().numpy() for parameter in net.parameters()]


def test_d10_batches_of_other_lengths_on_each_rank() -> None:
    alone = reader()
    optimizer = torch.optim.SGD(alone.parameters(), 0.5)
    for step in range(5):
        optimizer.zero_grad()
        (sum(read(alone, sentences(step, rank)) for rank in (0, 1)) / 2).backward()
        optimizer.step()
    for found in hvd_core.run(read_together, num_proc=2):
        for one, other in zip(found, alone.parameters(), strict=True):
            torch.testing.assert_close(torch.from_numpy(one), other.detach(), rtol=1e-12, atol=1e-12)
