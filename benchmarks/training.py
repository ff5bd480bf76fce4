"""Training steps for the figures `step` and `scaling`: a model in four copies, trained in four ways."""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from race import Contender
from side_by_side import Ranks

import hvd_core.torch as hvd

#: `WAIT` moves no gradient and meets the other rank before each step of the optimizer: what any way to train
#: in step costs, whatever it is made of.
ALONE, WAIT, HVD, DDP = "no communication", "barrier only", "hvd", "DDP gloo"
#: hvd while rank 0 writes a timeline of all ranks.
TIMELINE = "hvd, timeline"
#: So small that the gradients of the first steps are the same.
RATE = 1e-6


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


def _loss(net: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Against another target than zero: the mean square of a LayerNorm's output is a constant."""
    return torch.nn.functional.mse_loss(net(batch), batch.roll(1, -1))


#: By way: seconds of each step from the end of its backward to its own end.
Tails = dict[str, list[float]]


def contenders(
    ranks: Ranks,
    make: Callable[[], torch.nn.Module],
    batch: torch.Tensor,
    steps: int = 1,
    names: Sequence[str] = (ALONE, WAIT, HVD, DDP),
) -> tuple[list[Contender], Tails]:
    """Forward, backward and step, `steps` times a turn, in the ways `names`."""
    expected = _mean_gradients(make, batch, ranks.size)
    tails: Tails = defaultdict(list)
    ways = [_way(name, make, batch, steps, expected, tails[name]) for name in names]
    return [_with_timeline(ranks, way) if way.name == TIMELINE else way for way in ways], tails


def _mean_gradients(
    make: Callable[[], torch.nn.Module], batch: torch.Tensor, size: int
) -> list[torch.Tensor]:
    """Of the first step, by plain torch and gloo."""
    torch.manual_seed(0)
    net = make()
    _loss(net, batch).backward()
    gradients = [parameter.grad for parameter in net.parameters() if parameter.grad is not None]
    for gradient in gradients:
        dist.all_reduce(gradient)
        gradient /= size
    return gradients


def _way(
    name: str,
    make: Callable[[], torch.nn.Module],
    batch: torch.Tensor,
    steps: int,
    expected: list[torch.Tensor],
    tails: list[float],
) -> Contender:
    torch.manual_seed(0)
    net: Any = make()
    parameters = list(net.parameters())
    optimizer = torch.optim.SGD(net.parameters(), RATE)
    if name in (HVD, TIMELINE):
        optimizer = hvd.DistributedOptimizer(optimizer, net.named_parameters())
    elif name == DDP:
        net = torch.nn.parallel.DistributedDataParallel(net)

    def call() -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            _loss(net, batch).backward()
            begin = time.perf_counter()
            if name == WAIT:
                hvd.barrier()
            optimizer.step()
            tails.append(time.perf_counter() - begin)

    def check(turn: int) -> None:
        """In the first turns, where the weights have hardly moved; a plan takes over in the second step."""
        if name in (ALONE, WAIT) or turn > 2:
            return
        # What is left of a sum that nearly cancels is rounding of its terms: 1e-7 of the largest.
        rounding = 1e-7 * max(float(gradient.abs().max()) for gradient in expected)
        for parameter, gradient in zip(parameters, expected, strict=True):
            atol = max(rounding, 1e-3 * float(gradient.abs().max()))
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-2, atol=atol)

    return Contender(name, call, lambda _: None, check)


def _with_timeline(ranks: Ranks, way: Contender) -> Contender:
    """A timeline of each turn, begun and ended outside of the timing."""
    folder = tempfile.TemporaryDirectory()

    def prepare(turn: int) -> None:
        hvd.start_timeline(Path(folder.name, "timeline.json"))
        time.sleep(0.005)  # until the other ranks have heard of it
        hvd.barrier()

    def check(turn: int) -> None:
        hvd.stop_timeline()
        way.check(turn)
        if ranks.rank == 0:
            events = Path(folder.name, "timeline.json").read_text()
            assert all(f'"pid":{rank},' in events for rank in range(ranks.size)), "a rank without events"

    return Contender(way.name, way.call, prepare, check)
