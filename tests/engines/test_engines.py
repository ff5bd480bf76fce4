"""What holds on every engine: a function on ranks of this machine, of Spark, of Ray; a fit on both."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import hvd_core
from hvd_core.errors import NotEnoughSlots, NotPicklable, RankFailed

pytest.importorskip("ray")
torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.timeout(90, func_only=True),
]
Launch = Callable[..., list[Any]]


@pytest.fixture(params=["local", "spark", "ray"])
def launch(request: pytest.FixtureRequest) -> Launch:
    """`run` of an engine."""
    if request.param == "local":
        return hvd_core.run
    if request.param == "spark":
        request.getfixturevalue("spark")
        import hvd_spark

        return hvd_spark.run
    request.getfixturevalue("cluster")
    import hvd_ray

    return hvd_ray.run


def ranks(scale: float, *, more: dict[int, float]) -> dict[str, Any]:
    import hvd_core.torch as hvd

    hvd.init()
    mine = torch.full((5,), scale * (1 + hvd.rank()), dtype=torch.float64)
    return {
        "rank": hvd.rank(),
        "size": hvd.size(),
        "local": (hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()),
        "sum": hvd.allreduce(mine, op=hvd.Sum).tolist(),
        "mean": hvd.allreduce(mine).tolist(),
        "objects": hvd.allgather_object({"rank": hvd.rank(), **more}),
        "root": hvd.broadcast(mine, root_rank=1).tolist(),
        "env": os.environ.get("ONE"),
    }


def test_results_by_rank_and_again(launch: Launch) -> None:
    """R22, R24: arguments of all kinds; another number of ranks in the same process."""
    for _ in range(2):
        found = launch(ranks, (2.0,), {"more": {3: 4.0}}, num_proc=2, env={"ONE": "1"})
        assert launch(lambda x: x + 1, (41,), num_proc=1) == [42]
        for rank, one in enumerate(found):
            assert (one["rank"], one["size"], one["local"], one["env"]) == (rank, 2, (rank, 2, 0, 1), "1")
            assert one["sum"] == [6.0] * 5 and one["mean"] == [3.0] * 5 and one["root"] == [4.0] * 5
            assert one["objects"] == [{"rank": 0, 3: 4.0}, {"rank": 1, 3: 4.0}]


def fails(how: str, peers: str) -> None:
    import hvd_core.torch as hvd

    hvd.init()
    hvd.allreduce(torch.ones(3), name="first")
    if hvd.rank() == 1:
        if how == "exit":
            os._exit(86)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "undefined":
            undefined_name()  # type: ignore[name-defined]  # noqa: F821
        raise ValueError("token-4711")
    if peers == "sleep":
        time.sleep(120)
    hvd.allreduce(torch.ones(1 << 20), name="second")


@pytest.mark.parametrize(
    ("how", "peers", "says"),
    [
        ("raise", "sleep", "rank 1 raised ValueError: token-4711 ("),
        ("undefined", "collective", "rank 1 raised NameError: name 'undefined_name' is not defined ("),
        ("exit", "sleep", "rank 1 exited with status 86"),
        ("kill", "collective", "rank 1 was killed by signal 9"),
    ],
)
def test_r20_r21_the_first_cause(launch: Launch, how: str, peers: str, says: str) -> None:
    with pytest.raises(RankFailed) as caught:
        launch(fails, (how, peers), num_proc=2)
    if caught.value.failure.kind == "lost":
        pytest.skip("this kernel does not tell Ray's ranks how a process has ended (Linux 6.15 does)")
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(says) and len(lines) <= 60 and caught.value.rank == 1
    if how in ("raise", "undefined"):
        assert "test_engines.py" in lines[0]
        assert type(caught.value.__cause__).__name__ in ("ValueError", "NameError")


def test_r22_what_does_not_pickle(launch: Launch) -> None:
    lock = threading.Lock()
    with pytest.raises(NotPicklable, match="lock"):
        launch(lambda: lock, num_proc=2)


@pytest.mark.parametrize("launch", ["spark", "ray"], indirect=True)
def test_r19_more_ranks_than_slots(launch: Launch) -> None:
    with pytest.raises(NotEnoughSlots, match=r"\b4\b.*\b2\b"):
        launch(ranks, (1.0,), {"more": {}}, num_proc=4)


def loader_in_a_rank() -> int:
    """K4, K5: a DataLoader with a process of its own, and a collate that is not to be entered twice."""
    import hvd_core.torch as hvd

    class Collate:
        busy = False

        def __call__(self, rows: list[Any]) -> Any:
            assert not self.busy
            self.busy = True
            try:
                return torch.stack(rows)
            finally:
                self.busy = False

    hvd.init()
    data = torch.arange(12, dtype=torch.float32)
    rows = torch.utils.data.DataLoader(data, batch_size=4, num_workers=1, collate_fn=Collate())
    return int(hvd.allreduce(torch.stack([batch.sum() for batch in rows]).sum(), op=hvd.Sum))


def test_k4_k5_a_data_loader_in_a_rank(launch: Launch) -> None:
    assert launch(loader_in_a_rank, num_proc=2) == [132, 132]


@pytest.mark.timeout(150, func_only=True)
@pytest.mark.parametrize("more", [{}, {"grad_clip_norm": 0.1, "accumulate_steps": 2, "validation": 0.25}])
def test_one_spec_and_the_same_rows_give_the_same_bits(
    spark: Any, cluster: Any, more: dict[str, Any]
) -> None:
    """R32: rows in other partitions, on another engine; `row_order="global"`."""
    import hvd_ray
    import hvd_spark

    random = np.random.default_rng(1)
    x = random.normal(size=(203, 3)).astype(np.float32)
    columns = {name: x[:, i] for i, name in enumerate("abc")}
    table = pa.table({**columns, "y": (x @ np.array([1.0, -2.0, 3.0], np.float32))})
    spec: dict[str, Any] = {
        "optimizer": lambda parameters: torch.optim.Adam(parameters, 0.01),
        "loss": torch.nn.MSELoss(),
        "feature_cols": ["a", "b", "c"],
        "label_cols": ["y"],
        "batch_size": 16,
        "epochs": 3,
        "row_order": "global",
        "seed": 5,
        "verbose": 0,
        "num_proc": 2,
        **more,
    }

    def net() -> Any:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    frame = spark.createDataFrame(table.to_pylist(), "a float, b float, c float, y float").repartition(3)
    on_spark = hvd_spark.HorovodEstimator(model=net(), **spec).fit(frame)
    on_ray = hvd_ray.HorovodEstimator(model=net(), **spec).fit(
        cluster.data.from_arrow([table.slice(0, 7), table.slice(7, 150), table.slice(157)])
    )
    for one, other in zip(
        on_spark.getModel().state_dict().values(), on_ray.getModel().state_dict().values(), strict=True
    ):
        assert torch.equal(one, other)
    keys = ("loss", "val_loss", "rows", "steps")
    pick = lambda history: [{k: entry.get(k) for k in keys} for entry in history]  # noqa: E731
    assert pick(on_spark.history) == pick(on_ray.history)
