"""Which GPU is a rank's: a pure function of what the scheduler and the environment say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import LaunchFailed


@dataclass(frozen=True)
class Gpus:
    """mask: for CUDA_VISIBLE_DEVICES; "" shows none, so the rank computes on the CPU. index: of the rank's
    GPU among those that were visible; None: no GPU. warning: "" or what the user should know."""

    mask: str
    index: int | None
    warning: str = ""


def gpus_for(
    local_rank: int, visible: str | None, addresses: Sequence[str] = (), *, per_rank: float = 1.0
) -> Gpus:
    """The GPUs of the rank that is number `local_rank` on its host.

    visible: CUDA_VISIBLE_DEVICES, None where it is not set and all the machine's GPUs can be seen. addresses:
    what the scheduler has given this rank, if it schedules GPUs: numbers or names of the machine's GPUs, or
    positions in `visible`; the names win. per_rank: GPUs of one rank; below 1 ranks share one. Raises
    LaunchFailed when the rank's GPU is not among those that are visible.
    """
    names = None if visible is None else _names(visible)
    if names == []:
        return Gpus("", None)
    warning = ""
    if per_rank < 1:
        shared = round(1 / per_rank)
        warning = f"up to {shared} ranks share a GPU ({per_rank:g} for each) and slow each other down"
    if not addresses:
        first, count = int(local_rank * per_rank), max(1, int(per_rank))
        addresses = [str(i) for i in range(first, first + count)]
        at = None if names is None else list(range(first, first + count))
    else:
        at = None if names is None else [_position(names, address) for address in addresses]
    if names is None or at is None:
        return Gpus(",".join(addresses), int(addresses[0]) if addresses[0].isdigit() else 0, warning)
    if max(at) >= len(names):
        raise LaunchFailed(
            f"local rank {local_rank} is to have GPU {', '.join(addresses)}, but "
            f"CUDA_VISIBLE_DEVICES={visible!r} shows {len(names)} here: "
            "start fewer ranks on a host, or let each see its GPUs"
        )
    return Gpus(",".join(names[i] for i in at), at[0], warning)


def _names(visible: str) -> list[str]:
    """As CUDA reads them: what follows an invalid entry does not count."""
    names: list[str] = []
    for name in (part.strip() for part in visible.split(",")):
        if not name or name.startswith("-") or name == "NoDevFiles":
            break
        names.append(name)
    return names


def _position(names: Sequence[str], address: str) -> int:
    """Behind the end when it is not there."""
    if address in names:
        return names.index(address)
    return int(address) if address.isdigit() else len(names)
