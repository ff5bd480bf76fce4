"""How training scales on one machine: an MLP of 1.1 M parameters, random rows, one compute thread a rank.

    python benchmarks/scaling.py

Three ways in turn, five times: one rank on one core; two ranks that train together; two replicas that run at
the same time and never talk. Prints rows per second (medians) and the two ratios that matter: together
against one rank, and against the uncoupled replicas (what coupling costs).
"""

from __future__ import annotations

import statistics
import time

import torch

import hvd_core
import hvd_core.torch as hvd

ROWS, WIDTH, BATCH, STEPS, REPEATS = 50_000, 100, 512, 60, 5


def train(coupled: bool) -> float:
    """Seconds for STEPS steps, after a warm-up."""
    hvd.init()
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 1000),
        torch.nn.ReLU(),
        torch.nn.Linear(1000, 1000),
        torch.nn.ReLU(),
        torch.nn.Linear(1000, 1),
    )
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    if coupled:
        optimizer = hvd.DistributedOptimizer(optimizer, net.named_parameters())
    x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, 1)

    def step(i: int) -> None:
        at = i * BATCH % (ROWS - BATCH)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(x[at : at + BATCH]), y[at : at + BATCH]).backward()
        optimizer.step()

    for i in range(5):
        step(i)
    hvd.barrier()
    begin = time.perf_counter()
    for i in range(STEPS):
        step(i)
    return time.perf_counter() - begin


def main() -> None:
    ways = {"one rank": (1, True), "two ranks": (2, True), "two replicas": (2, False)}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(REPEATS):
        for name, (size, coupled) in ways.items():
            seconds = hvd_core.run(train, (coupled,), num_proc=size, cpus_per_rank=1)
            rates[name].append(size * BATCH * STEPS / max(seconds))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    for name, rate in medians.items():
        print(f"{name:>14}: {rate:>9.0f} rows/s")
    print(f"two ranks / one rank     {medians['two ranks'] / medians['one rank']:.2f}")
    print(f"two ranks / two replicas {medians['two ranks'] / medians['two replicas']:.2f}")


if __name__ == "__main__":
    main()
