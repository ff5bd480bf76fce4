"""A sweep of learning rates with Ray Tune, each trial a distributed training.

    python examples/ray_tune.py

The documented way for Ray Train v2: a Tune function makes a trainer, `TuneReportCallback` passes on what its
ranks report. Trials take turns, because each needs both CPUs.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import numpy as np
import ray
import ray.train
import torch
from ray import tune
from ray.train import RunConfig, ScalingConfig
from ray.tune.integration.ray_train import TuneReportCallback

import hvd_ray


def loop(config: dict[str, Any]) -> None:
    """On each rank: a line fitted to the rows of the dataset that are its own."""
    import hvd_core.torch as hvd

    rows = hvd_ray.prepare_data("train", batch_size=50)
    torch.manual_seed(0)
    net = torch.nn.Linear(1, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), config["lr"]), net.named_parameters()
    )
    for _ in range(3):
        total = 0.0
        for batch in rows:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(net(batch["x"][:, None]), batch["y"][:, None])
            (loss * rows.share).backward()
            optimizer.step()
            total += loss.item()
        mean = hvd.allreduce(torch.tensor(total / len(rows)), name="loss")
        ray.train.report({"loss": float(mean)})


def trial(config: dict[str, Any]) -> None:
    x = np.random.default_rng(0).normal(size=2_000).astype(np.float32)
    trainer = hvd_ray.HorovodTrainer(
        loop,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name=f"lr-{config['lr']}", storage_path=config["folder"], callbacks=[TuneReportCallback()]
        ),
        datasets={
            "train": ray.data.from_numpy(x).map_batches(lambda b: {"x": b["data"], "y": 3 * b["data"]})
        },
    )
    trainer.fit()


def main() -> None:
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"
    ray.init(num_cpus=3, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        tuner = tune.Tuner(
            trial,
            param_space={"lr": tune.grid_search([0.001, 0.1]), "folder": folder},
            tune_config=tune.TuneConfig(max_concurrent_trials=1, metric="loss", mode="min"),
            run_config=tune.RunConfig(storage_path=folder, verbose=0),
        )
        results = tuner.fit()
        for result in results:
            print(f"lr {result.config['lr']:<6} loss {result.metrics['loss']:.4f}")
        print(f"best: lr {results.get_best_result().config['lr']}")
    ray.shutdown()


if __name__ == "__main__":
    main()
