"""Saving and loading of estimator and model, as Spark's own stages do it: a directory, on every filesystem
that Spark can write to, through Spark alone, so in classic mode and under Spark Connect alike.

    metadata/   one line of JSON: class, uid, Params as Spark keeps them, and under "hvd" what follows below
    weights/    a safetensors file of all tensors, in Parquet rows (offset, data)
    objects/    a pickle of the model's class, functions and other objects, in the same form

`metadata` is written last: without it there is nothing to load. The pickle runs code when it is loaded.
"""

from __future__ import annotations

import base64
import hashlib
import json
import pickle
import sys
import tempfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
from pyspark.errors import AnalysisException
from pyspark.ml.util import DefaultParamsWriter, MLReadable, MLReader, MLWritable, MLWriter
from pyspark.sql import SparkSession

from hvd_core.errors import InvalidArgument
from hvd_core.launch import dumps
from hvd_core.train import Column
from hvd_core.train.framework import Framework, framework_of, name_to_save

from . import session

#: Small enough for a message of Spark Connect (4 MiB).
_CHUNK_NBYTES = 1 << 20
#: What is in flight at once, whatever the size of the model.
_PORTION_NBYTES = 32 << 20
_FORMAT = 1
#: Lives only as long as its session.
_NOT_SAVED = frozenset({"validation_df"})


class Stored(MLWritable, MLReadable[Any]):
    """Mixin of estimator and model: `save`, `write`, `load`, `read`."""

    def write(self) -> MLWriter:
        """`write().overwrite().save(path)` replaces what is there; `save(path)` does not."""
        return Writer(self)

    @classmethod
    def read(cls) -> MLReader[Any]:
        """`load(path)` runs code that was saved with the stage: load only from people you trust."""
        return Reader(cls)

    def _kept(self) -> dict[str, Any]:
        """What is to be saved besides parameters and objects, as JSON."""
        return {}

    def _restore(self, kept: dict[str, Any]) -> None:
        """Puts back what `_kept` gave."""


class Writer(MLWriter):
    def __init__(self, instance: Any):
        super().__init__()
        self.instance = instance

    def _handleOverwrite(self, path: str) -> None:
        if session.context_of(self.sparkSession) is not None:
            super()._handleOverwrite(path)
            return
        from pyspark.ml.util import _remove_dfs_dir

        _remove_dfs_dir(path, self.sparkSession)

    def saveImpl(self, path: str) -> None:
        """Raises NotPicklable by the name of what cannot be saved; InvalidArgument when `path` exists."""
        spark, stage = self.sparkSession, self.instance
        with tempfile.TemporaryDirectory() as folder:
            tensors = Path(folder) / "weights.safetensors"
            framework = framework_of(stage._objects.get("model"), stage._objects.get("framework"))
            objects = _pickled(stage, framework, tensors)
            python = sys.version.split()[0]
            name = name_to_save(framework, stage._objects.get("framework"))
            about: dict[str, Any] = {"format": _FORMAT, "python": python, "framework": name}
            try:
                about["objects"] = _write_bytes(spark, f"{path}/objects", BytesIO(objects))
            except AnalysisException as error:
                if "PATH_ALREADY_EXISTS" in str(error):
                    raise InvalidArgument(
                        f"something is saved at {path} already: write().overwrite().save(path) replaces it"
                    ) from None
                raise
            if tensors.exists():
                with tensors.open("rb") as file:
                    about["weights"] = _write_bytes(spark, f"{path}/weights", file)
        about["kept"] = stage._kept()
        metadata = json.loads(DefaultParamsWriter._get_metadata_to_save(stage, spark))
        metadata["class"] = f"hvd_spark.{type(stage).__name__}"
        text = json.dumps({**metadata, "hvd": about}, separators=(",", ":"))
        spark.createDataFrame([(text,)], "value string").coalesce(1).write.text(f"{path}/metadata")


class Reader(MLReader[Any]):
    def __init__(self, cls: type):
        super().__init__()
        self.cls = cls

    def load(self, path: str) -> Any:
        """Raises InvalidArgument when this is not what was saved at `path`, or it is damaged."""
        spark = self.sparkSession
        row = spark.read.text(f"{path}/metadata").first()
        metadata = json.loads(row[0]) if row is not None else {}
        stage = _instance(self.cls, metadata, path)
        about = metadata["hvd"]
        objects = BytesIO()
        _read_bytes(spark, f"{path}/objects", about["objects"], objects)
        with tempfile.TemporaryDirectory() as folder:
            tensors = None
            if "weights" in about:
                tensors = Path(folder) / "weights.safetensors"
                with tensors.open("wb+") as file:
                    _read_bytes(spark, f"{path}/weights", about["weights"], file)
            stage._objects = _unpickled(objects.getvalue(), tensors, path, about)
        stage._restore(about["kept"])
        return stage


