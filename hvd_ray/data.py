"""Which rows of a Ray Dataset each rank gets: every row once, whatever their number and blocks."""

from __future__ import annotations

from typing import Any

from ray.data import Dataset
from ray.train import DataConfig


class RowsConfig(DataConfig):
    """The `dataset_config` of a `HorovodTrainer` by default: splits hold every row once.

    Ray's own gives all workers equally many rows and drops what is left over (101 rows on 2 workers: 100).
    Here a rank has at most one row more than another. The datasets are executed before the workers take their
    CPUs, because on a small machine none would be left; so their rows must fit into the object store and
    what it may spill. For data that is to be streamed give a `ray.train.DataConfig`. datasets_to_split: "all"
    or names; ranks see the others whole.
    """

    def __init__(self, datasets_to_split: Any = "all"):
        super().__init__(datasets_to_split)
        self._parts: dict[str, list[Any]] = {}

    def __deepcopy__(self, memo: Any) -> RowsConfig:
        return self  # references to blocks are not to be copied, and nothing here changes any more

    def is_split(self, name: str) -> bool:
        return self._datasets_to_split == "all" or name in self._datasets_to_split

    def deal(self, name: str, whole: Any, workers: int) -> None:
        """Splits an executed dataset; uses CPUs of the cluster."""
        self._parts[name] = split_evenly(whole, workers)

    def configure(
        self,
        datasets: dict[str, Dataset],
        world_size: int,
        worker_handles: Any,
        worker_node_ids: Any,
        **_: Any,
    ) -> list[dict[str, Any]]:
        """Runs in Ray Train, beside the workers: starts no task."""
        shards: list[dict[str, Any]] = [{} for _ in range(world_size)]
        for name, dataset in datasets.items():
            parts = self._parts.get(name, [])
            if self.is_split(name) and len(parts) != world_size:
                parts = dataset.split(world_size)  # the number of workers has changed: by whole blocks
            for rank, shard in enumerate(shards):
                shard[name] = (parts[rank] if self.is_split(name) else dataset).iterator()
        return shards


def split_evenly(whole: Any, parts: int) -> list[Any]:
    """`parts` datasets of consecutive rows; where it does not come out even, some have one row more."""
    if parts == 1:
        return [whole]
    rows = whole.count()
    ends = [-(-rows * part // parts) for part in range(1, parts)]
    return list(whole.split_at_indices(ends))
