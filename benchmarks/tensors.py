"""The three libraries' allreduce of torch tensors as contenders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from race import Contender, Times, median_us, ratio
from side_by_side import Ranks

import hvd_core.torch as hvd

#: Beyond this many elements only some are compared in each turn.
_COMPARE_ALL = 1 << 18


def connect(ranks: Ranks) -> Any:
    """All libraries on all ranks, then bound to CPUs. Returns hvd's Group."""
    torch.set_num_threads(1)
    _ = ranks.mpi
    group = ranks.connect_hvd()
    ranks.connect_gloo()
    dist.all_reduce(torch.ones(1))
    group.barrier()
    ranks.pin()
    return group


def summed(ranks: Ranks, name: str, tensor: torch.Tensor, call: Callable[[], object]) -> Contender:
    """A contender whose call leaves the sum over ranks in `tensor`, exact: of small whole numbers."""
    some = tensor if tensor.numel() <= _COMPARE_ALL else tensor[:: tensor.numel() // 1021]
    total = ranks.size * (ranks.size + 1) // 2

    def prepare(turn: int) -> None:
        tensor.fill_(float((ranks.rank + 1) * (turn % 5 + 1)))

    def check(turn: int) -> None:
        expected = float(total * (turn % 5 + 1))
        compared = tensor if turn == 0 else some
        if not bool((compared == expected).all()):
            raise AssertionError(f"{name}: a wrong sum of {tensor.numel()} elements")

    return Contender(name, call, prepare, check)


def hvd_allreduce(ranks: Ranks, tensor: torch.Tensor, name: str = "hvd") -> Contender:
    key = f"{name}.{tensor.numel()}"
    return summed(ranks, name, tensor, lambda: hvd.allreduce_(tensor, name=key, op=hvd.Sum))


def gloo_allreduce(ranks: Ranks, tensor: torch.Tensor) -> Contender:
    return summed(ranks, "gloo", tensor, lambda: dist.all_reduce(tensor))


def mpi_allreduce(ranks: Ranks, tensor: torch.Tensor) -> list[Contender]:
    """Empty without MPI."""
    if ranks.mpi is None:
        return []
    from mpi4py import MPI

    array, world = tensor.numpy(), ranks.mpi
    return [summed(ranks, "mpi", tensor, lambda: world.Allreduce(MPI.IN_PLACE, array, MPI.SUM))]


def arena_tensor(group: Any, count: int) -> torch.Tensor:
    """(count,) float32 in hvd's shared memory."""
    return torch.from_numpy(group.empty(count * 4)).view(torch.float32)


def against_peers(times: Times, ours: str = "hvd") -> dict[str, Any]:
    """Medians, and how many times faster than the peers `ours` is; None for a peer that is not there."""
    row: dict[str, Any] = {"pairs": len(times[ours])}
    row.update({f"{name}_us": median_us(taken) for name, taken in times.items()})
    for peer in ("gloo", "mpi"):
        there = peer in times
        row[f"{peer}/{ours}"], low, high = ratio(times[peer], times[ours]) if there else (None, 0, 0)
        row[f"{peer}/{ours} 95%"] = f"{low:.2f}-{high:.2f}" if there else None
    return row
