"""From Arrow rows to a fitted model, once for every platform.

The driver makes a `TrainSpec` and `plan_layout`s it against its columns. Each rank packs its rows with a
`ShardWriter`; the process that trains attaches the `Shard` and calls `fit_shard`. `Predictor` serves
transform.
"""

from .columns import Column, Layout, columns_of, plan_layout
from .result import FitResult, OutputSpec
from .spec import EarlyStopping, Scheduler, TrainSpec

__all__ = [
    "Checkpoint",
    "CheckpointWarning",
    "Column",
    "EarlyStopping",
    "FitResult",
    "Layout",
    "MLflow",
    "OutputSpec",
    "PackedShard",
    "Predictor",
    "Scheduler",
    "Shard",
    "ShardWriter",
    "TensorBoard",
    "TrainSpec",
    "check_checkpoint_dir",
    "columns_of",
    "examine",
    "Framework",
    "fit_local",
    "fit_shard",
    "load_checkpoint",
    "plan_layout",
    "register_framework",
]

_LATE = {
    "Checkpoint": "checkpoint",
    "CheckpointWarning": "resume",
    "check_checkpoint_dir": "checkpoint",
    "examine": "quality",
    "Framework": "framework",
    "register_framework": "framework",
    "load_checkpoint": "checkpoint",
    "PackedShard": "shard",
    "Shard": "shard",
    "ShardWriter": "shard",
    "Predictor": "predict",
    "fit_local": "local",
    "fit_shard": "loop",
    "MLflow": "trackers",
    "TensorBoard": "trackers",
}


def __getattr__(name: str) -> object:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_LATE[name]}", __name__), name)
