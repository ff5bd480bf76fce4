"""ShardedOptimizer on three ranks: parameters and state of DistributedOptimizer to the bit, a third of the
memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hvd_core
import hvd_core.torch as hvd
from hvd_core.errors import InvalidArgument
from hvd_core.torch.sharded import shares

from .test_torch_run import same

pytestmark = pytest.mark.timeout(120)

RANKS, STEPS = 3, 4
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01, t0=2),
}


class Net(torch.nn.Module):
    """Sizes that no border divides, a parameter without dimensions, 16 bits, one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = torch.nn.Linear(7, 61), torch.nn.Linear(61, 1)
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.gate = torch.nn.Parameter(torch.randn(61).bfloat16())
        self.unused = torch.nn.Linear(5, 5)

    def forward(self, x: Any) -> Any:
        return self.last(torch.tanh(self.first(x)) * self.gate.float()) * self.scale


def groups_of(net: Any) -> Any:
    return [{"params": list(net.first.parameters())}, {"params": [net.last.weight], "lr": 0.02},
            {"params": [net.last.bias, net.scale, net.gate, *net.unused.parameters()]}]  # fmt: skip


def loss_of(net: Any, step: int) -> Any:
    x = torch.randn(12, 7, generator=torch.Generator().manual_seed(step))[hvd.rank() :: RANKS]
    return (net(x) - x.sum(1, keepdim=True)).pow(2).mean()


def train(net: Any, optimizer: Any, first: int = 0) -> None:
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(first, first + STEPS):
        optimizer.zero_grad()
        if step % 2:
            loss_of(net, step).backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
        else:

            def evaluate(step: int = step) -> Any:
                loss = loss_of(net, step)
                loss.backward()
                return loss

            assert optimizer.step(evaluate).item() > 0
        schedule.step()


def elements(optimizer: Any) -> int:
    return sum(
        v.numel() for values in optimizer.state.values() for v in values.values() if torch.is_tensor(v)
    )


def on_rank() -> None:
    torch.set_num_threads(1)
    hvd.init()
    for kind, make in OPTIMIZERS.items():
        whole, net = Net(), Net()
        plain = make(groups_of(whole))
        train(whole, hvd.DistributedOptimizer(plain))
        sharded = hvd.ShardedOptimizer(make(groups_of(net)), net.named_parameters())
        train(net, sharded)
        assert same(whole.state_dict(), net.state_dict()), kind
        state = sharded.state_dict()
        assert same(state["state"], plain.state_dict()["state"]), kind
        assert [set(g) for g in state["param_groups"]] == [set(g) for g in plain.state_dict()["param_groups"]]
        # Each goes on from the other's state.
        again, other = Net(), Net()
        again.load_state_dict(whole.state_dict())
        other.load_state_dict(whole.state_dict())
        resumed = hvd.ShardedOptimizer(make(groups_of(again)))
        resumed.load_state_dict(plain.state_dict())
        unsharded = make(groups_of(other))
        unsharded.load_state_dict(state)
        train(again, resumed, STEPS)
        train(other, hvd.DistributedOptimizer(unsharded), STEPS)
        train(whole, plain, STEPS)
        assert same(whole.state_dict(), again.state_dict()), kind
        assert same(whole.state_dict(), other.state_dict()), kind
    whole, net = Net(), Net()
    scaled(whole, hvd.DistributedOptimizer(torch.optim.Adam(groups_of(whole))))
    scaled(net, hvd.ShardedOptimizer(torch.optim.Adam(groups_of(net))))
    assert same(whole.state_dict(), net.state_dict())
    memory_and_errors()


def scaled(net: Any, optimizer: Any) -> None:
    """With a loss scaler, which all ranks lower when one of them overflows."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(net, step)
        scaler.scale(loss * float("inf") if (step, hvd.rank()) == (1, 2) else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (8.0 if step == 0 else 4.0)


def memory_and_errors() -> None:
    big = torch.nn.Sequential(
        *(torch.nn.Linear(300, 301 + i) for i in range(3)), torch.nn.Linear(1, 1)
    ).double()
    taken = torch.optim.AdamW(big.parameters())
    for p in big.parameters():
        p.grad = torch.ones_like(p)
    taken.step()
    sharded = hvd.ShardedOptimizer(taken)  # takes its state over
    assert same(sharded.state_dict()["state"], taken.state_dict()["state"])
    assert elements(sharded._inner) <= elements(taken) * (1 / RANKS + 0.05)
    for p in big.parameters():
        p.grad = torch.full_like(p, hvd.rank())
    sharded.step()
    assert elements(sharded._inner) <= elements(taken) * (1 / RANKS + 0.05)
    assert big[0].bias.grad[0] == 1.0

    p = torch.nn.Parameter(torch.ones(4, 4))
    for kind in (torch.optim.LBFGS, torch.optim.SparseAdam, torch.optim.Adafactor):
        with pytest.raises(InvalidArgument, match=f"element by element.* not {kind.__name__}"):
            hvd.ShardedOptimizer(kind([p]))
    with pytest.raises(InvalidArgument, match="distributed already"):
        hvd.ShardedOptimizer(hvd.DistributedOptimizer(torch.optim.SGD([p], 0.1)))
    with pytest.raises(InvalidArgument, match=r"one of shape \(4, 2\) is not"):
        hvd.ShardedOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(2, 4).t())], 0.1))
    with pytest.raises(InvalidArgument, match="a state of its own"):
        hvd.broadcast_optimizer_state(sharded, root_rank=0)
    with pytest.raises(InvalidArgument, match="make it anew"):
        sharded.add_param_group({"params": [p]})
    table = torch.nn.Embedding(5, 2, sparse=True)
    optimizer = hvd.ShardedOptimizer(torch.optim.SGD(table.parameters(), 0.1))
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(InvalidArgument, match="no sparse gradients"):
        optimizer.step()


def test_sharded_is_unsharded_to_the_bit() -> None:
    hvd_core.run(on_rank, num_proc=RANKS)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64])
@pytest.mark.parametrize("nbytes", [[], [0], [4], [63, 1, 64, 65], [10_000, 0, 4, 4, 3_000_001], [64] * 100])
def test_shares_are_even_and_whole(nbytes: list[int], size: int) -> None:
    found = shares(nbytes, size)
    of_rank = [0] * size
    for length, pieces in zip(nbytes, found, strict=True):
        assert len(pieces) == size
        assert [begin for begin, _ in pieces] + [length] == [0] + [end for _, end in pieces]
        for rank, (begin, end) in enumerate(pieces):
            assert begin <= end and (begin % 64 == 0 or begin == length)
            of_rank[rank] += end - begin
    assert sum(of_rank) == sum(nbytes)
    assert max(of_rank) <= sum(nbytes) / size + 64 + 1