def _pickled(stage: Any, framework: Framework, tensors: Path) -> bytes:
    objects = {name: value for name, value in stage._objects.items() if name not in _NOT_SAVED}
    try:
        return framework.save_objects(objects, tensors)
    except Exception:
        dumps(dict, (objects,), names=[type(stage).__name__])  # says what it is
        raise


def _unpickled(data: bytes, tensors: Path | None, path: str, about: dict[str, Any]) -> dict[str, Any]:
    try:
        return framework_of(None, about.get("framework", "torch")).load_objects(data, tensors)
    except (ImportError, AttributeError, TypeError, KeyError, pickle.UnpicklingError) as error:
        raise InvalidArgument(
            f"the objects saved at {path} cannot be loaded here: {type(error).__name__}: {error}; they were "
            f"saved by Python {about['python']}, this is {sys.version.split()[0]}. Modules in which models "
            "and functions are defined must be importable here too"
        ) from error


def _instance(cls: type, metadata: dict[str, Any], path: str) -> Any:
    """An empty stage with the saved uid and parameters."""
    import hvd_spark

    saved = str(metadata.get("class", "nothing"))
    kind = getattr(hvd_spark, saved.removeprefix("hvd_spark."), None) if "hvd" in metadata else None
    if not isinstance(kind, type) or not issubclass(kind, cls):
        raise InvalidArgument(f"what is saved at {path} is {saved}, not {cls.__name__}")
    if metadata["hvd"]["format"] > _FORMAT:
        raise InvalidArgument(f"what is saved at {path} comes from a later version of hvd")
    stage: Any = kind()
    stage._resetUid(metadata["uid"])
    for name, value in metadata["paramMap"].items():
        stage._set(**{stage.getParam(name).name: value})
    for name, value in metadata["defaultParamMap"].items():
        stage._setDefault(**{stage.getParam(name).name: value})
    return stage


def _chunks(file: BinaryIO) -> Iterator[tuple[int, bytearray]]:
    offset = 0
    while chunk := file.read(_CHUNK_NBYTES):
        yield offset, bytearray(chunk)
        offset += len(chunk)


def _write_bytes(spark: SparkSession, path: str, file: BinaryIO) -> dict[str, Any]:
    """The content of `file` as Parquet; returns what `_read_bytes` checks it against."""
    digest, nbytes, mode = hashlib.sha256(), 0, "error"
    portion: list[tuple[int, bytearray]] = []

    def flush() -> None:
        nonlocal mode
        frame = spark.createDataFrame(portion, "offset long, data binary")
        frame.write.mode(mode).option("compression", "none").parquet(path)
        mode = "append"
        portion.clear()

    for offset, chunk in _chunks(file):
        digest.update(chunk)
        nbytes = offset + len(chunk)
        portion.append((offset, chunk))
        if len(portion) * _CHUNK_NBYTES >= _PORTION_NBYTES:
            flush()
    if portion:
        flush()
    return {"nbytes": nbytes, "sha256": digest.hexdigest()}


def _read_bytes(spark: SparkSession, path: str, about: dict[str, Any], file: BinaryIO) -> None:
    """Raises InvalidArgument when these are not the bytes that were written."""
    for offset, chunk in spark.read.parquet(path).toLocalIterator():
        file.seek(offset)
        file.write(chunk)
    file.seek(0)
    digest, nbytes = hashlib.sha256(), 0
    for _, chunk in _chunks(file):
        digest.update(chunk)
        nbytes += len(chunk)
    if (nbytes, digest.hexdigest()) != (about["nbytes"], about["sha256"]):
        raise InvalidArgument(f"{path} is damaged: {nbytes} bytes that are not the {about['nbytes']} saved")
    file.seek(0)


def columns_to_json(columns: tuple[Column, ...]) -> list[dict[str, Any]]:
    """Arrow types travel as an Arrow schema in base64."""
    return [
        {
            "name": column.name,
            "type": base64.b64encode(pa.schema([("", column.type)]).serialize().to_pybytes()).decode(),
            "shape": None if column.shape is None else list(column.shape),
            "kind": column.kind,
        }
        for column in columns
    ]


def columns_from_json(kept: list[dict[str, Any]]) -> tuple[Column, ...]:
    return tuple(
        Column(
            entry["name"],
            pa.ipc.read_schema(pa.py_buffer(base64.b64decode(entry["type"]))).field(0).type,
            None if entry["shape"] is None else tuple(entry["shape"]),
            entry["kind"],
        )
        for entry in kept
    )
