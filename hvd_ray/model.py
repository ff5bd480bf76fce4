"""The fitted model: adds its output to Ray Datasets, and holds what training found."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import cloudpickle
import pyarrow as pa
import ray
from ray.data import ActorPoolStrategy, Dataset
from ray.train import Result

from hvd_core.errors import ColumnError
from hvd_core.launch import dumps
from hvd_core.train import FitResult, Layout
from hvd_core.train.framework import Maker, framework_of
from hvd_core.train.outputs import OutColumn, Wanted, columns_for
from hvd_core.train.predict import Predictor

from .rows import as_dataset, table_of


class HorovodModel:
    """Made by `HorovodEstimator.fit`.

    result: what training found (history, rows, seconds). ray_result: Ray's; where there was a run_config with
    the checkpoints that are kept, and their epochs as `metrics_dataframe`. Pickles.
    """

    def __init__(
        self,
        model: Any,
        layout: Layout,
        result: FitResult,
        ray_result: Result | None = None,
        *,
        names: Sequence[str] = ("prediction", "probability", "rawPrediction"),
        heads: Sequence[str] = (),
        threshold: float | None = None,
        batch_size: int = 4096,
        framework: Maker | None = None,
    ):
        self._model, self._layout, self.result, self.ray_result = model, layout, result, ray_result
        self._wanted = Wanted(names[0], names[1], names[2], list(heads), threshold)
        self._batch_size, self._framework = batch_size, framework

    def __repr__(self) -> str:
        return f"HorovodModel: model={type(self._model).__name__}, {len(self.history)} epochs"

    @property
    def history(self) -> list[dict[str, Any]]:
        """A dict for each epoch: loss, metrics, val_*, rows, seconds."""
        return list(self.result.history)

    def getModel(self) -> Any:
        """A copy of the model with its weights, of the user's class, on the CPU."""
        return pickle.loads(cloudpickle.dumps(self._model))

    def plot(self, path: Any = None) -> Any:
        """Losses, metrics, rows/s and where the time went, by epoch, as a matplotlib Figure."""
        return self.result.plot(path)

    def _repr_html_(self) -> str:
        return self.result._repr_html_()

    def predict(self, data: Any, *, use_gpu: bool = False) -> Dataset:
        """Every row of `data` (as for `fit`) with the model's output added, in the output's own dtype: a
        number where a row's output is one number, else a list; for classifiers `prediction` is the class, and
        `probability` and `rawPrediction` are added. Lazy, as Datasets are, on a pool of actors, at least one
        of which needs a CPU. use_gpu: each actor on a GPU. Raises ColumnError for columns that are missing or
        exist already."""
        dataset = as_dataset(data)
        added = columns_for(self.result.output_spec, self._wanted, pa.list_(pa.float64()))
        have = dataset.columns()
        for name in self._layout.input_columns:
            if name not in (have or ()):
                raise ColumnError(
                    f"column {name!r} does not exist; there are {', '.join(map(repr, have or ()))}"
                )
        for column in added:
            if column.name in (have or ()):
                raise ColumnError(
                    f"column {column.name!r} exists already: drop it, or give the estimator another "
                    "prediction_col, probability_col or raw_prediction_col"
                )
        payload = dumps(
            _predictor, (self._model, self._layout, self._batch_size, self._framework), names=["model"]
        )
        whole: Any = ray.cluster_resources()  # type: ignore[no-untyped-call]
        units = int(whole.get("GPU" if use_gpu else "CPU", 1))
        predicted = dataset.map_batches(
            _Predicting,
            fn_constructor_args=(payload, list(self._layout.input_columns), added, use_gpu),
            batch_format="pyarrow",
            batch_size=self._batch_size,
            zero_copy_batch=True,
            compute=ActorPoolStrategy(min_size=1, max_size=max(1, units if use_gpu else units - 1)),
            num_gpus=1 if use_gpu else None,
            num_cpus=1 if units > 1 else 0,  # the rows come from tasks that need a CPU too
        )
        predicted._hvd_source = dataset  # type: ignore[attr-defined]  # one from Spark owns its rows
        return predicted


def _predictor(model: Any, layout: Layout, batch_size: int, framework: Maker | None) -> Predictor:
    made = framework_of(model, framework)
    return Predictor(model, layout, batch_size=batch_size, framework=made)


class _Predicting:
    """An actor's copy of the model."""

    def __init__(self, payload: bytes, names: list[str], added: Sequence[OutColumn], use_gpu: bool):
        make, args, kwargs = pickle.loads(payload)
        self._predictor: Predictor = make(*args, **kwargs)
        self._names, self._added = names, added
        if use_gpu:
            self._predictor.device = next(iter(self._predictor.framework.devices()), None)

    def __call__(self, rows: pa.Table) -> pa.Table:
        given = table_of(rows.select(self._names)).combine_chunks().to_batches()
        outputs = self._predictor.predict(given[0]) if given else []
        for column in self._added if outputs else ():
            rows = rows.append_column(column.name, column.of(outputs))
        return rows


#: Horovod's name; the loop is chosen by the model's type.
TorchModel = HorovodModel
