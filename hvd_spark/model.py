"""The fitted model: a Transformer that predicts whole Arrow batches, and holds what training found."""

from __future__ import annotations

import hashlib
import json
import math
import pickle
from dataclasses import replace
from typing import Any

import cloudpickle
import numpy as np
from pyspark.ml import Model
from pyspark.sql import DataFrame
from pyspark.sql import types as T

from hvd_core.errors import ColumnError, InvalidArgument
from hvd_core.launch import dumps
from hvd_core.train import Column, FitResult, Layout, OutputSpec, TrainSpec, plan_layout
from hvd_core.train.predict import Predictor
from hvd_core.train.torch_model import run_model

from . import preflight, session
from .columns import arrow_type, columns_of, spark_type
from .params import KNOBS, Knob, Knobs, provide
from .persist import Stored, columns_from_json, columns_to_json
from .serve import Serving

#: Parameters that say how columns become inputs.
_FEEDING = (
    "model",
    "feature_cols",
    "input_columns",
    "shapes",
    "dtypes",
    "null_value",
    "transform_fn",
    "transform_cols",
)


@provide([k for k in KNOBS if k.serves] + [Knob("model", "torch.nn.Module that predicts")])
class HorovodModel(Model, Knobs, Stored):
    """Adds the model's output to a DataFrame, in the output's own dtype: a number where a row's output is one
    number, else an array; several outputs get `prediction`, `prediction_1`, ...

    Fitted by `HorovodEstimator`, or made from any torch module:

        HorovodModel(model=net, feature_cols=["a", "b"]).transform(df)

    `transform` runs no job. Raises ColumnError for columns that are missing or do not feed the model; its
    jobs fail on nulls in the features unless `null_value` is set.
    """

    def __init__(self, **values: Any):
        #: What training found; None when the model was not fitted here.
        self.result: FitResult | None = None
        #: How training fed the model, and the parameters for which that holds.
        self._trained: tuple[Layout, dict[str, Any]] | None = None
        self._pickled: tuple[Any, bytes, str] | None = None
        super().__init__(values)

    def __repr__(self) -> str:
        return f"HorovodModel: uid={self.uid}, model={type(self._objects.get('model')).__name__}"

    def fitted(self, layout: Layout, result: FitResult) -> HorovodModel:
        """For the estimator: what came with the weights, which the model has. Returns self."""
        self.result, self._trained = replace(result, weights=b""), (layout, self._values(_FEEDING))
        return self

    def _kept(self) -> dict[str, Any]:
        if self.result is None or self._trained is None:
            return {}
        kept: dict[str, Any] = {"result": json.loads(self.result.to_json())}
        if self._trained[1] == self._values(_FEEDING):
            kept["columns"] = columns_to_json(self._trained[0].columns)
        return kept

    def _restore(self, kept: dict[str, Any]) -> None:
        if "result" in kept:
            self.result = FitResult.from_json(json.dumps(kept["result"]))
        if "columns" in kept:
            layout = self._layout_for(list(columns_from_json(kept["columns"])))
            self._trained = (layout, self._values(_FEEDING))

    @property
    def history(self) -> list[dict[str, Any]]:
        """A dict for each epoch: loss, metrics, val_*, rows, seconds; [] when not fitted here."""
        return list(self.result.history) if self.result is not None else []

    def getModel(self) -> Any:
        """A copy of the model with its weights, of the user's class."""
        return pickle.loads(cloudpickle.dumps(self._model()))

    def _model(self) -> Any:
        model = self._objects.get("model")
        if model is None:
            raise InvalidArgument("HorovodModel has no model: HorovodModel(model=net, feature_cols=[...])")
        return model

    def _transform(self, dataset: DataFrame) -> DataFrame:
        preflight.check_frame(dataset)
        preflight.check_interpreter(dataset.sparkSession)
        schema = dataset.schema
        layout, outs = self._form(schema)
        inputs = _inputs(layout, schema)
        fields = [
            T.StructField(name, spark_type(output.dtype, () if _flat(output) else output.shape))
            for name, output in outs
        ]
        taken = [field.name for field in fields if field.name in schema.names]
        if taken:
            raise ColumnError(
                f"column {taken[0]!r} exists already: drop it, or set prediction_col to another name"
            )
        payload, key = self._payload(layout)
        outputs = tuple(
            (field.name, arrow_type(field.dataType), _flat(output))
            for field, (_, output) in zip(fields, outs, strict=True)
        )
        serving = Serving(payload, key, inputs, outputs, session.import_path(dataset.sparkSession))

        def serve(batches: Any) -> Any:
            yield from serving.run(batches)

        neutral = dataset.toDF(*(f"c{i}" for i in range(len(schema))))
        return session.map_in_arrow(neutral, serve, T.StructType([*schema.fields, *fields]), barrier=False)

    def _form(self, schema: T.StructType) -> tuple[Layout, list[tuple[str, OutputSpec]]]:
        """How columns feed the model, and name and form of each output."""
        if (
            self.result is not None
            and self._trained is not None
            and self._trained[1] == self._values(_FEEDING)
        ):
            layout, specs = self._trained[0], self.result.output_spec
        else:
            layout = self._layout_for(columns_of(schema))
            specs = self._tried(layout)
        name = self.getPredictionCol()  # type: ignore[attr-defined]
        return layout, [(name if i == 0 else f"{name}_{i}", spec) for i, spec in enumerate(specs)]

    def _layout_for(self, columns: list[Column]) -> Layout:
        """How these columns feed a model that was not fitted for them; labels and loss play no part."""
        model = self.getModel()
        for parameter in model.parameters():
            parameter.requires_grad_(True)  # a frozen model serves as well
        label = "label of a model that only predicts"
        spec = TrainSpec(
            model=model,
            optimizer=_not_trained,
            loss=_not_trained,
            loss_reduction="mean",
            label_cols=[label],
            **self._values(name for name in _FEEDING if name != "model"),
        )
        return plan_layout([*columns, Column.of(label, arrow_type(T.DoubleType()))], spec)

    def _tried(self, layout: Layout) -> tuple[OutputSpec, ...]:
        """What the model makes of one row of zeros."""
        for block in layout.inputs:
            if block.shape is None or block.dtype is None:
                names = ", ".join(map(repr, block.columns))
                raise ColumnError(f"the shape of a row of {names} is not known: set shapes={{column: shape}}")
        zeros = [np.zeros((1, *(b.shape or ())), b.dtype) for b in layout.inputs]
        try:
            outs = run_model(self.getModel(), zeros)
        except RuntimeError as error:  # what torch raises for shapes and dtypes that do not go together
            given = (f"{b.name} {x.dtype} {x.shape}" for b, x in zip(layout.inputs, zeros, strict=True))
            raise ColumnError(
                f"the model does not take one row of its inputs, {', '.join(given)}: {error}; "
                "dtypes={column: dtype} and shapes={column: shape of a row} change what it gets"
            ) from error
        return tuple(OutputSpec(str(o.dtype), o.shape[1:]) for o in outs)

    def _payload(self, layout: Layout) -> tuple[bytes, str]:
        """What makes the Predictor on the workers, with its hash; made once for each model."""
        asked = (self._model(), layout, self.getInferenceBatchSize())  # type: ignore[attr-defined]
        if self._pickled is None or any(a is not b for a, b in zip(asked, self._pickled[0], strict=True)):
            model, layout, batch_size = asked
            payload = dumps(Predictor, (model, layout), {"batch_size": batch_size}, names=["model"])
            self._pickled = (asked, payload, hashlib.sha256(payload).hexdigest())
        return self._pickled[1], self._pickled[2]


def _not_trained(*_: Any) -> Any:
    """Stands where a TrainSpec wants an optimizer and a loss."""
    raise AssertionError("a model that only predicts has no optimizer and no loss")


def _flat(output: OutputSpec) -> bool:
    """A row's output is one number."""
    return math.prod(output.shape) == 1


def _inputs(layout: Layout, schema: T.StructType) -> tuple[tuple[int, str], ...]:
    """Where the columns that the model needs are. Raises ColumnError."""
    have = {column.name: (i, column) for i, column in enumerate(columns_of(schema))}
    trained = {column.name: column for column in layout.columns}
    found = []
    for name in layout.input_columns:
        if name not in have:
            raise ColumnError(
                f"column {name!r} does not exist; there are {', '.join(map(repr, have)) or 'none'}"
            )
        i, column = have[name]
        if column.kind != trained[name].kind:
            raise ColumnError(
                f"column {name!r} is {column.type} here, but the model was made for {trained[name].type}"
            )
        found.append((i, name))
    return tuple(found)
