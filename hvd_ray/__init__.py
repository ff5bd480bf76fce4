"""hvd for Ray: a Ray Train trainer, an executor of actors, and functions on N ranks of a cluster.

Read order: `trainer` (what users make) -> `backend` (how its workers become ranks) -> `data` (which rows each
gets) -> `failure` (what is raised); `executor` and `runner` for ranks without Ray Train, with `worker` in
their actors.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backend import HorovodConfig as HorovodConfig
    from .data import RowsConfig as RowsConfig
    from .executor import RayExecutor as RayExecutor
    from .executor import create_settings as create_settings
    from .failure import WorkerFailed as WorkerFailed
    from .loader import prepare_data as prepare_data
    from .runner import run as run
    from .trainer import HorovodTrainer as HorovodTrainer
    from .worker import log as log

#: A worker imports only what it needs: torch not before it trains, and pandas never.
_HOME = {
    "HorovodConfig": "backend",
    "HorovodTrainer": "trainer",
    "RayExecutor": "executor",
    "RowsConfig": "data",
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
