"""`HorovodEstimator(...).fit(df)`: parameters, a look before the launch, the launch, a fitted model."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import cloudpickle
from pyspark.ml import Estimator
from pyspark.sql import DataFrame

from hvd_core.config import Config
from hvd_core.errors import RowsLost
from hvd_core.launch import dumps
from hvd_core.train import FitResult, TrainSpec
from hvd_core.train.checkpoint import check_checkpoint_dir
from hvd_core.train.torch_model import load_weights

from . import preflight, rank
from .launcher import JobSpec, Outcome, launch
from .model import HorovodModel
from .params import JOB, KNOBS, Knobs, provide
from .persist import Stored

#: Imported once by each worker's template, so that a rank starts warm. The first optimizer imports
#: torch._dynamo, which takes as long as torch itself.
_PRELOAD = (
    "torch",
    "torch._dynamo",
    "hvd_core.torch",
    "hvd_core.train.torch_loop",
    "hvd_core.train.loop",
    "hvd_spark.rank",
)


@provide(KNOBS)
class HorovodEstimator(Estimator["HorovodModel"], Knobs, Stored):
    """Trains a model on a Spark DataFrame, on `num_proc` ranks; a `pyspark.ml` Estimator.

    `fit(df)` returns a `HorovodModel`. Each row is used once per epoch, on one rank, and N ranks give what
    one rank gives on the joined batch. The model, optimizer and loss given here are never changed. Before
    anything is launched: NotEnoughSlots, ColumnError, DataError ("no rows"), NotPicklable, InvalidArgument.
    Later: DataError (nulls, ragged rows: column and count), RankFailed with the first cause, RowsLost. Ctrl-C
    cancels the job and ends the ranks.
    """

    def __init__(self, **values: Any):
        super().__init__(values)

    def _fit(self, dataset: DataFrame) -> HorovodModel:
        spec = self._spec()
        preflight.check_frame(dataset)
        preflight.check_finite(dataset)
        if spec.checkpoint_dir is not None:
            check_checkpoint_dir(spec.checkpoint_dir)
        size = preflight.check_cluster(dataset.sparkSession, self.getNumProc())  # type: ignore[attr-defined]
        layout = preflight.check_columns(dataset, spec)
        payload = dumps(rank.train, (spec,), names=["HorovodEstimator"])
        frame = preflight.selected(dataset, layout)
        layout = preflight.check_rows(frame, spec, layout)
        job = JobSpec(
            size,
            payload,
            f"hvd: fit {type(spec.model).__name__ if spec.model is not None else 'model'} on {size} ranks",
            layout=layout,
            preload=_PRELOAD,
            config=_config(spec),
            verbose=spec.verbose,
        )
        result = _checked(launch(frame, job), spec)
        trained = load_weights(_untrained(spec), result.weights)
        model = self._copyValues(HorovodModel(model=trained, transform_fn=spec.transform_fn))
        model._resetUid(self.uid)
        return model.fitted(layout, result)

    def _spec(self) -> TrainSpec:
        """The parameters as one frozen value; raises InvalidArgument."""
        return TrainSpec(**self._values(name for name in self._knobs if name not in JOB))


def _config(spec: TrainSpec) -> Config:
    """The settings of the environment, with where the estimator wants its shards."""
    config = Config.from_env()
    return replace(
        config,
        shard_memory_bytes=spec.shard_memory_bytes or config.shard_memory_bytes,
        shard_dir=spec.shard_dir or config.shard_dir,
    )


def _untrained(spec: TrainSpec) -> Any:
    """A copy of the user's model, made as the ranks made theirs."""
    return spec.model_fn() if spec.model_fn is not None else pickle.loads(cloudpickle.dumps(spec.model))


def _checked(outcome: Outcome, spec: TrainSpec) -> FitResult:
    result = FitResult.from_bytes(rank.unpickled(outcome.results[0]))
    sent = sum(outcome.rows)
    if result.rows_sent != sent or (result.rows_seen != sent and spec.max_steps is None):
        raise RowsLost(f"the ranks were given {sent} rows, but used {result.rows_seen} in an epoch")
    return result
