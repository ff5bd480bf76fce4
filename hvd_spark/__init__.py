"""hvd on Spark: train a model on a DataFrame, or run any function on the ranks of a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvd_core import errors
from hvd_core.errors import (
    ColumnError,
    DataError,
    HvdError,
    InvalidArgument,
    LossError,
    NotEnoughSlots,
    NotPicklable,
    PreflightError,
    RankFailed,
    RowsLost,
)

if TYPE_CHECKING:
    from .estimator import HorovodEstimator, TorchEstimator
    from .horovod_runner import HorovodRunner
    from .model import HorovodModel, TorchModel
    from .quality import examine
    from .runner import run
    from .store import LocalStore, Store

__all__ = [
    "ColumnError",
    "DataError",
    "HorovodEstimator",
    "HorovodModel",
    "HorovodRunner",
    "HvdError",
    "InvalidArgument",
    "LocalStore",
    "LossError",
    "NotEnoughSlots",
    "NotPicklable",
    "PreflightError",
    "RankFailed",
    "RowsLost",
    "Store",
    "TorchEstimator",
    "TorchModel",
    "errors",
    "examine",
    "run",
]

# Workers and ranks import this package too, and need neither pyspark.ml nor the driver's modules.
_LATE = {
    "HorovodEstimator": "estimator",
    "HorovodModel": "model",
    "HorovodRunner": "horovod_runner",
    "LocalStore": "store",
    "Store": "store",
    "TorchEstimator": "estimator",
    "TorchModel": "model",
    "examine": "quality",
    "run": "runner",
}


def __getattr__(name: str) -> object:
    if name in ("KerasEstimator", "KerasModel"):
        raise ImportError(
            f"hvd_spark.{name}: Keras is not supported yet; TorchEstimator trains torch modules"
        )
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_LATE[name]}", __name__), name)
