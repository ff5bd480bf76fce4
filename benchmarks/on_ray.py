"""Ray Train with hvd against Ray's own TorchTrainer: start, rows/s of the loaders, an epoch of a 25 M MLP.

    python benchmarks/on_ray.py [--quick]

Two workers on an embedded Ray. Runs take turns; rows/s are of both loaders in the same workers.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])  # workers know the functions by name

import numpy as np
import pyarrow as pa
import ray
import ray.train
import report
import torch
from race import ratio
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch.nn.functional import mse_loss

import hvd_ray

COLUMNS = 50


def first_step(config: dict[str, Any]) -> float:
    """One step of a small net; when it was done."""
    net, optimizer = _wrapped(torch.nn.Linear(8, 1), config["hvd"])
    _step(net, optimizer, torch.ones(4, 8), torch.ones(4, 1))
    return time.time()


def epoch(config: dict[str, Any]) -> list[float]:
    """Seconds of each epoch of `steps` steps of a 25 M MLP on rows that are there already."""
    torch.set_num_threads(1)
    width = config["width"]
    parts = [part for _ in range(6) for part in (torch.nn.Linear(width, width), torch.nn.ReLU())]
    net, optimizer = _wrapped(torch.nn.Sequential(*parts), config["hvd"])
    x = torch.randn(32, width, generator=torch.Generator().manual_seed(1))
    taken = []
    for _ in range(config["epochs"] + 1):
        begin = time.perf_counter()
        for _ in range(config["steps"]):
            _step(net, optimizer, x, x.roll(1, -1))
        taken.append(time.perf_counter() - begin)
    return taken[1:]


def loaders(config: dict[str, Any]) -> dict[str, list[float]]:
    """rows/s of whole epochs, one after the other in turns."""
    names = [f"c{i}" for i in range(COLUMNS)]
    begin = time.perf_counter()
    ours = hvd_ray.prepare_data("train", names, batch_size=512)
    packing_s = (time.perf_counter() - begin) / config["epochs"]  # a share of it counts in each epoch
    theirs = ray.train.get_dataset_shard("train")
    found: dict[str, list[float]] = {"hvd": [], "Ray": []}
    for _ in range(config["epochs"]):
        for name in found:
            batches = ours if name == "hvd" else theirs.iter_torch_batches(batch_size=512)
            rows, begin = 0, time.perf_counter()
            for batch in batches:
                rows += len(batch["c0"])
            assert rows >= config["least"]
            taken_s = time.perf_counter() - begin + (packing_s if name == "hvd" else 0.0)
            found[name].append(rows / taken_s)
    return found


def _wrapped(net: Any, with_hvd: bool) -> tuple[Any, Any]:
    if not with_hvd:
        net = ray.train.torch.prepare_model(net)
        return net, torch.optim.SGD(net.parameters(), 1e-6)
    import hvd_core.torch as hvd

    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    return net, hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), 1e-6), net.named_parameters())


def _step(net: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    mse_loss(net(x), y).backward()
    optimizer.step()


def run(trainer: Any, loop: Any, config: dict[str, Any], folder: str, **options: Any) -> Any:
    run_config = RunConfig(name=f"run-{time.time_ns()}", storage_path=folder)
    return (
        trainer(
            loop,
            train_loop_config=config,
            scaling_config=ScalingConfig(num_workers=2),
            run_config=run_config,
            **options,
        )
        .fit()
        .return_value
    )


def both(loop: Any, turns: int, folder: str, **config: Any) -> dict[str, list[Any]]:
    """What the loop returns with hvd and with DDP on gloo, in turns; with the seconds since the call."""
    found: dict[str, list[Any]] = {"hvd": [], "DDP gloo": []}
    for turn in range(turns):
        for name in found if turn % 2 else reversed(found):
            trainer = hvd_ray.HorovodTrainer if name == "hvd" else TorchTrainer
            begin = time.time()
            returned = run(trainer, loop, {"hvd": name == "hvd", **config}, folder)
            found[name].append(returned - begin if isinstance(returned, float) else returned)
    return found


def main() -> None:
    options = report.arguments(__doc__).parse_args()
    quick = options.quick
    figure = report.Figure("on_ray", "Ray Train with hvd and with DDP on gloo", quick)
    ray.init(
        num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR",
        object_store_memory=(200 if quick else 3000) << 20,
    )  # fmt: skip
    ray.data.DataContext.get_current().enable_progress_bars = False
    with tempfile.TemporaryDirectory() as folder:
        starts = both(first_step, 2 if quick else 6, folder)
        epochs = both(
            epoch, 1 if quick else 2, folder,
            steps=2 if quick else 10, epochs=2 if quick else 8, width=64 if quick else 2048,
        )  # fmt: skip
        rows = 2_000 if quick else 2_000_000
        made = {f"c{i}": np.random.default_rng(i).random(rows, np.float32) for i in range(COLUMNS)}
        whole = pa.table(made)
        dataset = ray.data.from_arrow([whole.slice(i * rows // 8, rows // 8) for i in range(8)])
        del made, whole
        speeds = run(
            hvd_ray.HorovodTrainer, loaders, {"epochs": 2 if quick else 4, "least": rows // 2 - 1}, folder,
            datasets={"train": dataset},
        )  # fmt: skip
    ray.shutdown()
    values = {
        "start to first step, s": starts,
        "epoch of 25 M MLP, s": {name: [s for one in taken for s in one] for name, taken in epochs.items()},
        "loader, rows/s": {"hvd": speeds["hvd"], "Ray": speeds["Ray"]},
    }
    for what, ways in values.items():
        base = np.array(list(ways.values())[1])
        for name, taken in ways.items():
            share, low, high = ratio(np.array(taken), base)
            row = {"what": what, "way": name, "turns": len(taken), "median": float(np.median(taken))}
            figure.rows.append({**row, "of the other": share, "95%": f"{low:.2f}-{high:.2f}"})
    share_of = {row["what"]: row["of the other"] for row in figure.rows if row["way"] == "hvd"}
    start, one_epoch, loader = share_of.values()
    figure.targets = [
        report.Target("start to first step / TorchTrainer", start, 1.1, at_most=True),
        report.Target("rows/s of prepare_data / iter_torch_batches", loader, 5.0),
        report.Target("epoch of 25 M MLP / DDP on gloo", one_epoch, 0.7, at_most=True),
    ]
    figure.publish()


if __name__ == "__main__":
    main()
