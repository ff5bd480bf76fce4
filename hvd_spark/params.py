"""Every parameter of the estimator and the model, once: the table from which Spark Params, getters, setters
and constructor arguments are made.

A parameter has one name in snake_case (the constructor's, and the field of `TrainSpec`) and the same name in
camelCase (Spark's `Param`, getters and setters); constructors take both. Values that JSON can hold are Spark
Params, so `ParamGridBuilder` can sweep them and Spark can save them; models, functions and other objects are
held beside.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pyspark.ml.param import Param, Params, TypeConverters

from hvd_core.errors import no_such

from . import horovod_names

Convert = Callable[[Any], Any]


@dataclass(frozen=True)
class Knob:
    """name: snake_case. convert: to the type Spark keeps; None: an object, held outside JSON.
    serves: also a parameter of the fitted model."""

    name: str
    doc: str
    convert: Convert | None = None
    default: Any = None
    serves: bool = False

    @property
    def camel(self) -> str:
        first, *rest = self.name.split("_")
        return first + "".join(word.capitalize() for word in rest)

    @property
    def suffix(self) -> str:
        """As in getBatchSize."""
        return self.camel[0].upper() + self.camel[1:]


def _names(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else TypeConverters.toListString(value)


def _number_or_name(value: Any) -> float | str:
    return value if isinstance(value, str) else TypeConverters.toFloat(value)


def _steps_or_name(value: Any) -> int | str:
    return value if isinstance(value, str) else TypeConverters.toInt(value)


def _inputs(value: Any) -> list[str | list[str]]:
    entries = [value] if isinstance(value, str) else value
    return [entry if isinstance(entry, str) else TypeConverters.toListString(entry) for entry in entries]


def _shapes(value: Any) -> dict[str, list[int]]:
    return {
        str(name): [int(n) for n in ((shape,) if isinstance(shape, int) else shape)]
        for name, shape in value.items()
    }


def _lists(value: Any) -> list[list[int]]:
    return [TypeConverters.toListInt(entry) for entry in value]


def _mapping(value: Any) -> dict[str, Any]:
    return dict(value)


def _number_or_map(value: Any) -> float | dict[str, float]:
    if isinstance(value, Mapping):
        return {str(name): float(number) for name, number in value.items()}
    return TypeConverters.toFloat(value)


_INT, _FLOAT, _STRING, _BOOL = (
    TypeConverters.toInt,
    TypeConverters.toFloat,
    TypeConverters.toString,
    TypeConverters.toBoolean,
)

KNOBS: tuple[Knob, ...] = (
    # what is trained
    Knob("model", "torch.nn.Module to train; it is copied, never changed"),
    Knob("model_fn", "function that makes the model, called on each rank; instead of model"),
    Knob("optimizer", "optimizer bound to model, or function of the parameters: lambda p: Adam(p, 1e-3)"),
    Knob("loss", "loss(output, label), or one for each label column"),
    Knob("loss_weights", "weights of several losses", TypeConverters.toListFloat),
    Knob("loss_reduction", "what a loss of your own returns: 'mean', 'sum' or 'custom'", _STRING),
    Knob("metrics", "{name: function(output, label)}"),
    # columns
    Knob("feature_cols", "feature columns, in the order of the model's inputs", _names, serves=True),
    Knob("label_cols", "label columns, in the order of the model's outputs", _names, serves=True),
    Knob("sample_weight_col", "column of row weights", _STRING),
    Knob("input_columns", "columns of the inputs: ['a', ['b', 'c']] for two", _inputs, serves=True),
    Knob("shapes", "{column: shape of one row} for array columns", _shapes, serves=True),
    Knob("dtypes", "{column: dtype} that overrides the stated rule", _mapping, serves=True),
    Knob("null_value", "replaces nulls: a number, or {column: number}", _number_or_map, serves=True),
    Knob("transform_fn", "function({column: array}) on whole batches, run on the workers", serves=True),
    Knob("transform_cols", "further columns that transform_fn reads", _names, serves=True),
    Knob("validation", "fraction of the rows, or a boolean or 0/1 column that marks them", _number_or_name),
    Knob("validation_df", "a DataFrame of its own to validate on; it is not saved"),
    Knob("prediction_col", "column that transform adds", _STRING, "prediction", serves=True),
    Knob("probability_col", "column of class probabilities that transform adds for classifiers; '': none",
         _STRING, "probability", serves=True),
    Knob("raw_prediction_col", "column of scores that transform adds for classifiers; '': none",
         _STRING, "rawPrediction", serves=True),
    Knob("heads", "what each output is: 'output', 'softmax', ...; default: what the loss says",
         TypeConverters.toListString, serves=True),
    Knob("threshold", "of two classes predict 1.0 above this probability, else 0.0; default: predict it",
         _FLOAT, serves=True),
    Knob("vector_prediction", "several numbers as a Spark ML vector, not an array",
         _BOOL, False, serves=True),
    Knob("use_gpu", "transform on the GPU of the executor, if it has one", _BOOL, True, serves=True),
    # how long, how large
    Knob("num_proc", "number of ranks; default: as many as the cluster has slots", _INT),
    Knob("env", "the ranks' environment: {name: string}, or a function of the rank that gives one"),
    Knob("start_timeout_s", "seconds to wait while other jobs hold the slots", _FLOAT, 600.0),
    Knob("max_retries", "begin again after a lost rank, this often, from the last checkpoint if there is one",
         _INT, 0),
    Knob("batch_size", "rows of one rank in one step (32 unless global_batch_size is given)", _INT),
    Knob("global_batch_size", "rows of all ranks in one step", _INT),
    Knob("epochs", "passes over the rows (1 unless max_steps is given)", _INT),
    Knob("max_steps", "stop after this many optimizer steps", _INT),
    Knob("accumulate_steps", "batches for one optimizer step", _INT, 1),
    Knob("inference_batch_size", "rows of one forward in transform", _INT, 4096, serves=True),
    # how
    Knob("seed", "seed of shuffling, split and model_fn; the same for every process", _INT, 0),
    Knob("shuffle", "another order in each epoch", _BOOL, True),
    Knob("row_order", "'shard' (sorted by hash), 'global' (also dealt by it) or 'arrival'", _STRING, "shard"),
    Knob("learning_rate", "overrides the optimizer's", _FLOAT),
    Knob("lr_scaling", "multiply the rate by the number of ranks ('linear') or its root ('sqrt')", _STRING),
    Knob("lr_schedule", "function(epoch) -> factor, or hvd_core.train.Scheduler"),
    Knob("warmup_epochs", "the learning rate grows linearly over this many epochs", _FLOAT, 0.0),
    Knob("grad_clip_norm", "limit of the gradients' global norm", _FLOAT),
    Knob("precision", "'fp32', 'bf16' or 'fp16'", _STRING, "fp32"),
    Knob("wire_dtype", "gradients travel as 'fp16' or 'bf16'", _STRING),
    Knob("ema_decay", "keep a running mean of the weights with this decay", _FLOAT),
    Knob("sync_batchnorm", "BatchNorm statistics over all ranks", _BOOL, False),
    Knob("early_stopping", "hvd_core.train.EarlyStopping"),
    Knob("callbacks", "objects with on_epoch_end(run, logs), ..., called on every rank"),
    Knob("checksum_steps", "compare the ranks' parameters every so many steps; default: each epoch", _INT),
    Knob("prefetch", "batches gathered ahead of the step", _INT, 2),
    Knob("shard_memory_bytes", "a rank's rows stay in memory up to this many bytes", _INT),
    Knob("shard_dir", "where larger shards are written; default: Spark's local directory", _STRING),
    Knob("checkpoint_dir", "URL of this run's own directory, reachable from the executors", _STRING),
    Knob("checkpoint_every", "'epoch' (default) or a number of steps", _steps_or_name),
    Knob("keep_checkpoints", "how many of the newest are kept, besides the best; default 2", _INT),
    Knob("resume", "go on from the last checkpoint in checkpoint_dir, if there is one", _BOOL, False),
    Knob("store", "hvd_spark.Store: with run_id another way to say checkpoint_dir and resume"),
    Knob("run_id", "name of the run in the store; default: a new one", _STRING, serves=True),
    Knob("input_shapes", "Horovod's shapes of the feature columns, [[-1, ...], ...]", _lists, serves=True),
    Knob("label_shapes", "Horovod's shapes of the label columns, [[-1, ...], ...]", _lists),
    Knob("framework", "name of a registered framework; default: by the model's type", serves=True),
    Knob("verbose", "0: the ranks' own output only", _INT, 1),
)  # fmt: skip

#: Spark's usual names for a single column, and Horovod's.
ALIASES = {
    "featuresCol": "feature_cols",
    "features_col": "feature_cols",
    "labelCol": "label_cols",
    "label_col": "label_cols",
    "feature_columns": "feature_cols",
    "label_columns": "label_cols",
    "weightCol": "sample_weight_col",
    "weight_col": "sample_weight_col",
    "random_seed": "seed",
    "backward_passes_per_step": "accumulate_steps",
    "val_batch_size": "inference_batch_size",
    "start_timeout": "start_timeout_s",
    "backend_env": "env",
    "label_coloumns": "label_cols",  # as Horovod's setter spells it
}

#: Parameters of the job and of transform, not of the training.
JOB = frozenset(
    {
        "num_proc", "env", "start_timeout_s", "max_retries", "prediction_col", "probability_col",
        "raw_prediction_col", "heads", "threshold", "vector_prediction", "use_gpu", "validation_df", "store",
        "run_id", "input_shapes", "label_shapes",
    }
)  # fmt: skip


class Knobs(Params):
    """Base of estimator and model: keyword arguments in, Params and objects out. Knows the knobs in
    `_knobs`."""

    _knobs: Mapping[str, Knob] = {}

    def __init__(self, values: Mapping[str, Any]):
        super().__init__()
        #: Never changed in place: copies of a stage share it.
        self._objects: Mapping[str, Any] = {}
        self._setDefault(
            **{k.camel: k.default for k in self._knobs.values() if k.convert and k.default is not None}
        )
        self.setParams(**values)

    def setParams(self, **values: Any) -> Any:
        """Sets several parameters, in either spelling or by Horovod's name. None unsets."""
        for name, value in horovod_names.translated(values):
            self._put(self._knob(name), value)
        return self

    def explainParams(self) -> str:
        """Name, doc and value of each parameter, also of those that are objects and not Spark Params."""
        objects = [
            f"{knob.camel}: {knob.doc} ({_shown(self._objects.get(knob.name))})"
            for knob in self._knobs.values()
            if knob.convert is None
        ]
        return "\n".join([super().explainParams(), *objects])

    def _knob(self, name: str) -> Knob:
        by_name = {**self._knobs, **{k.camel: k for k in self._knobs.values()}}
        knob = by_name.get(ALIASES.get(name) or ALIASES.get(horovod_names.snake(name), name))
        if knob is None:
            raise TypeError(no_such(type(self).__name__, "parameter", name, by_name, self._knobs))
        return knob

    def _put(self, knob: Knob, value: Any) -> None:
        if knob.name == "model" and isinstance(value, Knobs):
            value = value.getModel()  # type: ignore[attr-defined]  # a fitted model: go on from its weights
        if knob.convert is None:
            self._objects = {**self._objects, knob.name: value}
        elif value is None:
            self._paramMap.pop(getattr(self, knob.camel), None)
        else:
            self._set(**{knob.camel: value})

    def _value(self, knob: Knob) -> Any:
        if knob.convert is None:
            return self._objects.get(knob.name)
        param = getattr(self, knob.camel)
        return self.getOrDefault(param) if self.isDefined(param) else None

    def _values(self, names: Iterable[str]) -> dict[str, Any]:
        """Those of `names` that have a value, by snake_case name."""
        found = {name: self._value(self._knobs[name]) for name in names}
        return {name: value for name, value in found.items() if value is not None}


