"""The torch implementation of `Framework`: one optimizer step for each batch, equal to one on the joined
batch."""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import InvalidArgument, LossError
from .columns import ModelFacts
from .framework import Batch, Totals
from .ranks import Ranks
from .shard import Shard
from .spec import Scheduler, TrainSpec
from .torch_batchnorm import SyncBatchNorm, convert
from .torch_losses import Term, terms_for
from .torch_model import (
    build_model,
    build_optimizer,
    digests,
    facts,
    float_dtype,
    outputs_of,
    run_model,
    state_bytes,
    to_tensors,
)

#: We reduce by `synchronize()` once a step, whatever the number of backward passes before it.
_NEVER = 1 << 30
#: Keeps the random streams of the ranks (dropout) apart.
_RANK_STRIDE = 1_000_003


class TorchFramework:
    """Not thread-safe. `model` and `optimizer` are the user's own objects, trained in place."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def facts(self, spec: TrainSpec) -> ModelFacts:
        return facts(spec)

    # -- prepare --

    def prepare(self, spec: TrainSpec, ranks: Ranks, shard: Shard) -> None:
        """Seeds torch with `spec.seed` before a model_fn runs; afterwards ranks other than 0 go on with a
        stream of their own, so rank 0 (and N = 1) is plain torch after `torch.manual_seed(seed)`."""
        self.spec, self._ranks, self._shard = spec, ranks, shard
        per_rank = spec.batch_size or -(-(spec.global_batch_size or 1) // ranks.size)
        self._micro_rows = max(1, per_rank)
        torch.manual_seed(spec.seed)
        self.model = build_model(spec)
        if spec.sync_batchnorm and ranks.size > 1:
            self.model = convert(self.model, ranks)
        self.optimizer = build_optimizer(spec, self.model)
        if ranks.rank:
            torch.manual_seed(spec.seed + _RANK_STRIDE * ranks.rank)
        self._dtype = float_dtype(self.model)
        self._amp_dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[spec.precision]
        self._scaler = torch.amp.GradScaler("cpu") if spec.precision == "fp16" else None
        self._prepare_losses()
        self._prepare_rate()
        self._distribute()
        self._ema = None if spec.ema_decay is None else [p.detach().clone() for p in self.model.parameters()]
        self._steps_done = 0
        self._rows_since_sync = 0
        self.totals = Totals()

    def _prepare_losses(self) -> None:
        spec, shard = self.spec, self._shard
        self._terms = terms_for(spec)
        self._joined = False
        self._weighted = bool(shard.of_role("weight"))
        labels = [shard.block(i) for i in shard.of_role("label")]
        seen = np.array([t.see_labels(y) for t, y in zip(self._terms, labels, strict=True)], np.int64)
        for term, ignored in zip(self._terms, self._ranks.sum(seen, "ignored"), strict=True):
            if ignored:
                term.count_targets()
        if spec.accumulate_steps > 1 and any(t.how == "custom" for t in self._terms):
            raise InvalidArgument("accumulate_steps > 1 does not work with loss_reduction='custom'")
        if spec.accumulate_steps > 1 and spec.sync_batchnorm:
            raise InvalidArgument("accumulate_steps > 1 does not work with sync_batchnorm=True")

    def bind_outputs(self, count: int) -> None:
        """How many outputs the model has. Several labels of one output and one loss are joined to (B, k)."""
        spec = self.spec
        if count == 1 and len(self._terms) > 1 and len(spec.losses) == 1 and spec.loss_weights is None:
            self._joined, self._terms = True, self._terms[:1]
        if count != len(self._terms):
            raise LossError(f"the model returns {count} outputs for {len(self._terms)} labels")
        weights = spec.loss_weights
        self._loss_weights = [None if weights is None else float(weights[i]) for i in range(count)]
        self._names = ["loss"] if count == 1 else [f"{t.label}_loss" for t in self._terms]
        self.names = [*self._names, *(self._metric_name(t, m) for t in self._terms for m in spec.metrics)]

    def _metric_name(self, term: Term, metric: str) -> str:
        return metric if len(self._terms) == 1 else f"{term.label}_{metric}"

    def _labels(self, batch: Batch) -> list[Tensor]:
        labels = to_tensors(batch.labels, torch.float32)
        return [torch.cat([y.reshape(len(y), -1) for y in labels], 1)] if self._joined else labels

    def _prepare_rate(self) -> None:
        spec, size = self.spec, self._ranks.size
        scale = {None: 1.0, "linear": float(size), "sqrt": math.sqrt(size)}[spec.lr_scaling]
        for group in self.optimizer.param_groups:
            if spec.learning_rate is not None:
                group["lr"] = spec.learning_rate
                group.pop("initial_lr", None)
            if scale != 1.0:
                group["lr"] *= scale
        self._base_rates = [float(g["lr"]) for g in self.optimizer.param_groups]
        schedule = spec.lr_schedule
        self._scheduler = schedule.factory(self.optimizer) if isinstance(schedule, Scheduler) else None
        if isinstance(schedule, Scheduler) and not hasattr(self._scheduler, "step"):
            raise InvalidArgument(
                f"Scheduler: factory(optimizer) returned {self._scheduler!r}, not a scheduler"
            )
        self._schedule: Callable[[float], float] | None = (
            None if isinstance(schedule, Scheduler) else schedule
        )

    def _distribute(self) -> None:
        if self._ranks.size == 1:
            return
        from .. import torch as hvd

        state = {k: v for k, v in self.model.state_dict().items() if isinstance(v, Tensor)}
        hvd.broadcast_parameters(state, root_rank=0)
        wire = self.spec.wire_dtype
        hvd.DistributedOptimizer(
            self.optimizer,
            named_parameters=self.model.named_parameters(),
            compression=hvd.Compression.none if wire is None else getattr(hvd.Compression, wire),
            backward_passes_per_step=_NEVER,
            op=hvd.Sum,
            sparse_as_dense=True,
        )

    @property
    def needs_pairs(self) -> bool:
        """Whether a batch of one row cannot be trained on."""
        return any(
            isinstance(m, _BatchNorm) and not isinstance(m, SyncBatchNorm) for m in self.model.modules()
        )

    # -- train --

    def train_epoch(self, batches: Iterator[Batch], epoch: int, steps: int) -> Totals:
        self._epoch, self._steps_of_epoch = epoch, steps
        totals = self.totals = Totals()
        self.model.train()
        for batch in batches:
            try:
                self._step(batch, totals)
            except LossError as error:
                where = f"rank {self._ranks.rank}, epoch {epoch}, step {batch.step}"
                raise LossError(f"{where}: {error}") from error.__cause__
            totals.rows += batch.rows
            totals.steps += 1
        self._rows_since_sync += totals.rows
        start = time.perf_counter()
        self._sync_buffers()
        totals.communication_s += time.perf_counter() - start
        return totals

    def _step(self, batch: Batch, totals: Totals) -> None:
        self._set_rate(batch.step)
        self.optimizer.zero_grad()
        labels = self._labels(batch)
        weight = None if batch.weight is None else torch.from_numpy(batch.weight)
        own = [self._base(t, y, weight, batch.rows) for t, y in zip(self._terms, labels, strict=True)]
        bases = self._global_bases(own, batch.global_rows, totals)
        if not any(bases) and all(t.how not in ("sum", "total", "custom") for t in self._terms):
            return  # nothing counts anywhere: no gradient, so no step
        for begin, end in self._micro_batches(batch.rows):
            part = slice(begin, end)
            inputs = to_tensors([x[part] for x in batch.inputs], self._dtype)
            part_labels = [y[part] for y in labels]
            part_weight = None if weight is None else weight[part]
            loss = self._loss(inputs, part_labels, part_weight, bases, batch, totals)
            if loss is None:
                continue
            self._check_finite(loss, batch)
            (loss if self._scaler is None else self._scaler.scale(loss)).backward()
        self._apply(totals)

    def _micro_batches(self, rows: int) -> list[tuple[int, int]]:
        if rows == 0:
            # A synchronised BatchNorm, and a denominator known only after the forward, need every rank.
            joins = self._ranks.size > 1 and (
                self.spec.sync_batchnorm or any(t.how == "custom" for t in self._terms)
            )
            return [(0, 0)] if joins else []
        size = self._micro_rows if self.spec.accumulate_steps > 1 else rows
        return [(i, min(i + size, rows)) for i in range(0, rows, size)]

    def _base(self, term: Term, label: Tensor, weight: Tensor | None, rows: int) -> float:
        base = term.base(label, weight) if rows else None
        return float(rows) if base is None else float(base)

    def _global_bases(self, own: list[float], global_rows: int, totals: Totals) -> list[float]:
        """Denominators over all ranks; plain row counts are known from the plan."""
        counted = [t.how == "counted" or self._weighted for t in self._terms]
        if self._ranks.size == 1 or not any(counted):
            return own if self._ranks.size == 1 else [float(global_rows)] * len(own)
        start = time.perf_counter()
        summed = self._ranks.sum(np.array(own), "denominators")
        totals.communication_s += time.perf_counter() - start
        return [float(s) if c else float(global_rows) for s, c in zip(summed, counted, strict=True)]

    def _loss(
        self,
        inputs: list[Tensor],
        labels: list[Tensor],
        weight: Tensor | None,
        bases: list[float],
        batch: Batch,
        totals: Totals,
    ) -> Tensor | None:
        rows = len(labels[0])
        custom = any(t.how == "custom" for t in self._terms)
        if rows == 0 and not self.spec.sync_batchnorm:
            self._custom_denominators([0.0] * len(self._terms), totals)
            return None
        amp = contextlib.nullcontext() if self._amp_dtype is None else torch.autocast("cpu", self._amp_dtype)
        with amp:
            value = self.model(*inputs)
        outputs = self._full_precision(outputs_of(value))
        if rows == 0:
            if custom:
                self._custom_denominators([0.0] * len(self._terms), totals)
            return torch.stack([o.sum() * 0 for o in outputs]).sum()
        pairs = self._pairs(outputs, labels)
        self._add_metrics(pairs, rows, totals)
        is_part = rows < batch.rows
        by_rows = all(t.how in ("rows", "mean", "sum", "total") for t in self._terms)
        if self._ranks.size == 1 and weight is None and not custom and (by_rows or not is_part):
            return self._plain_loss(pairs, rows, batch.rows, totals)
        return self._shared_loss(pairs, weight, bases, totals)

    def _plain_loss(
        self, pairs: list[tuple[Term, Tensor, Tensor]], rows: int, step_rows: int, totals: Totals
    ) -> Tensor:
        """The user's own loss call: with one rank training is plain training, bit for bit."""
        parts = []
        for (term, output, label), factor, name in zip(pairs, self._loss_weights, self._names, strict=True):
            loss = term.plain(output, label)
            value = float(loss.detach())
            is_sum = term.how in ("sum", "total")
            base = float(rows) if is_sum else self._base(term, label, None, rows)
            totals.add(name, value if is_sum else value * base, base)
            if rows < step_rows and not is_sum:
                # As users write it: divided by the number of equal parts.
                loss = loss / (step_rows // rows) if step_rows % rows == 0 else loss * (rows / step_rows)
            parts.append(loss if factor is None else loss * factor)
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum()

    def _shared_loss(
        self,
        pairs: list[tuple[Term, Tensor, Tensor]],
        weight: Tensor | None,
        bases: list[float],
        totals: Totals,
    ) -> Tensor:
        """This part's numerators over the denominators of all ranks."""
        found = [term.terms(output, label, weight) for term, output, label in pairs]
        if any(t.how == "custom" for t in self._terms):
            own = [
                float(d) if t.how == "custom" else 0.0 for t, (_, d) in zip(self._terms, found, strict=True)
            ]
            customs = self._custom_denominators(own, totals)
            bases = [
                c if t.how == "custom" else b for t, c, b in zip(self._terms, customs, bases, strict=True)
            ]
        parts = []
        for i, (term, output, label) in enumerate(pairs):
            numerator, elements = found[i]
            value = float(numerator.detach())
            rows = len(output)
            if term.how in ("sum", "total"):
                denominator = 1.0
                totals.add(self._names[i], value, float(rows))
            elif term.how == "custom":
                denominator = bases[i]
                totals.add(self._names[i], value, float(elements))
            else:
                denominator = float(elements) * bases[i]
                totals.add(self._names[i], value / float(elements), self._base(term, label, weight, rows))
            loss = numerator / denominator if denominator else numerator * 0.0
            factor = self._loss_weights[i]
            parts.append(loss if factor is None else loss * factor)
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum()

    def _custom_denominators(self, own: list[float], totals: Totals) -> list[float]:
        start = time.perf_counter()
        summed = self._ranks.sum(np.array(own), "custom_denominators")
        totals.communication_s += time.perf_counter() - start
        return [float(s) for s in summed]

    def _pairs(self, outputs: list[Tensor], labels: list[Tensor]) -> list[tuple[Term, Tensor, Tensor]]:
        """Each loss with its output and label; several labels of one output are joined to (B, k)."""
        if len(outputs) != len(labels):
            raise LossError(f"the model returned {len(outputs)} outputs for {len(labels)} labels")
        return [(t, o, t.match(o, y)) for t, o, y in zip(self._terms, outputs, labels, strict=True)]

    def _full_precision(self, outputs: list[Tensor]) -> list[Tensor]:
        """Losses are taken in float32 when the model ran in a smaller type."""
        if self._amp_dtype is None:
            return outputs
        return [o.float() if o.dtype is self._amp_dtype else o for o in outputs]

    def _add_metrics(self, pairs: list[tuple[Term, Tensor, Tensor]], rows: int, totals: Totals) -> None:
        with torch.no_grad():
            for term, output, label in pairs:
                for name, metric in self.spec.metrics.items():
                    value = torch.as_tensor(metric(output.detach(), label), dtype=torch.float64)
                    mean = float(value.mean()) if value.ndim else float(value)
                    totals.add(self._metric_name(term, name), mean * rows, rows)

    def _check_finite(self, loss: Tensor, batch: Batch) -> None:
        value = float(loss.detach())
        if math.isfinite(value):
            return
        if self._scaler is not None and self._scaler.get_scale() > 1.0:
            return  # an overflow of fp16: the scaler skips the step and lowers its scale
        arrays = [*batch.inputs, *batch.labels]
        blocks = [b for b in self._shard.blocks if b.role in ("input", "label")]
        for block, x in zip(blocks, arrays, strict=True):
            if x.dtype.kind == "f" and not np.isfinite(x).all():
                columns = ", ".join(map(repr, block.columns))
                raise LossError(
                    f"the loss is {value}; {block.role} column {columns} holds NaN or infinity here"
                )
        raise LossError(
            f"the loss is {value}, from finite inputs and labels: is the learning rate too large?"
        )

    def _apply(self, totals: Totals) -> None:
        """Reduce, unscale, clip, step: in this order, so that all ranks see the same values."""
        if self._ranks.size > 1:
            start = time.perf_counter()
            self.optimizer.synchronize()  # type: ignore[attr-defined]
            totals.communication_s += time.perf_counter() - start
        if self._scaler is not None:
            self._scaler.scale(torch.zeros(()))  # a rank without rows has not used it yet
            self._scaler.unscale_(self.optimizer)
        if self.spec.grad_clip_norm is not None:
            params = [p for g in self.optimizer.param_groups for p in g["params"]]
            torch.nn.utils.clip_grad_norm_(params, self.spec.grad_clip_norm)
        if self._scaler is None:
            self.optimizer.step()
        else:
            self._scaler.step(self.optimizer)
            self._scaler.update()
        self._steps_done += 1
        if self._scheduler is not None and self.spec.lr_schedule.every == "step":  # type: ignore[union-attr]
            self._scheduler.step()
        if self._ema is not None:
            assert self.spec.ema_decay is not None
            with torch.no_grad():
                for mean, p in zip(self._ema, self.model.parameters(), strict=True):
                    mean.lerp_(p, 1.0 - self.spec.ema_decay)

    # -- learning rate --

    def _set_rate(self, step: int) -> None:
        spec = self.spec
        if self._schedule is None and not spec.warmup_epochs:
            return
        at = self._epoch + step / self._steps_of_epoch
        factor = 1.0 if self._schedule is None else float(self._schedule(at))
        if spec.warmup_epochs:
            factor *= min(1.0, (at + 1.0 / self._steps_of_epoch) / spec.warmup_epochs)
        for group, rate in zip(self.optimizer.param_groups, self._base_rates, strict=True):
            group["lr"] = rate * factor

    def end_epoch(self, logs: dict[str, float]) -> None:
        """Steps a scheduler that goes by epochs. `logs`: equal on all ranks."""
        schedule = self.spec.lr_schedule
        if self._scheduler is None or not isinstance(schedule, Scheduler) or schedule.every != "epoch":
            return
        if schedule.metric is None:
            self._scheduler.step()
            return
        if schedule.metric not in logs:
            raise InvalidArgument(
                f"Scheduler: there is no metric {schedule.metric!r}, only {', '.join(logs)}"
            )
        self._scheduler.step(logs[schedule.metric])

    @property
    def learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def loss_weights(self) -> dict[str, float]:
        """Names of the losses in Totals, and what each counts in "loss"."""
        return {n: 1.0 if w is None else w for n, w in zip(self._names, self._loss_weights, strict=True)}

    # -- evaluate, predict --

    def evaluate(self, batches: Iterator[Batch]) -> Totals:
        totals = Totals()
        was_training = self.model.training
        self.model.eval()
        with self._averaged(), torch.inference_mode():
            for batch in batches:
                if not batch.rows:
                    continue
                labels = self._labels(batch)
                weight = None if batch.weight is None else torch.from_numpy(batch.weight)
                outputs = outputs_of(self.model(*to_tensors(batch.inputs, self._dtype)))
                pairs = self._pairs(outputs, labels)
                self._add_metrics(pairs, batch.rows, totals)
                for (term, output, label), name in zip(pairs, self._names, strict=True):
                    numerator, elements = term.terms(output, label, weight)
                    if term.how == "custom":
                        totals.add(name, float(numerator), float(elements))
                    elif term.how in ("sum", "total"):
                        totals.add(name, float(numerator), float(batch.rows))
                    else:
                        base = self._base(term, label, weight, batch.rows)
                        totals.add(name, float(numerator) / float(elements), base)
                totals.rows += batch.rows
                totals.steps += 1
        self.model.train(was_training)
        return totals

    def predict(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        with self._averaged():
            return run_model(self.model, inputs)

    @contextlib.contextmanager
    def _averaged(self) -> Iterator[None]:
        """The EMA's values in the parameters, and back."""
        if self._ema is None:
            yield
            return
        params = list(self.model.parameters())
        own = [p.detach().clone() for p in params]
        with torch.no_grad():
            for p, mean in zip(params, self._ema, strict=True):
                p.copy_(mean)
        try:
            yield
        finally:
            with torch.no_grad():
                for p, value in zip(params, own, strict=True):
                    p.copy_(value)

    # -- state --

    def _sync_buffers(self) -> None:
        """Floating buffers become their mean over ranks, weighted by the rows each has seen; others are
        rank 0's."""
        buffers = [(n, b) for n, b in self.model.named_buffers() if isinstance(b, Tensor)]
        rows, self._rows_since_sync = self._rows_since_sync, 0
        if self._ranks.size == 1 or not buffers:
            return
        total = float(self._ranks.sum(np.array([float(rows)]), "buffer_rows")[0])
        share = rows / total if total else 1.0 / self._ranks.size
        with torch.no_grad():
            for name, buffer in buffers:
                floating = buffer.is_floating_point()
                value = buffer.double() * share if floating else buffer.cpu() * (self._ranks.rank == 0)
                data = np.ascontiguousarray(value.cpu().numpy()).reshape(-1)
                self._ranks.sum(data, f"buffer.{name}")
                buffer.copy_(torch.from_numpy(data).reshape(buffer.shape))

    def digests(self) -> dict[str, bytes]:
        return digests(self.model.named_parameters())

    def weights(self) -> bytes:
        with self._averaged():
            return state_bytes(self.model.state_dict())

    def state(self) -> dict[str, Any]:
        """A copy of what training changes, as plain tensors and numbers."""
        return copy.deepcopy(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scheduler": None if self._scheduler is None else self._scheduler.state_dict(),
                "scaler": None if self._scaler is None else self._scaler.state_dict(),
                "ema": self._ema,
                "rng": torch.get_rng_state(),
                "steps_done": self._steps_done,
            }
        )

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self._scheduler is not None:
            self._scheduler.load_state_dict(state["scheduler"])
        if self._scaler is not None:
            self._scaler.load_state_dict(state["scaler"])
        self._ema = copy.deepcopy(state["ema"])
        torch.set_rng_state(state["rng"])
        self._steps_done = state["steps_done"]
