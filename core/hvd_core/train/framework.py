"""The seam of a framework: what the training loop needs of torch, Keras, ... Chosen by the model's type."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..errors import InvalidArgument
from .columns import ModelFacts
from .spec import TrainSpec

if TYPE_CHECKING:
    from .ranks import Ranks
    from .shard import Shard

#: Keeps the random streams of the ranks (dropout) apart: rank r goes on with seed + r * RANK_STRIDE.
RANK_STRIDE = 1_000_003


@dataclass
class Batch:
    """The rows of this rank in one step. Arrays are views of reused buffers: valid until the next batch is
    asked for; copy what is to be kept.

    inputs, labels: one array for each block, (rows, *shape); weight: (rows,) or None. rows may be 0.
    global_rows: rows of all ranks in this step.
    """

    inputs: list[np.ndarray]
    labels: list[np.ndarray]
    weight: np.ndarray | None
    rows: int
    global_rows: int
    step: int

    def take(self, keep: np.ndarray) -> Batch:
        """A copy with the rows where `keep` (rows,) is true; global_rows stays what it is."""
        inputs, labels = [x[keep] for x in self.inputs], [y[keep] for y in self.labels]
        weight = None if self.weight is None else self.weight[keep]
        return Batch(inputs, labels, weight, int(keep.sum()), self.global_rows, self.step)


@dataclass
class Totals:
    """Sums of one pass over this rank's rows: numerators and denominators by name, rows and steps."""

    sums: dict[str, tuple[float, float]] = field(default_factory=dict)
    rows: int = 0
    steps: int = 0
    communication_s: float = 0.0

    def add(self, name: str, numerator: float, denominator: float) -> None:
        n, d = self.sums.get(name, (0.0, 0.0))
        self.sums[name] = (n + numerator, d + denominator)

    def means(self, loss_weights: Mapping[str, float]) -> dict[str, float]:
        """The mean of each name; with several losses also "loss", their weighted sum. NaN where nothing
        counted."""
        means = {name: n / d if d else float("nan") for name, (n, d) in self.sums.items()}
        if "loss" not in loss_weights and means:
            means = {"loss": sum(w * means.get(n, float("nan")) for n, w in loss_weights.items()), **means}
        return means


class Framework(Protocol):
    """Made anew for each fit, in the process of the rank. All ranks call each method at the same time.

    names: keys of Totals, the same on all ranks, once `bind_outputs` was called. loss_weights: those of
    them that are losses, with what each counts. learning_rate: of the last step, or before it of the next.
    needs_pairs: a batch of a single row cannot be trained on. weights_file: what `weights` are called in a
    checkpoint; the ending says what they are.
    """

    model: Any
    optimizer: Any
    weights_file: str

    @property
    def names(self) -> list[str]: ...

    @property
    def loss_weights(self) -> dict[str, float]: ...

    @property
    def needs_pairs(self) -> bool: ...

    @property
    def learning_rate(self) -> float: ...

    def facts(self, spec: TrainSpec) -> ModelFacts:
        """What `plan_layout` needs; refuses losses that cannot be reduced. Runs on the driver, without
        ranks."""

    def prepare(self, spec: TrainSpec, ranks: Ranks, shard: Shard) -> None:
        """Builds model and optimizer, makes the ranks equal, registers what reduces gradients."""

    def bind_outputs(self, count: int) -> None:
        """Says how many outputs the model has, before the first epoch."""

    def train_epoch(self, batches: Iterator[Batch], epoch: int, steps: int, totals: Totals) -> None:
        """One optimizer step for each batch, also for batches without rows on this rank; adds to `totals`,
        completely before the next batch is asked for. `steps`: of a whole epoch; a resumed one begins
        later, and may have no batch left."""

    def evaluate(self, batches: Iterator[Batch]) -> Totals:
        """Loss and metrics without training. No collective inside: ranks may have different numbers of
        batches."""

    def end_epoch(self, logs: dict[str, float]) -> None:
        """After validation; `logs` are equal on all ranks."""

    def predict(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Outputs for one batch, in their own dtype."""

    def digests(self) -> dict[str, bytes]:
        """Parameter name -> digest of its bits."""

    def weights(self) -> bytes:
        """What `FitResult.weights` holds: the whole model, readable without running code."""

    def state(self) -> dict[str, Any]:
        """A copy of what else training changes and is equal on all ranks (optimizer, schedule, ...), asked
        of rank 0 only: no collective. Plain values and numpy arrays, see `tree.dumps`."""

    def own_state(self) -> dict[str, Any]:
        """A copy of what differs between ranks (random states), of the same kind. Without a collective."""

    def load(self, weights: bytes, state: dict[str, Any], own: dict[str, Any] | None) -> None:
        """Puts back what the three above gave; called after `prepare`. own None: the ranks are others now.
        Raises CheckpointError when they are of another model or optimizer."""


def framework_for(spec: TrainSpec) -> Framework:
    """The framework of `spec.model` (torch for a model_fn)."""
    model = spec.model
    if model is None or any(c.__module__.startswith("torch.nn") for c in type(model).__mro__):
        from .torch_loop import TorchFramework

        return TorchFramework()
    raise InvalidArgument(
        f"model must be a torch.nn.Module, not {type(model).__module__}.{type(model).__name__}"
    )