def _shown(value: Any) -> str:
    if value is None:
        return "undefined"
    return f"current: {getattr(value, '__qualname__', type(value).__qualname__)}"


def provide(knobs: Iterable[Knob]) -> Callable[[type], type]:
    """Class decorator: makes Param, getter and setter of each knob, and the signature that `help()` shows."""

    def decorate(cls: type) -> type:
        table = {knob.name: knob for knob in knobs}
        for knob in table.values():
            if knob.convert is not None:
                setattr(cls, knob.camel, Param(Params._dummy(), knob.camel, knob.doc, knob.convert))
            if not hasattr(cls, f"get{knob.suffix}"):
                setattr(cls, f"get{knob.suffix}", _getter(knob))
            setattr(cls, f"set{knob.suffix}", _setter(knob))
        cls._knobs = table  # type: ignore[attr-defined]
        for name in _OTHER_NAMES:
            suffix = Knob(name, "").suffix
            if not hasattr(cls, f"set{suffix}"):
                setattr(cls, f"set{suffix}", _other_setter(name))
        arguments = [
            inspect.Parameter(knob.name, inspect.Parameter.KEYWORD_ONLY, default=knob.default)
            for knob in table.values()
        ]
        cls.__signature__ = inspect.Signature(arguments)  # type: ignore[attr-defined]
        listing = "\n".join(f"    {knob.name}: {knob.doc}." for knob in table.values())
        cls.__doc__ = f"{inspect.getdoc(cls)}\n\nParameters (camelCase works too):\n\n{listing}\n"
        return cls

    return decorate


#: What has a setter although it is no parameter of ours.
_OTHER_NAMES = (
    *(name for name in ALIASES if name.islower()),
    *horovod_names.WITHOUT_EFFECT,
    *horovod_names.INSTEAD,
    *("gradient_compression", "shuffle_buffer_size", "shuffling_buffer_size", "output_cols"),
)


def _getter(knob: Knob) -> Callable[[Knobs], Any]:
    def get(self: Knobs) -> Any:
        return self._value(knob)

    get.__name__, get.__doc__ = f"get{knob.suffix}", f"{knob.doc}."
    return get


def _setter(knob: Knob) -> Callable[[Knobs, Any], Knobs]:
    def set(self: Knobs, value: Any) -> Knobs:
        self._put(knob, value)
        return self

    set.__name__, set.__doc__ = f"set{knob.suffix}", f"Sets {knob.name}: {knob.doc}."
    return set


def _other_setter(name: str) -> Callable[[Knobs, Any], Knobs]:
    def set(self: Knobs, value: Any) -> Knobs:
        self.setParams(**{name: value})
        return self

    set.__name__, set.__doc__ = f"set{Knob(name, '').suffix}", f"Horovod's name: see setParams({name}=...)."
    return set
