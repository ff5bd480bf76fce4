"""The fitted model: a Transformer that predicts whole Arrow batches, and holds what training found."""

from __future__ import annotations

import hashlib
import json
import pickle
from dataclasses import replace
from typing import Any

import cloudpickle
import numpy as np
from pyspark.ml import Model
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T

from hvd_core.errors import ColumnError, InvalidArgument
from hvd_core.launch import dumps
from hvd_core.train import Column, FitResult, Layout, OutputSpec, TrainSpec, plan_layout
from hvd_core.train.framework import Framework, framework_of
from hvd_core.train.outputs import OutColumn, Wanted
from hvd_core.train.predict import Predictor

from . import preflight, session
from .columns import arrow_type, columns_of
from .horovod_names import with_shapes
from .outputs import fields_for
from .params import KNOBS, Knob, Knobs, provide
from .parcel import Parcel
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
    "input_shapes",
)


@provide(
    [k for k in KNOBS if k.serves]
    + [Knob("model", "torch module, or a model of another framework, that predicts")]
)
class HorovodModel(Model, Knobs, Stored):
    """Adds the model's output to a DataFrame, in the output's own dtype: a number where a row's output is one
    number, else an array; several outputs get `prediction`, `prediction_1`, ...

    For a classifier, which a model is that was trained with a loss of classes (or whose `heads` say so),
    `prediction` is the number of the class, and the vectors `probability` and `rawPrediction` are added; of
    two classes with one output (BCELoss, BCEWithLogitsLoss) it is the probability of class 1, and with a
    `threshold` the class. heads=["output"] gives the model's output as it is.

    Fitted by `HorovodEstimator`, or made from any torch module (or a model of a registered framework):

        HorovodModel(model=net, feature_cols=["a", "b"]).transform(df)

    `transform` runs no job. Raises ColumnError for columns that are missing or do not feed the model; its
    jobs fail on nulls in the features unless `null_value` is set.
    """

    def __init__(self, **values: Any):
        #: What training found; None when the model was not fitted here.
        self.result: FitResult | None = None
        #: How training fed the model, and the parameters for which that holds.
        self._trained: tuple[Layout, dict[str, Any]] | None = None
        self._sent: tuple[Any, Parcel, str] | None = None
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

    def getHistory(self) -> list[dict[str, Any]]:
        """`history`, by Horovod's name."""
        return self.history

    @property
    def hasSummary(self) -> bool:
        """Whether training left something to sum up: false for a model that was not fitted by hvd."""
        return self.result is not None

    @property
    def summary(self) -> FitResult:
        """What training found: history, rows, seconds. Raises RuntimeError as Spark's models do."""
        if self.result is None:
            raise RuntimeError(f"No training summary available for this {type(self).__name__}")
        return self.result

    def plot(self, path: Any = None) -> Any:
        """`summary.plot(path)`: losses, metrics, rows/s and where the time went, by epoch, as a matplotlib
        Figure."""
        return self.summary.plot(path)

    def _repr_html_(self) -> str | None:
        return self.summary._repr_html_() if self.hasSummary else None

    def getModel(self) -> Any:
        """A copy of the model with its weights, of the user's class."""
        return pickle.loads(cloudpickle.dumps(self._model()))

    def _model(self) -> Any:
        model = self._objects.get("model")
        if model is None:
            raise InvalidArgument("HorovodModel has no model: HorovodModel(model=net, feature_cols=[...])")
        return model

    def framework(self) -> Framework:
        """What runs the model."""
        return framework_of(self._model(), self._objects.get("framework"))

    def _transform(self, dataset: DataFrame) -> DataFrame:
        preflight.check_frame(dataset)
        preflight.check_interpreter(dataset.sparkSession)
        schema = dataset.schema
        layout, specs = self._form(schema)
        inputs = _inputs(layout, schema)
        added = fields_for(specs, self._wanted())
        _check_names([*schema.names, *(field.name for field, _ in added)])
        payload, key = self._payload(layout, dataset.sparkSession)
        serving = Serving(
            payload,
            key,
            inputs,
            tuple(column for _, column in added),
            self.getUseGpu(),  # type: ignore[attr-defined]
            session.import_path(dataset.sparkSession),
        )

        def serve(batches: Any) -> Any:
            yield from serving.run(batches)

        neutral = dataset.toDF(*(f"c{i}" for i in range(len(schema))))
        whole = T.StructType([*schema.fields, *(field for field, _ in added)])
        return session.map_in_arrow(neutral, serve, whole, barrier=False)

    def form(
        self, schema: T.StructType | None = None
    ) -> tuple[Layout, tuple[OutputSpec, ...], list[OutColumn]]:
        """How columns feed the model, its outputs, and the columns that `transform` adds for them. schema: of
        a DataFrame, needed when the model was not fitted by hvd, or InvalidArgument is raised."""
        if schema is None and (self._trained is None or self._trained[1] != self._values(_FEEDING)):
            raise InvalidArgument("this model was not fitted by hvd: set like=df, which has its columns")
        layout, specs = self._form(schema if schema is not None else T.StructType())
        return layout, specs, [column for _, column in fields_for(specs, self._wanted())]

    def _wanted(self) -> Wanted:
        names = ("prediction_col", "probability_col", "raw_prediction_col", "heads", "threshold")
        prediction, probability, raw, heads, threshold = (self._value(self._knobs[n]) for n in names)
        return Wanted(prediction, probability, raw, heads or [], threshold, self.getVectorPrediction())  # type: ignore[attr-defined]

    def _form(self, schema: T.StructType) -> tuple[Layout, tuple[OutputSpec, ...]]:
        """How columns feed the model, and the form of each output."""
        if (
            self.result is not None
            and self._trained is not None
            and self._trained[1] == self._values(_FEEDING)
        ):
            return self._trained[0], self.result.output_spec
        layout = self._layout_for(columns_of(schema))
        return layout, self._tried(layout)

    def _layout_for(self, columns: list[Column]) -> Layout:
        """How these columns feed a model that was not fitted for them; labels and loss play no part."""
        label = "label of a model that only predicts"
        spec = TrainSpec(
            model=self._model(),
            optimizer=_not_trained,
            loss=_not_trained,
            loss_reduction="mean",
            label_cols=[label],
            **with_shapes(self._values(name for name in _FEEDING if name != "model")),
        )
        facts = self.framework().facts(spec, to_train=False)
        return plan_layout([*columns, Column.of(label, arrow_type(T.DoubleType()))], spec, facts)

    def _tried(self, layout: Layout) -> tuple[OutputSpec, ...]:
        """What the model makes of one row of zeros."""
        for block in layout.inputs:
            if block.shape is None or block.dtype is None:
                names = ", ".join(map(repr, block.columns))
                raise ColumnError(f"the shape of a row of {names} is not known: set shapes={{column: shape}}")
        zeros = [np.zeros((1, *(b.shape or ())), b.dtype) for b in layout.inputs]
        try:
            outs = self.framework().predict(self._model(), zeros)
        except RuntimeError as error:  # what frameworks raise for shapes and dtypes that do not go together
            given = (f"{b.name} {x.dtype} {x.shape}" for b, x in zip(layout.inputs, zeros, strict=True))
            raise ColumnError(
                f"the model does not take one row of its inputs, {', '.join(given)}: {error}; "
                "dtypes={column: dtype} and shapes={column: shape of a row} change what it gets"
            ) from error
        return tuple(OutputSpec(str(o.dtype), o.shape[1:]) for o in outs)

    def _payload(self, layout: Layout, spark: SparkSession) -> tuple[Parcel, str]:
        """What makes the Predictor on the workers, with its hash; made once for each model and session."""
        asked = (self._model(), layout, self.getInferenceBatchSize(), spark)  # type: ignore[attr-defined]
        if self._sent is None or any(a is not b for a, b in zip(asked, self._sent[0], strict=True)):
            model, layout, batch_size, _ = asked
            options = {"batch_size": batch_size, "framework": self.framework()}
            payload = dumps(Predictor, (model, layout), options, names=["model"])
            key = hashlib.sha256(payload).hexdigest()
            self._sent = (asked, Parcel.of(spark, payload), key)
        return self._sent[1], self._sent[2]


def _not_trained(*_: Any) -> Any:
    """Stands where a TrainSpec wants an optimizer and a loss."""
    raise AssertionError("a model that only predicts has no optimizer and no loss")


def _check_names(names: list[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ColumnError(
                f"column {name!r} exists already: drop it, or set prediction_col, probability_col or "
                "raw_prediction_col to another name"
            )


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


#: Horovod's name; the loop is chosen by the model's type.
TorchModel = HorovodModel
