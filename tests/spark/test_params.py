"""Parameters: one table, two spellings, objects beside. Needs no Spark session."""

from __future__ import annotations

import inspect
from dataclasses import fields

import pytest

from hvd_core.train import TrainSpec
from hvd_spark.params import JOB, KNOBS


def test_every_field_of_the_spec_is_a_parameter():
    assert {f.name for f in fields(TrainSpec)} == {k.name for k in KNOBS} - JOB


def test_defaults_are_those_of_the_spec():
    spec = TrainSpec(model=1, optimizer=print, loss=print, feature_cols=["x"], label_cols=["y"])
    for knob in KNOBS:
        if knob.default is not None and knob.name not in JOB:
            assert getattr(spec, knob.name) == knob.default, knob.name


@pytest.fixture
def estimator(spark):
    from hvd_spark import HorovodEstimator

    return HorovodEstimator


def test_both_spellings_getters_and_setters(estimator):
    one = estimator(batch_size=3, learning_rate=0.5, feature_cols="a")
    two = estimator(batchSize=3, learningRate=0.5, featuresCol="a")
    for est in (one, two):
        assert (est.getBatchSize(), est.getLearningRate(), est.getFeatureCols()) == (3, 0.5, ["a"])
        assert est.extractParamMap()[est.batchSize] == 3
    assert one.setBatchSize(4).getBatchSize() == 4
    assert one.setBatchSize(None).getBatchSize() is None
    assert one.setParams(epochs=2, labelCol="y").getLabelCols() == ["y"]
    assert "rows of one rank" in one.explainParam("batchSize")
    assert one.getSeed() == 0, "a fixed seed, the same in every process"


def test_objects_are_shared_by_copies_and_not_changed(estimator):
    model = object()
    est = estimator(model=model)
    copy = est.copy().setModel(None)
    assert est.getModel() is model
    assert copy.getModel() is None
    assert "model" not in {p.name for p in est.params}


def test_signature_shows_the_parameters(estimator):
    parameters = inspect.signature(estimator).parameters
    assert list(parameters) == [k.name for k in KNOBS]
    assert parameters["prediction_col"].default == "prediction"


def test_wrong_names_and_types(estimator):
    with pytest.raises(TypeError, match="no parameter 'epoch'; did you mean epochs"):
        estimator(epoch=1)
    with pytest.raises(TypeError, match=r"(?i)convert|int"):
        estimator(batch_size="many")
