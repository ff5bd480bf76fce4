"""`prepare_data`: the rows of a dataset in batches, the same number of steps on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from hvd_core import basics
from hvd_core.errors import DataError, InvalidArgument
from hvd_core.train.agree import agree_on_rows
from hvd_core.train.batches import Batches
from hvd_core.train.columns import Column, ModelFacts, columns_of, plan_layout
from hvd_core.train.local import shard_of
from hvd_core.train.order import EpochPlan, requests
from hvd_core.train.ranks import Ranks
from hvd_core.train.spec import TrainSpec

from .rows import table_of

if TYPE_CHECKING:
    import torch


Columns = Sequence[str] | Mapping[str, "str | Sequence[str]"]


def prepare_data(
    name: str = "train",
    columns: Columns | None = None,
    *,
    batch_size: int = 32,
    shuffle: bool = True,
    seed: int = 0,
    shapes: Mapping[str, Sequence[int]] | None = None,
    dtypes: Mapping[str, str] | None = None,
    null_value: float | Mapping[str, float] | None = None,
    prefetch: int = 2,
) -> Loader:
    """In a training loop: this rank's rows of the dataset `name` as a `Loader`. All ranks call it together.

    columns: names, None for all; or {"x": ["a", "b"], "y": "y"}, which joins columns: batches have "x" of
    shape (rows, 2) and "y" of shape (rows,). batch_size: rows of one rank in one step. shuffle: another order
    in each epoch, by `seed`. shapes, dtypes, null_value: as in `TrainSpec`; floats come as float32, whole
    numbers as int64. Raises ColumnError for columns that are no numbers, DataError for nulls and for fewer
    rows than ranks.
    """
    import ray.train

    shard = ray.train.get_dataset_shard(name)
    blocks = shard.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1)
    table = _table([table_of(block) for block in blocks if block.num_rows])
    wanted = columns if columns is not None else table.schema.names
    parts = _parts(wanted, columns_of(table.schema), apart=set(dtypes or ()))
    spec = TrainSpec(
        model=SimpleNamespace(),
        optimizer=_not_trained,
        loss=_not_trained,
        loss_reduction="mean",
        input_columns=[part.columns if part.is_joined else part.columns[0] for part in parts],
        label_cols=parts[0].columns[:1],
        shapes=shapes or {},
        dtypes=dtypes or {},
        null_value=null_value,
        batch_size=batch_size,
        shuffle=shuffle,
        seed=seed,
        prefetch=prefetch,
    )
    return Loader(table, spec, parts)


@dataclass(frozen=True)
class _Part:
    """Columns that are packed side by side. name: of the whole in a batch; "": each by its own."""

    name: str
    columns: tuple[str, ...]

    @property
    def is_joined(self) -> bool:
        return not self.name or len(self.columns) > 1

    def tensors(self, whole: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        if self.name:
            yield self.name, whole
        else:
            yield from zip(self.columns, whole.unbind(1), strict=True)


def _parts(columns: Columns, have: Sequence[Column], apart: Set[str]) -> list[_Part]:
    """Single numbers of one kind go together, but for those `apart`: one copy for a batch of many columns."""
    if not columns:
        raise InvalidArgument("columns is empty")
    if isinstance(columns, Mapping):
        return [_Part(n, (c,) if isinstance(c, str) else tuple(c)) for n, c in columns.items()]
    known = {column.name: column for column in have}
    together: dict[str, list[str]] = {}
    for name in columns:
        column = known.get(name)
        is_number = column is not None and column.kind == "scalar" and name not in apart
        kind = column.leaf if column is not None and is_number else ""
        together.setdefault(kind if kind in ("float", "int") else f"alone {name}", []).append(name)
    return [_Part("" if kind in ("float", "int") else n[0], tuple(n)) for kind, n in together.items()]


class Loader:
    """Iterating gives one epoch: dicts of name to a torch tensor (rows, *shape), each row of the dataset once
    over all ranks, and as many steps on every rank. A new iteration is the next epoch; all ranks iterate
    together, to the end.

    `share`: multiply a mean loss by it, and averaged gradients are those of the mean over the rows of all
    ranks, also where one has a row more than another.
    """

    def __init__(self, table: pa.Table, spec: TrainSpec, parts: Sequence[_Part]):
        self._spec, self._parts = spec, parts
        facts = ModelFacts(tuple(part.name for part in parts), len(parts), False, "float32", (False,))
        layout = plan_layout(columns_of(table.schema), spec, facts)
        layout = replace(layout, blocks=layout.inputs)  # what a label is, the user's loop knows
        ranks = Ranks(basics.default_group())
        found = agree_on_rows(spec, shard_of(table, layout), ranks, fingerprint=False)
        self._shard, self._split, self._rank = found.shard, found.split, ranks.rank
        if not all(found.train):
            raise DataError(
                f"{sum(found.train)} rows for {ranks.size} ranks: rank {found.train.index(0)} has none"
            )
        self._plan = EpochPlan(found.train, spec.batch_size or 1)
        self._size = ranks.size
        self.epoch = 0
        self.rows = found.train[ranks.rank]
        self.share = 1.0

    def __len__(self) -> int:
        """Steps of an epoch, the same on all ranks."""
        return self._plan.steps

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is this epoch: for a run that goes on from a checkpoint."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        import torch

        spec, plan = self._spec, self._plan
        epoch, self.epoch = self.epoch, self.epoch + 1
        wanted = requests(
            self._split,
            plan,
            self._rank,
            range(plan.steps),
            seed=spec.seed,
            epoch=epoch,
            shuffle=spec.shuffle,
        )
        largest = plan.largest(self._rank)
        with Batches(self._shard, wanted, largest=largest, prefetch=spec.prefetch) as batches:
            for batch in batches:
                self.share = batch.rows * self._size / batch.global_rows
                found: dict[str, torch.Tensor] = {}
                for part, array in zip(self._parts, batch.inputs, strict=True):
                    found.update(part.tensors(torch.from_numpy(array.copy())))
                yield found


def _table(blocks: Sequence[pa.Table]) -> pa.Table:
    """All ranks call it: one without rows learns from the others what columns there are."""
    own = blocks[0].schema.serialize().to_pybytes() if blocks else b""
    schemas = [data for data in Ranks(basics.default_group()).gather(own, "schemas") if data]
    if not schemas:
        raise DataError("no rows: there is nothing to train on")
    return (
        pa.concat_tables(blocks, promote_options="permissive")
        if blocks
        else pa.ipc.read_schema(pa.py_buffer(schemas[0])).empty_table()
    )


def _not_trained(*_: Any) -> Any:
    """Stands where a TrainSpec wants an optimizer and a loss."""
    raise AssertionError("the loop is the user's")
