"""Horovod's names for parameters: what they become, what has no effect here, and what to do instead.

Every name that a constructor or setter of Horovod 0.28's Spark estimators takes is in `params.KNOBS`, in
`params.ALIASES` or here. `docs/migrating-from-horovod.md` tells the same to people.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hvd_core.errors import InvalidArgument

_READER = "there is no reader: rows are packed once into a shard of each rank"
_PROCESSES = "ranks are forked from a warm process"

#: Accepted with a warning: old jobs run unchanged, and better off.
WITHOUT_EFFECT = {
    "partitions_per_process": _READER,
    "train_reader_num_workers": _READER,
    "val_reader_num_workers": _READER,
    "train_reader_num_worker": _READER,
    "val_reader_num_worker": _READER,
    "reader_pool_type": _READER,
    "inmemory_cache_all": _READER,
    "in_memory_cache_all": _READER,
    "compress_sparse_cols": "sparse vectors are unpacked as they are packed into the shard",
    "tensorflow_dataset_prefetch_buffer_size": "prefetch is the number of batches gathered ahead",
    "train_async_data_loader_queue_size": "prefetch is the number of batches gathered ahead",
    "val_async_data_loader_queue_size": "prefetch is the number of batches gathered ahead",
    "debug_data_loader": _READER,
    "loader_num_epochs": _READER,
    "mp_start_method": _PROCESSES,
    "log_every_n_steps": "progress is shown twice a second",
}

#: Refused: an old job that counts on them would do something else.
INSTEAD = {
    "backend": "num_proc is the number of ranks; env sets their environment",
    "data_module": "rows come from the DataFrame; transform_fn changes whole batches of them",
    "continuous_cols": "list all columns in feature_cols; input_columns says how they are joined",
    "categorical_cols": "list all columns in feature_cols; input_columns says how they are joined",
    "loss_constructors": "loss takes anything that pickles, lambdas and local classes too",
    "train_minibatch_fn": "write the loop with hvd_core.torch and hvd_spark.run",
    "train_steps_per_epoch": "an epoch is every row once; max_steps ends the run after so many steps",
    "validation_steps_per_epoch": "validation uses every row of its part, once",
    "transformation_fn": "transform_fn gets and returns {column: numpy array}, not a pandas DataFrame",
    "transformation_edit_fields": "transform_fn may return columns of any shape",
    "transformation_removed_fields": "columns that are neither features nor labels are not read",
    "custom_objects": "Keras is not supported yet",
    "checkpoint_callback": "checkpoint_dir keeps the last and the best epoch",
    "trainer_args": "Lightning is not supported yet",
    "num_gpus": "training is on CPUs for now",
    "logger": "callbacks=[hvd_core.train.MLflow()] or TensorBoard(log_dir)",
    "profiler": "HVD_TIMELINE=path writes what each rank did",
    "terminate_on_nan": "a loss that is no number always ends training, with rank, step and column",
}


def translated(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """`values` without what has no effect, each in our terms. Raises InvalidArgument for what is refused; a
    value of None always means that nothing was said."""
    for given, value in values.items():
        name = snake(given)
        if name in INSTEAD:
            if value is not None:
                raise InvalidArgument(f"{given}: {INSTEAD[name]}")
        elif name in WITHOUT_EFFECT:
            if value is not None:
                warnings.warn(f"{given} has no effect: {WITHOUT_EFFECT[name]}", stacklevel=4)
        elif name in ("shuffle_buffer_size", "shuffling_buffer_size"):
            if value == 0:
                yield "shuffle", False
            elif value is not None:
                warnings.warn(f"{given} has no effect: the whole shard is shuffled", stacklevel=4)
        elif name == "gradient_compression":
            yield "wire_dtype", _wire_dtype(value)
        elif name == "output_cols":
            yield "prediction_col", _one_name(value)
        else:
            yield given, value


def snake(name: str) -> str:
    return "".join("_" + c.lower() if c.isupper() else c for c in name)


def _wire_dtype(value: Any) -> str | None:
    """Of `hvd.Compression.fp16`, ours or Horovod's, by the name of the class."""
    name = value if isinstance(value, str) else getattr(value, "__name__", type(value).__name__)
    for dtype in ("fp16", "bf16"):
        if name.lower() in (dtype, f"{dtype}compressor"):
            return dtype
    if value is None or name == "NoneCompressor":
        return None
    raise InvalidArgument(
        f"gradient_compression: {name} is none of hvd.Compression; wire_dtype='fp16' or 'bf16'"
    )


def _one_name(value: Any) -> str:
    names = [value] if isinstance(value, str) else list(value)
    if len(names) != 1:
        raise InvalidArgument(
            f"outputCols: {names}; give the first as prediction_col; further outputs are named it_1, it_2"
        )
    return str(names[0])


def with_shapes(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` in which Horovod's input_shapes and label_shapes, one for each column with -1 for the batch,
    have become shapes and input_columns. Raises InvalidArgument when they are not one for each column."""
    found = dict(values)
    shapes = dict(found.get("shapes") or {})
    for given, names in (("input_shapes", "feature_cols"), ("label_shapes", "label_cols")):
        if found.get(given) is None:
            found.pop(given, None)
            continue
        rows = [_row(given, shape) for shape in found.pop(given)]
        columns = list(found.get(names) or ())
        if len(rows) != len(columns):
            raise InvalidArgument(f"{given} has {len(rows)} shapes for {len(columns)} columns of {names}")
        for name, row in zip(columns, rows, strict=True):
            if row not in ((), (1,)):  # a number is that without being told
                shapes.setdefault(name, row)
        if given == "input_shapes" and "input_columns" not in found:
            found["input_columns"] = [
                [name] if row else name for name, row in zip(columns, rows, strict=True)
            ]
    if shapes:
        found["shapes"] = shapes
    return found


def _row(given: str, shape: Sequence[int]) -> tuple[int, ...]:
    if not shape or shape[0] != -1 or any(n < 1 for n in shape[1:]):
        raise InvalidArgument(
            f"{given}: {list(shape)} is not [-1, ...], -1 for the batch and the shape of a row"
        )
    return tuple(int(n) for n in shape[1:])
