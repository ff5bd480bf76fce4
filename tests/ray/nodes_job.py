"""Two nodes on this machine, one of which dies under a job. Prints one line of JSON."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ray
from ray.cluster_utils import Cluster
from ray.train import RunConfig, ScalingConfig

import hvd_ray
from hvd_core.errors import RankFailed


def node() -> str:
    return str(ray.get_runtime_context().get_node_id())


def wait(config: dict[str, Any]) -> None:
    """Both ranks are in the same collectives until somebody ends."""
    import torch

    import hvd_core.torch as hvd

    hvd.init()
    Path(config["flag"]).with_name(node()).write_text(str(hvd.rank()))
    hvd.allreduce(torch.ones(3), name="first")
    if hvd.rank() == 0:
        Path(config["flag"]).write_text("x")
    for i in range(10_000):
        time.sleep(0.05)
        hvd.allreduce(torch.ones(3), name=f"step.{i}")


def kill_when(flag: Path, cluster: Any, victim: Any) -> threading.Thread:
    def kill() -> None:
        while not flag.exists():
            time.sleep(0.02)
        cluster.remove_node(victim, allow_graceful=False)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    return thread


def fails(fit: Any, flag: Path) -> dict[str, Any]:
    """How it fails, and how long after both ranks were at work."""
    try:
        fit()
    except RankFailed as error:
        return {
            "rank": error.rank,
            "kind": error.failure.kind,
            "text": str(error),
            "seconds": time.time() - flag.stat().st_mtime,
        }
    raise AssertionError("a node died, and nobody noticed")


def by_executor(flag: Path) -> dict[str, Any]:
    executor = hvd_ray.RayExecutor(num_hosts=2)
    executor.start()
    found = fails(lambda: executor.run(wait, [{"flag": str(flag)}]), flag)
    found["again"] = len(hvd_ray.run(node, num_proc=1))
    return found


def by_trainer(flag: Path) -> dict[str, Any]:
    trainer = hvd_ray.HorovodTrainer(
        wait,
        train_loop_config={"flag": str(flag)},
        scaling_config=ScalingConfig(num_workers=2, placement_strategy="STRICT_SPREAD"),
        run_config=RunConfig(name="nodes", storage_path=str(flag.parent)),
    )
    return fails(trainer.fit, flag)


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    victim = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    with TemporaryDirectory() as folder:
        flag = Path(folder, "both-at-work")
        thread = kill_when(flag, cluster, victim)
        found = by_executor(flag) if sys.argv[1] == "executor" else by_trainer(flag)
        thread.join()
        found |= {"node": victim.node_id, "expected": int(flag.with_name(victim.node_id).read_text())}
    ray.shutdown()
    cluster.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
