"""What an executor runs first: finds out whether hvd is there at all, which nobody else could say well."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle

import hvd_core

#: At this stage of a failure row a module was missing, and no rank has started.
MISSING = "missing"


class _Sealed:
    """Arrives as bytes, so that only who opens them needs what is in there."""

    def __init__(self, value: Any):
        self._value = value

    def __reduce__(self) -> Any:
        return bytes, (cloudpickle.dumps(self._value),)


def guarded(plan: Any) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """The function of `mapInArrow(..., barrier=True)` for a `task.JobPlan`. It travels by value and names
    nothing of hvd: where that is missing, or another version than here, it still takes part in the one
    gathering of the tasks, and yields a failure row with host and interpreter."""
    sealed: Any = _Sealed(plan)
    version = hvd_core.__version__

    def task(batches: Iterator[Any]) -> Iterator[Any]:
        import pickle

        try:
            import hvd_core

            if hvd_core.__version__ != version:
                raise ImportError(f"hvd {version}, which the driver has: {hvd_core.__version__} is there")
            opened = pickle.loads(sealed)
            from hvd_spark.task import barrier_task as run
        except ImportError as error:
            import json
            import socket
            import sys
            import time

            import pyarrow
            from pyspark import BarrierTaskContext

            context = BarrierTaskContext.get()
            context.allGather(json.dumps({"error": str(error)}))
            for _ in batches:
                pass
            rank = context.partitionId()
            about = {
                "rank": rank,
                "kind": "exception",
                "exc_type": "ModuleNotFoundError",
                "message": f"{error} ({sys.executable})",
                "host": socket.gethostname(),
                "at": time.time(),
            }
            columns = [
                pyarrow.array([rank], pyarrow.int32()),
                pyarrow.array(["failure/missing"], pyarrow.string()),
                pyarrow.array([json.dumps(about).encode() + b"\n"], pyarrow.binary()),
            ]
            yield pyarrow.RecordBatch.from_arrays(columns, names=["rank", "kind", "data"])
            return
        yield from run(opened, batches)

    return task
