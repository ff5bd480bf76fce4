"""All gradients of ResNet-50 and of BERT-base, submitted asynchronously in random order, then waited for.

    python benchmarks/gradient_set.py [--quick] [--ranks 2] [--models resnet50 bert]

hvd: every tensor by itself, as autograd leaves them; and buckets of 1 and then 8 MiB in the arena. gloo: what
DDP does, buckets of 25 MiB that gradients are copied into and out of, all in flight at once; and the same
without the copies. Open MPI: one flat array without any copies, and tensor by tensor.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import report
import side_by_side
import tensors
import torch
import torch.distributed as dist
from race import Contender, median_us, race, ratio
from side_by_side import Ranks

import hvd_core.torch as hvd

MIB = 1 << 20
Shapes = list[tuple[int, ...]]


def resnet50() -> Shapes:
    """Its 161 parameters, in order of definition."""
    shapes: Shapes = [(64, 3, 7, 7), (64,), (64,)]
    features = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            out = 4 * width
            shapes += [(width, features, 1, 1), (width,), (width,), (width, width, 3, 3), (width,), (width,)]
            shapes += [(out, width, 1, 1), (out,), (out,)]
            if block == 0:
                shapes += [(out, features, 1, 1), (out,), (out,)]
            features = out
    return [*shapes, (1000, 2048), (1000,)]


def bert_base() -> Shapes:
    """Its 199 parameters, in order of definition."""
    hidden, inner = 768, 3072
    shapes: Shapes = [(30522, hidden), (512, hidden), (2, hidden), (hidden,), (hidden,)]
    for _ in range(12):
        shapes += [(hidden, hidden), (hidden,)] * 4 + [(hidden,), (hidden,)]
        shapes += [(inner, hidden), (inner,), (hidden, inner), (hidden,), (hidden,), (hidden,)]
    return [*shapes, (hidden, hidden), (hidden,)]


MODELS: dict[str, Callable[[], Shapes]] = {
    "resnet50": resnet50,
    "bert": bert_base,
    "tiny": lambda: [(7, 5)] * 9,
}


def buckets_of(counts: list[int], first_nbytes: int, nbytes: int) -> list[list[int]]:
    """Indices of tensors, last first as backward makes them, in buckets of at least so many bytes."""
    buckets: list[list[int]] = [[]]
    filled, limit = 0, first_nbytes
    for index in reversed(range(len(counts))):
        if filled >= limit:
            buckets.append([])
            filled, limit = 0, nbytes
        buckets[-1].append(index)
        filled += counts[index] * 4
    return buckets


def several(ranks: Ranks, name: str, parts: list[torch.Tensor], call: Callable[[], object]) -> Contender:
    """A contender whose call leaves the sums in all `parts`."""
    each = [tensors.summed(ranks, name, part, call) for part in parts]

    def prepare(turn: int) -> None:
        for one in each:
            one.prepare(turn)

    def check(turn: int) -> None:
        for one in each:
            one.check(turn)

    return Contender(name, call, prepare, check)


def hvd_in_random_order(ranks: Ranks, name: str, parts: list[torch.Tensor]) -> Contender:
    order = list(range(len(parts)))
    shuffle = random.Random(ranks.rank).shuffle

    def call() -> None:
        handles = [hvd.allreduce_async_(parts[i], name=names[i], op=hvd.Sum) for i in order]
        for handle in handles:
            hvd.synchronize(handle)
        shuffle(order)

    names = [f"{name}.{i}" for i in range(len(parts))]
    return several(ranks, name, parts, call)


def gloo_buckets(ranks: Ranks, name: str, gradients: list[torch.Tensor], copies: bool) -> Contender:
    counts = [gradient.numel() for gradient in gradients]
    buckets = buckets_of(counts, MIB, 25 * MIB)
    flats = [torch.empty(sum(counts[i] for i in bucket)) for bucket in buckets]
    inside = [list(f.split([counts[i] for i in b])) for f, b in zip(flats, buckets, strict=True)]
    outside = [[gradients[i].view(-1) for i in bucket] for bucket in buckets]

    def call() -> None:
        works = []
        for flat, views, parts in zip(flats, inside, outside, strict=True):
            if copies:
                torch._foreach_copy_(views, parts)
            works.append(dist.all_reduce(flat, async_op=True))
        for work, views, parts in zip(works, inside, outside, strict=True):
            work.wait()
            if copies:
                torch._foreach_copy_(parts, views)

    return several(ranks, name, gradients if copies else flats, call)


def mpi_contenders(ranks: Ranks, gradients: list[torch.Tensor]) -> list[Contender]:
    if ranks.mpi is None:
        return []
    from mpi4py import MPI

    world, arrays = ranks.mpi, [gradient.numpy() for gradient in gradients]
    flat = torch.empty(sum(gradient.numel() for gradient in gradients))
    whole = flat.numpy()

    def per_tensor() -> None:
        for array in arrays:
            world.Allreduce(MPI.IN_PLACE, array, MPI.SUM)

    return [
        several(ranks, "mpi flat", [flat], lambda: world.Allreduce(MPI.IN_PLACE, whole, MPI.SUM)),
        several(ranks, "mpi per tensor", gradients, per_tensor),
    ]


def measure(ranks: Ranks, models: list[str], budget_s: float) -> list[dict[str, Any]]:
    group = tensors.connect(ranks)
    rows = []
    for model in models:
        shapes = MODELS[model]()
        gradients = [torch.empty(shape) for shape in shapes]
        counts = [math.prod(shape) for shape in shapes]
        arena = [
            tensors.arena_tensor(group, sum(counts[i] for i in bucket))
            for bucket in buckets_of(counts, MIB, 8 * MIB)
        ]
        contenders = [
            hvd_in_random_order(ranks, "hvd", gradients),
            hvd_in_random_order(ranks, "hvd arena", arena),
            gloo_buckets(ranks, "gloo buckets", gradients, copies=True),
            gloo_buckets(ranks, "gloo no copies", gradients, copies=False),
            *mpi_contenders(ranks, gradients),
        ]
        times = race(ranks, contenders, budget_s=budget_s)
        for name, taken in times.items():
            row: dict[str, Any] = {"model": model, "tensors": len(shapes), "elements": sum(counts)}
            row |= {
                "ranks": ranks.size,
                "way": name,
                "pairs": len(taken),
                "median_ms": median_us(taken) / 1e3,
            }
            for ours in ("hvd", "hvd arena"):
                row[f"/ {ours}"], low, high = ratio(taken, times[ours])
                row[f"/ {ours} 95%"] = f"{low:.2f}-{high:.2f}"
            rows.append(row)
    return rows


def targets_of(rows: list[dict[str, Any]], model: str) -> list[report.Target]:
    times = {row["way"]: row["median_ms"] for row in rows if row["model"] == model and row["ranks"] == 2}
    mpi = min((times[way] for way in ("mpi flat", "mpi per tensor") if way in times), default=None)
    targets = []
    for ours, over_gloo, over_mpi in (("hvd", 3, 1.3), ("hvd arena", 8, 3)):
        best = None if mpi is None else mpi / times[ours]
        targets += [
            report.Target(f"{model}: gloo buckets / {ours}", times["gloo buckets"] / times[ours], over_gloo),
            report.Target(f"{model}: Open MPI's best / {ours}", best, over_mpi),
        ]
    return targets


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS))
    options = parser.parse_args()
    figure = report.Figure("gradient_set", "all gradients of a model, in random order", options.quick)
    models = options.models or (["tiny"] if options.quick else ["resnet50", "bert"])
    outcome = side_by_side.run(
        measure, size=options.ranks, models=models, budget_s=0.05 if options.quick else 12.0
    )
    figure.saw(outcome)
    figure.rows = outcome.value
    if options.ranks == 2:
        figure.targets = [target for model in models for target in targets_of(figure.rows, model)]
    figure.publish()


if __name__ == "__main__":
    main()
