"""`HorovodTrainer`: Ray Train's data-parallel trainer whose workers are ranks."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray
from ray.train import ControllerError, Result, RunConfig, ScalingConfig, WorkerGroupError
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from hvd_core.errors import InvalidArgument, LaunchFailed
from hvd_core.launch import dumps
from hvd_core.train.trackers import tracking_env

from .backend import HorovodConfig, refuse_unknown
from .data import RowsConfig
from .failure import worker_failed
from .resources import require


class HorovodTrainer(DataParallelTrainer):
    """Runs `train_loop_per_worker` on `scaling_config.num_workers` ranks; a Ray Train (v2) trainer.

        def loop(config):
            rows = hvd_ray.prepare_data("train", batch_size=64)
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), config["lr"]), ...)
            ...
            ray.train.report({"loss": loss})

        result = HorovodTrainer(loop, train_loop_config={"lr": 0.1}, datasets={"train": ds},
                                scaling_config=ScalingConfig(num_workers=2)).fit()

    In the loop the ranks are connected: `hvd_core.torch` works, `hvd.init()` does nothing more, and
    `ray.train.report`, `get_checkpoint`, `get_dataset_shard` and `get_context` are as in Ray's own trainers.
    The loop runs in a thread that is not the main one. scaling_config, run_config, datasets,
    validation_config: as in Ray. dataset_config: None splits exactly, see `RowsConfig`. horovod_config: how
    the ranks connect and how long to wait for CPUs.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        train_loop_config: dict[str, Any] | None = None,
        horovod_config: HorovodConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, Any] | None = None,
        dataset_config: Any = None,
        validation_config: Any = None,
        **unknown: Any,
    ):
        refuse_unknown(type(self), unknown)
        super().__init__(
            train_loop_per_worker,
            train_loop_config=train_loop_config,
            backend_config=horovod_config or HorovodConfig(),
            scaling_config=scaling_config,
            run_config=run_config,
            datasets=dict(datasets or {}),
            dataset_config=dataset_config or RowsConfig(),
            validation_config=validation_config,
        )

    def fit(self) -> Result:
        """Trains; returns Ray's Result. Before anything is started: NotPicklable, and NotEnoughSlots when the
        cluster is too small; NotEnoughSlots also when its CPUs are not free in `start_timeout_s`. Then
        `WorkerFailed` with the first cause, which is a `RankFailed` and Ray's `WorkerGroupError`;
        LaunchFailed when Ray could not keep the workers running.

        When a worker dies or raises, whatever it raised, Ray starts all again,
        `run_config.failure_config.max_failures` times, and they find the last checkpoint in
        `ray.train.get_checkpoint()`; the error is then the last attempt's. With
        `HorovodConfig(replace_workers=True)` only that worker starts again, if the loop is one of
        `hvd.elastic.run`. Ctrl-C ends the workers.
        """
        if self.running_in_local_mode:
            return super().fit()
        self._check_replacing()
        if not ray.is_initialized():
            ray.init()
        self._check_pickles()
        scaling: Any = self.scaling_config
        config = self.backend_config
        timeout_s = config.start_timeout_s if isinstance(config, HorovodConfig) else 600.0
        workers = scaling.min_workers
        bundle = scaling._resources_per_worker_not_none
        require(bundle, workers, timeout_s=timeout_s)
        if isinstance(self.data_config, RowsConfig):
            self._execute_datasets(self.data_config, workers)
            require(bundle, workers, timeout_s=timeout_s)
        if isinstance(config, HorovodConfig):  # trackers in ranks write to the run that is active here
            self.backend_config = config.with_env(tracking_env())
        try:
            with _interruptible():
                return super().fit()
        except WorkerGroupError as error:
            failed = worker_failed(error)
            raise failed from failed.__cause__
        except ControllerError as error:
            raise LaunchFailed(f"Ray Train could not start or keep the workers: {error}") from error

    def _check_replacing(self) -> None:
        if not getattr(self.backend_config, "replace_workers", False):
            return
        scaling: Any = self.scaling_config
        failure: Any = self.run_config.failure_config
        trouble = {
            "a fixed num_workers": not isinstance(scaling.num_workers, int),
            "FailureConfig(max_failures=...), which counts replaced workers": failure.max_failures == 0,
            "the default dataset_config": self.datasets and not isinstance(self.data_config, RowsConfig),
        }
        for needed, is_missing in trouble.items():
            if is_missing:
                raise InvalidArgument(f"replace_workers=True needs {needed}")

    def _check_pickles(self) -> None:
        """By Ray, which counts references to objects; what is in the way is found by hand."""
        try:
            ray.put((self.train_loop_per_worker, self.train_loop_config))
        except Exception:
            dumps(self.train_loop_per_worker, [self.train_loop_config])
            raise

    def _execute_datasets(self, config: RowsConfig, workers: int) -> None:
        self._given = dict(self.datasets)  # a Dataset from Spark owns its rows
        for name, dataset in self._given.items():
            whole = (dataset() if callable(dataset) else dataset).materialize()
            self.datasets[name] = whole
            if config.is_split(name):
                config.deal(name, whole, workers)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ray handles SIGINT while it trains, and leaves its handler behind; it ends an interrupted script as if
    all was well."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    except SystemExit as error:
        raise KeyboardInterrupt from error
    finally:
        signal.signal(signal.SIGINT, before)
