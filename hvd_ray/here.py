"""Small actors that live on the driver's node, so that no other node's death takes them away."""

from __future__ import annotations

from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


def options() -> dict[str, Any]:
    """For an actor without work: no CPU, and this node."""
    node = ray.get_runtime_context().get_node_id()
    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}


def queue() -> Any:
    """From ranks to the driver."""
    from ray.util.queue import Queue

    return Queue(actor_options=options())


def drained(queue: Any) -> list[Any]:
    """What is in it now; nothing where it is gone."""
    try:
        found: list[Any] = queue.get_nowait_batch(queue.qsize())
    except Exception:  # noqa: BLE001  what failed is told by the ranks' own errors
        return []
    return found
