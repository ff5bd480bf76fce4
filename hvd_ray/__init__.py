"""hvd on Ray: train a model on a Dataset, Ray Train loops whose workers are ranks, functions on N ranks.

Read order: `estimator` -> `trainer` -> `backend` (how workers become ranks) -> `rank` (what they do) ->
`model`; `data` and `rows` (which rows each gets), `failure` (what is raised); `executor` and `runner` for
ranks without Ray Train, `actor` and `worker` in their processes.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backend import HorovodConfig as HorovodConfig
    from .data import RowsConfig as RowsConfig
    from .estimator import HorovodEstimator as HorovodEstimator
    from .estimator import TorchEstimator as TorchEstimator
    from .executor import RayExecutor as RayExecutor
    from .executor import create_settings as create_settings
    from .failure import WorkerFailed as WorkerFailed
    from .loader import prepare_data as prepare_data
    from .model import HorovodModel as HorovodModel
    from .model import TorchModel as TorchModel
    from .runner import run as run
    from .trainer import HorovodTrainer as HorovodTrainer
    from .worker import log as log

#: A worker imports only what it needs: torch not before it trains, and pandas never.
_HOME = {
    "HorovodConfig": "backend",
    "HorovodEstimator": "estimator",
    "HorovodModel": "model",
    "HorovodTrainer": "trainer",
    "RayExecutor": "executor",
    "RowsConfig": "data",
    "TorchEstimator": "estimator",
    "TorchModel": "model",
    "WorkerFailed": "failure",
    "create_settings": "executor",
    "log": "worker",
    "prepare_data": "loader",
    "run": "runner",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
