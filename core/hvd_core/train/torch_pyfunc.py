"""A fitted torch model as MLflow loads it, without hvd: this file and heads.py travel with the model, as the
package hvd_pyfunc. They need numpy, torch and what MLflow itself brings, nothing of hvd.

In the model's data directory, written by torch_export.py:

    model.pt        the module with its weights, by torch.save; loading it runs code
    transform.pkl   the user's transform_fn, if there is one
    feed.json       how columns become inputs and outputs become columns
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import heads


def _load_pyfunc(data_path: str) -> Model:
    """What MLflow calls."""
    folder = Path(data_path)
    transform = folder / "transform.pkl"
    return Model(
        torch.load(folder / "model.pt", map_location="cpu", weights_only=False),
        json.loads((folder / "feed.json").read_text()),
        pickle.loads(transform.read_bytes()) if transform.exists() else None,
    )


class Model:
    """`predict` adds nothing to its input: it returns the columns that `HorovodModel.transform` adds."""

    def __init__(self, model: torch.nn.Module, feed: Mapping[str, Any], transform_fn: Any = None):
        self._model, self._feed, self._transform_fn = model.eval(), feed, transform_fn

    def predict(self, model_input: Any, params: Any = None) -> Any:
        """model_input: a pandas DataFrame, a dict of columns, or an array (rows, columns) in the order of the
        feature columns; arrays and vectors are one value of a column. A DataFrame gives a DataFrame, others a
        dict of columns.

        Raises ValueError for columns that are missing, have nulls that nothing replaces, or are ragged. With
        null_value NaN counts as a null: DataFrames have no other for numbers.
        """
        names = self._feed["columns"]
        raw = _columns_of(model_input, names)
        rows = len(raw[names[0]])
        arrays = {name: self._array(name, raw[name]) for name in names}
        if self._transform_fn is not None:
            arrays = {**arrays, **self._transform_fn(dict(arrays))}
        inputs = [self._input(block, arrays) for block in self._feed["inputs"]]
        outputs = self._outputs(inputs, rows)
        found: dict[str, Any] = {}
        for column in self._feed["outputs"]:
            output = outputs[column["output"]]
            values = heads.column(column["what"], column["head"], output, column["threshold"])
            found[column["name"]] = values.reshape(rows) if column["form"] == "flat" else list(values)
        if hasattr(model_input, "index"):
            return type(model_input)(found, index=model_input.index)
        return found

    def _array(self, name: str, values: np.ndarray) -> np.ndarray:
        """(rows, *shape); bytes stay objects, for transform_fn."""
        fill = self._feed["null_value"]
        fill = fill.get(name) if isinstance(fill, dict) else fill
        shape = self._feed["shapes"].get(name)
        if values.dtype == object:
            values = _stacked(name, values, fill, shape)
        elif values.dtype.kind == "f" and fill is not None:
            values = np.where(np.isnan(values), np.asarray(fill, values.dtype), values)
        if shape is not None and values.dtype != object:
            values = values.reshape(len(values), *shape)
        return values

    def _input(self, block: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        parts = [np.asarray(arrays[name]) for name in block["columns"]]
        if block["joined"] and (len(parts) > 1 or parts[0].ndim == 1):
            whole = np.concatenate([p if p.ndim > 1 else p[:, None] for p in parts], axis=1)
        else:
            whole = parts[0]
        is_float = any(p.dtype.kind in "fb" for p in parts)
        dtype = np.dtype(block["dtype"] or (block["float_dtype"] if is_float else "int64"))
        what = ", ".join(map(repr, block["columns"]))
        if dtype.kind == "i" and whole.dtype.kind == "f" and not (np.floor(whole) == whole).all():
            raise ValueError(f"column {what} must hold whole numbers")
        if block["shape"] is not None and list(whole.shape[1:]) != list(block["shape"]):
            raise ValueError(
                f"column {what} has rows of shape {whole.shape[1:]}, not {tuple(block['shape'])}"
            )
        return np.ascontiguousarray(whole, dtype)

    def _outputs(self, inputs: list[np.ndarray], rows: int) -> list[np.ndarray]:
        dtypes = (p.dtype for p in self._model.parameters() if p.is_floating_point())
        narrow = next(dtypes, None) is torch.bfloat16  # which numpy does not have
        size = self._feed["batch_size"]
        parts = []
        with torch.inference_mode():
            for i in range(0, rows, size):
                tensors = [torch.from_numpy(x[i : i + size]) for x in inputs]
                out = self._model(
                    *(t.to(torch.bfloat16) if narrow and t.is_floating_point() else t for t in tensors)
                )
                several = (
                    [out] if isinstance(out, torch.Tensor) else out.values() if isinstance(out, dict) else out
                )
                parts.append([(o.float() if o.dtype is torch.bfloat16 else o).numpy() for o in several])
        if not parts:
            return [np.empty((0, *o["shape"]), o["dtype"]) for o in self._feed["model_outputs"]]
        return [np.concatenate(one) for one in zip(*parts, strict=True)]


def _columns_of(data: Any, names: list[str]) -> dict[str, np.ndarray]:
    if isinstance(data, np.ndarray):
        if data.ndim != 2 or data.shape[1] != len(names):
            raise ValueError(f"an array of shape {data.shape}, but (rows, {len(names)}): {', '.join(names)}")
        return {name: data[:, i] for i, name in enumerate(names)}
    missing = [name for name in names if name not in data]
    if missing:
        raise ValueError(f"column {missing[0]!r} does not exist; needed are {', '.join(map(repr, names))}")
    return {
        name: data[name].to_numpy() if hasattr(data[name], "to_numpy") else _objects(data[name])
        for name in names
    }


def _objects(values: Iterable[Any]) -> np.ndarray:
    """One value a row, whatever it is."""
    if isinstance(values, np.ndarray) and values.ndim == 1:
        return values
    return np.array([*values, None], dtype=object)[:-1]


def _stacked(name: str, values: np.ndarray, fill: Any, shape: Any) -> np.ndarray:
    nulls = sum(value is None for value in values)
    if nulls and fill is None:
        raise ValueError(f"column {name!r} has {nulls} nulls in {len(values)} rows and no null_value")
    if nulls:
        like = next((np.shape(_plain(v)) for v in values if v is not None), shape or ())
        values = _objects([np.full(like, fill) if value is None else value for value in values])
    if any(isinstance(value, (bytes, str)) for value in values):
        return values
    try:
        stacked = np.array([_plain(value) for value in values])
    except ValueError as error:
        raise ValueError(f"column {name!r} has rows of different shapes: {error}") from error
    return stacked.astype(np.float64) if stacked.dtype == object else stacked  # decimals


def _plain(value: Any) -> Any:
    """Spark's vectors as arrays."""
    return value.toArray() if hasattr(value, "toArray") else value
