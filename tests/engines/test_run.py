"""A function on the ranks of this machine, of Spark, of Ray: results, first causes, what is refused."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch

from hvd_core.errors import NotEnoughSlots, NotPicklable, RankFailed

from ..conftest import KERNEL_TELLS
from .conftest import Launch

pytest.importorskip("ray")


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
    if caught.value.failure.kind == "lost" and not KERNEL_TELLS:
        pytest.skip("this kernel does not tell Ray's ranks how a process has ended (Linux 6.15 does)")
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(says) and len(lines) <= 60 and caught.value.rank == 1
    if how in ("raise", "undefined"):
        assert "test_run.py" in lines[0]
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
