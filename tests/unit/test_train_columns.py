"""The binding of columns to model inputs, the dtype rules, and what is refused before anything is
launched."""

from __future__ import annotations

import pickle
from typing import Any

import cloudpickle
import numpy as np
import pytest

pa = pytest.importorskip("pyarrow")
from hvd_core.errors import ColumnError, InvalidArgument  # noqa: E402
from hvd_core.train import Column, EarlyStopping, Scheduler, TrainSpec, columns_of, plan_layout  # noqa: E402
from hvd_core.train.columns import Layout, ModelFacts  # noqa: E402

pytestmark = pytest.mark.timeout(60)

VECTOR = pa.struct(
    [
        ("type", pa.int8()),
        ("size", pa.int32()),
        ("indices", pa.list_(pa.int32())),
        ("values", pa.list_(pa.float64())),
    ]
)
SCHEMA = pa.schema(
    [
        ("a", pa.float64()), ("b", pa.float32()), ("c", pa.float64()), ("i", pa.int32()), ("j", pa.int64()),
        ("flag", pa.bool_()), ("dec", pa.decimal128(10, 2)), ("v", VECTOR), ("l", pa.list_(pa.float32())),
        ("f3", pa.list_(pa.float32(), 3)), ("img", pa.list_(pa.list_(pa.list_(pa.float32(), 3), 8), 8)),
        ("raw", pa.binary()), ("city", pa.string()), ("day", pa.date32()),
        ("map", pa.map_(pa.string(), pa.int32())),
        ("y", pa.float64()), ("w", pa.float64()), ("held", pa.bool_()),
    ]
)  # fmt: skip


class Model:
    """Any object with parameters: the layout does not know torch."""

    def parameters(self) -> list[Any]:
        return []


def spec_of(**changes: Any) -> TrainSpec:
    base: dict[str, Any] = {
        "model": Model(), "optimizer": lambda params: None, "loss": lambda o, y: o, "label_cols": "y",
    }  # fmt: skip
    return TrainSpec(**{**base, **changes})


def facts(
    *inputs: str, required: int | None = None, varargs: bool = False, classes: bool = False
) -> ModelFacts:
    need = len(inputs) if required is None else required
    return ModelFacts(inputs, need, varargs, "float32", (classes,), "Net")


def layout(features: Any, inputs: ModelFacts, **changes: Any) -> Layout:
    return plan_layout(columns_of(SCHEMA), spec_of(feature_cols=features, **changes), inputs)


def shapes(found: Layout) -> list[tuple[str, str | None, tuple[int, ...] | None]]:
    return [(b.name, b.dtype, b.shape) for b in found.blocks]


ONE, TWO, FIVE = facts("x"), facts("x", "z"), facts("p", "q", "r", "s", "t")


@pytest.mark.parametrize(
    ("features", "inputs", "options", "expected"),
    [
        (["a", "b", "c"], ONE, {}, [("x", "float32", (3,))]),
        ("a", ONE, {}, [("x", "float32", (1,))]),
        (["i", "j"], ONE, {}, [("x", "int64", (2,))]),
        (["i", "a"], ONE, {}, [("x", "float32", (2,))]),
        (["i", "flag"], ONE, {}, [("x", "float32", (2,))]),
        ("dec", ONE, {}, [("x", "float32", (1,))]),
        (["i", "a"], TWO, {}, [("x", "int64", ()), ("z", "float32", ())]),
        ("f3", ONE, {}, [("x", "float32", (3,))]),
        (["f3", "a"], ONE, {}, [("x", "float32", (4,))]),
        ("img", ONE, {}, [("x", "float32", (8, 8, 3))]),
        ("l", ONE, {}, [("x", "float32", None)]),
        ("v", ONE, {}, [("x", "float32", None)]),
        ("l", ONE, {"shapes": {"l": (2, 2)}}, [("x", "float32", (2, 2))]),
        (["a", "b", "c"], TWO, {"input_columns": ["a", ["b", "c"]]},
         [("x", "float32", ()), ("z", "float32", (2,))]),
        (["a", "b"], facts("x", "mask", required=1), {}, [("x", "float32", (2,))]),
        (["a", "b"], facts(required=0, varargs=True), {"input_columns": ["b", "a"]},
         [("input 0", "float32", ()), ("input 1", "float32", ())]),
        (["i"], ONE, {"dtypes": {"i": "float64"}}, [("x", "float64", (1,))]),
    ],
)  # fmt: skip
def test_r02_binding(features: Any, inputs: ModelFacts, options: dict[str, Any], expected: Any) -> None:
    assert shapes(layout(features, inputs, **options))[:-1] == expected


