"""The seam of a framework: what a training loop needs of torch, Keras, ... Chosen by the model's type."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..errors import InvalidArgument
from .columns import ModelFacts
from .spec import TrainSpec

if TYPE_CHECKING:
    from ..group import Group
    from .result import OutputSpec


@dataclass
class Batch:
    """The rows of this rank in one step. Arrays are views of reused buffers: valid until the next batch is asked
    for; copy what is to be kept.

    inputs, labels: one array for each block, (rows, *shape); weight: (rows,) or None. rows may be 0.
    global_rows: rows of all ranks in this step.
    """

    inputs: list[np.ndarray]
    labels: list[np.ndarray]
    weight: np.ndarray | None
    rows: int
    global_rows: int
    step: int


@dataclass
class Totals:
    """Sums of one pass over this rank's rows: numerators and denominators by name ("loss", metrics), rows used."""

    sums: dict[str, tuple[float, float]] = field(default_factory=dict)
    rows: int = 0
    steps: int = 0
    data_s: float = 0.0
    compute_s: float = 0.0
    communication_s: float = 0.0

    def add(self, name: str, numerator: float, denominator: float) -> None:
        n, d = self.sums.get(name, (0.0, 0.0))
        self.sums[name] = (n + numerator, d + denominator)


class Framework(Protocol):
    """Made anew for each fit, in the rank's process. All ranks call each method at the same time."""

    def facts(self, spec: TrainSpec) -> ModelFacts:
        """What `plan_layout` needs; also refuses losses that cannot be reduced. Runs on the driver, no Group."""

    def prepare(self, spec: TrainSpec, group: Group, label_sample: Iterable[np.ndarray]) -> None:
        """Builds model and optimizer, makes the ranks equal, registers what reduces gradients."""

    def train_epoch(self, batches: Iterator[Batch], epoch: int, steps: int) -> Totals:
        """One optimizer step for each batch, also for batches without rows on this rank."""

    def evaluate(self, batches: Iterator[Batch]) -> Totals:
        """Loss and metrics without training. No collective inside: ranks may have different numbers of batches."""

    def predict(self, inputs: list[np.ndarray]) -> list[np.ndarray]:
        """Outputs for one batch."""

    def state(self) -> dict[str, Any]:
        """A copy of everything that training changes, apart from the position in the data."""

    def load(self, state: dict[str, Any]) -> None:
        """Puts a `state()` back."""


def framework_for(spec: TrainSpec) -> Any:
    """The framework of `spec.model` (torch for a model_fn)."""
    model = spec.model
    if model is None or any(c.__module__.startswith("torch.nn") for c in type(model).__mro__):
        from .torch_loop import TorchFramework

        return TorchFramework()
    raise InvalidArgument(
        f"model must be a torch.nn.Module, not {type(model).__module__}.{type(model).__name__}"
    )


__all__ = ["Batch", "Framework", "OutputSpec", "Totals", "framework_for"]
