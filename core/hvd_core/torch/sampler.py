"""`hvd.elastic.ElasticSampler`: which rows of a dataset are this rank's, and which are still to come."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from typing import Any

import torch

from .. import basics
from ..errors import InvalidArgument


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Deals the rows of `dataset` to the ranks, and after a reset those that are left of the epoch:

        sampler = hvd.elastic.ElasticSampler(dataset)
        loader = DataLoader(dataset, batch_size=32, sampler=sampler)
        state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0)
        ...
        for i, batch in enumerate(loader):
            ...
            sampler.record_batch(i, 32)        # before state.commit()
        sampler.set_epoch(epoch + 1)

    Every rank gets as many rows: where they do not come out even, rows from the beginning come twice. With
    `shuffle` the order is that of `seed` and the epoch, the same on all ranks, which pass the same `seed`.
    Make it after `init()`.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0):
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = 0
        #: Rows of this epoch that all ranks together are through with.
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch. Call it at the end of the one before, so that one that was left in the middle
        goes on there."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """All ranks have done another batch, each of `batch_size` rows. What is iterated over stays as it is
        until `reset`. `batch_idx` is there for Horovod's sake."""
        if batch_size < 1:
            raise InvalidArgument(f"record_batch: batch_size={batch_size} must be at least 1")
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Deals what is left of the epoch to the ranks that there are now."""
        self.rank, self.num_replicas = basics.rank(), basics.size()
        count = len(self.dataset)
        order: Sequence[int] = range(count)
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(count, generator=generator).tolist()
        self.remaining_indices = list(order[self.processed_num :])
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        left = self.remaining_indices
        return iter([left[i % len(left)] for i in range(self.rank, self.total_size, self.num_replicas)])

    def __len__(self) -> int:
        return self.num_samples
