"""Old jobs: each parameter of Horovod's Spark estimators works, or says what to do."""

from __future__ import annotations

import importlib
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hvd_core.torch as hvd
from hvd_spark import HorovodEstimator, InvalidArgument, LocalStore, Store, TorchEstimator, TorchModel
from hvd_spark.horovod_names import INSTEAD, WITHOUT_EFFECT
from hvd_spark.params import ALIASES, KNOBS
from hvd_spark.store import FilesystemStore, HDFSStore, new_run_id

from . import nets

#: Of Horovod 0.28.1: the constructors of the torch, keras and lightning estimators.
HOROVODS = [
    "num_proc", "data_module", "model", "backend", "store", "optimizer", "loss", "loss_constructors",
    "metrics", "loss_weights", "sample_weight_col", "gradient_compression", "feature_cols",
    "continuous_cols", "categorical_cols", "input_shapes", "validation", "label_cols", "callbacks",
    "batch_size", "val_batch_size", "epochs", "verbose", "random_seed", "shuffle_buffer_size",
    "shuffle", "partitions_per_process", "run_id", "train_minibatch_fn", "train_steps_per_epoch",
    "validation_steps_per_epoch", "transformation_fn", "train_reader_num_workers",
    "val_reader_num_workers", "reader_pool_type", "label_shapes", "inmemory_cache_all", "use_gpu",
    "mp_start_method", "backward_passes_per_step", "custom_objects", "checkpoint_callback",
    "backend_env", "tensorflow_dataset_prefetch_buffer_size", "transformation_edit_fields",
    "transformation_removed_fields", "trainer_args", "num_gpus", "logger", "log_every_n_steps",
    "loader_num_epochs", "terminate_on_nan", "profiler", "debug_data_loader",
    "train_async_data_loader_queue_size", "val_async_data_loader_queue_size", "compress_sparse_cols",
]  # fmt: skip

#: Setters of Horovod whose names are not those of the parameters.
SETTERS = [
    "setShufflingBufferSize", "setTrainReaderNumWorker", "setValReaderNumWorker", "setInMemoryCacheAll",
    "setLabelColoumns", "setUseGpu", "setMpStartMethod", "setBackwardPassesPerStep", "setBackendEnv",
    "setTensorflowDatasetPrefetchBufferSize", "setGradientCompression", "setRandomSeed", "setStore",
]  # fmt: skip


def test_each_name_works_has_no_effect_or_says_what_to_do(spark: Any) -> None:
    ours = {knob.name for knob in KNOBS}
    translated = {"gradient_compression", "shuffle_buffer_size"}
    kinds = [ours, set(ALIASES), translated, set(WITHOUT_EFFECT), set(INSTEAD)]
    for name in HOROVODS:
        assert sum(name in kind for kind in kinds) == 1, name
        HorovodEstimator(**{name: None})
    for name in set(HOROVODS) & set(WITHOUT_EFFECT):
        with pytest.warns(UserWarning, match=f"^{name} has no effect: "):
            HorovodEstimator(**{name: 7})
    for name in set(HOROVODS) & set(INSTEAD):
        with pytest.raises(InvalidArgument, match=re.escape(f"{name}: {INSTEAD[name]}")):
            HorovodEstimator(**{name: 7})
    est = HorovodEstimator()
    for name in SETTERS:
        assert getattr(est, name)(None) is est, name
    table = (Path(__file__).parents[2] / "docs/migrating-from-horovod.md").read_text()
    assert [name for name in HOROVODS if f"`{name}`" not in table] == []


def test_what_they_become(spark: Any) -> None:
    est = HorovodEstimator(
        backward_passes_per_step=4, random_seed=3, val_batch_size=64,
        gradient_compression=hvd.Compression.fp16, shuffle_buffer_size=0, weightCol="w", features_col="f",
    )  # fmt: skip
    want = {"accumulateSteps": 4, "seed": 3, "inferenceBatchSize": 64, "wireDtype": "fp16", "shuffle": False}
    assert {name: est.getOrDefault(name) for name in want} == want
    assert (est.getSampleWeightCol(), est.getFeatureCols()) == ("w", ["f"])
    assert est.setGradientCompression(hvd.Compression.none).getWireDtype() is None
    assert TorchModel(outputCols=["p"]).getPredictionCol() == "p"
    with pytest.raises(InvalidArgument, match="further outputs are named"):
        TorchModel().setOutputCols(["p", "q"])
    with pytest.raises(InvalidArgument, match="print is none of hvd"):
        est.setGradientCompression(print)
    with pytest.raises(InvalidArgument, match=r"input_shapes has 1 shapes for 2 columns of feature_cols"):
        given(model=nets.TwoInputs(), feature_cols=["a", "b"], input_shapes=[[-1]])._spec()
    with pytest.raises(InvalidArgument, match=r"\[3, 4\] is not \[-1, ...\]"):
        given(model=nets.TwoInputs(), feature_cols=["a"], input_shapes=[[3, 4]])._spec()


