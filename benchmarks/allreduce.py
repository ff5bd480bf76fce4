"""Allreduce against gloo: two processes, fp32, both libraries in the same processes, turn by turn.

    python benchmarks/allreduce.py [ranks]

Prints the median microseconds of one blocking allreduce for ordinary torch tensors, the same in the arena,
and gloo's, with the ratio. Buffers are rewritten before every iteration.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import hvd_core
from hvd_core.world import current

SIZES = [4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20]


def measure(store: str) -> list[tuple[int, float, float, float]]:
    rows = []
    world = current()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=world.rank, world_size=world.size)
    with world.connect() as group:
        for nbytes in SIZES:
            ordinary = torch.empty(nbytes // 4)
            arena = torch.from_numpy(group.empty(nbytes)).view(torch.float32)
            calls: list[tuple[torch.Tensor, Callable[[], object]]] = [
                (ordinary, lambda t=ordinary: group.allreduce(t, name="ordinary")),
                (arena, lambda t=arena: group.allreduce(t, name="arena")),
                (ordinary, lambda t=ordinary: dist.all_reduce(t)),
            ]
            times: list[list[float]] = [[] for _ in calls]
            for _ in range(max(15, min(300, (256 << 20) // nbytes))):
                for (tensor, call), taken in zip(calls, times, strict=True):
                    tensor.fill_(1.0)
                    group.barrier()
                    begin = time.perf_counter()
                    call()
                    taken.append((time.perf_counter() - begin) * 1e6)
                    assert tensor[-1] == world.size
            rows.append((nbytes, *(statistics.median(taken) for taken in times)))
    dist.destroy_process_group()
    return rows


def main() -> None:
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    with tempfile.TemporaryDirectory() as folder:
        rows = hvd_core.run(measure, (f"{folder}/store",), num_proc=ranks)[0]
    print(f"{ranks} ranks, fp32, median microseconds")
    print(f"{'bytes':>10} {'hvd':>10} {'hvd arena':>10} {'gloo':>10} {'gloo/hvd':>9}")
    for nbytes, ordinary, arena, gloo in rows:
        print(f"{nbytes:>10} {ordinary:>10.0f} {arena:>10.0f} {gloo:>10.0f} {gloo / ordinary:>9.1f}")


if __name__ == "__main__":
    main()
