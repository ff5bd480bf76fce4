"""The packed shard and the loop on it, without an engine: batches per second, and what the loop costs.

python benchmarks/shard.py [--quick]

One process on one CPU, so that the thread that gathers ahead gets nothing for free.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import report
import side_by_side
import torch
from pyspark.ml.torch.data import _SparkPartitionTorchDataset
from pyspark.sql import types as T
from race import Times, ratio, take_turns
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from hvd_core.train import TrainSpec, plan_layout
from hvd_core.train.batches import Batches
from hvd_core.train.columns import columns_of
from hvd_core.train.local import shard_of
from hvd_core.train.loop import fit_shard
from hvd_core.train.order import EpochPlan, requests, split_rows
from hvd_core.train.shard import Shard

COLUMNS = 50
BATCH_ROWS = 1024
NAMES = [f"c{i}" for i in range(COLUMNS)]
HVD, MEMCPY, LOADER, BY_BATCH, PYSPARK = (
    "hvd",
    "memcpy",
    "DataLoader",
    "DataLoader, batch indices",
    "pyspark's loader",
)
LOOP, BY_HAND = "hvd's loop", "by hand"


def table_of(rows: int) -> pa.Table:
    """COLUMNS float32 features and a label."""
    values = np.random.default_rng(0).standard_normal((COLUMNS + 1, rows), np.float32)
    return pa.table({name: pa.array(v) for name, v in zip([*NAMES, "y"], values, strict=True)})


def mlp() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(COLUMNS, 256), torch.nn.ReLU(), torch.nn.Linear(256, 128), torch.nn.ReLU(),
        torch.nn.Linear(128, 1),
    )  # fmt: skip


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 1e-3)


def spec_of(batch_size: int) -> TrainSpec:
    return TrainSpec(
        model=mlp(),
        optimizer=adam,
        loss=torch.nn.MSELoss(),
        feature_cols=NAMES,
        label_cols=["y"],
        batch_size=batch_size,
        epochs=1,
    )


def batches(table: pa.Table, shard: Shard, folder: Path, quick: bool) -> tuple[Times, dict[str, int]]:
    """Times of a pass over shuffled batches, and how many rows each has: slow ones take a part of them."""
    rows, few = shard.rows, min(shard.rows, 2_000 if quick else 50_000)
    features, labels = (torch.from_numpy(np.array(shard.block(i))) for i in range(2))
    data = TensorDataset(features, labels)
    plan, split = EpochPlan((rows,), BATCH_ROWS), split_rows(rows, shard.sorted_order())
    copy = np.empty(shard.maps[0].nbytes, np.uint8)

    def ours() -> None:
        steps = range(plan.steps)
        wanted = requests(split, plan, 0, steps, seed=7, epoch=0, shuffle=True)
        with Batches(shard, wanted, largest=BATCH_ROWS) as gathered:
            assert sum(batch.rows for batch in gathered) == rows

    def memcpy() -> None:
        np.copyto(copy, shard.maps[0])

    def drained(loader: Any, count: int) -> None:
        assert sum(len(batch[0]) for batch in loader) == count

    file, schema = arrow_stream(table.slice(0, few), folder)
    pick = RandomSampler(data, num_samples=few)
    loaders: dict[str, Callable[[], Any]] = {
        LOADER: lambda: DataLoader(data, BATCH_ROWS, sampler=pick),
        BY_BATCH: lambda: DataLoader(
            data, batch_size=None, sampler=BatchSampler(RandomSampler(data), BATCH_ROWS, drop_last=False)
        ),
        PYSPARK: lambda: DataLoader(_SparkPartitionTorchDataset(str(file), schema, few), BATCH_ROWS),
    }
    counts = {HVD: rows, MEMCPY: rows, LOADER: few, BY_BATCH: rows, PYSPARK: few}
    calls: dict[str, Callable[[], None]] = {HVD: ours, MEMCPY: memcpy}
    calls[LOADER] = lambda: drained(loaders[LOADER](), few)
    calls[BY_BATCH] = lambda: drained(loaders[BY_BATCH](), rows)
    # Its batch is a list of columns.
    calls[PYSPARK] = lambda: drained(loaders[PYSPARK](), few)
    take_turns(calls, 1)
    return take_turns(calls, 1 if quick else 9), counts


def arrow_stream(table: pa.Table, folder: Path) -> tuple[Path, T.StructType]:
    """The file that TorchDistributor makes of a partition."""
    file = folder / "partition.arrow"
    with pa.ipc.new_stream(str(file), table.schema) as writer:
        writer.write_table(table, max_chunksize=10_000)
    return file, T.StructType([T.StructField(name, T.FloatType()) for name in table.schema.names])


def loops(shard: Shard, batch_size: int, turns: int) -> Times:
    """Seconds of one epoch: ours, and what a user would write for tensors in memory."""
    features, labels = (torch.from_numpy(np.array(shard.block(i))) for i in range(2))
    rows = len(features)

    def ours() -> float:
        return float(fit_shard(spec_of(batch_size), shard, None).history[0]["seconds"])

    def by_hand() -> None:
        model = mlp()
        optimizer = adam(model.parameters())
        lossy = torch.nn.MSELoss()
        order = torch.randperm(rows)
        total = 0.0
        for begin in range(0, rows, batch_size):
            index = order[begin : begin + batch_size]
            optimizer.zero_grad()
            loss = lossy(model(features[index]).squeeze(1), labels[index])
            loss.backward()
            optimizer.step()
            total += loss.item() * len(index)
        assert np.isfinite(total / rows)

    calls: dict[str, Callable[[], float | None]] = {LOOP: ours, BY_HAND: by_hand}
    take_turns(calls, 1)
    return take_turns(calls, turns)


def rows_of(times: Times, counts: dict[str, int], against: str, what: str) -> Iterator[dict[str, Any]]:
    for name, each in times.items():
        share, low, high = ratio(times[against] / counts[against], each / counts[name])
        yield {
            "what": what,
            "way": name,
            "turns": len(each),
            "rows": counts[name],
            "M rows/s": counts[name] / float(np.median(each)) / 1e6,
            f"of {MEMCPY} or {BY_HAND}": share,
            "95%": f"{low:.3g}-{high:.3g}",
        }


def main() -> None:
    quick = report.arguments(__doc__).parse_args().quick
    figure = report.Figure("shard", "batches from a shard, and the loop on them", quick)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    load = side_by_side.Load()
    with tempfile.TemporaryDirectory() as folder:
        table = table_of(20_000 if quick else 2_000_000)
        shard = shard_of(table, plan_layout(columns_of(table.schema), spec_of(1)))
        times, counts = batches(table, shard, Path(folder), quick)
    figure.rows += rows_of(times, counts, MEMCPY, "batches")
    speed = {row["way"]: row["M rows/s"] for row in figure.rows}
    figure.targets = [
        report.Target("batches / memcpy", speed[HVD] / speed[MEMCPY], 0.3),
        report.Target("batches / torch DataLoader", speed[HVD] / speed[LOADER], 5),
        report.Target("batches / pyspark's torch loader", speed[HVD] / speed[PYSPARK], 5),
    ]
    del shard, table
    table = table_of(10_000 if quick else 200_000)
    shard = shard_of(table, plan_layout(columns_of(table.schema), spec_of(1)))
    for batch_size in (128, 512):
        epoch = loops(shard, batch_size, 1 if quick else 9)
        rows = dict.fromkeys(epoch, shard.rows)
        figure.rows += rows_of(epoch, rows, BY_HAND, f"epoch, batches of {batch_size}")
        share = ratio(epoch[BY_HAND], epoch[LOOP])[0]
        figure.targets.append(report.Target(f"loop / by hand, batches of {batch_size}", share, 0.95))
    figure.notes = [
        f"{COLUMNS} float32 columns and a label; batches of {BATCH_ROWS}; MLP {COLUMNS}-256-128-1 with Adam",
        f"{LOADER} is TensorDataset and a random sampler; {BY_BATCH} asks the same for whole batches",
    ]
    figure.foreign_cpu, figure.stolen_cpu = load.taken_by_others()
    figure.publish()


if __name__ == "__main__":
    main()
