"""broadcast_optimizer_state: root's state and options on all ranks, and no step. Oracle: the same steps made
here, alone, from root's start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hvd_core
import hvd_core.torch as hvd
from hvd_core.errors import InvalidArgument, MismatchError

from .test_torch_run import same

pytestmark = pytest.mark.timeout(120)

ROOT = 1
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),  # has state before its first step
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


def make(seed: int, kind: str) -> tuple[list[Any], Any]:
    """Two groups, one parameter that never gets a gradient, one of 16 bits and one of no plain layout."""
    generator = torch.Generator().manual_seed(seed)
    first = [torch.nn.Parameter(torch.randn(4, 3, generator=generator, dtype=torch.float64))]
    second = [
        torch.nn.Parameter(
            torch.randn(2, 3, 4, 5, generator=generator).to(memory_format=torch.channels_last)
        ),
        torch.nn.Parameter(torch.randn((), generator=generator)),
        torch.nn.Parameter(torch.randn(7, generator=generator).bfloat16()),
        torch.nn.Parameter(torch.ones(5)),
    ]
    params = first + second
    return params, OPTIMIZERS[kind]([{"params": first}, {"params": second}])


def step(params: list[Any], optimizer: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params[:-1]:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
    optimizer.step()


def trained(kind: str, seed: int, steps: int) -> tuple[list[Any], Any]:
    params, optimizer = make(seed, kind)
    for i in range(steps):
        step(params, optimizer, 100 * seed + i)
    optimizer.param_groups[1]["lr"] = optimizer.param_groups[1]["lr"] * 0.5
    optimizer.param_groups[0]["note"] = f"of {seed}"
    return params, optimizer


def go_on(params: list[Any], optimizer: Any) -> Any:
    for i in range(2):
        step(params, optimizer, 900 + i)
    return [p.detach() for p in params], optimizer.state_dict()


def exchange(kind: str, root_steps: int, other_steps: int) -> Any:
    rank = hvd.rank()
    params, optimizer = trained(kind, rank, root_steps if rank == ROOT else other_steps)
    made: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: made.append(1))
    rate = optimizer.param_groups[1]["lr"]
    before = [p.detach().clone() for p in params]
    hvd.broadcast_optimizer_state(optimizer, root_rank=ROOT)
    assert not made
    assert same(before, [p.detach() for p in params])
    if isinstance(rate, torch.Tensor):  # others may hold it
        assert optimizer.param_groups[1]["lr"] is rate
    hvd.broadcast_parameters([(str(i), p) for i, p in enumerate(params)], root_rank=ROOT)
    return go_on(params, optimizer)


def what_differs() -> None:
    rank = hvd.rank()
    params = [torch.nn.Parameter(torch.ones(2 + rank))]
    with pytest.raises(MismatchError, match=r"rank 1 has no 'parameter 0 of group 0, torch.float32 of shape"):
        hvd.broadcast_optimizer_state(torch.optim.SGD(params, lr=0.1), root_rank=0)
    kind = torch.optim.Adam if rank else torch.optim.SGD
    with pytest.raises(MismatchError, match="rank 1 has no 'class SGD'"):
        hvd.broadcast_optimizer_state(kind([torch.nn.Parameter(torch.ones(2))], lr=0.1), root_rank=0)
    plain = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(InvalidArgument, match="root_rank=2 is not a rank, there are 2"):
        hvd.broadcast_optimizer_state(plain, root_rank=2)
    with pytest.raises(InvalidArgument, match="LBFGS"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS(plain.param_groups[0]["params"]), root_rank=0)


def all_kinds() -> dict[str, Any]:
    torch.set_num_threads(1)
    hvd.init()
    what_differs()
    results = {kind: exchange(kind, 3, 1) for kind in OPTIMIZERS}
    results["adam, root without state"] = exchange("adam", 0, 2)
    results["adam, others without state"] = exchange("adam", 3, 0)
    # A distributed one is the same to it.
    params, optimizer = trained("adam", hvd.rank(), 2)
    hvd.broadcast_parameters([(str(i), p) for i, p in enumerate(params)], root_rank=ROOT)
    optimizer = hvd.DistributedOptimizer(optimizer)
    hvd.broadcast_optimizer_state(optimizer, ROOT, model=torch.nn.Linear(1, 1))
    results["distributed"] = go_on(params, optimizer)
    return results


def test_all_ranks_go_on_as_root_would_have() -> None:
    results = hvd_core.run(all_kinds, num_proc=2)
    expected = {kind: go_on(*trained(kind, ROOT, 3)) for kind in OPTIMIZERS}
    expected["adam, root without state"] = go_on(*trained("adam", ROOT, 0))
    expected["adam, others without state"] = expected["adam"]
    expected["distributed"] = go_on(*trained("adam", ROOT, 2))
    for rank, found in enumerate(results):
        for kind, oracle in expected.items():
            assert same(found[kind], oracle), (rank, kind)
