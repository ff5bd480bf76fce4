"""`HorovodEstimator(...).fit(df)`: parameters, a look before the launch, the launch, a fitted model."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pyspark.ml import Estimator
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from hvd_core.config import Config
from hvd_core.errors import ColumnError, InvalidArgument, RowsLost
from hvd_core.launch import dumps, envs_of
from hvd_core.train import FitResult, Layout, TrainSpec
from hvd_core.train.checkpoint import check_checkpoint_dir
from hvd_core.train.framework import framework_for, portable

from . import preflight, rank, session
from .horovod_names import with_shapes
from .launcher import JobSpec, Outcome, launch
from .model import HorovodModel
from .params import JOB, KNOBS, Knobs, provide
from .parcel import Parcel
from .parts import PartsReader, unpickled
from .persist import Stored
from .store import new_run_id

#: Imported once by each worker's template, besides the framework, so that a rank starts warm.
PRELOAD = ("hvd_core.train.loop", "hvd_spark.rank")


#: Of the models that one job trains one after the other (`fit` with several maps) the weights come back
#: together, so there may be this much of them.
_TOGETHER_NBYTES = 256 << 20

#: Says of a row whether it comes from validation_df.
_MARK = "hvd_validation"


@provide(KNOBS)
class HorovodEstimator(Estimator["HorovodModel"], Knobs, Stored):
    """Trains a model on a Spark DataFrame, on `num_proc` ranks; a `pyspark.ml` Estimator.

    `fit(df)` returns a `HorovodModel`. Each row is used once per epoch, on one rank, and N ranks give what
    one rank gives on the joined batch. The model, optimizer and loss given here are never changed. With
    several parameter maps (`fit(df, maps)`, `CrossValidator`) the ranks take their rows once and train one
    model after the other on them. Before anything is launched: NotEnoughSlots, ColumnError, DataError ("no
    rows"), NotPicklable, InvalidArgument. Later: DataError (nulls, ragged rows: column and count), RankFailed
    with the first cause, RowsLost, StorageFull. After a lost rank (killed, its executor gone) the job begins
    again up to `max_retries` times, from the last checkpoint in `checkpoint_dir`. Ctrl-C cancels the job and
    ends the ranks.
    """

    def __init__(self, **values: Any):
        super().__init__(values)

    def fit(self, dataset: DataFrame, params: Any = None, *, max_retries: int | None = None) -> Any:
        """Trains; as in pyspark one model, or a list of them for a list of parameter maps. max_retries:
        instead of the parameter."""
        stage = self if max_retries is None else self.copy().setParams(max_retries=max_retries)
        return Estimator.fit(stage, dataset, params)

    def _fit(self, dataset: DataFrame) -> HorovodModel:
        return next(_Models(dataset, [self]))[1]

    def fitMultiple(self, dataset: DataFrame, paramMaps: Sequence[Any]) -> Iterator[tuple[int, HorovodModel]]:
        """Pairs (index, model), one for each map; can be iterated by several threads. The first one asked
        for trains all whose maps leave the rows as they are, in one job."""
        return _Models(dataset, [self.copy(values) for values in paramMaps])

    def _spec(self) -> TrainSpec:
        """The parameters as one frozen value; raises InvalidArgument."""
        shapes = ("input_shapes", "label_shapes")
        values = with_shapes(self._values(n for n in self._knobs if n not in JOB or n in shapes))
        if self._objects.get("validation_df") is not None:
            if "validation" in values:
                raise InvalidArgument("give one of validation and validation_df, not both")
            values["validation"] = _MARK
        store = self._objects.get("store")
        if store is not None and store.saving_runs:
            if "checkpoint_dir" in values:
                raise InvalidArgument("give one of checkpoint_dir and store, not both")
            values.update(checkpoint_dir=store.get_run_path(self.getRunId()), resume=True)  # type: ignore[attr-defined]
        return TrainSpec(**values)

    def _named_run(self) -> HorovodEstimator:
        """Itself, or a copy whose run in the store has a name."""
        if self._objects.get("store") is None or self.getRunId() is not None:  # type: ignore[attr-defined]
            return self
        named: HorovodEstimator = self.copy().setParams(run_id=new_run_id())
        return named


class _Models:
    """What `fitMultiple` returns."""

    def __init__(self, dataset: DataFrame, stages: list[HorovodEstimator]):
        self._dataset, self._stages = dataset, stages
        self._planned: list[_Planned] | None = None
        self._rows = dataset
        #: Trained, and not handed out yet.
        self._models: dict[int, HorovodModel] = {}
        self._error: BaseException | None = None
        self._next = 0
        self._lock = threading.Lock()

    def __iter__(self) -> _Models:
        return self

    def __next__(self) -> tuple[int, HorovodModel]:
        with self._lock:
            if self._next == len(self._stages):
                raise StopIteration
            if self._error is not None:
                raise self._error  # to every thread that waited, instead of the same failure once more
            index = self._next
            if index not in self._models:
                try:
                    self._train(index)
                except BaseException as error:
                    self._error = error
                    raise
            self._next += 1
            return index, self._models.pop(index)

    def _train(self, index: int) -> None:
        """This model, and of the further ones as many as can share its job."""
        if self._planned is None:
            self._rows, self._planned = _planned(self._dataset, self._stages)
        planned = self._planned
        together = [
            i
            for i in range(index, len(planned))
            if i not in self._models and planned[i].shares_rows_with(planned[index])
        ]
        models = _fit_together(self._rows, [planned[i] for i in together])
        self._models.update(zip(together, models, strict=False))  # large models come in several jobs


@dataclass(frozen=True)
class _Planned:
    """An estimator with what was found about it before the launch."""

    stage: HorovodEstimator
    spec: TrainSpec
    size: int
    layout: Layout

    def shares_rows_with(self, other: _Planned) -> bool:
        """One ingestion serves both."""
        mine, theirs = (
            (one.size, one.layout, _config(one.spec), one.spec.row_order == "global") for one in (self, other)
        )
        return mine == theirs


def _planned(dataset: DataFrame, stages: Sequence[HorovodEstimator]) -> tuple[DataFrame, list[_Planned]]:
    """What can be known of `stages`, copies of one estimator, before the launch; with the rows to train
    on."""
    stages = [stage._named_run() for stage in stages]
    specs = [stage._spec() for stage in stages]
    if len({spec.checkpoint_dir for spec in specs} - {None}) < sum(
        bool(spec.checkpoint_dir) for spec in specs
    ):
        raise InvalidArgument(
            "checkpoint_dir (or store with run_id) is the directory of one run: with several parameter maps "
            "leave it out, or give each map its own"
        )
    preflight.check_frame(dataset)
    preflight.check_finite(dataset)
    apart = stages[0]._objects.get("validation_df")
    if apart is not None:
        dataset = _joined(dataset, apart, specs)
    planned = []
    for stage, spec in zip(stages, specs, strict=True):
        # Under Spark Connect this machine need not see what the executors see; rank 0 looks in any case.
        if spec.checkpoint_dir is not None and session.context_of(dataset.sparkSession) is not None:
            check_checkpoint_dir(spec.checkpoint_dir)
        size = preflight.check_cluster(dataset.sparkSession, stage.getNumProc())  # type: ignore[attr-defined]
        planned.append(_Planned(stage, spec, size, preflight.check_columns(dataset, spec)))
    return dataset, planned


def _joined(rows: DataFrame, apart: DataFrame, specs: Sequence[TrainSpec]) -> DataFrame:
    """Both as one, with a column that says which rows validate. Raises ColumnError."""
    preflight.check_frame(apart)
    preflight.check_finite(apart)
    names: dict[str, None] = {}
    for spec in specs:
        weight = () if spec.sample_weight_col is None else (spec.sample_weight_col,)
        names.update(dict.fromkeys((*spec.feature_cols, *spec.label_cols, *spec.transform_cols, *weight)))
    have, other = dict(rows.dtypes), dict(apart.dtypes)
    for name in names:
        if have.get(name) != other.get(name):
            raise ColumnError(
                f"column {name!r} is {have.get(name, 'not there')} in the DataFrame to fit and "
                f"{other.get(name, 'not there')} in validation_df"
            )
    quoted = [F.col("`" + name.replace("`", "``") + "`") for name in names if name in have]
    train, validate = (
        frame.select(*quoted, F.lit(mark).alias(_MARK)) for frame, mark in ((rows, False), (apart, True))
    )
    return train.union(validate)


def _fit_together(dataset: DataFrame, planned: Sequence[_Planned]) -> list[HorovodModel]:
    """One job: its ranks train one model after the other on the same rows. Models for the first of `planned`
    at least, for all unless their weights are large."""
    spec, size, layout = planned[0].spec, planned[0].size, planned[0].layout
    changes = [_difference(one.spec, spec) for one in planned]
    # What does not pickle is found before any job.
    payload = dumps(
        rank.train,
        (portable(spec), changes, secrets.token_hex(8), _TOGETHER_NBYTES),
        names=["HorovodEstimator"],
    )
    envs = envs_of(size, planned[0].stage.getEnv())  # type: ignore[attr-defined]
    frame = preflight.selected(dataset, layout)
    layout = preflight.check_rows(frame, spec, layout)
    name = type(spec.model).__name__ if spec.model is not None else "model"
    times = f", {len(planned)} times" if len(planned) > 1 else ""
    max_retries = planned[0].stage.getMaxRetries()  # type: ignore[attr-defined]
    parcel = Parcel.of(dataset.sparkSession, payload)
    del payload  # as large as the weights
    job = JobSpec(
        size,
        parcel,
        f"hvd: fit {name} on {size} ranks{times}",
        layout=layout,
        preload=(*framework_for(spec).preload, *PRELOAD),
        envs=envs,
        config=_config(spec),
        verbose=spec.verbose,
        start_timeout_s=planned[0].stage.getStartTimeoutS(),  # type: ignore[attr-defined]
        max_retries=max_retries,
        restart=_restart([one.spec for one in planned]),
    )
    with spec.telling_failure():
        outcome = launch(frame, job)
    portions: list[rank.Portion] = unpickled(outcome.results.pop(0))
    return [
        _model(one, layout, _checked(portion, outcome, one.spec), portion)
        for one, portion in zip(planned, portions, strict=False)
    ]


def _restart(specs: Sequence[TrainSpec]) -> str:
    if all(spec.checkpoint_dir is not None for spec in specs):
        return "from the last checkpoint"
    return "from the start, as there is no checkpoint_dir"


def _difference(spec: TrainSpec, base: TrainSpec) -> dict[str, Any]:
    """What `replace(base, **...)` needs to become `spec`. Objects are those of the one estimator."""
    names = [knob.name for knob in KNOBS if knob.convert is not None and knob.name not in JOB]
    return {name: getattr(spec, name) for name in names if getattr(spec, name) != getattr(base, name)}


def _model(one: _Planned, layout: Layout, result: FitResult, portion: rank.Portion) -> HorovodModel:
    """Uses up the portion's weights."""
    stage, spec = one.stage, one.spec
    framework = framework_for(spec)
    parts, portion.weights[:] = PartsReader(portion.weights), []
    trained = framework.trained(spec, parts)
    model = stage._copyValues(
        HorovodModel(model=trained, transform_fn=spec.transform_fn, framework=spec.framework)
    )
    model._resetUid(stage.uid)
    if not model.isSet("heads"):
        model.setParams(heads=list(framework.facts(spec).heads))
    return model.fitted(layout, result)


def _config(spec: TrainSpec) -> Config:
    """The settings of the environment, with where the estimator wants its shards."""
    config = Config.from_env()
    return replace(
        config,
        shard_memory_bytes=spec.shard_memory_bytes or config.shard_memory_bytes,
        shard_dir=spec.shard_dir or config.shard_dir,
    )


def _checked(portion: rank.Portion, outcome: Outcome, spec: TrainSpec) -> FitResult:
    result = FitResult.from_json(portion.about)
    sent = sum(outcome.rows)
    if result.rows_sent != sent or (result.rows_seen != sent and spec.max_steps is None):
        raise RowsLost(f"the ranks were given {sent} rows, but used {result.rows_seen} in an epoch")
    return result


#: Horovod's name; the loop is chosen by the model's type.
TorchEstimator = HorovodEstimator
