"""Workers that are replaced one by one, while the others keep their process."""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from hvd_core.errors import InvalidArgument, RankFailed

from ..conftest import await_end

ray_train = pytest.importorskip("ray.train")
import ray.data  # noqa: E402
from ray.train import FailureConfig, RunConfig, ScalingConfig  # noqa: E402

import hvd_ray  # noqa: E402
from hvd_ray import HorovodConfig, HorovodTrainer  # noqa: E402

EPOCHS, ROWS = 6, 21
TWO = ScalingConfig(num_workers=2)


def fit(loop: Any, config: dict[str, Any], max_failures: int, **options: Any) -> Any:
    folder = config["folder"]
    run_config = RunConfig(
        name="run", storage_path=folder, failure_config=FailureConfig(max_failures=max_failures)
    )
    options = {"scaling_config": TWO, "horovod_config": HorovodConfig(replace_workers=True), **options}
    return HorovodTrainer(loop, train_loop_config=config, run_config=run_config, **options).fit()


def linear(seed: int) -> Any:
    import torch

    torch.manual_seed(seed)
    return torch.nn.Linear(2, 1).double()


def note(config: dict[str, Any], **what: Any) -> None:
    """What happens on this rank, for the test to read."""
    context = ray_train.get_context()
    line = {"pid": os.getpid(), "at": time.time(), "local_of_ray": context.get_local_rank(), **what}
    with Path(config["folder"], f"rank{context.get_world_rank()}").open("a") as file:
        print(json.dumps(line), file=file)


def train(config: dict[str, Any]) -> Any:
    import torch

    import hvd_core.torch as hvd

    net = linear(hvd.rank())  # each rank its own weights
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    hvd.DistributedOptimizer(optimizer, net.named_parameters())
    state = hvd.elastic.TorchState(net, optimizer, epoch=0, used=[])

    @hvd.elastic.run
    def epochs(state: Any) -> None:
        rows = hvd_ray.prepare_data("train", {"id": "id", "x": ["a", "b"], "y": "y"}, batch_size=ROWS)
        rows.set_epoch(state.epoch)
        while state.epoch < EPOCHS:
            note(config, epoch=state.epoch, local=hvd.local_rank())
            for batch in rows:
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(net(batch["x"].double()).reshape(-1), batch["y"].double())
                if (hvd.rank(), state.epoch) in ((1, 1), (0, 3)) and first(config):
                    os.kill(os.getpid(), 9)
                (loss * rows.share).backward()
                optimizer.step()
            used = hvd.allgather_object(batch["id"].tolist())
            state.used.append(sorted(id for ids in used for id in ids))
            state.epoch += 1
            state.commit()
            ray_train.report({"epoch": state.epoch})

    epochs(state)
    mine = {"weights": [p.tolist() for p in net.parameters()], "used": state.used}
    return hvd.allgather_object(mine)


def first(config: dict[str, Any]) -> bool:
    """Whether this is the first process of its rank."""
    try:
        Path(config["folder"], f"dies{ray_train.get_context().get_world_rank()}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.timeout(180, func_only=True)
def test_r39_only_the_dead_worker_is_replaced(cluster: Any, tmp_path: Path) -> None:
    """Rank 1 is killed, later rank 0. Oracle: plain torch on all rows, from the weights of rank 0."""
    import torch

    random = np.random.default_rng(0)
    a, b = random.normal(size=(2, ROWS)).astype(np.float32)
    y = (2 * a - b + 0.5).astype(np.float32)
    table = pa.table({"id": np.arange(ROWS), "a": a, "b": b, "y": y})
    ds = ray.data.from_arrow([table.slice(0, 3), table.slice(3)])
    result = fit(train, {"folder": str(tmp_path)}, 2, datasets={"train": ds})

    net = linear(0)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    x, want = torch.from_numpy(np.stack([a, b], 1)).double(), torch.from_numpy(y).double()
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(x).reshape(-1), want).backward()
        optimizer.step()
    one, other = result.return_value
    assert one == other
    for got, parameter in zip(one["weights"], net.parameters(), strict=True):
        np.testing.assert_allclose(got, parameter.detach().numpy(), rtol=1e-6)
    assert one["used"] == [list(range(ROWS))] * EPOCHS

    lived: dict[int, dict[int, list[int]]] = {}
    began: dict[tuple[int, int], list[float]] = defaultdict(list)
    for rank in range(2):
        lived[rank] = defaultdict(list)
        for line in Path(tmp_path, f"rank{rank}").read_text().splitlines():
            noted = json.loads(line)
            lived[rank][noted["pid"]].append(noted["epoch"])
            began[rank, noted["epoch"]].append(noted["at"])
            assert (noted["local"], noted["local_of_ray"]) == (rank, 0)
    # By process: the epochs that it began. Each outlived the other rank's death, and did that epoch again.
    assert list(lived[0].values()) == [[0, 1, 1, 2, 3], [3, 4, 5]]
    assert list(lived[1].values()) == [[0, 1], [1, 2, 3, 3, 4, 5]]
    # Ray looks every two seconds, and starts a process, which imports torch: 8 and 12 s on a busy machine.
    for survivor, epoch in ((0, 1), (1, 3)):
        assert began[survivor, epoch][1] - began[survivor, epoch][0] < 60
    deadline = time.monotonic() + 10
    assert all(await_end(pid, deadline) for rank in lived.values() for pid in rank)


def fails(config: dict[str, Any]) -> None:
    import torch

    import hvd_core.torch as hvd

    @hvd.elastic.run
    def step(state: Any) -> None:
        note(config, rank=hvd.rank())
        hvd.allreduce(torch.ones(3), name="first")
        if hvd.rank() == 1:
            raise ValueError("token-4711")
        hvd.allreduce(torch.ones(3), name="second")

    step(hvd.elastic.ObjectState())


@pytest.mark.slow
@pytest.mark.timeout(180, func_only=True)
def test_r20_a_bug_ends_the_survivors_too(cluster: Any, tmp_path: Path) -> None:
    with pytest.raises(
        RankFailed, match=r"^rank 1 raised ValueError: token-4711 \(.*test_replacing.py"
    ) as caught:
        fit(fails, {"folder": str(tmp_path)}, 1)
    assert set(caught.value.worker_failures) == {1}  # type: ignore[attr-defined]
    noted = [Path(tmp_path, f"rank{rank}").read_text().splitlines() for rank in range(2)]
    pids = [{json.loads(line)["pid"] for line in lines} for lines in noted]
    assert [len(one) for one in pids] == [1, 2]
    deadline = time.monotonic() + 10
    assert all(await_end(pid, deadline) for one in pids for pid in one)


def test_what_replacing_needs(cluster: Any, tmp_path: Path) -> None:
    folder = {"folder": str(tmp_path)}
    with pytest.raises(InvalidArgument, match="needs FailureConfig"):
        fit(fails, folder, 0)
    with pytest.raises(InvalidArgument, match="needs a fixed num_workers"):
        fit(fails, folder, 1, scaling_config=ScalingConfig(num_workers=(1, 2)))
    with pytest.raises(InvalidArgument, match="needs the default dataset_config"):
        fit(fails, folder, 1, datasets={"train": ray.data.range(3)}, dataset_config=ray_train.DataConfig())
