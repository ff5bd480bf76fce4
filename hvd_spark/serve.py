"""transform's part on the workers: whole Arrow batches through a model that is loaded once per process."""

from __future__ import annotations

import pickle
import sys
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from hvd_core.train.predict import Predictor

#: Models of that many transforms stay loaded in a Python worker.
_KEPT = 2


@dataclass(frozen=True)
class Serving:
    """payload: from `dumps(Predictor, ...)`; key: its hash. inputs: position in the batch and name of
    each column the model needs. outputs: name, type and whether a row is one number, of each column to add.
    sys_path: where the driver finds modules, if the workers are on its machine.
    """

    payload: bytes
    key: str
    inputs: tuple[tuple[int, str], ...]
    outputs: tuple[tuple[str, pa.DataType, bool], ...]
    sys_path: tuple[str, ...] = ()

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The function of mapInArrow: every batch with the outputs added."""
        sys.path.extend(entry for entry in self.sys_path if entry not in sys.path)
        predictor = _predictor(self.key, self.payload)
        for batch in batches:
            if batch.num_rows == 0:
                continue
            names = [name for _, name in self.inputs]
            given = pa.RecordBatch.from_arrays([batch.column(i) for i, _ in self.inputs], names=names)
            found = predictor.predict(given)
            columns = [
                as_arrow(rows, kind, flat) for rows, (_, kind, flat) in zip(found, self.outputs, strict=True)
            ]
            fields = [pa.field(name, kind) for name, kind, _ in self.outputs]
            yield pa.RecordBatch.from_arrays(
                [*batch.columns, *columns], schema=pa.schema([*batch.schema, *fields])
            )


_loaded: OrderedDict[str, Predictor] = OrderedDict()


def _predictor(key: str, payload: bytes) -> Predictor:
    if key not in _loaded:
        make, args, kwargs = pickle.loads(payload)
        _loaded[key] = make(*args, **kwargs)
        while len(_loaded) > _KEPT:
            _loaded.popitem(last=False)
    _loaded.move_to_end(key)
    return _loaded[key]


def as_arrow(rows: np.ndarray, kind: pa.DataType, flat: bool) -> pa.Array:
    """(rows, *shape) as a column of `kind`; `flat`: a row is one number, whatever its shape."""
    if flat:
        return pa.array(rows.reshape(len(rows)), kind)
    types = [kind]
    while pa.types.is_list(types[-1]):
        types.append(types[-1].value_type)
    column = pa.array(np.ascontiguousarray(rows).reshape(-1), types[-1])
    for axis in range(rows.ndim - 1, 0, -1):
        width = rows.shape[axis]
        offsets = np.arange(0, len(column) + 1, width, dtype=np.int32)
        column = pa.ListArray.from_arrays(pa.array(offsets), column, type=types[axis - 1])
    return column
