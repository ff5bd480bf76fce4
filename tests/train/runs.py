"""Runs that are cut short and go on, beside the same run uninterrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import nn

from hvd_core.train import FitResult, TrainSpec

COLUMNS = ["a", "b", "c"]
MEASURED = ("seconds", "data", "compute", "communication")


def table(rows: int = 50, seed: int = 0) -> pa.Table:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 3))
    y = x @ [1.0, -2.0, 0.5] + rng.normal(size=rows)
    return pa.table({"a": x[:, 0], "b": x[:, 1], "c": x[:, 2], "y": y, "id": np.arange(rows) + 1000 * seed})


def net(dropout: float = 0.3, norm: bool = False) -> nn.Module:
    torch.manual_seed(3)
    layers = [nn.Linear(3, 8), nn.BatchNorm1d(8) if norm else nn.Identity(), nn.Tanh(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(8, 1)).double()


def sgd(params: Any) -> Any:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def adam(params: Any) -> Any:
    return torch.optim.Adam(params, lr=0.01)


def spec_of(**changes: Any) -> TrainSpec:
    base: dict[str, Any] = {
        "model": net(), "optimizer": adam, "loss": nn.MSELoss(), "feature_cols": COLUMNS, "label_cols": "y",
        "batch_size": 8, "epochs": 3, "seed": 5,
    }  # fmt: skip
    return TrainSpec(**{**base, **changes})


class Killed(Exception):
    """What ends a run in the middle."""


class KillAt:
    """Ends the run after so many optimizer steps."""

    def __init__(self, step: int):
        self.step = step

    def on_batch_end(self, run: Any, batch: Any) -> None:
        if run.step == self.step:
            raise Killed


def learned(result: FitResult) -> list[dict[str, Any]]:
    """The history without what a clock measured."""
    return [{k: v for k, v in entry.items() if k not in MEASURED} for entry in result.history]


def newest(directory: Path) -> Path:
    return max(directory.glob("step-*"))
