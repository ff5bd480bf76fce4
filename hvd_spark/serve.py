"""transform's part on the workers: whole Arrow batches through a model that is loaded once per process."""

from __future__ import annotations

import os
import pickle
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa

from hvd_core.errors import LaunchFailed
from hvd_core.launch.gpus import gpus_for
from hvd_core.train.framework import Framework
from hvd_core.train.outputs import OutColumn
from hvd_core.train.predict import Predictor

from .parcel import Parcel

#: Models of that many transforms stay loaded in a Python worker.
_KEPT = 2


@dataclass(frozen=True)
class Serving:
    """payload: from `dumps(Predictor, ...)`; key: its hash. inputs: position in the batch and name of
    each column the model needs. outputs: the columns to add. gpu: use the executor's, if it has one.
    sys_path: where the driver finds modules, if the workers are on its machine.
    """

    payload: Parcel
    key: str
    inputs: tuple[tuple[int, str], ...]
    outputs: tuple[OutColumn, ...]
    gpu: bool = True
    sys_path: tuple[str, ...] = ()

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The function of mapInArrow: every batch with the outputs added."""
        sys.path.extend(entry for entry in self.sys_path if entry not in sys.path)
        predictor = self._predictor()
        predictor.device = own_device(predictor.framework) if self.gpu else None
        for batch in batches:
            if batch.num_rows == 0:
                continue
            names = [name for _, name in self.inputs]
            given = pa.RecordBatch.from_arrays([batch.column(i) for i, _ in self.inputs], names=names)
            found = predictor.predict(given)
            columns = [column.of(found) for column in self.outputs]
            fields = [pa.field(column.name, column.type) for column in self.outputs]
            yield pa.RecordBatch.from_arrays(
                [*batch.columns, *columns], schema=pa.schema([*batch.schema, *fields])
            )

    def _predictor(self) -> Predictor:
        key = (self.key, self.gpu)  # a model that is on a GPU stays there
        if key not in _loaded:
            make, args, kwargs = pickle.loads(self.payload.open())
            _loaded[key] = make(*args, **kwargs)
            while len(_loaded) > _KEPT:
                _loaded.popitem(last=False)
        _loaded.move_to_end(key)
        return _loaded[key]


_loaded: OrderedDict[tuple[str, bool], Predictor] = OrderedDict()


def own_device(framework: Framework) -> str | None:
    """The framework's name of the GPU of this task; None: there is none."""
    from pyspark import TaskContext

    devices = framework.devices()
    if not devices:
        return None
    context = TaskContext.get()
    gpu = context.resources().get("gpu") if context is not None else None
    return devices[gpu_index(gpu.addresses if gpu else [], os.environ, len(devices))]


def gpu_index(addresses: list[str], environ: Mapping[str, str], count: int) -> int:
    """Which of the `count` visible GPUs Spark means; the first where it means one that is not visible."""
    try:
        index = gpus_for(0, environ.get("CUDA_VISIBLE_DEVICES"), addresses).index or 0
    except LaunchFailed:
        return 0
    return index if index < count else 0
