"""cloudpickle, with the names of source files kept. Imported only where something is pickled."""

from __future__ import annotations

import io
import marshal
import pickle
import types
from typing import Any

import cloudpickle


class SourcePickler(cloudpickle.Pickler):
    """cloudpickle replaces the file name of code it sends by value, and a traceback from a rank would not say
    where the user's line is. `marshal` keeps it; it needs the same Python version at both ends, as
    cloudpickle does.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.CodeType):
            try:
                return marshal.loads, (marshal.dumps(obj),)
            except ValueError:  # a constant that no compiler made
                return NotImplemented
        return super().reducer_override(obj)


def dumps(value: Any) -> bytes:
    file = io.BytesIO()
    SourcePickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


class _Counter:
    """A file that keeps no bytes."""

    def __init__(self) -> None:
        self.nbytes = 0

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self.nbytes += size
        return size


def pickled_nbytes(value: Any) -> int:
    """The size of `dumps(value)`, without making it."""
    counter = _Counter()
    SourcePickler(counter, pickle.HIGHEST_PROTOCOL).dump(value)
    return counter.nbytes
