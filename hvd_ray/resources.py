"""Whether the cluster has what a job needs: asked before anything is started, waited for within bounds."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

import ray

from hvd_core.errors import NotEnoughSlots

#: A job that waits says so after this time.
_SAY_AFTER_S = 5.0
_LOOK_EVERY_S = 0.1
#: Ray counts in ten-thousandths.
_EPSILON = 1e-4


def require(
    bundle: Mapping[str, float],
    count: int,
    *,
    timeout_s: float,
    apart: bool = False,
    knob: str = "start_timeout_s",
) -> None:
    """Returns when `count` workers with `bundle` each fit into what is free; apart: one on each node. knob:
    what the user calls the timeout.

    Raises NotEnoughSlots: at once when the whole cluster is too small and cannot grow, after `timeout_s` when
    others hold it.
    """
    asked = {name: amount for name, amount in bundle.items() if amount > 0}
    if not asked or count == 0:
        return
    whole = _fitting(_nodes("Resources"), asked, apart)
    what = f"{count} {'nodes' if apart else 'workers'} with {text(asked)} each"
    if whole < count and not _can_grow():
        raise NotEnoughSlots(
            f"{what} are needed, and the cluster has room for {whole}: {text(_total(asked))} in all. "
            "Ask for fewer workers, or for less for each"
        )
    begin, said = time.monotonic(), False
    while (free := _fitting(_free_by_node(), asked, apart)) < count:
        waited_s = time.monotonic() - begin
        if waited_s >= timeout_s:
            raise NotEnoughSlots(
                f"waited {waited_s:.0f} s for {what}; there is room for {free} now, others hold the rest "
                f"({knob}={timeout_s:g})"
            )
        if waited_s >= min(_SAY_AFTER_S, timeout_s) and not said:
            said = True
            print(f"hvd: waiting for {what}; others hold them", file=sys.stderr, flush=True)
        time.sleep(_LOOK_EVERY_S)


def _nodes(key: str) -> list[dict[str, float]]:
    nodes: Any = ray.nodes()  # type: ignore[no-untyped-call]
    return [node[key] for node in nodes if node["Alive"]]


def _free_by_node() -> list[dict[str, float]]:
    from ray._private.state import available_resources_per_node

    found: Any = available_resources_per_node()  # type: ignore[no-untyped-call]
    return list(found.values())


def _fitting(nodes: list[dict[str, float]], asked: Mapping[str, float], apart: bool) -> int:
    rooms = [
        int(min((node.get(name, 0.0) + _EPSILON) // amount for name, amount in asked.items()))
        for node in nodes
    ]
    return sum(min(room, 1) for room in rooms) if apart else sum(rooms)


def _total(asked: Mapping[str, float]) -> dict[str, float]:
    return {name: sum(node.get(name, 0.0) for node in _nodes("Resources")) for name in asked}


def text(amounts: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in amounts.items())


def _can_grow() -> bool:
    """Whether an autoscaler may add nodes."""
    from ray._private.state import state

    try:
        most: Any = state.get_max_resources_from_cluster_config()
    except Exception:  # noqa: BLE001  no such question in this version of Ray
        return False
    return most is not None
