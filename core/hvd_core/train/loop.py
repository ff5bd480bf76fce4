"""Epochs, validation, early stopping, history: the loop of every framework."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ColumnError, DataError, InvalidArgument, RanksDiverged, RowsLost
from .batches import Batches, Request
from .framework import Batch, Framework, Totals, framework_for
from .order import EpochPlan, RowSplit, rows_in_use, split_rows, validation_counts
from .ranks import Ranks
from .result import FitResult, OutputSpec
from .shard import Shard
from .spec import EarlyStopping, TrainSpec

if TYPE_CHECKING:
    from ..group import Group

_PROGRESS_INTERVAL_S = 0.5


@dataclass
class Run:
    """What callbacks get. `step` counts optimizer steps of the whole run; `logs` is the epoch's history
    entry."""

    spec: TrainSpec
    model: Any
    optimizer: Any
    rank: int
    size: int
    epoch: int = 0
    step: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)
    stopping: bool = False

    def stop(self) -> None:
        """Ends training after this epoch, on all ranks, when any rank asks for it."""
        self.stopping = True


def fit_shard(
    spec: TrainSpec,
    shard: Shard,
    group: Group | None,
    *,
    on_progress: Callable[[dict[str, Any]], None] | None = None,
) -> FitResult:
    """Trains in this process; every rank of `group` calls it at the same time with the same spec.

    `group` is hvd's default Group (`hvd_core.basics.default_group()`), or None for this process alone.
    on_progress is called on rank 0, about twice a second and at the end of each epoch, with {"epoch",
    "epochs", "step", "steps", "rows_per_s", "loss"} (epoch and step are 0-based; loss is this rank's mean
    in this epoch), at the end of an epoch also "history", its entry. Raises DataError, LossError,
    RanksDiverged, RowsLost.
    """
    return _Loop(spec, shard, Ranks(group), on_progress).fit()


class _Loop:
    def __init__(
        self,
        spec: TrainSpec,
        shard: Shard,
        ranks: Ranks,
        on_progress: Callable[[dict[str, Any]], None] | None,
    ):
        self._spec, self._shard, self._ranks = spec, shard, ranks
        self._on_progress = on_progress if ranks.rank == 0 else None
        self._framework: Framework = framework_for(spec)
        self._seconds = {"data": 0.0, "compute": 0.0, "communication": 0.0}
        self._best: tuple[int, float] | None = None
        self._best_weights: bytes | None = None
        self._since_better = 0
        self._last_progress = 0.0

    def fit(self) -> FitResult:
        spec, framework = self._spec, self._framework
        start = time.perf_counter()
        rows = self._compare_shards()
        self._split, train, validation = self._split_rows(rows)
        self._check_weights()
        framework.prepare(spec, self._ranks, self._shard)
        outputs = self._output_spec(rows)
        framework.bind_outputs(len(outputs))
        self._plan = EpochPlan(
            rows=tuple(train),
            capacity=(spec.batch_size or spec.global_batch_size or 1) * spec.accumulate_steps,
            per_rank=spec.batch_size is not None,
            pairs=framework.needs_pairs and self._ranks.size > 1,
        )
        self._validation_rows = sum(validation)
        self._check_parameters()
        self._run = Run(spec, framework.model, framework.optimizer, self._ranks.rank, self._ranks.size)
        self._call("on_train_begin")
        ended = self._epochs()
        self._call("on_train_end")
        self._seconds["total"] = time.perf_counter() - start
        return self._result(outputs, sum(rows), ended)

    # -- before the first epoch --

    def _compare_shards(self) -> list[int]:
        """Rows of each rank. All ranks must have packed their rows alike."""
        blocks = (
            [{**asdict(b), "columns": list(b.columns)} for b in self._shard.blocks]
            if self._shard.rows
            else []
        )
        own = json.dumps({"rows": self._shard.rows, "blocks": blocks}).encode()
        shards = [json.loads(data) for data in self._ranks.gather(own, "shards")]
        filled = [r for r, s in enumerate(shards) if s["rows"]]
        if not filled:
            raise DataError("no rows: there is nothing to train on")
        first = filled[0]
        for r in filled[1:]:
            for a, b in zip(shards[first]["blocks"], shards[r]["blocks"], strict=True):
                if a != b:
                    names = ", ".join(map(repr, b["columns"]))
                    raise DataError(
                        f"column {names}: rows of shape {tuple(a['shape'])} ({a['dtype']}) on rank {first} "
                        f"and of "
                        f"{tuple(b['shape'])} ({b['dtype']}) on rank {r}; all rows must have one shape"
                    )
        return [int(s["rows"]) for s in shards]

    def _split_rows(self, rows: list[int]) -> tuple[RowSplit, list[int], list[int]]:
        """This rank's split; training and validation rows of all ranks."""
        spec, shard, rank = self._spec, self._shard, self._ranks.rank
        order = shard.sorted_order() if spec.row_order == "shard" and shard.rows else None
        marks = shard.of_role("validation")
        if marks:
            split = split_rows(shard.rows, order, marks=shard.block(marks[0]) if shard.rows else None)
            own = np.zeros(self._ranks.size, np.int64)
            own[rank] = len(split.validation)
            validation = [int(v) for v in self._ranks.sum(own, "validation_rows")]
        elif isinstance(spec.validation, (int, float)):
            validation = list(validation_counts(rows, float(spec.validation)))
            split = split_rows(shard.rows, order, seed=spec.seed, validation_rows=validation[rank])
        else:
            validation = [0] * len(rows)
            split = split_rows(shard.rows, order)
        train = [n - v for n, v in zip(rows, validation, strict=True)]
        if not sum(train):
            raise DataError(f"no rows to train on: all {sum(rows)} are validation rows")
        return split, train, validation

    def _check_weights(self) -> None:
        blocks = self._shard.of_role("weight")
        if blocks:
            total = np.array([self._shard.block(blocks[0]).sum(dtype=np.float64)])
            if not self._ranks.sum(total, "weights")[0]:
                raise DataError(f"all weights in column {self._spec.sample_weight_col!r} are 0")

    def _output_spec(self, rows: list[int]) -> tuple[OutputSpec, ...]:
        """Found with one row, by the first rank that has any."""
        root = next(r for r, n in enumerate(rows) if n)
        data = None
        if self._ranks.rank == root:
            request = Request(0, np.zeros(1, np.int64), 1)
            with Batches(self._shard, iter([request]), largest=1, prefetch=1) as batches:
                outputs = self._first_outputs(next(batches).inputs)
            data = json.dumps([[o.dtype.name, o.shape[1:]] for o in outputs]).encode()
        found = json.loads(self._ranks.broadcast(data, root, "outputs"))
        return tuple(OutputSpec(dtype, tuple(shape)) for dtype, shape in found)

    def _first_outputs(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        try:
            return self._framework.predict(inputs)
        except RuntimeError as error:  # what frameworks raise for shapes and dtypes that do not go together
            blocks = [self._shard.blocks[i] for i in self._shard.of_role("input")]
            given = ", ".join(f"{b.name} {x.dtype} {x.shape}" for b, x in zip(blocks, inputs, strict=True))
            hint = ""
            if "int64" in given:
                hint = "; dtypes={column: 'float32'} makes floats of whole numbers"
            elif "Long" in str(error) or "Int" in str(error):  # as an embedding says of its indices
                hint = "; dtypes={column: 'int64'} makes whole numbers of a column, such as StringIndexer's"
            raise ColumnError(
                f"the model does not take one row of its inputs, {given}: {error}{hint}"
            ) from error

    # -- epochs --

    def _epochs(self) -> str:
        """Runs them; why the last one was the last: "" (all done), "early" or "callback"."""
        spec = self._spec
        steps = self._plan.steps
        epochs = spec.epochs if spec.epochs is not None else 1 << 62
        if spec.max_steps is not None:
            epochs = min(epochs, -(-spec.max_steps // steps))
        for epoch in range(epochs):
            left = steps if spec.max_steps is None else min(steps, spec.max_steps - epoch * steps)
            self._run.epoch = epoch
            entry = self._epoch(epoch, epochs, left)
            self._run.history.append(entry)
            early = self._is_enough(entry, epoch)
            self._call("on_epoch_end", entry)
            self._report(epoch, epochs, left - 1, entry["rows"] / max(entry["seconds"], 1e-9), entry)
            if early or self._any_stops():
                return "early" if early else "callback"
        return ""

    def _any_stops(self) -> bool:
        """Whether a callback of any rank asked to stop."""
        if not self._spec.callbacks:
            return False
        return bool(self._ranks.sum(np.array([float(self._run.stopping)]), "stop")[0])

    def _epoch(self, epoch: int, epochs: int, steps: int) -> dict[str, Any]:
        framework, rank, plan = self._framework, self._ranks.rank, self._plan
        start = time.perf_counter()
        requests = self._requests(epoch, steps)
        with Batches(
            self._shard, requests, largest=plan.largest(rank), prefetch=self._spec.prefetch
        ) as batches:
            rate = framework.learning_rate
            totals = framework.train_epoch(
                self._watched(batches, epoch, epochs, steps, start), epoch, plan.steps
            )
            data_s = batches.wait_s
        self._check_parameters()
        trained_s = time.perf_counter() - start
        entry: dict[str, Any] = {"epoch": epoch}
        extra = [data_s, totals.communication_s, trained_s]
        means, rows, sums = self._reduced(totals, extra, "epoch")
        entry.update(means)
        if steps == plan.steps and rows != plan.total:
            raise RowsLost(f"epoch {epoch} used {rows} of {plan.total} training rows")
        if self._validation_rows:
            entry.update({f"val_{k}": v for k, v in self._validate().items()})
        framework.end_epoch({k: v for k, v in entry.items() if isinstance(v, float)})
        data_s, communication_s, trained_s = (s / self._ranks.size for s in sums)
        entry.update(
            rows=rows,
            steps=steps,
            lr=rate,
            seconds=time.perf_counter() - start,
            data=data_s,
            compute=max(0.0, trained_s - data_s - communication_s),
            communication=communication_s,
        )
        for part in ("data", "compute", "communication"):
            self._seconds[part] += entry[part]
        return entry

    def _requests(self, epoch: int, steps: int) -> Iterator[Request]:
        spec, rank = self._spec, self._ranks.rank
        for step in range(steps):
            index = rows_in_use(
                self._split, self._plan.span(rank, step), seed=spec.seed, epoch=epoch, shuffle=spec.shuffle
            )
            yield Request(step, index, self._plan.global_rows(step))

    def _watched(
        self, batches: Iterator[Batch], epoch: int, epochs: int, steps: int, start: float
    ) -> Iterator[Batch]:
        """Hands on batches, and between two of them does what happens after each step."""
        used = 0
        for batch in batches:
            yield batch
            used += batch.global_rows
            self._run.step += 1
            self._call("on_batch_end", batch)
            every = self._spec.checksum_steps
            if every is not None and self._run.step % every == 0:
                self._check_parameters()
            now = time.perf_counter()
            if self._on_progress is not None and now - self._last_progress > _PROGRESS_INTERVAL_S:
                self._last_progress = now
                self._report(epoch, epochs, batch.step, used / (now - start), steps=steps)

    def _validate(self) -> dict[str, float]:
        """Means over the validation rows of all ranks."""
        index, rows = self._split.validation, max(self._spec.inference_batch_size, 1)
        requests = (Request(i, index[i : i + rows], 0) for i in range(0, len(index), rows))
        with Batches(self._shard, requests, largest=min(rows, max(1, len(index))), prefetch=1) as batches:
            totals = self._framework.evaluate(batches)
        means, used, _ = self._reduced(totals, [], "validation")
        if used != self._validation_rows:
            raise RowsLost(f"validation used {used} of {self._validation_rows} rows")
        return means

    def _reduced(
        self, totals: Totals, extra: list[float], name: str
    ) -> tuple[dict[str, float], int, list[float]]:
        """Means and row count over all ranks, and the sums of `extra`: one small allreduce."""
        names = self._framework.names
        pairs = [v for n in names for v in totals.sums.get(n, (0.0, 0.0))]
        sums = self._ranks.sum(np.array([*pairs, float(totals.rows), *extra]), name).tolist()
        whole = Totals({n: (sums[2 * i], sums[2 * i + 1]) for i, n in enumerate(names)})
        at = 2 * len(names)
        return whole.means(self._framework.loss_weights), round(sums[at]), sums[at + 1 :]

    # -- decisions, equal on all ranks because the values are --

    def _is_enough(self, entry: dict[str, Any], epoch: int) -> bool:
        rule = self._spec.early_stopping
        metric = rule.metric if rule is not None else "val_loss" if self._validation_rows else "loss"
        if metric not in entry:
            known = ", ".join(k for k, v in entry.items() if isinstance(v, float))
            raise InvalidArgument(f"early_stopping: there is no metric {metric!r}, only {known}")
        watch = rule or EarlyStopping(metric)
        if watch.better(entry[metric], None if self._best is None else self._best[1]):
            self._best = (epoch, entry[metric])
            self._since_better = 0
            if rule is not None and rule.restore_best and self._ranks.rank == 0:
                self._best_weights = self._framework.weights()
        else:
            self._since_better += 1
        return rule is not None and self._since_better > 0 and self._since_better >= rule.patience

    def _check_parameters(self) -> None:
        """Raises RanksDiverged on every rank when parameters are not the same bits on all."""
        if self._ranks.size == 1:
            return
        own = self._framework.digests()
        all_digests = self._ranks.gather(b"".join(own.values()), "digests")
        for rank, digests in enumerate(all_digests):
            if digests != all_digests[0]:
                differ = [
                    i
                    for i in range(len(own))
                    if digests[8 * i : 8 * i + 8] != all_digests[0][8 * i : 8 * i + 8]
                ]
                name = list(own)[differ[0]] if differ else "(other parameters)"
                raise RanksDiverged(
                    f"parameter {name} of rank {rank} differs from rank 0's (and {len(differ) - 1} more "
                    f"parameters): "
                    "something changes the model on one rank only"
                )

    # -- outwards --

    def _call(self, event: str, *args: Any) -> None:
        for callback in self._spec.callbacks:
            function = getattr(callback, event, None)
            if function is None and event == "on_epoch_end" and not hasattr(callback, "on_batch_end"):
                function = callback if callable(callback) else None
            if function is not None:
                function(self._run, *args)

    def _report(
        self,
        epoch: int,
        epochs: int,
        step: int,
        rows_per_s: float,
        entry: dict[str, Any] | None = None,
        steps: int | None = None,
    ) -> None:
        if self._on_progress is None:
            return
        loss = self._framework.totals.means(self._framework.loss_weights).get("loss", float("nan"))
        event: dict[str, Any] = {
            "epoch": epoch,
            "epochs": epochs,
            "step": step,
            "steps": self._plan.steps if steps is None else steps,
            "rows_per_s": rows_per_s,
            "loss": loss if entry is None else entry["loss"],
        }
        if entry is not None:
            event["history"] = entry
        self._on_progress(event)

    def _result(self, outputs: tuple[OutputSpec, ...], rows_sent: int, ended: str) -> FitResult:
        spec, ranks, plan, history = self._spec, self._ranks, self._plan, self._run.history
        weights = b""
        if ranks.rank == 0:
            weights = self._best_weights if self._best_weights is not None else self._framework.weights()
        best = self._best[0] if self._best is not None else len(history) - 1
        batch = plan.capacity * (ranks.size if plan.per_rank else 1)
        lines = [
            f"{ranks.size} rank{'s' * (ranks.size > 1)}, {plan.total} training rows and "
            f"{self._validation_rows} for "
            f"validation, up to {batch} rows in a step, {plan.steps} steps an epoch",
            f"learning rate {history[0]['lr']:g}"
            + (f" ({spec.lr_scaling} scaling with the number of ranks)" if spec.lr_scaling else ""),
            f"{len(history)} epochs, {', '.join(f'{k} {v:.2f} s' for k, v in self._seconds.items())}",
        ]
        return FitResult(
            weights=weights,
            history=history,
            best_epoch=best,
            rows_seen=max(int(e["rows"]) for e in history) + self._validation_rows,
            rows_sent=rows_sent,
            train_rows=plan.total,
            validation_rows=self._validation_rows,
            seconds=self._seconds,
            summary="\n".join(lines),
            output_spec=outputs,
            stopped_early=ended == "early",
            size=ranks.size,
        )
