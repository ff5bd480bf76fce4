"""The seam of a framework: all that the loop and the platforms need of torch, Keras, ..., and the registry by
which it is chosen from the model's type."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
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


#: Fields of the spec that a framework, not the loop, gives a meaning.
OPTIONAL = frozenset(
    {
        "sample_weight_col", "loss_weights", "loss_reduction", "metrics", "accumulate_steps", "learning_rate",
        "lr_scaling", "lr_schedule", "warmup_epochs", "grad_clip_norm", "precision", "wire_dtype",
        "ema_decay", "sync_batchnorm",
    }
)  # fmt: skip


class Readable(Protocol):
    """A binary file that is read once, from front to back."""

    def read(self, nbytes: int = -1, /) -> bytes: ...

    def readinto(self, buffer: Any, /) -> int: ...


class Framework(Protocol):
    """What the loop and the platforms need of torch, Keras, ...; they reach it through nothing else.

    Made anew for each use, without arguments. Two halves: what serves anywhere without ranks (driver, tasks
    that predict), and training, where all ranks call each method at the same time, after `prepare`.

    name: of `register_framework`. supports: those of OPTIONAL that it takes; a spec that sets another is
    refused by that field's name. preload: modules worth importing once before ranks are forked.
    weights_file: what `weights` are called in a checkpoint; the ending says what they are. pyfunc: the module
    that writes models which load without hvd, with what `torch_export` has; None: there is none.
    names: keys of Totals, the same on all ranks, once `bind_outputs` was called. loss_weights: those of
    them that are losses, with what each counts. learning_rate: of the last step, or before it of the next.
    needs_pairs: a batch of a single row cannot be trained on.
    """

    name: str
    supports: frozenset[str]
    preload: tuple[str, ...]
    weights_file: str
    pyfunc: str | None

    # -- without ranks --

    def facts(self, spec: TrainSpec, *, to_train: bool = True) -> ModelFacts:
        """What `plan_layout` needs, and what the outputs mean. Refuses models without anything to train and
        losses that cannot be reduced, unless the model is only to predict (to_train False)."""

    def trained(self, spec: TrainSpec, weights: Readable) -> Any:
        """A new model of the user's class with what `weights()` gave, ready to predict."""

    def predict(
        self, model: Any, inputs: Sequence[np.ndarray], device: str | None = None
    ) -> list[np.ndarray]:
        """Outputs for one batch, in their own dtype, in which rows come first; changes nothing in the model.
        device: one of `devices()`, to which the model moves; None: where it is."""

    def devices(self) -> list[str]:
        """Names of the GPUs that can be used here, by CUDA's numbers; [] where there are none."""

    def save_objects(self, objects: Mapping[str, Any], tensors_path: Path) -> bytes:
        """A pickle of `objects`; the numbers of objects["model"], if there are any, go to a file at
        `tensors_path`, which is read without running code."""

    def load_objects(self, data: bytes, tensors_path: Path | None) -> dict[str, Any]:
        """What `save_objects` was given. Runs code from `data`."""

    # -- training --

    model: Any
    optimizer: Any

    @property
    def names(self) -> list[str]: ...

    @property
    def loss_weights(self) -> dict[str, float]: ...

    @property
    def needs_pairs(self) -> bool: ...

    @property
    def learning_rate(self) -> float: ...

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

    def digests(self) -> dict[str, bytes]:
        """Parameter name -> 8 bytes that tell all its bits from others."""

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


#: What makes a framework: a function without arguments, or "module:name" of one, imported when it is needed.
Maker = str | Callable[[], Framework]


@dataclass(frozen=True)
class _Entry:
    make: Maker
    owns: Callable[[Any], bool]


_registered: dict[str, _Entry] = {}


def register_framework(name: str, make: Maker, owns: Callable[[Any], bool]) -> None:
    """Lets models be trained of which `owns(model)` says that they are this framework's; it must import
    nothing. Called where the estimator is used: ranks and tasks are sent `make`. The latest of a name
    counts."""
    _registered[name] = _Entry(make, owns)


def framework_for(spec: TrainSpec) -> Framework:
    """What `spec.framework` says, else the one of the model's type (torch for a model_fn). Raises
    InvalidArgument for a model of no framework, and for a field of the spec that its framework lacks."""
    maker = _maker(spec.framework, spec.model)
    return checked(_made(maker), spec)


def framework_of(model: Any, said: Maker | None = None) -> Framework:
    """The same without a spec. model None: torch."""
    return _made(_maker(said, model))


def portable(spec: TrainSpec) -> TrainSpec:
    """With what makes its framework, for a process in which nothing was registered."""
    return replace(spec, framework=_maker(spec.framework, spec.model))


def name_to_save(framework: Framework, said: Maker | None) -> str:
    """What `framework_of(None, name)` makes it from in another process, where "module:name" needs no
    registration and a plain name does."""
    return said if isinstance(said, str) else framework.name


def checked(framework: Framework, spec: TrainSpec) -> Framework:
    """Raises InvalidArgument for a field of the spec that the framework does not support."""
    for name in sorted(OPTIONAL - framework.supports):
        if name in spec.changed:
            raise InvalidArgument(f"{name} is not supported for {framework.name} models: leave it out")
    return framework


def _maker(said: Maker | None, model: Any) -> Maker:
    if said is not None:
        if isinstance(said, str) and ":" not in said:
            if said not in _registered:
                raise InvalidArgument(
                    f"framework {said!r} is none of {', '.join(_registered)}: register_framework adds one"
                )
            return _registered[said].make
        return said
    if model is None:
        return _registered["torch"].make
    # The latest first, so that a framework can take models that are torch modules too (Lightning's).
    for entry in reversed(_registered.values()):
        if entry.owns(model):
            return entry.make
    others = "".join(f", a {name} model" for name in _registered if name != "torch")
    raise InvalidArgument(
        f"model must be a torch.nn.Module{others}, not {type(model).__module__}.{type(model).__name__}"
    )


def _made(maker: Maker) -> Framework:
    if isinstance(maker, str):
        module, _, name = maker.partition(":")
        maker = getattr(import_module(module), name)
    assert not isinstance(maker, str)
    return maker()


def _is_torch(model: Any) -> bool:
    return any(c.__module__.startswith("torch.nn") for c in type(model).__mro__)


register_framework("torch", "hvd_core.train.torch_loop:TorchFramework", _is_torch)
