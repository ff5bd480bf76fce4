"""Callbacks that write the history to where people look at it: MLflow and TensorBoard.

Rank 0 alone writes; the other ranks do not even import the tracker. Values are those of the history, reduced
over all ranks. Not being able to begin is an error; when a later write fails, training goes on with one
warning.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
import warnings
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ..errors import InvalidArgument
from .storage import shown

if TYPE_CHECKING:
    from .loop import Run

_TAG = "hvd.fit"
#: MLflow refuses longer ones.
_PARAM_LENGTH = 500


class MLflow:
    """Logs to one MLflow run: the settings as parameters, each epoch's numbers as metrics.

        with mlflow.start_run():
            HorovodEstimator(..., callbacks=[MLflow()]).fit(df)

    Make it on the driver: it takes the active run and the tracking URI of the process that makes it. With
    neither an active run nor `run_id`, or with `experiment` (a name; created if need be), rank 0 begins a run
    of its own and ends it; when the fit fails, the process that called it ends the run as FAILED. A run that
    was there before is left as it was, still active. The ranks need mlflow (or mlflow-skinny) and a tracking
    server, or directory, that they can reach.
    """

    def __init__(
        self,
        run_id: str | None = None,
        *,
        tracking_uri: str | None = None,
        experiment: str | None = None,
        run_name: str | None = None,
    ):
        mlflow = _imported("mlflow", "mlflow")
        active = mlflow.active_run()
        if run_id is None and active is not None and experiment is None:
            run_id = active.info.run_id
        self.run_id = run_id
        self._uri = _absolute(tracking_uri or mlflow.get_tracking_uri())
        self._experiment, self._run_name = experiment, run_name
        #: By which the driver finds the runs that ranks began.
        self._fit = secrets.token_hex(8)
        self._owns = False
        self._warned = False

    def on_train_begin(self, run: Run) -> None:
        if run.rank != 0:
            return
        client = self._client()
        if self.run_id is None:
            self._end_all(client, "FAILED")  # of an attempt whose rank was lost
            made = client.create_run(
                _experiment_id(client, self._experiment), run_name=self._run_name, tags={_TAG: self._fit}
            )
            self.run_id = made.info.run_id
            self._owns = True
        from mlflow.entities import Param

        there = client.get_run(self.run_id).data.params  # of an earlier fit; MLflow lets nobody change them
        settings = {**_settings(run.spec), "ranks": run.size}
        params = [Param(k, str(v)[:_PARAM_LENGTH]) for k, v in settings.items() if k not in there]
        client.log_batch(self.run_id, params=params)

    def on_epoch_end(self, run: Run, logs: Mapping[str, Any]) -> None:
        if run.rank != 0:
            return
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(k, float(v), now, int(logs["epoch"])) for k, v in _numbers(logs).items()]
        self._try(lambda client: client.log_batch(self.run_id, metrics=metrics))

    def on_train_end(self, run: Run) -> None:
        if run.rank == 0 and self._owns:
            self._try(lambda client: client.set_terminated(self.run_id))

    def on_fit_failed(self, error: BaseException) -> None:
        if self.run_id is None:
            status = "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED"
            self._try(lambda client: self._end_all(client, status))

    def _end_all(self, client: Any, status: str) -> None:
        unfinished = f"tags.`{_TAG}` = '{self._fit}' and attributes.status = 'RUNNING'"
        for run in client.search_runs([_experiment_id(client, self._experiment)], unfinished):
            client.set_terminated(run.info.run_id, status)

    def _client(self) -> Any:
        return _imported("mlflow", "mlflow").MlflowClient(tracking_uri=self._uri)

    def _try(self, write: Any) -> None:
        try:
            write(self._client())
        except Exception as error:  # noqa: BLE001  whatever a server says; training is worth more than its log
            if not self._warned:
                warnings.warn(
                    f"MLflow run {self.run_id or ''} at {self._uri} was not written: {error!r}", stacklevel=2
                )
            self._warned = True


class TensorBoard:
    """Writes each epoch's numbers as scalars to an event file in `log_dir`.

    log_dir: a directory of the machine of rank 0, or whatever else the package tensorboard can write to (it
    takes other filesystems when tensorflow is installed). Shown by `tensorboard --logdir LOG_DIR`.
    """

    def __init__(self, log_dir: str | os.PathLike[str]):
        self._log_dir = os.fspath(log_dir)
        self._writer: Any = None
        self._warned = False

    def on_train_begin(self, run: Run) -> None:
        if run.rank == 0:
            module = _imported("tensorboard.summary.writer.event_file_writer", "tensorboard")
            self._writer = module.EventFileWriter(self._log_dir)

    def on_epoch_end(self, run: Run, logs: Mapping[str, Any]) -> None:
        if self._writer is None:
            return
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=_tag(k), simple_value=float(v)) for k, v in _numbers(logs).items()]
        try:
            self._writer.add_event(
                Event(wall_time=time.time(), step=int(logs["epoch"]), summary=Summary(value=values))
            )
            self._writer.flush()
        except OSError as error:
            if not self._warned:
                warnings.warn(
                    f"TensorBoard events in {self._log_dir} were not written: {error}", stacklevel=2
                )
            self._warned = True

    def on_train_end(self, run: Run) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def tracking_env() -> dict[str, str]:
    """Settings with which ranks that use MLflow log to the active run of this process, and not each to one
    of its own; {} when there is none."""
    mlflow = sys.modules.get("mlflow")
    active = mlflow.active_run() if mlflow is not None and hasattr(mlflow, "active_run") else None
    if mlflow is None or active is None:
        return {}
    return {"MLFLOW_RUN_ID": active.info.run_id, "MLFLOW_TRACKING_URI": _absolute(mlflow.get_tracking_uri())}


def _imported(module: str, package: str) -> Any:
    from importlib import import_module

    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise InvalidArgument(f"this callback needs the package {package}: pip install {package}") from error


def _absolute(uri: str) -> str:
    """A path means the same in every process; other URIs are left alone."""
    named = urlsplit(uri).scheme or uri in ("databricks", "databricks-uc", "uc")
    return uri if named else os.path.abspath(uri)


def _experiment_id(client: Any, name: str | None) -> str:
    if name is None:
        settings = _imported("mlflow.environment_variables", "mlflow")
        name = settings.MLFLOW_EXPERIMENT_NAME.get()
        if name is None:
            return str(settings.MLFLOW_EXPERIMENT_ID.get() or 0)
    found = client.get_experiment_by_name(name)
    return str(found.experiment_id if found is not None else client.create_experiment(name))


def _settings(spec: Any) -> dict[str, Any]:
    """What was set, as far as it is a plain value; model, optimizer and loss by their class."""
    found: dict[str, Any] = {}
    for field in fields(spec):
        value = getattr(spec, field.name)
        if field.name == "checkpoint_dir" and value is not None:
            found[field.name] = shown(value)
        elif isinstance(value, (bool, int, float, str)):
            found[field.name] = value
        elif field.name in ("feature_cols", "label_cols"):
            found[field.name] = ", ".join(value)
        elif field.name in ("model", "optimizer", "loss") and value is not None:
            found[field.name] = getattr(value, "__qualname__", type(value).__name__)
    return found


def _numbers(logs: Mapping[str, Any]) -> dict[str, float]:
    return {k: v for k, v in logs.items() if k != "epoch" and isinstance(v, (int, float))}


def _tag(name: str) -> str:
    """TensorBoard draws what has a prefix in common side by side."""
    return f"validation/{name[4:]}" if name.startswith("val_") else f"training/{name}"
