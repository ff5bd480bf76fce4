"""Large bytes on their way to the executors: sent once to each of them, whatever the number of tasks."""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from . import session

#: Smaller ones travel with the function that uses them.
_SMALL_NBYTES = 1 << 20


@dataclass(frozen=True)
class Parcel:
    """Exactly one is set. data: the bytes. broadcast: Spark's, in classic mode. file: the name of a file of
    the session, under Spark Connect, whose plans must stay below 128 MiB."""

    data: bytes | None = None
    broadcast: Any = None
    file: str | None = None

    @classmethod
    def of(cls, spark: SparkSession, data: bytes) -> Parcel:
        context = session.context_of(spark)
        if len(data) <= _SMALL_NBYTES:
            return cls(data=data)
        if context is not None:
            return cls(broadcast=context.broadcast(data))
        if not hasattr(spark, "addArtifact"):
            return cls(data=data)
        name = f"hvd-{hashlib.sha256(data).hexdigest()[:32]}"
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / name
            path.write_bytes(data)
            spark.addArtifact(str(path), file=True)
        return cls(file=name)

    def open(self) -> bytes:
        """The bytes; called in a task."""
        if self.data is not None:
            return self.data
        if self.broadcast is not None:
            return self.broadcast.value
        from pyspark import SparkFiles

        assert self.file is not None
        return Path(SparkFiles.get(self.file)).read_bytes()

    def destroy(self) -> None:
        """Frees what executors hold; nothing may use it any more."""
        if self.broadcast is not None:
            with contextlib.suppress(Exception):
                self.broadcast.destroy()
