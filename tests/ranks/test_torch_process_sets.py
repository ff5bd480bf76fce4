"""Training within process sets, three ranks of which two make a set. Oracle: three replicas here, whose
gradients are averaged by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hvd_core
import hvd_core.torch as hvd

pytestmark = pytest.mark.timeout(90)

MEMBERS, SIZE, STEPS = [0, 2], 3, 5


class Net(torch.nn.Module):
    """A body that all ranks share, and a head of the set's ranks, which rank 1 has for itself."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = torch.nn.Linear(4, 6), torch.nn.Sequential(torch.nn.Linear(6, 3), norm)
        self.double()

    def forward(self, x: Any) -> Any:
        return self.head(torch.tanh(self.body(x)))


def rows(step: int, rank: int) -> Any:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4 + rank, 4, generator=generator, dtype=torch.float64)


def loss_of(outputs: Any) -> Any:
    return (outputs * torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)).sin().sum()


def train() -> Any:
    torch.set_num_threads(1)
    hvd.init()
    process_set = hvd.add_process_set(MEMBERS)
    is_member = hvd.rank() in MEMBERS
    net = Net(hvd.SyncBatchNorm(3, process_set=process_set) if is_member else torch.nn.BatchNorm1d(3))
    body = hvd.DistributedOptimizer(torch.optim.SGD(net.body.parameters(), lr=0.02))
    # Outside of the set it stays a plain one.
    head = hvd.DistributedOptimizer(
        torch.optim.SGD(net.head.parameters(), lr=0.01, momentum=0.9), process_set=process_set
    )
    for step in range(STEPS):
        for optimizer in (body, head):
            optimizer.zero_grad()
        loss_of(net(rows(step, hvd.rank()))).backward()
        for optimizer in (body, head):
            optimizer.step()
    sharded = [torch.nn.Parameter(torch.ones(40, dtype=torch.float64))]
    if is_member:
        optimizer = hvd.ShardedOptimizer(torch.optim.Adam(sharded, lr=0.1), process_set=process_set)
        (sharded[0] * (hvd.rank() + 1)).sum().backward()
        assert sharded[0].grad[0] == 2.0  # of ranks 0 and 2
        optimizer.step()
        assert len(optimizer.state_dict()["state"][0]["exp_avg"]) == 40
    hvd.remove_process_set(process_set)
    return {name: value.detach() for name, value in net.state_dict().items()}


def oracle() -> list[Any]:
    nets = [Net(torch.nn.BatchNorm1d(3)) for _ in range(SIZE)]
    bodies = [torch.optim.SGD(net.body.parameters(), lr=0.02) for net in nets]
    heads = [torch.optim.SGD(net.head.parameters(), lr=0.01, momentum=0.9) for net in nets]
    for step in range(STEPS):
        for net in nets:
            net.zero_grad()
        # The members' heads are one, which sees their rows together.
        hidden = [torch.tanh(net.body(rows(step, rank))) for rank, net in enumerate(nets)]
        joined = nets[0].head(torch.cat([hidden[rank] for rank in MEMBERS]))
        (loss_of(joined) + loss_of(nets[1].head(hidden[1]))).backward()
        for params in zip(*(net.body.parameters() for net in nets), strict=True):
            mean = torch.stack([p.grad for p in params]).mean(0)
            for p in params:
                p.grad = mean.clone()
        for p in nets[0].head.parameters():
            p.grad /= len(MEMBERS)
        for optimizer in (*bodies, *heads[:2]):
            optimizer.step()
        nets[2].head.load_state_dict(nets[0].head.state_dict())
    return [net.state_dict() for net in nets]


def test_a_head_of_a_process_set_under_a_body_of_all() -> None:
    for rank, (found, expected) in enumerate(zip(hvd_core.run(train, num_proc=SIZE), oracle(), strict=True)):
        for name, value in expected.items():
            assert torch.allclose(found[name], value, rtol=0, atol=1e-9), (rank, name)
