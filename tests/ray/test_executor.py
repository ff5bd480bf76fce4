"""RayExecutor and run: Horovod's meanings, failures, nothing left behind."""

from __future__ import annotations

import importlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from hvd_core.errors import InvalidArgument, NotEnoughSlots, NotPicklable, RankFailed

pytest.importorskip("ray")
import hvd_ray
from hvd_ray import RayExecutor, create_settings
from hvd_ray.places import Offer, visible_gpus

from ..conftest import KERNEL_TELLS


def total(x: float, y: float = 0.0) -> tuple[int, int, float, int]:
    import torch

    import hvd_core.torch as hvd

    hvd.init()
    value = float(hvd.allreduce(torch.tensor([x + hvd.rank()]), name="x", op=hvd.Sum)) + y
    return hvd.rank(), hvd.size(), value, os.getpid()


def as_horovod(factor: int) -> int:
    import horovod.torch as hvd
    import torch

    hvd.init()
    return factor * int(hvd.allreduce(torch.tensor([1]), op=hvd.Sum))


class Counter:
    def __init__(self, start: int, step: int = 1):
        self.value, self.step = start, step

    def up(self) -> int:
        self.value += self.step
        return self.value


def are_gone(pids: Any) -> bool:
    return not any(is_running(pid) for pid in pids)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def left(cluster: Any) -> Any:
    """What nobody uses, when it is all again; the last seen otherwise."""
    until = time.monotonic() + 10
    while (free := cluster.available_resources()).get("CPU", 0) < 2 and time.monotonic() < until:
        threading.Event().wait(0.1)
    return free


def test_start_run_execute_and_shutdown(cluster: Any) -> None:
    executor = RayExecutor(create_settings(timeout_s=30), num_workers=2, env_vars={"ONE": "1"})
    executor.start(Counter, [10], {"step": 2}, extra_env_vars={"TWO": "2"})
    first = executor.run(total, args=[1.0], kwargs={"y": 0.5})
    assert [(rank, size, value) for rank, size, value, _ in first] == [(0, 2, 3.5), (1, 2, 3.5)]
    again = cluster.get(executor.run_remote(total, [1.0]))
    assert [pid for *_, pid in again] == [pid for *_, pid in first]  # the same processes
    assert executor.execute(lambda counter: counter.up()) == [12, 12]
    assert executor.execute_single(lambda counter: counter.up()) == 14
    assert executor.execute(lambda counter: counter.up()) == [16, 14]
    assert executor.run(lambda: os.environ["ONE"] + os.environ["TWO"]) == ["12", "12"]
    seen: list[Any] = []

    def tell() -> str:
        for epoch in range(3):
            hvd_ray.log({"epoch": epoch})
        return "told"

    assert executor.run(tell, callbacks=[seen.append]) == ["told", "told"]
    assert sorted(info["epoch"] for info in seen) == [0, 0, 1, 1, 2, 2]
    with pytest.raises(InvalidArgument, match="has been started"):
        executor.start()
    executor.shutdown()
    executor.shutdown()
    assert are_gone(pid for *_, pid in first)
    with pytest.raises(InvalidArgument, match="call start"):
        executor.run(total, [1.0])
    assert left(cluster)["CPU"] == 2
    groups = cluster.util.placement_group_table().values()
    assert all(group["state"] == "REMOVED" for group in groups)


def fail(how: str, peers: str) -> None:
    import torch

    import hvd_core.torch as hvd

    hvd.init()
    hvd.allreduce(torch.ones(3), name="first")
    if hvd.rank() == 0:
        if how == "exit":
            os._exit(86)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "leave":
            raise SystemExit(3)
        raise ValueError("token-4711")
    if peers == "sleep":
        time.sleep(120)
    while peers == "loop":
        pass
    hvd.allreduce(torch.ones(1 << 20), name="second")


@pytest.mark.parametrize(
    ("how", "peers", "says"),
    [
        ("raise", "sleep", "rank 0 raised ValueError: token-4711 ("),
        ("raise", "loop", "rank 0 raised ValueError: token-4711 ("),
        ("raise", "collective", "rank 0 raised ValueError: token-4711 ("),
        ("leave", "collective", "rank 0 exited with status 3"),
        ("exit", "sleep", "rank 0 exited with status 86"),
        ("kill", "collective", "rank 0 was killed by signal 9"),
    ],
)
def test_r20_r21_failures(cluster: Any, how: str, peers: str, says: str) -> None:
    executor = RayExecutor(num_workers=2)
    executor.start()
    pids = executor.run(os.getpid)
    began = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        executor.run(fail, [how, peers])
    assert time.monotonic() - began < 15
    text = str(caught.value)
    if how not in ("exit", "kill") or KERNEL_TELLS:
        assert text.startswith(says)
    assert caught.value.rank == 0 and len(text.splitlines()) <= 60
    assert f"id {cluster.nodes()[0]['NodeID']}" in text.splitlines()[1]
    if how == "raise":
        assert "test_executor.py" in text.splitlines()[0]
        assert isinstance(caught.value.__cause__, ValueError)
    assert are_gone(pids)
    assert left(cluster)["CPU"] == 2
    if how == "kill":  # the session is usable again
        assert [size for _, size, *_ in hvd_ray.run(total, [1.0], num_proc=2)] == [2, 2]


def test_r22_what_does_not_pickle_is_named_before_anything_starts(cluster: Any) -> None:
    lock = threading.Lock()

    def uses() -> bool:
        return lock.locked()

    with pytest.raises(NotPicklable, match="lock"):
        hvd_ray.run(uses, num_proc=2)


def test_r19_more_ranks_than_cpus_and_bad_options(cluster: Any) -> None:
    began = time.monotonic()
    with pytest.raises(NotEnoughSlots, match=r"4 workers with 1 CPU each .* room for 2"):
        hvd_ray.run(total, [1.0], num_proc=4)
    with pytest.raises(NotEnoughSlots, match=r"2 nodes with 1 CPU each .* room for 1"):
        RayExecutor(num_hosts=2).start()
    assert time.monotonic() - began < 10
    with pytest.raises(InvalidArgument, match="did you mean num_workers"):
        RayExecutor(num_worker=2)
    with pytest.raises(InvalidArgument, match="exactly one of"):
        RayExecutor()
    with pytest.raises(InvalidArgument, match="did you mean timeout_s"):
        create_settings(timeout=3)
    with pytest.raises(InvalidArgument, match="elastic"):
        RayExecutor(min_workers=1)


def offer(node: str, *gpus: str) -> Offer:
    return Offer("", node, "", "", "", 0, gpus)


@pytest.mark.parametrize(
    ("offers", "shown"),
    [
        ([offer("a"), offer("a")], [None, None]),
        ([offer("a", "2"), offer("a", "3"), offer("b", "0")], ["2,3", "2,3", "0"]),
        ([offer("a", "0"), offer("a", "0")], ["0", "0"]),  # half a GPU each
        ([offer("a", "0", "1"), offer("a", "2", "3")], ["0,1", "2,3"]),
    ],
)
def test_s1_visible_gpus(offers: list[Offer], shown: list[str | None]) -> None:
    assert visible_gpus(offers) == shown


def test_jobs_of_horovods_run_unchanged(cluster: Any, horovod: Any) -> None:
    executor_class = importlib.import_module("horovod.ray").RayExecutor
    executor = executor_class(executor_class.create_settings(timeout_s=30), num_workers=2)
    executor.start()
    assert executor.run(as_horovod, args=[5]) == [10, 10]
    executor.shutdown()
