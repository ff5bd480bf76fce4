"""From outputs and labels to the scalar that is differentiated, and to the sums that the history needs."""

from __future__ import annotations

import math
import time

import numpy as np
import torch
from torch import Tensor

from ..errors import InvalidArgument, LossError
from .framework import Batch, Totals
from .ranks import Ranks
from .shard import Shard
from .spec import TrainSpec
from .torch_losses import Term, terms_for
from .torch_model import to_tensors

_SUMS = ("sum", "total")


class Objective:
    """The losses and metrics of a spec over the labels of a shard.

    names: keys of Totals, the same on all ranks; loss_weights: those that are losses, with what each
    counts. Both are known after `bind`. Methods that take part in collectives say so; they add the time to
    `totals.communication_s`.
    """

    def __init__(self, spec: TrainSpec, ranks: Ranks, shard: Shard):
        """All ranks at the same time: whether any rank's labels have an ignored class must be known to
        all."""
        self._spec, self._ranks = spec, ranks
        self._terms = terms_for(spec)
        self._joined = False
        self._weighted = bool(shard.of_role("weight"))
        labels = [shard.block(i) for i in shard.of_role("label")]
        seen = np.array([t.see_labels(y) for t, y in zip(self._terms, labels, strict=True)], np.int64)
        for term, ignored in zip(self._terms, ranks.sum(seen, "ignored"), strict=True):
            if ignored:
                term.count_targets()
        self.is_custom = any(t.how == "custom" for t in self._terms)
        if spec.accumulate_steps > 1 and self.is_custom:
            raise InvalidArgument("accumulate_steps > 1 does not work with loss_reduction='custom'")

    def bind(self, outputs: int) -> None:
        """How many outputs the model has. Several labels of one output and one loss are joined to (B, k)."""
        spec = self._spec
        if outputs == 1 and len(self._terms) > 1 and len(spec.losses) == 1 and spec.loss_weights is None:
            self._joined, self._terms = True, self._terms[:1]
        self._check_count(outputs, len(self._terms))
        weights = spec.loss_weights
        self._factors = [None if weights is None else float(weights[i]) for i in range(outputs)]
        self._names = ["loss"] if outputs == 1 else [f"{t.label}_loss" for t in self._terms]
        self.loss_weights = {
            n: 1.0 if f is None else f for n, f in zip(self._names, self._factors, strict=True)
        }
        self.names = [*self._names, *(self._metric_name(t, m) for t in self._terms for m in spec.metrics)]

    def labels(self, batch: Batch) -> list[Tensor]:
        """One for each loss."""
        labels = to_tensors(batch.labels, torch.float32)
        if not self._joined:
            return labels
        return [torch.cat([y.reshape(len(y), math.prod(y.shape[1:])) for y in labels], 1)]

    def bases(self, labels: list[Tensor], weight: Tensor | None, batch: Batch, totals: Totals) -> list[float]:
        """Denominators of the whole step over all ranks; [] when nothing counts in it anywhere. Row counts
        are known from the plan, others take one small allreduce."""
        pairs = zip(self._terms, labels, strict=True)
        bases = [_base(t, y, weight, batch.rows) for t, y in pairs]
        if self._ranks.size > 1:
            counted = [t.how == "counted" or self._weighted for t in self._terms]
            rows = float(batch.global_rows)
            summed = self._summed(bases, "denominators", totals) if any(counted) else bases
            bases = [s if c else rows for s, c in zip(summed, counted, strict=True)]
        always = any(t.how in (*_SUMS, "custom") for t in self._terms)
        return bases if always or any(bases) else []

    def without_rows(self, outputs: list[Tensor] | None, totals: Totals) -> Tensor | None:
        """This rank's part of a step in which it has no rows: nothing, but attached to `outputs` if given."""
        if self.is_custom:
            self._summed([0.0] * len(self._terms), "custom", totals)
        return None if outputs is None else torch.stack([o.sum() * 0 for o in outputs]).sum()

    def loss(
        self,
        outputs: list[Tensor],
        labels: list[Tensor],
        weight: Tensor | None,
        bases: list[float],
        step_rows: int,
        totals: Totals,
    ) -> Tensor:
        """What these rows add to the loss of the whole step (of which this rank has `step_rows`), to be
        differentiated and summed over parts and ranks."""
        matched = self._matched(outputs, labels)
        self._add_metrics(outputs, matched, totals)
        is_part = len(matched[0]) < step_rows
        by_rows = all(t.how in ("rows", "mean", *_SUMS) for t in self._terms)
        if self._ranks.size == 1 and weight is None and not self.is_custom and (by_rows or not is_part):
            parts = self._plain(outputs, matched, step_rows, totals)
        else:
            parts = self._shared(outputs, matched, weight, bases, totals)
        weighted = [p if f is None else p * f for p, f in zip(parts, self._factors, strict=True)]
        return weighted[0] if len(weighted) == 1 else torch.stack(weighted).sum()

    def _plain(
        self, outputs: list[Tensor], labels: list[Tensor], step_rows: int, totals: Totals
    ) -> list[Tensor]:
        """The user's own loss calls: with one rank training is plain training, bit for bit."""
        parts = []
        for term, output, label, name in zip(self._terms, outputs, labels, self._names, strict=True):
            rows = len(label)
            loss = term.plain(output, label)
            value = loss.item()
            if term.how in _SUMS:
                totals.add(name, value, rows)
            else:
                base = _base(term, label, None, rows)
                totals.add(name, value * base, base)
                if rows < step_rows:
                    # As users write it: divided by the number of equal parts.
                    equal = step_rows % rows == 0
                    loss = loss / (step_rows // rows) if equal else loss * (rows / step_rows)
            parts.append(loss)
        return parts

    def _shared(
        self,
        outputs: list[Tensor],
        labels: list[Tensor],
        weight: Tensor | None,
        bases: list[float],
        totals: Totals,
    ) -> list[Tensor]:
        """This rank's numerators over the denominators of all ranks."""
        found = [t.terms(o, y, weight) for t, o, y in zip(self._terms, outputs, labels, strict=True)]
        if self.is_custom:
            is_custom = [t.how == "custom" for t in self._terms]
            own = [float(d) if c else 0.0 for c, (_, d) in zip(is_custom, found, strict=True)]
            summed = self._summed(own, "custom", totals)
            bases = [s if c else b for c, s, b in zip(is_custom, summed, bases, strict=True)]
        parts = []
        for i, (term, (numerator, elements)) in enumerate(zip(self._terms, found, strict=True)):
            self._add_loss(i, numerator, elements, labels[i], weight, totals)
            if term.how in _SUMS:
                denominator = 1.0
            else:
                denominator = bases[i] if term.how == "custom" else float(elements) * bases[i]
            parts.append(numerator / denominator if denominator else numerator * 0.0)
        return parts

    def evaluate(
        self, outputs: list[Tensor], labels: list[Tensor], weight: Tensor | None, totals: Totals
    ) -> None:
        """Adds losses and metrics to `totals`."""
        matched = self._matched(outputs, labels)
        self._add_metrics(outputs, matched, totals)
        for i, (term, output, label) in enumerate(zip(self._terms, outputs, matched, strict=True)):
            numerator, elements = term.terms(output, label, weight)
            self._add_loss(i, numerator, elements, label, weight, totals)

    def _add_loss(
        self,
        i: int,
        numerator: Tensor,
        elements: Tensor | float,
        label: Tensor,
        weight: Tensor | None,
        totals: Totals,
    ) -> None:
        """Of losses that are sums the history shows the mean over rows."""
        term, value, rows = self._terms[i], float(numerator.detach()), len(label)
        if term.how in _SUMS:
            totals.add(self._names[i], value, rows)
        elif term.how == "custom":
            totals.add(self._names[i], value, float(elements))
        else:
            totals.add(self._names[i], value / float(elements), _base(term, label, weight, rows))

    def _add_metrics(self, outputs: list[Tensor], labels: list[Tensor], totals: Totals) -> None:
        if not self._spec.metrics:
            return
        with torch.no_grad():
            for term, output, label in zip(self._terms, outputs, labels, strict=True):
                for name, metric in self._spec.metrics.items():
                    value = torch.as_tensor(metric(output.detach(), label), dtype=torch.float64)
                    mean = float(value.mean()) if value.ndim else float(value)
                    totals.add(self._metric_name(term, name), mean * len(label), len(label))

    def _metric_name(self, term: Term, metric: str) -> str:
        return metric if len(self._terms) == 1 else f"{term.label}_{metric}"

    def _matched(self, outputs: list[Tensor], labels: list[Tensor]) -> list[Tensor]:
        self._check_count(len(outputs), len(labels))
        return [t.match(o, y) for t, o, y in zip(self._terms, outputs, labels, strict=True)]

    def _check_count(self, outputs: int, labels: int) -> None:
        if outputs != labels:
            raise LossError(f"the model returned {outputs} outputs for {labels} labels")

    def _summed(self, values: list[float], name: str, totals: Totals) -> list[float]:
        """Over ranks; all at the same time."""
        start = time.perf_counter()
        summed = self._ranks.sum(np.array(values), f"{name}_of_step")
        totals.communication_s += time.perf_counter() - start
        return [float(s) for s in summed]


def _base(term: Term, label: Tensor, weight: Tensor | None, rows: int) -> float:
    base = term.base(label, weight) if rows else None
    return float(rows) if base is None else float(base)
