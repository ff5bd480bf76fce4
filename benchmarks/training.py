"""Training steps for the figures `step` and `scaling`: a model in three copies, trained in three ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from race import Contender
from side_by_side import Ranks

import hvd_core.torch as hvd

ALONE, HVD, DDP = "no communication", "hvd", "DDP gloo"


def mlp(layers: int, width: int = 2048) -> torch.nn.Module:
    """`layers` x `width`^2 weights, and biases."""
    parts: list[torch.nn.Module] = []
    for _ in range(layers):
        parts += [torch.nn.Linear(width, width), torch.nn.ReLU()]
    return torch.nn.Sequential(*parts)


def transformer(layers: int = 4, width: int = 256) -> torch.nn.Module:
    layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
    return torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def parameters_of(net: torch.nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def contenders(ranks: Ranks, make: Callable[[], torch.nn.Module], batch: torch.Tensor) -> list[Contender]:
    """Forward, backward and step, with gradients of nobody, ours, and DDP's."""
    return [_way(ranks, name, make, batch) for name in (ALONE, HVD, DDP)]


def _way(ranks: Ranks, name: str, make: Callable[[], torch.nn.Module], batch: torch.Tensor) -> Contender:
    torch.manual_seed(0)
    net: Any = make()
    optimizer = torch.optim.SGD(net.parameters(), 1e-6)
    if name == HVD:
        optimizer = hvd.DistributedOptimizer(optimizer, net.named_parameters())
    elif name == DDP:
        net = torch.nn.parallel.DistributedDataParallel(net)

    def call() -> None:
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()

    def check(turn: int) -> None:
        """The gradients are those of all ranks: checked for the last parameters, which costs little."""
        if name == ALONE or turn > 2:
            return
        grads = [p.grad for p in optimizer.param_groups[0]["params"][-2:]]
        sums = [float(grad.double().sum()) for grad in grads]
        if name == HVD:
            own = hvd.allreduce(torch.tensor(sums, dtype=torch.float64), name="check")
        else:
            own = torch.tensor(sums, dtype=torch.float64)
            dist.all_reduce(own)
            own /= ranks.size
        assert own.tolist() == sums, "the ranks have different gradients"

    return Contender(name, call, lambda _: None, check)
