"""What to train and how: one frozen value, checked when it is made, sent to every rank as one pickle."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal

from ..errors import InvalidArgument

#: One model input: a column name gives (B,) or (B, *shape); a list of names gives (B, k), joined in order.
InputColumns = Sequence["str | Sequence[str]"]


@dataclass(frozen=True)
class EarlyStopping:
    """Stop when `metric` has not become better by more than `min_delta` for `patience` epochs.

    `metric` is a key of the history ("val_loss", "loss", "val_mae", ...): a value reduced over all ranks,
    so all ranks stop at the same epoch. With `restore_best` the result holds the weights of the best epoch.
    """

    metric: str = "val_loss"
    patience: int = 1
    mode: Literal["min", "max"] = "min"
    min_delta: float = 0.0
    restore_best: bool = True

    def __post_init__(self) -> None:
        if self.patience < 0:
            raise InvalidArgument(f"early_stopping: patience must be >= 0, not {self.patience}")
        if self.mode not in ("min", "max"):
            raise InvalidArgument(f"early_stopping: mode must be 'min' or 'max', not {self.mode!r}")

    def better(self, value: float, best: float | None) -> bool:
        """Whether `value` improves on `best` (None: nothing seen yet). NaN never does."""
        if math.isnan(value):
            return False
        if best is None:
            return True
        return value < best - self.min_delta if self.mode == "min" else value > best + self.min_delta


@dataclass(frozen=True)
class Scheduler:
    """A framework's own learning-rate scheduler: `factory(optimizer)` is called on every rank.

    It is stepped after each "epoch" or optimizer "step"; with `metric` it is given that value of the history
    (ReduceLROnPlateau), which is the same on all ranks.
    """

    factory: Callable[[Any], Any]
    every: Literal["epoch", "step"] = "epoch"
    metric: str | None = None

    def __post_init__(self) -> None:
        if self.every not in ("epoch", "step"):
            raise InvalidArgument(f"Scheduler: every must be 'epoch' or 'step', not {self.every!r}")
        if self.metric is not None and self.every != "epoch":
            raise InvalidArgument("Scheduler: a metric is known once an epoch, so every must be 'epoch'")


@dataclass(frozen=True)
class TrainSpec:
    """Everything `fit` needs besides the rows. Frozen, printable, picklable with cloudpickle.

    Model, optimizer and loss travel in ONE pickle, so an optimizer instance stays bound to its model. Lists
    given as a single string or callable are accepted and kept as tuples. A bad value raises
    `InvalidArgument` here.
    """

    # What is trained. Exactly one of model and model_fn; model_fn() runs on each rank (and once on the
    # driver).
    model: Any = None
    model_fn: Callable[[], Any] | None = None
    #: An instance bound to `model`, or a factory: `lambda params: Adam(params, 1e-3)`.
    optimizer: Any = None
    #: One callable `loss(output, label)`, or one for each label.
    loss: Any = None
    #: Weights of several losses; None: all 1.
    loss_weights: Sequence[float] | None = None
    #: What a loss that is not one of the framework's own returns: the "mean" over its rows, their "sum", or
    #: ("custom") a pair (numerator, denominator). A per-row tensor is accepted for "mean" and "sum".
    loss_reduction: Literal["mean", "sum", "custom"] | None = None
    #: {name: fn(output, label)}; fn returns the mean over the rows or one value for each row.
    metrics: Mapping[str, Callable[[Any, Any], Any]] = field(default_factory=dict)

    # Columns.
    feature_cols: Sequence[str] = ()
    label_cols: Sequence[str] = ()
    sample_weight_col: str | None = None
    #: How feature columns become the inputs of forward(); None: one each, or all joined for a single input.
    input_columns: InputColumns | None = None
    #: {column: shape of one row}, for array columns whose rows are to be reshaped.
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    #: {column: "int64" | "float32" | "float64" | ...}: overrides the stated rule for one column.
    dtypes: Mapping[str, str] = field(default_factory=dict)
    #: Replaces nulls: one value for all columns or {column: value}; None: nulls are refused.
    null_value: float | Mapping[str, float] | None = None
    #: `fn({column: array of B rows}) -> {column: array of B rows}`; runs once on each batch of rows as it
    #: arrives.
    transform_fn: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    #: Further columns that transform_fn reads.
    transform_cols: Sequence[str] = ()
    #: A fraction of the rows (exact, seeded), or the name of a boolean or 0/1 column that marks them.
    validation: float | str | None = None

    # How long, how large.
    #: Rows of one rank in one step; or global_batch_size: rows of all ranks in one step.
    batch_size: int | None = None
    global_batch_size: int | None = None
    epochs: int | None = None
    #: Stop after this many optimizer steps (in the middle of an epoch if need be).
    max_steps: int | None = None
    #: One optimizer step uses this many batches; equal to one batch of all their rows.
    accumulate_steps: int = 1
    inference_batch_size: int = 4096

    # How.
    seed: int = 0
    shuffle: bool = True
    #: "shard" sorts each rank's rows by their hash; "global" also deals them to the ranks by it, so that a
    #: run depends on no partitioning; "arrival" takes them as they come.
    row_order: Literal["shard", "arrival", "global"] = "shard"
    #: Overrides the optimizer's.
    learning_rate: float | None = None
    #: The learning rate is multiplied by size ("linear") or its root ("sqrt"); never without being asked.
    lr_scaling: Literal["linear", "sqrt"] | None = None
    #: `fn(epoch as a float) -> factor on the learning rate`, before each step; or a `Scheduler`.
    lr_schedule: Callable[[float], float] | Scheduler | None = None
    #: The learning rate grows linearly from 0 over this many epochs (fractions allowed).
    warmup_epochs: float = 0.0
    grad_clip_norm: float | None = None
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    #: Gradients travel in this dtype (a bit-exact sum is then not promised).
    wire_dtype: Literal["fp16", "bf16"] | None = None
    #: Weights of validation and of the result are a running mean with this decay.
    ema_decay: float | None = None
    sync_batchnorm: bool = False
    early_stopping: EarlyStopping | None = None
    #: Objects with any of on_train_begin(run), on_batch_end(run, batch), on_epoch_end(run, logs),
    #: on_train_end(run); a plain function is on_epoch_end. Called on every rank. on_fit_failed(error) is
    #: called in the process that called fit.
    callbacks: Sequence[Any] = ()
    #: Parameters of all ranks are compared every so many steps; None: each epoch.
    checksum_steps: int | None = None

    #: Batches gathered ahead of the step.
    prefetch: int = 2
    #: The shard stays in memory up to this many bytes; None: see Config.shard_memory_bytes.
    shard_memory_bytes: int | None = None
    shard_dir: str | None = None
    verbose: int = 1
    #: A name given to `register_framework`, "module:name" or a function that makes it; None: by the model's
    #: type, torch for a model_fn.
    framework: Any = None

    #: URL of this run's own directory (a path, s3://..., hdfs://..., dbfs:/...), reachable from where rank 0
    #: runs; None: no checkpoints.
    checkpoint_dir: str | None = None
    #: "epoch" (the default once there is a directory), or a number of optimizer steps. The best epoch and the
    #: end of the run are always kept.
    checkpoint_every: int | Literal["epoch"] | None = None
    #: So many of the newest checkpoints are kept, besides the best one; None: 2.
    keep_checkpoints: int | None = None
    #: Goes on from the last checkpoint in the directory, if there is one.
    resume: bool = False

    def __post_init__(self) -> None:
        for name in ("feature_cols", "label_cols", "transform_cols", "callbacks"):
            object.__setattr__(self, name, _as_tuple(name, getattr(self, name)))
        if self.input_columns is not None:
            object.__setattr__(self, "input_columns", _as_inputs(self.input_columns))
        if isinstance(self.loss, list):
            object.__setattr__(self, "loss", tuple(self.loss))
        if self.loss_weights is not None:
            object.__setattr__(self, "loss_weights", tuple(float(w) for w in self.loss_weights))
        if not isinstance(self.metrics, Mapping):
            object.__setattr__(self, "metrics", _named(self.metrics))
        if self.batch_size is None and self.global_batch_size is None:
            object.__setattr__(self, "batch_size", 32)
        if self.epochs is None and self.max_steps is None:
            object.__setattr__(self, "epochs", 1)
        _check_checkpoints(self)
        _check(self)

    @contextmanager
    def telling_failure(self) -> Iterator[None]:
        """Around a fit, in the process that asked for it: tells the callbacks when it fails."""
        try:
            yield
        except BaseException as error:
            for callback in self.callbacks:
                if hasattr(callback, "on_fit_failed"):
                    callback.on_fit_failed(error)
            raise

    @property
    def losses(self) -> tuple[Any, ...]:
        """The loss functions, one for all labels or one for each."""
        return self.loss if isinstance(self.loss, tuple) else (self.loss,)

    @property
    def input_names(self) -> tuple[str, ...]:
        """The feature columns in the order of the inputs, as transform_fn leaves them."""
        if self.input_columns is None:
            return tuple(self.feature_cols)
        return tuple(
            n for entry in self.input_columns for n in ((entry,) if isinstance(entry, str) else entry)
        )

    @property
    def changed(self) -> set[str]:
        """Names of the fields that are not what they are by default."""
        found = set()
        for f in fields(self):
            default = f.default if f.default_factory is MISSING else f.default_factory()
            value = getattr(self, f.name)
            if not (isinstance(value, _COMPARED) and value == default):
                found.add(f.name)
        return found

    def __str__(self) -> str:
        lines = ["TrainSpec("]
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name in _ALWAYS_SHOWN or not (isinstance(value, _PLAIN) and value in _UNSAID):
                text = type(value).__name__ if f.name == "model" else _short(value)
                lines.append(f"  {f.name}={text},")
        return "\n".join([*lines, ")"])


#: Keys of a history entry that are not metrics.
_HISTORY = {"epoch", "loss", "rows", "steps", "lr", "seconds", "data", "compute", "communication"}
_EVENTS = ("on_train_begin", "on_batch_end", "on_epoch_end", "on_train_end", "on_fit_failed")
_ALWAYS_SHOWN = {"feature_cols", "label_cols", "epochs", "seed"}
_UNSAID: tuple[Any, ...] = (None, (), {}, 0, 0.0, False)
#: Arrays, and much else that users pass, compare in their own way.
_PLAIN = (type(None), tuple, dict, int, float)
_COMPARED = (*_PLAIN, str)


def _short(value: Any, room: int = 120) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= room else text[: room - 3] + "..."


def _as_tuple(name: str, value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, Sequence):
        return (value,)
    return tuple(value)


def _as_inputs(value: Any) -> tuple[str | tuple[str, ...], ...]:
    if isinstance(value, str):
        value = [value]
    entries = tuple(e if isinstance(e, str) else tuple(e) for e in value)
    if not entries or any(not e for e in entries):
        raise InvalidArgument(f"input_columns must name at least one column for each input, got {value!r}")
    return entries


def _named(metrics: Any) -> dict[str, Any]:
    items = metrics if isinstance(metrics, Sequence) else [metrics]
    named = {getattr(m, "__name__", type(m).__name__): m for m in items}
    if len(named) != len(items):
        raise InvalidArgument("metrics: two have the same name; give a dict {name: function}")
    return named


def _check(spec: TrainSpec) -> None:
    _check_what(spec)
    _check_columns(spec)
    _check_numbers(spec)
    choices = {
        "loss_reduction": (None, "mean", "sum", "custom"),
        "row_order": ("shard", "arrival", "global"),
        "lr_scaling": (None, "linear", "sqrt"),
        "precision": ("fp32", "bf16", "fp16"),
        "wire_dtype": (None, "fp16", "bf16"),
    }
    for name, allowed in choices.items():
        if getattr(spec, name) not in allowed:
            words = ", ".join(repr(a) for a in allowed)
            raise InvalidArgument(f"{name} must be one of {words}, not {getattr(spec, name)!r}")


def _check_checkpoints(spec: TrainSpec) -> None:
    if spec.checkpoint_dir is None:
        for name in ("checkpoint_every", "keep_checkpoints", "resume"):
            if getattr(spec, name) not in (None, False):
                raise InvalidArgument(f"{name} needs checkpoint_dir, the URL of the run's directory")
        return
    directory = os.fspath(spec.checkpoint_dir)
    if ":" not in directory:  # a path: of this process's directory, wherever rank 0 will run
        directory = os.path.abspath(directory)
    object.__setattr__(spec, "checkpoint_dir", directory)
    every = "epoch" if spec.checkpoint_every is None else spec.checkpoint_every
    keep = 2 if spec.keep_checkpoints is None else spec.keep_checkpoints
    if every != "epoch" and not _is_count(every):
        raise InvalidArgument(f"checkpoint_every must be 'epoch' or a number of steps, not {every!r}")
    if not _is_count(keep):
        raise InvalidArgument(f"keep_checkpoints must be a whole number >= 1, not {keep!r}")
    object.__setattr__(spec, "checkpoint_every", every)
    object.__setattr__(spec, "keep_checkpoints", keep)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _check_what(spec: TrainSpec) -> None:
    if spec.early_stopping is not None and not isinstance(spec.early_stopping, EarlyStopping):
        raise InvalidArgument(
            f"early_stopping must be hvd_core.train.EarlyStopping(metric=...), not {spec.early_stopping!r}"
        )
    rule = spec.early_stopping
    if rule is not None and rule.metric.startswith("val_") and spec.validation is None:
        raise InvalidArgument(
            f"early_stopping watches {rule.metric!r}, but there are no validation rows: set validation, or "
            "watch EarlyStopping(metric='loss')"
        )
    if (spec.model is None) == (spec.model_fn is None):
        raise InvalidArgument("give exactly one of model and model_fn")
    if spec.optimizer is None:
        raise InvalidArgument(
            "optimizer is missing: an instance bound to the model, or a function of parameters"
        )
    is_instance = hasattr(spec.optimizer, "param_groups") and not isinstance(spec.optimizer, type)
    if is_instance and spec.model is None:
        raise InvalidArgument(
            "with model_fn the optimizer must be a function of the parameters (lambda params: "
            "Adam(params, 1e-3)); "
            "an optimizer instance is bound to another model"
        )
    if is_instance:
        _check_bound(spec)
    elif not callable(spec.optimizer):
        raise InvalidArgument(
            f"optimizer must be an optimizer or a function, not {type(spec.optimizer).__name__}"
        )
    if spec.loss is None or not spec.losses:
        raise InvalidArgument("loss is missing")
    for loss in spec.losses:
        if not callable(loss):
            raise InvalidArgument(f"loss must be callable, not {type(loss).__name__} {loss!r}")
        if isinstance(loss, type):
            raise InvalidArgument(f"loss is the class {loss.__name__}; give an instance: {loss.__name__}()")
    taken = _HISTORY | {f"{label}_loss" for label in spec.label_cols}
    for name, metric in spec.metrics.items():
        if not callable(metric):
            raise InvalidArgument(f"metric {name!r} must be callable, not {type(metric).__name__}")
        if name in taken or name.startswith("val_"):
            raise InvalidArgument(f"metric {name!r}: the history has an entry of that name; choose another")
    for callback in spec.callbacks:
        if not callable(callback) and not any(hasattr(callback, event) for event in _EVENTS):
            raise InvalidArgument(
                f"callback {callback!r} is neither a function nor has any of {', '.join(_EVENTS)}"
            )
    if spec.lr_schedule is not None and not (
        isinstance(spec.lr_schedule, Scheduler) or callable(spec.lr_schedule)
    ):
        raise InvalidArgument("lr_schedule must be a function of the epoch or a Scheduler")
    if spec.warmup_epochs and isinstance(spec.lr_schedule, Scheduler):
        raise InvalidArgument("warmup_epochs does not go with a Scheduler, which sets the rate itself")


def _check_bound(spec: TrainSpec) -> None:
    own = {id(p) for p in spec.model.parameters()} if hasattr(spec.model, "parameters") else None
    if own is None:
        return
    foreign = sum(id(p) not in own for g in spec.optimizer.param_groups for p in g["params"])
    if foreign:
        raise InvalidArgument(
            f"the optimizer is not bound to the model: {foreign} of its parameters are not the model's; "
            "build it from model.parameters(), or give a function of the parameters"
        )


def _check_columns(spec: TrainSpec) -> None:
    if not spec.feature_cols:
        if spec.input_columns is None:
            raise InvalidArgument("feature_cols is empty")
        object.__setattr__(spec, "feature_cols", tuple(dict.fromkeys(spec.input_names)))
    if not spec.label_cols:
        raise InvalidArgument("label_cols is empty")
    for name in ("feature_cols", "label_cols", "transform_cols"):
        for column in getattr(spec, name):
            if not isinstance(column, str):
                raise InvalidArgument(f"{name} holds column names, not {column!r}")
    unknown = [n for n in spec.input_names if n not in spec.feature_cols]
    if unknown:
        raise InvalidArgument(
            f"input_columns names {unknown} which are not in feature_cols {list(spec.feature_cols)}"
        )
    unused = [n for n in spec.feature_cols if n not in spec.input_names]
    if unused:
        raise InvalidArgument(f"feature columns {unused} are in no entry of input_columns")
    if isinstance(spec.null_value, Mapping):
        extra = [c for c in (spec.sample_weight_col, spec.validation) if isinstance(c, str)]
        used = {*spec.feature_cols, *spec.label_cols, *spec.transform_cols, *extra}
        if unknown := [name for name in spec.null_value if name not in used]:
            raise InvalidArgument(f"null_value names {unknown}, which are not columns that are used")
    fills = spec.null_value.values() if isinstance(spec.null_value, Mapping) else [spec.null_value]
    for fill in fills:
        if fill is not None and (isinstance(fill, (str, bytes)) or not hasattr(fill, "__float__")):
            raise InvalidArgument(f"null_value must be a number or {{column: number}}, not {fill!r}")
    if len(spec.losses) > 1 and len(spec.losses) != len(spec.label_cols):
        raise InvalidArgument(
            f"{len(spec.losses)} losses for {len(spec.label_cols)} label columns; give one or as many"
        )
    if spec.loss_weights is not None and len(spec.loss_weights) != max(
        len(spec.losses), len(spec.label_cols)
    ):
        raise InvalidArgument(
            f"{len(spec.loss_weights)} loss_weights for {len(spec.label_cols)} label columns"
        )
    if isinstance(spec.validation, (int, float)) and not 0 < spec.validation < 1:
        raise InvalidArgument(
            f"validation must be a fraction between 0 and 1 or a column name, not {spec.validation!r}"
        )


def _check_numbers(spec: TrainSpec) -> None:
    if spec.batch_size is not None and spec.global_batch_size is not None:
        raise InvalidArgument("give one of batch_size (rows of one rank) and global_batch_size, not both")
    for name in (
        "batch_size", "global_batch_size", "max_steps", "accumulate_steps", "inference_batch_size",
        "prefetch", "checksum_steps",
    ):  # fmt: skip
        value = getattr(spec, name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise InvalidArgument(f"{name} must be a whole number >= 1, not {value!r}")
    if spec.epochs is not None and (not isinstance(spec.epochs, int) or spec.epochs < 1):
        raise InvalidArgument(f"epochs must be a whole number >= 1, not {spec.epochs!r}")
    if not isinstance(spec.seed, int) or not 0 <= spec.seed < 1 << 63:
        raise InvalidArgument(f"seed must be a whole number in [0, 2**63), not {spec.seed!r}")
    for name in ("learning_rate", "grad_clip_norm"):
        value = getattr(spec, name)
        if value is not None and not value > 0:
            raise InvalidArgument(f"{name} must be > 0, not {value!r}")
    if spec.ema_decay is not None and not 0 < spec.ema_decay < 1:
        raise InvalidArgument(f"ema_decay must be between 0 and 1, not {spec.ema_decay!r}")
    if not spec.warmup_epochs >= 0:
        raise InvalidArgument(f"warmup_epochs must be >= 0, not {spec.warmup_epochs!r}")