def given(**options: Any) -> TorchEstimator:
    return TorchEstimator(
        optimizer=nets.sgd, loss=nn.MSELoss(), label_cols=["y"], num_proc=2, batch_size=20, **options
    )


class Image(nn.Module):
    """As written for Horovod: an image from a flat column, a number as (B, 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.lin = nn.Conv2d(1, 2, 2), nn.Linear(9, 1)

    def forward(self, image: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        return self.lin(torch.cat([self.conv(image).flatten(1), number], 1))


def test_a_job_of_horovod_with_store_run_id_and_shapes(spark: Any, tmp_path: Path) -> None:
    torch.manual_seed(1)
    df = spark.range(40).selectExpr(
        "transform(sequence(1, 9), i -> (i * id % 10) / 10.0f) AS image", "id / 40.0d AS n", "id / 20.0d AS y"
    )
    store = Store.create(f"{tmp_path}/jobs")
    assert isinstance(store, LocalStore) and LocalStore is FilesystemStore is HDFSStore
    shapes = [[-1, 1, 3, 3], [-1, 1]]
    options: dict[str, Any] = {
        "model": Image(), "feature_cols": ["image", "n"], "input_shapes": shapes, "label_shapes": [[-1]],
        "store": store,
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        est = given(epochs=2, partitions_per_process=3, reader_pool_type="thread", **options)
    model = est.fit(df)
    run = model.getRunId()
    assert est.getRunId() is None, "each fit is a run of its own"
    assert {path.name for path in (tmp_path / "jobs" / "runs").iterdir()} == {run}
    # The same run once more: to three epochs in all, the first two of which are there.
    more = given(epochs=3, run_id=run, **options).fit(df)
    assert more.getHistory()[:2] == model.getHistory() and len(more.getHistory()) == 3
    assert [path.name for path in (tmp_path / "jobs" / "runs").iterdir()] == [run], (
        "and nothing else is stored"
    )
    # Saved, and wrapped anew by the same names.
    more.save(f"{tmp_path}/m")
    rows = more.transform(df).collect()
    assert TorchModel.load(f"{tmp_path}/m").transform(df).collect() == rows
    wrapped = TorchModel(model=more.getModel(), feature_columns=["image", "n"], input_shapes=shapes)
    assert wrapped.transform(df).collect() == rows
    with pytest.raises(InvalidArgument, match="one of checkpoint_dir and store"):
        given(checkpoint_dir=f"{tmp_path}/x", run_id="a", **options).fit(df)


def test_where_a_store_keeps_its_runs() -> None:
    store = Store.create("s3://b/jobs?region=eu-west-1", save_runs=False, train_path="s3://b/train")
    assert store.get_run_path("a") == "s3://b/jobs/runs/a?region=eu-west-1"
    assert not store.saving_runs
    assert len({new_run_id() for _ in range(100)}) == 100, "also within a second"
    assert Store("/x", runs_path="/y").get_checkpoint_path("a") == "/y/a"


def test_spark_jobs_of_horovod_run_unchanged(spark: Any, horovod: Any) -> None:
    def train(factor: int) -> int:
        import horovod.torch as hvd

        hvd.init()
        return factor * int(hvd.allgather(torch.tensor([hvd.rank()]))[1])

    run = importlib.import_module("horovod.spark").run
    assert run(train, args=(3,), num_proc=2, start_timeout=60, use_gloo=True, verbose=0) == [3, 3]
    assert importlib.import_module("horovod.spark.torch").TorchEstimator is TorchEstimator
    assert importlib.import_module("horovod.spark.common.store").LocalStore is LocalStore
    with pytest.raises(InvalidArgument, match="there is no MPI"):
        run(train, args=(3,), num_proc=2, use_mpi=True)
