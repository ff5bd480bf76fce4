"""hvd's core: ranks, collectives between them, and what trains on top. Importing it needs numpy only.

`hvd_core.torch` is the API that scripts use; `run` starts ranks on this machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .config import Config
from .group import Adasum, Average, Group, Handle, Listener, Max, Min, Product, ReduceOp, Sum
from .world import World

if TYPE_CHECKING:
    from .as_horovod import install_as_horovod
    from .launch import log_to_driver, run

__version__ = "0.1.0"

__all__ = [
    "Adasum",
    "Average",
    "Config",
    "Group",
    "Handle",
    "Listener",
    "Max",
    "Min",
    "Product",
    "ReduceOp",
    "Sum",
    "World",
    "install_as_horovod",
    "log_to_driver",
    "run",
]


def __getattr__(name: str) -> Any:
    # The launcher needs cloudpickle; who only computes does not.
    if name in ("run", "log_to_driver"):
        from . import launch

        return getattr(launch, name)
    if name == "install_as_horovod":
        from . import as_horovod

        return as_horovod.install_as_horovod
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
