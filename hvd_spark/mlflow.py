"""Fitted models for MLflow: what `hvd_spark.mlflow.log_model(model)` logs, `mlflow.pyfunc.load_model` loads
wherever torch is, also without hvd and without Spark.

The plain torch module, without its columns, is `mlflow.pytorch.log_model(model.getModel(), ...)`.
"""

from __future__ import annotations

import contextlib
import importlib
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame

from hvd_core.errors import InvalidArgument
from hvd_core.train import Column

from .model import HorovodModel


def log_model(
    model: HorovodModel, name: str = "model", *, like: DataFrame | None = None, **options: Any
) -> Any:
    """Logs `model` to the active MLflow run (or a new one) as a pyfunc; returns MLflow's ModelInfo.

    `mlflow.pyfunc.load_model(uri).predict(frame)` gives the columns that `transform` adds. like: a DataFrame
    with the model's columns, for models that hvd did not fit. options: of `mlflow.pyfunc.log_model`.
    """
    pyfunc = _pyfunc()
    with _files(model, like) as files:
        return pyfunc.log_model(name=name, **{**files, **options})


def save_model(model: HorovodModel, path: str, *, like: DataFrame | None = None, **options: Any) -> None:
    """The same into a new directory of this machine."""
    pyfunc = _pyfunc()
    with _files(model, like) as files:
        pyfunc.save_model(path, **{**files, **options})


def _pyfunc() -> Any:
    try:
        import mlflow.pyfunc
    except ImportError as error:
        raise InvalidArgument(f"this needs the package mlflow: pip install mlflow ({error})") from error
    return mlflow.pyfunc


@contextlib.contextmanager
def _files(model: HorovodModel, like: DataFrame | None) -> Iterator[dict[str, Any]]:
    """What mlflow.pyfunc wants to know, and the files it copies."""
    framework = model.framework()
    if framework.pyfunc is None:
        raise InvalidArgument(f"{framework.name} models cannot be stored for MLflow as a pyfunc")
    export: Any = importlib.import_module(framework.pyfunc)
    layout, specs, columns = model.form(None if like is None else like.schema)
    outputs = [{k: v for k, v in asdict(column).items() if k != "type"} for column in columns]
    used = set(layout.input_columns)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        batch_size = model.getInferenceBatchSize()  # type: ignore[attr-defined]
        export.write_model(data, model.getModel(), layout, specs, outputs, batch_size=batch_size)
        yield {
            "loader_module": export.LOADER,
            "data_path": str(data),
            "code_paths": [str(export.write_code(Path(folder)))],
            "signature": _signature([column for column in layout.columns if column.name in used]),
            "pip_requirements": export.requirements(),
        }


_TYPES = {
    pa.bool_(): "boolean",
    pa.int8(): "integer",
    pa.int16(): "integer",
    pa.int32(): "integer",
    pa.int64(): "long",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.binary(): "binary",
}


def _signature(columns: list[Column]) -> Any:
    """Of the inputs; None where MLflow has no word for a column."""
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, Schema

    specs: list[Any] = []
    for column in columns:
        type = _mlflow_type(column.type)
        if type is None:
            return None
        specs.append(ColSpec(type, column.name))
    return ModelSignature(inputs=Schema(specs))


def _mlflow_type(type: pa.DataType) -> Any:
    from mlflow.types.schema import Array

    if pa.types.is_list(type):
        inner = _mlflow_type(type.value_type)
        return None if inner is None else Array(inner)
    return _TYPES.get(type)
