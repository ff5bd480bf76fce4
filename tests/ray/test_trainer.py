"""HorovodTrainer: the loop's ranks, exact data, results, failures."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from hvd_core.errors import DataError, InvalidArgument, NotEnoughSlots, NotPicklable, RankFailed

ray_train = pytest.importorskip("ray.train")
import ray.data  # noqa: E402
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig  # noqa: E402

import hvd_ray  # noqa: E402
from hvd_ray import HorovodConfig, HorovodTrainer  # noqa: E402

from ..conftest import KERNEL_TELLS  # noqa: E402

TWO = ScalingConfig(num_workers=2)


def fit(loop: Any, run_config: Any, config: Any = None, **options: Any) -> Any:
    options = {"scaling_config": TWO, **options}
    return HorovodTrainer(loop, train_loop_config=config or {}, run_config=run_config, **options).fit()


def use_rows(config: dict[str, Any]) -> Any:
    """What the ranks saw, from rank 0: ids of each rank and epoch, steps, and a sum over the ranks."""
    import torch

    import hvd_core.torch as hvd

    hvd.init()  # harmless
    columns = {"id": "id", "x": "x", "pair": ["x", "z"]}
    rows = hvd_ray.prepare_data("train", columns, batch_size=config["batch_size"])
    flat = next(iter(hvd_ray.prepare_data("train", batch_size=4, dtypes={"z": "float64"})))
    assert {name: (str(value.dtype), value.dim()) for name, value in flat.items()} == {
        "id": ("torch.int64", 1),
        "x": ("torch.float32", 1),
        "z": ("torch.float64", 1),
    }
    seen: list[list[int]] = []
    steps = 0
    weight = 0.0
    for _ in range(2):
        ids: list[int] = []
        for batch in rows:
            assert batch["x"].dtype == torch.float32 and batch["id"].dtype == torch.int64
            assert torch.equal(batch["x"], batch["id"] * 1.5) and batch["pair"].shape[1:] == (2,)
            assert torch.equal(batch["pair"][:, 0], batch["x"])
            share = torch.tensor([rows.share])
            weight += float(hvd.allreduce(share, name="share", op=hvd.Sum))
            ids += batch["id"].tolist()
            steps += 1
        seen.append(ids)
    raw = ray_train.get_dataset_shard("train").iter_batches(batch_format="pyarrow")
    mine = (seen, steps, len(rows), sum(block.num_rows for block in raw))
    context = ray_train.get_context()
    assert (hvd.rank(), hvd.size()) == (context.get_world_rank(), context.get_world_size())
    return [hvd.allgather_object(mine), weight]


def doubled(batch: Any) -> Any:
    return {"id": batch["id"], "x": batch["id"] * 1.5, "z": batch["id"] * 0.5}


@pytest.mark.slow
@pytest.mark.parametrize("rows", [101, 11])
def test_every_row_once_and_as_many_steps(run_config: Any, rows: int) -> None:
    """R35, R37, K1: the dataset is lazy and the workers take both CPUs."""
    ds = ray.data.range(rows, override_num_blocks=3).map_batches(doubled)
    began = time.monotonic()
    result = fit(use_rows, run_config, {"batch_size": 8}, datasets={"train": ds})
    assert time.monotonic() - began < 60
    (first, second), weight = result.return_value
    assert first[1:3] == second[1:3]
    assert first[2] in (-(-rows // 2 // 8), -(-(rows + 1) // 2 // 8))
    assert first[3] + second[3] == rows and abs(first[3] - second[3]) <= 1
    for epoch in range(2):
        ids = first[0][epoch] + second[0][epoch]
        assert sorted(ids) == list(range(rows))
    assert first[0][0] != first[0][1]  # shuffled anew
    assert weight == pytest.approx(2 * first[1], rel=1e-6)  # shares of a step add up to the size


@pytest.mark.slow
def test_one_worker_more_rows_than_ranks_is_needed(run_config: Any) -> None:
    with pytest.raises(RankFailed, match="1 rows for 2 ranks: rank 1 has none") as caught:
        fit(
            use_rows,
            run_config,
            {"batch_size": 8},
            datasets={"train": ray.data.range(1).map_batches(doubled)},
        )
    assert isinstance(caught.value.__cause__, DataError)


def report_epochs(config: dict[str, Any]) -> str:
    import tempfile

    import hvd_core.torch as hvd

    start = 0
    if (checkpoint := ray_train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            start = int(Path(folder, "epoch").read_text()) + 1
    for epoch in range(start, 4):
        if config.get("dies") and epoch == 2 and start == 0 and hvd.rank() == 1:
            os.kill(os.getpid(), 9)
        with tempfile.TemporaryDirectory() as folder:
            if hvd.rank() == 0:
                Path(folder, "epoch").write_text(str(epoch))
            kept = Checkpoint.from_directory(folder) if hvd.rank() == 0 else None
            ray_train.report({"loss": 1.0 / (1 + epoch), "start": start}, checkpoint=kept)
    return "done"


@pytest.mark.slow
def test_result_checkpoints_and_restart(tmp_path: Path, cluster: Any) -> None:
    config = RunConfig(
        name="run",
        storage_path=str(tmp_path),
        failure_config=FailureConfig(max_failures=1),
        checkpoint_config=CheckpointConfig(
            num_to_keep=2, checkpoint_score_attribute="loss", checkpoint_score_order="min"
        ),
    )
    result = fit(report_epochs, config, {"dies": True})
    assert result.return_value == "done"
    # Whether epoch 1 counts, whose end only the survivor has reported, is Ray's to decide.
    assert result.metrics["loss"] == 0.25 and result.metrics["start"] in (1, 2)
    assert len(result.best_checkpoints) == 2
    assert result.metrics_dataframe is not None
    with result.checkpoint.as_directory() as folder:
        assert Path(folder, "epoch").read_text() == "3"


def fail(config: dict[str, Any]) -> None:
    import torch

    import hvd_core.torch as hvd

    hvd.allreduce(torch.ones(3), name="first")
    if hvd.rank() == config["who"]:
        if config["how"] == "exit":
            os._exit(86)
        if config["how"] == "kill":
            os.kill(os.getpid(), 9)
        raise ValueError("token-4711")
    if config["peers"] == "sleep":
        time.sleep(120)
    hvd.allreduce(torch.ones(3), name="second")


@pytest.mark.slow
@pytest.mark.parametrize("peers", ["sleep", "collective"])
def test_r20_a_worker_raises(run_config: Any, peers: str) -> None:
    began = time.monotonic()
    with pytest.raises(hvd_ray.WorkerFailed) as caught:
        fit(fail, run_config, {"who": 1, "how": "raise", "peers": peers})
    assert time.monotonic() - began < 40
    error = caught.value
    assert isinstance(error, ray_train.WorkerGroupError) and 1 in error.worker_failures
    headline, *more = str(error).splitlines()
    assert headline.startswith("rank 1 raised ValueError: token-4711 (") and "test_trainer.py" in headline
    assert f"id {ray.nodes()[0]['NodeID']}" in more[0]
    assert len(more) < 60 and "Aborted" not in str(error)
    assert isinstance(error.__cause__, ValueError)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "says"), [("exit", "exited with status 86"), ("kill", "killed by signal 9")])
def test_r21_a_worker_dies(run_config: Any, how: str, says: str) -> None:
    with pytest.raises(RankFailed) as caught:
        fit(fail, run_config, {"who": 0, "how": how, "peers": "collective"})
    assert caught.value.rank == 0
    assert f"id {ray.nodes()[0]['NodeID']}" in str(caught.value).splitlines()[1]
    assert not KERNEL_TELLS or says in str(caught.value)


def test_r19_too_many_workers_and_busy_cpus(run_config: Any, cluster: Any) -> None:
    began = time.monotonic()
    with pytest.raises(NotEnoughSlots, match=r"4 workers with 1 CPU each are needed.* room for 2"):
        fit(report_epochs, run_config, scaling_config=ScalingConfig(num_workers=4))
    assert time.monotonic() - began < 10

    @cluster.remote(num_cpus=2)
    class Holder:
        def ready(self) -> None:
            return None

    holder = Holder.remote()
    cluster.get(holder.ready.remote())
    with pytest.raises(NotEnoughSlots, match=r"waited 2 s .*others hold the rest .start_timeout_s=2"):
        fit(report_epochs, run_config, horovod_config=HorovodConfig(start_timeout_s=2))
    cluster.kill(holder)
    assert fit(report_epochs, run_config).return_value == "done"


def test_local_mode_and_misspelt_options(run_config: Any) -> None:
    result = fit(
        use_rows,
        run_config,
        {"batch_size": 8},
        scaling_config=ScalingConfig(num_workers=0),
        datasets={"train": ray.data.range(20).map_batches(doubled)},
    )
    ((seen, *_),), _ = result.return_value
    assert sorted(seen[0]) == list(range(20))
    with pytest.raises(InvalidArgument, match="did you mean start_timeout_s"):
        HorovodConfig(start_timeout=3)
    with pytest.raises(InvalidArgument, match="did you mean scaling_config"):
        HorovodTrainer(fail, scaling_confg=TWO)
    lock = __import__("threading").Lock()
    with pytest.raises(NotPicklable, match="lock"):
        HorovodTrainer(lambda config: lock, scaling_config=TWO, run_config=run_config).fit()


class Awkward(Exception):
    """Pickles, and does not unpickle."""

    def __init__(self, what: str, why: str):
        super().__init__(f"{what}: {why}")


def raise_awkward(config: dict[str, Any]) -> None:
    import torch

    import hvd_core.torch as hvd

    if hvd.rank() == 1:
        raise Awkward("token", "4712")
    hvd.allreduce(torch.ones(3), name="never")


@pytest.mark.slow
def test_an_exception_that_does_not_travel_is_told(run_config: Any) -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(RankFailed, match=r"rank 1 raised .*Awkward: token: 4712 \(.*test_trainer.py"):
        fit(raise_awkward, run_config)
    assert signal.getsignal(signal.SIGINT) is before
