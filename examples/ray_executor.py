"""Ranks that stay alive between calls, and tell the driver how far they are: hvd_ray.RayExecutor.

    python examples/ray_executor.py

Two actors fit a line to rows of their own, with gradients averaged over both, and keep what they have between
two calls of `run`.
"""

from __future__ import annotations

import ray
import torch

import hvd_ray


class Trainer:
    """One lives in each worker."""

    def __init__(self, rate: float):
        import hvd_core.torch as hvd

        hvd.init()
        torch.manual_seed(hvd.rank())  # other rows on each rank
        self.x = torch.randn(500, 2)
        self.y = self.x @ torch.tensor([[3.0], [-2.0]]) + 1.0
        torch.manual_seed(0)
        self.net = torch.nn.Linear(2, 1)
        hvd.broadcast_parameters(self.net.state_dict(), root_rank=0)
        optimizer = torch.optim.SGD(self.net.parameters(), rate)
        self.optimizer = hvd.DistributedOptimizer(optimizer, self.net.named_parameters())

    def train(self, epochs: int) -> list[float]:
        for epoch in range(epochs):
            self.optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(self.net(self.x), self.y)
            loss.backward()
            self.optimizer.step()
            hvd_ray.log({"epoch": epoch, "loss": loss.item()})
        return self.net.weight.flatten().tolist()


def main() -> None:
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    losses: list[float] = []
    executor = hvd_ray.RayExecutor(num_workers=2)
    executor.start(Trainer, [0.1])
    executor.execute(lambda trainer: trainer.train(20), callbacks=[lambda info: losses.append(info["loss"])])
    weights = executor.execute(lambda trainer: trainer.train(20))
    executor.shutdown()
    ray.shutdown()
    print(f"loss of both ranks, live: {losses[0]:.2f} to {losses[-1]:.4f}")
    first, second = weights
    print(f"weights: {first[0]:.3f} {first[1]:.3f}, the same on both ranks: {first == second}")


if __name__ == "__main__":
    main()
