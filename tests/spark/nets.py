"""Models and callbacks of the Spark tests. Ranks import them by name."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 0.05)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1)


class FiveInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(5, 1)

    def forward(self, a: Any, b: Any, c: Any, d: Any, e: Any) -> Any:
        assert all(x.ndim == 1 for x in (a, b, c, d, e))
        return self.lin(torch.stack([a, b, c, d, e], 1))


class OneInput(nn.Module):
    def __init__(self, width: int = 5, outputs: int = 1) -> None:
        super().__init__()
        self.lin = nn.Linear(width, outputs)

    def forward(self, x: Any) -> Any:
        return self.lin(x)


class Noisy(nn.Module):
    """Draws from the generators of torch and numpy."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lin, self.drop = nn.Linear(width, 1), nn.Dropout(0.3)

    def forward(self, x: Any) -> Any:
        return self.lin(self.drop(x) + float(np.random.rand()))


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 1)

    def forward(self, left: Any, right: Any) -> Any:
        return self.lin(torch.stack([left, right], 1))


class WithId(nn.Module):
    """Input columns (id, x, ...); the id only travels along, so that a Recorder can see it."""

    def __init__(self, width: int = 1) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, rows: Any) -> Any:
        return self.net(rows[:, 1:])


class Embedded(nn.Module):
    """`dow` must come as int64, or nn.Embedding refuses it."""

    def __init__(self) -> None:
        super().__init__()
        self.day = nn.Embedding(7, 3)
        self.lin = nn.Linear(4, 1)

    def forward(self, dow: Any, km: Any) -> Any:
        assert dow.dtype is torch.int64, dow.dtype
        return self.lin(torch.cat([self.day(dow), km[:, None]], 1))


def sigmoid_net(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 1), nn.Sigmoid())


class Recorder:
    """A callback that writes the ids (first input column) of every batch into a file for each rank."""

    def __init__(self, directory: Path | str):
        self.directory = str(directory)

    def on_batch_end(self, run: Any, batch: Any) -> None:
        ids = batch.inputs[0][:, 0].astype(int).tolist() if batch.rows else []
        with open(Path(self.directory) / f"rank{run.rank}", "a") as file:
            file.write(json.dumps([run.epoch, ids]) + "\n")

    def batches(self, rank: int) -> list[tuple[int, list[int]]]:
        """(epoch, ids) of each batch of a rank, in order."""
        path = Path(self.directory) / f"rank{rank}"
        return [tuple(json.loads(line)) for line in path.read_text().splitlines()]

    def epochs(self, rank: int) -> dict[int, list[int]]:
        """Sorted ids of each epoch of a rank."""
        found: dict[int, list[int]] = defaultdict(list)
        for epoch, ids in self.batches(rank):
            found[epoch] += ids
        return {epoch: sorted(ids) for epoch, ids in found.items()}


class Shards:
    """A callback that appends to `file` the directory of each file that holds a part of the rank's shard: of
    those mapped, and of those open."""

    def __init__(self, file: Path | str):
        self.file = str(file)

    def on_epoch_end(self, run: Any, logs: Any) -> None:
        maps = Path("/proc/self/maps").read_text().splitlines()
        links = [os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
        paths = [line.split()[-2] for line in [*maps, *links] if line.endswith("(deleted)")]
        paths = [path for path in paths if not path.startswith("/memfd:") or "hvd-shard" in path]
        with open(self.file, "a") as file:
            file.writelines(f"{Path(path).parent}\n" for path in paths)


def parameters_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])