def test_r02_a_label_may_be_a_string_or_a_list_and_order_is_kept() -> None:
    for label in ("y", ["y"]):
        found = layout(list("cab"), ONE, label_cols=label, sample_weight_col="w", validation="held")
        assert found.schema.names == ["c", "a", "b", "y", "w", "held"]
        assert [(b.role, b.dtype) for b in found.blocks[1:]] == [
            ("label", "float32"), ("weight", "float32"), ("validation", "uint8"),
        ]  # fmt: skip
    assert found.input_columns == ("c", "a", "b")


def test_labels_of_class_losses_are_int64_unless_they_are_probabilities() -> None:
    classes = facts("x", classes=True)
    for label, dtype in (("i", "int64"), ("a", "int64"), ("f3", "float32")):
        assert layout("b", classes, label_cols=label).labels[0].dtype == dtype
    assert layout("b", ONE, label_cols="i").labels[0].dtype == "float32"


@pytest.mark.parametrize(
    ("features", "inputs", "options", "words"),
    [
        (["a", "b", "c", "i", "j"], TWO, {}, ["takes 2 inputs (x, z)", "5 feature columns", "input_columns"]),
        (["a", "b"], FIVE, {}, ["takes 5", "2 feature columns"]),
        (["a"], ONE, {"input_columns": ["a", "a"]}, ["takes 1", "2 entries"]),
        (["a"], facts(required=0, varargs=True), {}, ["*args", "input_columns"]),
        (["a", "nope"], ONE, {}, ["'nope'", "'a'", "'city'"]),
        (["a", "city"], ONE, {}, ["'city'", "string", "StringIndexer", "boolean, integers"]),
        (["day"], ONE, {}, ["'day'", "date32", "cast"]),
        (["map"], ONE, {}, ["'map'", "map<"]),
        (["raw"], ONE, {}, ["'raw'", "binary", "transform_fn"]),
        (["img", "a"], ONE, {}, ["'img'", "(8, 8, 3)", "'a'"]),
        (["a"], ONE, {"label_cols": "city"}, ["'city'", "string"]),
        (["a"], ONE, {"sample_weight_col": "l"}, ["'l'", "one number"]),
        (["a"], ONE, {"validation": "w"}, ["'w'", "boolean"]),
        (["a"], ONE, {"validation": "nope"}, ["'nope'"]),
    ],
)
def test_r07_refused_with_the_column_the_type_and_what_to_do(
    features: Any, inputs: ModelFacts, options: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ColumnError) as caught:
        layout(features, inputs, **options)
    for word in words:
        assert word in str(caught.value)


def test_with_a_transform_the_rows_decide() -> None:
    found = layout("img2", ONE, transform_fn=lambda batch: batch, transform_cols=["raw", "city"])
    assert shapes(found) == [("x", None, None), ("y", None, None)]
    assert found.schema.names == ["raw", "city", "y"]
    assert found.input_columns == ("raw", "city")
    with pytest.raises(ColumnError, match="'nope'"):
        layout("img2", ONE, transform_fn=lambda batch: batch, transform_cols=["nope"])


def test_kinds_of_arrow_types() -> None:
    kinds = {c.name: (c.kind, c.leaf) for c in columns_of(SCHEMA)}
    assert kinds["v"] == ("vector", "float")
    assert kinds["img"] == ("array", "float")
    assert kinds["raw"][0] == "binary"
    assert {kinds[n][0] for n in ("city", "day", "map")} == {"unsupported"}
    assert kinds["flag"] == ("scalar", "bool")
    tensor = Column.of("t", pa.fixed_shape_tensor(pa.int8(), (2, 3)))
    assert (tensor.kind, tensor.shape, tensor.leaf) == ("array", (2, 3), "int")
    assert Column.of("n", pa.null()).kind == "unsupported"


