"""`HorovodEstimator`: `fit(data)` on the ranks of a Ray cluster, for a model that predicts Ray Datasets."""

from __future__ import annotations

import inspect
import io
import itertools
import math
import secrets
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import pyarrow as pa
import ray
from ray.train import Result, RunConfig, ScalingConfig

from hvd_core.errors import InvalidArgument, RowsLost, no_such
from hvd_core.launch import dumps
from hvd_core.launch.display import Progress
from hvd_core.train import FitResult, Layout, TrainSpec, plan_layout
from hvd_core.train.columns import columns_of
from hvd_core.train.framework import framework_for, portable

from . import here, rank
from .backend import HorovodConfig
from .failure import WorkerFailed
from .model import HorovodModel
from .resources import require
from .rows import as_dataset, blocks_of, deal, table_of
from .trainer import HorovodTrainer

_LOOK_EVERY_S = 0.25
_SPEC = {field.name for field in fields(TrainSpec)}


class HorovodEstimator:
    """Trains a model on `num_proc` ranks of a Ray cluster, with the parameters, loops and numbers of
    `hvd_spark.HorovodEstimator`.

        model = HorovodEstimator(model=net, optimizer=lambda p: Adam(p, 1e-3), loss=MSELoss(),
                                 feature_cols=["a", "b"], label_cols=["y"], num_proc=2).fit(ds)
        predictions = model.predict(ds)

    Parameters of the training are those of `hvd_core.train.TrainSpec`; the others say where it runs and what
    `predict` adds. num_proc: ranks, default one for each CPU of the cluster (GPU with use_gpu).
    cpus_per_rank: what each reserves. run_config: a `ray.train.RunConfig`; with one each epoch is reported to
    Ray with a checkpoint of the weights, so its `CheckpointConfig` keeps the best; its
    `failure_config.max_failures` counts as max_retries. max_retries: after a lost worker all begin again,
    this often, from the last checkpoint in `checkpoint_dir` if there is one; what would fail again is raised.
    start_timeout_s: how long to wait while others use the CPUs. prediction_col, probability_col,
    raw_prediction_col, heads, threshold: the columns that `predict` adds. A misspelt parameter raises
    InvalidArgument.
    """

    def __init__(
        self,
        *,
        num_proc: int | None = None,
        cpus_per_rank: float = 1,
        use_gpu: bool = False,
        accelerator_type: str | None = None,
        run_config: RunConfig | None = None,
        start_timeout_s: float = 600.0,
        max_retries: int = 0,
        prediction_col: str = "prediction",
        probability_col: str = "probability",
        raw_prediction_col: str = "rawPrediction",
        heads: Sequence[str] | None = None,
        threshold: float | None = None,
        **spec: Any,
    ):
        own = [name for name in inspect.signature(type(self)).parameters if name != "spec"]
        for name in spec:
            if name not in _SPEC:
                raise InvalidArgument(no_such(type(self).__name__, "parameter", name, [*own, *_SPEC]))
        if num_proc is not None and (not isinstance(num_proc, int) or num_proc < 1):
            raise InvalidArgument(f"num_proc must be a whole number of at least 1, not {num_proc!r}")
        self.spec = TrainSpec(**spec)
        self.num_proc, self.run_config = num_proc, run_config
        self._place: dict[str, Any] = {
            "cpus_per_rank": cpus_per_rank,
            "use_gpu": use_gpu,
            "accelerator_type": accelerator_type,
        }
        self._start_timeout_s, self._max_retries = start_timeout_s, max_retries
        self._names = (prediction_col, probability_col, raw_prediction_col)
        self._heads, self._threshold = heads, threshold

    def fit(self, data: Any) -> HorovodModel:
        """Trains on a Ray Dataset, a pandas DataFrame, an Arrow table or a Spark DataFrame; each row is used
        once per epoch, on one rank. The model, optimizer and loss given are never changed.

        Before anything is launched: NotPicklable, NotEnoughSlots, ColumnError, DataError ("no rows").
        Later: DataError (nulls, ragged rows), StorageFull, LossError, ... when rank raised them, as
        `__cause__` of a WorkerFailed that names the rank; RowsLost. Ctrl-C ends the ranks.
        """
        spec = self.spec
        if not ray.is_initialized():
            ray.init()
        scaling = self._scaling()
        size: Any = scaling.num_workers
        run, keep = secrets.token_hex(8), self.run_config is not None
        require(self._bundle(), size, timeout_s=self._start_timeout_s)
        rows = as_dataset(data)  # kept: it may own what is in the object store
        dataset: Any = rows.materialize()
        blocks = blocks_of(dataset)
        schemas = ray.get([_schema.remote(block) for block, _ in blocks])
        layout = plan_layout(columns_of(pa.unify_schemas(schemas, promote_options="permissive")), spec)
        payload = dumps(rank.train, (portable(spec), layout, run, keep), names=["HorovodEstimator"])
        config = {"payload": payload, "pieces": deal(blocks, size)}
        with spec.telling_failure(), _shown(spec.verbose) as live:
            outcome = self._attempts({**config, "live": live}, scaling, run)
        return self._model(layout, outcome, sum(rows for _, rows in blocks))

    def _attempts(self, config: dict[str, Any], scaling: ScalingConfig, run: str) -> Result:
        """Until one succeeds, or what failed would fail again, or the retries are used up."""
        given = self.run_config or RunConfig()
        asked: Any = given.failure_config
        retries = math.inf if asked.max_failures < 0 else max(self._max_retries, asked.max_failures)
        # Ray would retry whatever failed; and attempts of one name go on with the checkpoints it keeps.
        run_config = replace(
            given, name=given.name or f"hvd-{run}", failure_config=replace(asked, max_failures=0)
        )
        first: WorkerFailed | None = None
        for attempt in itertools.count():
            try:
                return HorovodTrainer(
                    rank.train,
                    train_loop_config={**config, "attempt": attempt},
                    scaling_config=scaling,
                    run_config=run_config,
                    horovod_config=HorovodConfig(start_timeout_s=self._start_timeout_s),
                ).fit()
            except WorkerFailed as error:
                if not error.retryable:
                    raise
                first = first or error
                if attempt == retries:
                    failed = WorkerFailed(first.failure, first.worker_failures, attempt + 1)
                    raise failed from first.__cause__
                headline, which = error.failure.headline(), f"{attempt + 1} of {retries:g}"
                print(f"hvd: {headline}; retry {which}, {self._restart()}", file=sys.stderr, flush=True)
        raise AssertionError("there is always an attempt")

    def _restart(self) -> str:
        if self.spec.checkpoint_dir is not None:
            return "from the last checkpoint"
        return "from the start, as there is no checkpoint_dir"

    def _scaling(self) -> ScalingConfig:
        size, use_gpu = self.num_proc, bool(self._place["use_gpu"])
        if size is None:
            whole: Any = ray.cluster_resources()  # type: ignore[no-untyped-call]
            size = int(
                whole.get("GPU", 0) if use_gpu else whole.get("CPU", 0) // self._place["cpus_per_rank"]
            )
        return ScalingConfig(
            num_workers=max(1, size),
            use_gpu=use_gpu,
            resources_per_worker=self._bundle(),
            accelerator_type=self._place["accelerator_type"],
        )

    def _bundle(self) -> dict[str, float]:
        gpu = {"GPU": 1.0} if self._place["use_gpu"] else {}
        return {"CPU": float(self._place["cpus_per_rank"]), **gpu}

    def _model(self, layout: Layout, outcome: Result, sent: int) -> HorovodModel:
        spec = self.spec
        about, weights = outcome.return_value  # type: ignore[attr-defined]
        result = FitResult.from_json(about)
        if result.rows_sent != sent or (result.rows_seen != sent and spec.max_steps is None):
            raise RowsLost(f"the ranks were given {sent} rows, but used {result.rows_seen} in an epoch")
        framework = framework_for(spec)
        heads = self._heads if self._heads is not None else framework.facts(spec).heads
        return HorovodModel(
            framework.trained(spec, io.BytesIO(weights)),
            layout,
            result,
            replace(outcome, return_value=None),  # type: ignore[call-arg]  # the weights are in the model
            names=self._names,
            heads=list(heads),
            threshold=self._threshold,
            batch_size=spec.inference_batch_size,
            framework=portable(spec).framework,
        )


@ray.remote(num_cpus=0)
def _schema(block: Any) -> Any:
    return table_of(block).schema


@contextmanager
def _shown(verbose: int) -> Iterator[Any]:
    """A queue whose records of progress are shown here, by a thread, until the end of the block."""
    queue, progress, over = here.queue(), Progress(verbose=verbose), threading.Event()

    def show() -> None:
        is_last = False
        while not is_last:
            is_last = over.wait(_LOOK_EVERY_S)
            for record in here.drained(queue):
                progress.take({"kind": "progress", "rank": 0, **record})

    thread = threading.Thread(target=show, name="hvd-progress", daemon=True)
    thread.start()
    try:
        yield queue
    finally:
        over.set()
        thread.join()
        progress.close()
        queue.shutdown(force=True)


#: Horovod's name; the loop is chosen by the model's type.
TorchEstimator = HorovodEstimator
