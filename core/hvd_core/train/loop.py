"""Epochs, validation, early stopping, history: the loop of every framework."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..config import Config
from ..errors import CollectiveTimeout, InvalidArgument, LossError, RanksDiverged, RowsLost
from .agree import agree_on_rows, find_outputs
from .batches import Batches
from .checkpoint import name_of
from .exchange import deal_by_hash
from .framework import RANK_STRIDE, Batch, Framework, Totals, checked, framework_for
from .order import EpochPlan, Request, requests
from .progress import Best
from .quality import examine_shard, lines_of, troubles
from .ranks import Ranks, places_of
from .result import FitResult, OutputSpec
from .resume import Attempt, Checkpoints, EpochSums
from .shard import Shard
from .spec import EarlyStopping, TrainSpec

if TYPE_CHECKING:
    from ..group import Group

_PROGRESS_INTERVAL_S = 0.5


@dataclass
class Run:
    """What callbacks get. `step` counts optimizer steps of the whole run; `logs` is the epoch's history
    entry; `weights()` gives what `FitResult.weights` would be now."""

    spec: TrainSpec
    model: Any
    optimizer: Any
    rank: int
    size: int
    epoch: int = 0
    step: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)
    stopping: bool = False
    weights: Callable[[], bytes] = bytes

    def stop(self) -> None:
        """Ends training after this epoch, on all ranks, when any rank asks for it."""
        self.stopping = True


def fit_shard(
    spec: TrainSpec,
    shard: Shard,
    group: Group | None,
    *,
    framework: Framework | None = None,
    on_progress: Callable[[dict[str, Any]], None] | None = None,
    attempt: Attempt | None = None,
) -> FitResult:
    """Trains in this process; every rank of `group` calls it at the same time with the same spec.

    `group` is hvd's default Group (`hvd_core.basics.default_group()`), or None for this process alone.
    framework: None: the one of the model's type. attempt: where a launcher tries again after a lost rank.
    on_progress is called on rank 0, about twice a second and at the end of each epoch, with {"epoch",
    "epochs", "step", "steps", "rows_per_s", "loss"} (epoch and step are 0-based; loss is this rank's mean
    in this epoch), at the end of an epoch also "history", its entry. Raises DataError, LossError,
    RanksDiverged, RowsLost,
    CheckpointError.
    """
    chosen = framework_for(spec) if framework is None else checked(framework, spec)
    return _Loop(spec, shard, Ranks(group), chosen, on_progress, attempt or Attempt()).fit()


class _Loop:
    def __init__(
        self,
        spec: TrainSpec,
        shard: Shard,
        ranks: Ranks,
        framework: Framework,
        on_progress: Callable[[dict[str, Any]], None] | None,
        attempt: Attempt,
    ):
        self._spec, self._shard, self._ranks, self._framework = spec, shard, ranks, framework
        self._on_progress = on_progress if ranks.rank == 0 else None
        self._checkpoints = Checkpoints(spec, ranks, framework, attempt)
        self._best_weights: bytes | None = None
        self._due = False
        #: Epochs of the history that an earlier process trained, perhaps on other rows.
        self._earlier = 0
        self._has_trained = False
        self._last_progress = 0.0
        self._start = time.perf_counter()

    def fit(self) -> FitResult:
        spec, framework = self._spec, self._framework
        self._checkpoints.open()
        if spec.row_order == "global":
            deal_by_hash(spec, self._shard, self._ranks)
        rows = agree_on_rows(spec, self._shard, self._ranks, fingerprint=self._checkpoints.enabled)
        self._shard = rows.shard
        self._data = examine_shard(self._shard, self._ranks)
        self._places = places_of(self._ranks)
        # For models, losses and callbacks that draw from them: alike for model_fn, then each rank its own.
        _seed(spec.seed)
        framework.prepare(spec, self._ranks, self._shard)
        if self._ranks.rank:
            _seed(spec.seed + RANK_STRIDE * self._ranks.rank)
        outputs = find_outputs(framework, self._shard, self._ranks, rows.rows)
        framework.bind_outputs(len(outputs))
        self._split = rows.split
        self._plan = EpochPlan(
            rows=rows.train,
            capacity=(spec.batch_size or spec.global_batch_size or 1) * spec.accumulate_steps,
            per_rank=spec.batch_size is not None,
            pairs=framework.needs_pairs and self._ranks.size > 1,
        )
        self._validation_rows = sum(rows.validation)
        self._check_metrics()
        self._progress, self._sums = self._checkpoints.restore(rows.fingerprint)
        self._best_weights = self._checkpoints.best_weights
        self._seconds_before = self._progress.seconds["total"]
        self._check_parameters()
        if self._stop_at() > self._progress.position:
            self._train()
        return self._result(outputs, sum(rows.rows))

    def _train(self) -> None:
        ranks, progress, framework = self._ranks, self._progress, self._framework
        self._run = Run(self._spec, framework.model, framework.optimizer, ranks.rank, ranks.size)
        self._run.history, self._run.step = progress.history, progress.step
        self._run.weights = framework.weights
        progress.ended = None
        self._earlier, self._has_trained = len(progress.history), True
        self._call("on_train_begin")
        while self._stop_at() > progress.position:
            self._run.epoch = progress.epoch
            self._one_epoch(self._stop_at())
        self._call("on_train_end")

    def _stop_at(self) -> int:
        return self._progress.stop_at(self._spec, self._plan.steps)

    # -- epochs --

    def _one_epoch(self, stop_at: int) -> None:
        """From `position` to `stop_at`, and everything that follows the last step."""
        progress = self._progress
        entry = self._epoch(stop_at)
        progress.history.append(entry)
        is_enough, is_best = self._judge(entry)
        self._call("on_epoch_end", entry)
        self._report(stop_at - 1, entry["rows"] / max(entry["seconds"], 1e-9), stop_at, entry)
        is_cut = stop_at < self._plan.steps
        progress.epoch += not is_cut
        progress.position = progress.counted_from = stop_at if is_cut else 0
        self._sums = EpochSums()
        if is_enough or self._any_stops():
            progress.ended = "early" if is_enough else "callback"
        elif self._stop_at() <= progress.position:
            progress.ended = "done"
        if self._due or is_best or progress.ended or self._spec.checkpoint_every == "epoch":
            self._save()

    def _save(self) -> None:
        self._progress.seconds["total"] = self._seconds_before + time.perf_counter() - self._start
        self._due = False
        if self._checkpoints.enabled:
            self._checkpoints.save(self._progress, self._sums)

    def _any_stops(self) -> bool:
        """Whether a callback of any rank asked to stop."""
        if not self._spec.callbacks:
            return False
        return bool(self._ranks.sum(np.array([float(self._run.stopping)]), "stop")[0])

    def _epoch(self, stop_at: int) -> dict[str, Any]:
        framework, rank, plan, progress = self._framework, self._ranks.rank, self._plan, self._progress
        sums = self._sums
        start = time.perf_counter() - sums.elapsed_s
        expected = sum(plan.used_before(stop_at)) - sum(plan.used_before(progress.counted_from))
        wanted = requests(
            self._split,
            plan,
            rank,
            range(progress.position, stop_at),
            seed=self._spec.seed,
            epoch=progress.epoch,
            shuffle=self._spec.shuffle,
        )
        with Batches(
            self._shard, wanted, largest=plan.largest(rank), prefetch=self._spec.prefetch
        ) as batches:
            waited_s = sums.data_s
            watched = self._watched(batches, stop_at, start, waited_s)
            try:
                framework.train_epoch(watched, progress.epoch, plan.steps, sums.totals)
            except LossError as error:
                raise LossError("\n".join([str(error), *lines_of(self._data)])) from error.__cause__
            except CollectiveTimeout as error:
                at = f"epoch {progress.epoch}, step {progress.position}"
                raise CollectiveTimeout(f"{at}: {error}") from error.__cause__
            data_s = waited_s + batches.wait_s
        self._check_parameters()
        trained_s = time.perf_counter() - start
        entry: dict[str, Any] = {"epoch": progress.epoch}
        extra = [data_s, sums.totals.communication_s, trained_s]
        means, rows, reduced = self._reduced(sums.totals, extra, "epoch")
        entry.update(means)
        if rows != expected:
            raise RowsLost(f"epoch {progress.epoch} used {rows} of {expected} training rows")
        if self._validation_rows:
            entry.update({f"val_{k}": v for k, v in self._validate().items()})
        framework.end_epoch({k: v for k, v in entry.items() if isinstance(v, float)})
        data_s, communication_s, trained_s = (s / self._ranks.size for s in reduced)
        entry.update(
            rows=rows,
            steps=stop_at - progress.counted_from,
            lr=sums.rate,
            seconds=time.perf_counter() - start,
            data=data_s,
            compute=max(0.0, trained_s - data_s - communication_s),
            communication=communication_s,
        )
        for part in ("data", "compute", "communication"):
            progress.seconds[part] += entry[part]
        return entry

    def _watched(self, batches: Batches, stop_at: int, start: float, waited_s: float) -> Iterator[Batch]:
        """Hands on batches, and between two of them does what happens after each step."""
        spec, progress = self._spec, self._progress
        used = 0
        for batch in batches:
            yield batch
            if self._sums.rate is None:
                self._sums.rate = self._framework.learning_rate
            used += batch.global_rows
            progress.position += 1
            progress.step += 1
            self._run.step = progress.step
            self._call("on_batch_end", batch)
            if spec.checksum_steps is not None and progress.step % spec.checksum_steps == 0:
                self._check_parameters()
            now = time.perf_counter()
            if isinstance(spec.checkpoint_every, int) and progress.step % spec.checkpoint_every == 0:
                self._due = True
                self._sums.elapsed_s, self._sums.data_s = now - start, waited_s + batches.wait_s
                if progress.position < stop_at:  # else it waits for the end of the epoch
                    self._save()
            if self._on_progress is not None and now - self._last_progress > _PROGRESS_INTERVAL_S:
                self._last_progress = now
                self._report(batch.step, used / (now - start), stop_at)

    def _validate(self) -> dict[str, float]:
        """Means over the validation rows of all ranks."""
        index, rows = self._split.validation, max(self._spec.inference_batch_size, 1)
        wanted = (Request(i, index[i : i + rows], 0) for i in range(0, len(index), rows))
        with Batches(self._shard, wanted, largest=min(rows, max(1, len(index))), prefetch=1) as batches:
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

    def _check_metrics(self) -> None:
        """Before the first epoch, whose end is too late to hear of a wrong name."""
        names = dict.fromkeys(["loss", *self._framework.names])
        known = [*names, *(f"val_{name}" for name in names if self._validation_rows)]
        for field_name in ("early_stopping", "lr_schedule"):
            metric = getattr(getattr(self._spec, field_name), "metric", None)
            if metric is not None and metric not in known:
                raise InvalidArgument(f"{field_name}: there is no metric {metric!r}, only {', '.join(known)}")

    def _judge(self, entry: dict[str, Any]) -> tuple[bool, bool]:
        """(whether to stop early, whether this epoch is the best so far)."""
        rule, progress = self._spec.early_stopping, self._progress
        metric = rule.metric if rule is not None else "val_loss" if self._validation_rows else "loss"
        watch = rule or EarlyStopping(metric)
        best = progress.best
        if best is not None and (best.metric, best.mode) != (metric, watch.mode):  # of an earlier process
            progress.best, progress.since_better = None, 0
        is_best = watch.better(entry[metric], None if progress.best is None else progress.best.value)
        if is_best:
            progress.best = Best(progress.epoch, entry[metric], metric, watch.mode, name_of(progress.step))
            progress.since_better = 0
            if rule is not None and rule.restore_best and self._ranks.rank == 0:
                self._best_weights = self._framework.weights()
        else:
            progress.since_better += 1
        since = progress.since_better
        return rule is not None and since > 0 and since >= rule.patience, is_best

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

    def _report(self, step: int, rows_per_s: float, steps: int, entry: dict[str, Any] | None = None) -> None:
        if self._on_progress is None:
            return
        loss = self._sums.totals.means(self._framework.loss_weights).get("loss", float("nan"))
        event: dict[str, Any] = {
            "epoch": self._progress.epoch,
            "epochs": self._epochs_in_all(),
            "step": step,
            "steps": steps,
            "rows_per_s": rows_per_s,
            "loss": loss if entry is None else entry["loss"],
        }
        if entry is not None:
            event["history"] = entry
        self._on_progress(event)

    def _epochs_in_all(self) -> int:
        spec = self._spec
        by_steps = -(-spec.max_steps // self._plan.steps) if spec.max_steps is not None else None
        return min(n for n in (spec.epochs, by_steps) if n is not None)

    def _result(self, outputs: tuple[OutputSpec, ...], rows_sent: int) -> FitResult:
        spec, ranks, plan, progress = self._spec, self._ranks, self._plan, self._progress
        history = progress.history
        weights = b""
        if ranks.rank == 0:
            weights = self._best_weights if self._best_weights is not None else self._framework.weights()
        batch = plan.capacity * (ranks.size if plan.per_rank else 1)
        lines = [
            f"{ranks.size} rank{'s' * (ranks.size > 1)}, {plan.total} training rows and "
            f"{self._validation_rows} for validation, up to {batch} rows in a step, "
            f"{plan.steps} steps an epoch",
            f"learning rate {history[0]['lr'] if history else self._framework.learning_rate:g}"
            + (f" ({spec.lr_scaling} scaling with the number of ranks)" if spec.lr_scaling else ""),
            f"{len(history)} epochs, {', '.join(f'{k} {v:.2f} s' for k, v in progress.seconds.items())}",
            *map(str, self._shard.blocks),
            *self._places,
            *troubles(self._data)[:20],
            *self._checkpoints.notes,
        ]
        return FitResult(
            weights=weights,
            history=history,
            best_epoch=progress.best.epoch if progress.best is not None else max(0, len(history) - 1),
            rows_seen=self._rows_seen() + self._validation_rows,
            rows_sent=rows_sent,
            train_rows=plan.total,
            validation_rows=self._validation_rows,
            seconds=progress.seconds,
            summary="\n".join(lines),
            output_spec=outputs,
            stopped_early=progress.ended == "early",
            size=ranks.size,
            timeline_path=None if ranks.group is None else _timeline_path(),
            data=[asdict(report) for report in self._data],
        )

    def _rows_seen(self) -> int:
        """In an epoch of this process; one that it went on with in the middle says nothing, and each was
        compared with its plan already."""
        entries = self._progress.history[self._earlier :] if self._has_trained else []
        whole = self._spec.max_steps is None
        counted = [int(e["rows"]) for e in entries if not whole or e["steps"] == self._plan.steps]
        return max(counted, default=self._plan.total)


def _seed(seed: int) -> None:
    """The generators that no framework owns. numpy's takes 32 bits."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))


def _timeline_path() -> str | None:
    """Of the file that rank 0 writes from beginning to end, if any."""
    return Config.from_env().timeline_path or None