def test_specs_and_layouts_pickle() -> None:
    spec = spec_of(feature_cols=["a"])
    assert cloudpickle.loads(cloudpickle.dumps(spec)).feature_cols == ("a",)
    found = layout(["a"], ONE)
    assert pickle.loads(pickle.dumps(found)) == found
    assert "feature_cols=('a',)" in str(spec)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": None}, "model and model_fn"),
        ({"model_fn": Model}, "model and model_fn"),
        ({"optimizer": None}, "optimizer is missing"),
        ({"optimizer": 3}, "optimizer must be"),
        ({"loss": None}, "loss is missing"),
        ({"loss": "mse"}, "loss must be callable"),
        ({"loss": [abs, abs]}, "2 losses for 1 label"),
        ({"loss": Column}, r"class Column; give an instance: Column\(\)"),
        ({"loss_weights": [1.0, 2.0]}, "2 loss_weights"),
        ({"metrics": {"m": 3}}, "metric 'm'"),
        ({"metrics": {"loss": abs}}, "metric 'loss'.*choose another"),
        ({"callbacks": ["stop"]}, "callback 'stop'"),
        ({"null_value": "x"}, "null_value must be a number"),
        ({"null_value": {"typo": 0}}, "typo"),
        ({"feature_cols": []}, "feature_cols is empty"),
        ({"label_cols": []}, "label_cols is empty"),
        ({"feature_cols": [1]}, "column names"),
        ({"input_columns": ["nope"]}, "nope"),
        ({"feature_cols": ["a", "b"], "input_columns": ["a"]}, "'b'"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": 2.5}, "batch_size"),
        ({"batch_size": 2, "global_batch_size": 4}, "not both"),
        ({"epochs": 0}, "epochs"),
        ({"seed": -1}, "seed"),
        ({"validation": 1.5}, "validation"),
        ({"learning_rate": 0}, "learning_rate"),
        ({"grad_clip_norm": -1}, "grad_clip_norm"),
        ({"ema_decay": 1.0}, "ema_decay"),
        ({"precision": "fp8"}, "precision must be one of"),
        ({"lr_scaling": "double"}, "lr_scaling"),
        ({"loss_reduction": "max"}, "loss_reduction"),
        ({"resume": True}, "resume needs checkpoint_dir"),
        ({"checkpoint_every": 1}, "checkpoint_every needs checkpoint_dir"),
        ({"lr_schedule": 3}, "lr_schedule"),
        ({"lr_schedule": Scheduler(abs), "warmup_epochs": 1.0}, "warmup_epochs"),
        ({"accumulate_steps": 0}, "accumulate_steps"),
        ({"early_stopping": EarlyStopping()}, "'val_loss'.*no validation rows"),
    ],
)
def test_bad_values_are_refused_when_the_spec_is_made(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        spec_of(**{"feature_cols": ["a"], **options})


def test_a_spec_prints_whatever_it_holds() -> None:
    weights, rule = np.array([1.0, 0.5]), np.array([0.1, 0.2])
    text = str(spec_of(feature_cols=["a"], label_cols=["y", "z"], loss_weights=weights, verbose=rule))
    assert "loss_weights=(1.0, 0.5)" in text
    assert "verbose=array([0.1, 0.2])" in text
    assert "shapes" not in text


def test_rules_of_early_stopping_and_scheduler() -> None:
    with pytest.raises(InvalidArgument, match=r"EarlyStopping\(metric=...\), not 'val_loss'"):
        spec_of(feature_cols=["a"], early_stopping="val_loss")
    rule = EarlyStopping("m", mode="max", min_delta=0.1)
    assert rule.better(1.0, None)
    assert not rule.better(1.05, 1.0)
    assert rule.better(1.2, 1.0)
    assert not rule.better(float("nan"), None)
    for make in (
        lambda: EarlyStopping(mode="up"),  # type: ignore[arg-type]
        lambda: EarlyStopping(patience=-1),
        lambda: Scheduler(abs, every="row"),  # type: ignore[arg-type]
        lambda: Scheduler(abs, every="step", metric="loss"),
    ):
        with pytest.raises(InvalidArgument):
            make()
