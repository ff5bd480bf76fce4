"""What is found before the launch, and what the counts say after it."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import Row
from pyspark.sql import types as T

import hvd_spark
from hvd_core.errors import CheckpointError, PlainTextRefused
from hvd_core.train import Column, OutputSpec
from hvd_core.train.outputs import Wanted
from hvd_spark import (
    ColumnError,
    HorovodEstimator,
    NotEnoughSlots,
    NotPicklable,
    PreflightError,
    RowsLost,
    columns,
    launcher,
    preflight,
    rows,
    session,
)
from hvd_spark.estimator import _planned
from hvd_spark.outputs import fields_for


@pytest.fixture
def interpreter(spark: Any, monkeypatch: Any) -> Any:
    return lambda path: monkeypatch.setattr(spark.sparkContext, "pythonExec", path)


def test_local_mode_takes_the_drivers_interpreter_when_nothing_is_set(
    spark: Any, interpreter: Any, tmp_path: Any, monkeypatch: Any
) -> None:
    """As for a newcomer: another python3 comes first in the PATH, and nobody has heard of PYSPARK_PYTHON."""
    (tmp_path / "python3").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "python3").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("PYSPARK_PYTHON")
    interpreter("python3")
    assert hvd_spark.run(_prefix, num_proc=1) == [sys.prefix]
    assert spark.sparkContext.pythonExec == "python3"


def _prefix() -> str:
    return sys.prefix


def test_another_version_of_hvd_on_the_executors(spark: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("hvd_core.__version__", "0.0.9")
    with pytest.raises(PreflightError, match=r"hvd 0\.0\.9, which the driver has: \d.* is there .* on "):
        hvd_spark.run(_prefix, num_proc=2)


def test_interpreter_that_does_not_exist(spark: Any, interpreter: Any, job_count: Any) -> None:
    before = job_count()
    interpreter("/nowhere/python3")
    with pytest.raises(PreflightError, match=f"(?s)/nowhere/python3.*PYSPARK_PYTHON={sys.executable}"):
        hvd_spark.run(len, ("x",), num_proc=2)
    assert job_count() == before


def test_interpreter_without_hvd(spark: Any, interpreter: Any, tmp_path: Any) -> None:
    bare = tmp_path / "python3"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    interpreter(str(bare))
    from torch import nn

    with pytest.raises(PreflightError, match=r"(?s)cannot run hvd.*ModuleNotFoundError"):
        hvd_spark.run(len, ("x",), num_proc=2)
    model = hvd_spark.HorovodModel(model=nn.Linear(1, 1), feature_cols="x")
    with pytest.raises(PreflightError, match=r"(?s)cannot run hvd.*ModuleNotFoundError"):
        model.transform(spark.createDataFrame([(1.0,)], ["x"]))


def test_session_that_was_stopped(spark: Any, monkeypatch: Any) -> None:
    from torch import nn

    frame = spark.createDataFrame([(1.0,)], ["x"])
    monkeypatch.setattr(spark.sparkContext, "_jsc", None)  # what stop() does
    with pytest.raises(PreflightError, match="was stopped"):
        hvd_spark.HorovodModel(model=nn.Linear(1, 1), feature_cols="x").transform(frame)


@pytest.fixture
def settings(monkeypatch: Any) -> dict[str, str]:
    """What is set in the test is all that is known of the session."""
    told: dict[str, str] = {}
    monkeypatch.setattr(session, "setting", lambda spark, key, default="": told.get(key, default))
    return told


@pytest.mark.parametrize("has_context", [True, False])
def test_dynamic_allocation_is_named(
    spark: Any, settings: dict[str, str], monkeypatch: Any, has_context: bool
) -> None:
    """Under Connect, where there is no context, as well."""
    if not has_context:
        monkeypatch.setattr(session, "context_of", lambda spark: None)
    settings["spark.dynamicAllocation.enabled"] = "true"
    settings["spark.master"] = "local[2]"
    assert preflight.check_cluster(spark, 2) == 2, "which Spark ignores in one process"
    settings["spark.master"] = "spark://host:7077"
    with pytest.raises(PreflightError, match=r"spark\.dynamicAllocation\.enabled=false"):
        preflight.check_cluster(spark, 2)


@pytest.mark.parametrize(
    "key",
    [
        "spark.ssl.enabled",
        "spark.ssl.rpc.enabled",
        "spark.network.crypto.enabled",
        "spark.authenticate.enableSaslEncryption",
    ],
)
def test_what_encrypts_is_named(spark: Any, settings: dict[str, str], monkeypatch: Any, key: str) -> None:
    settings.update({"spark.master": "spark://host:7077", key: "true"})
    with pytest.raises(PlainTextRefused, match=rf"^{re.escape(key)}=true .*HVD_PLAIN_TEXT=1"):
        preflight.check_cluster(spark, 2)
    assert preflight.check_cluster(spark, 1) == 1
    settings["spark.master"] = "local[2]"
    assert preflight.check_cluster(spark, 2) == 2, "nothing leaves the process"
    settings["spark.master"] = "spark://host:7077"
    monkeypatch.setenv("HVD_PLAIN_TEXT", "1")
    assert preflight.check_cluster(spark, 2) == 2


def test_a_session_with_ssl(spark: Any, monkeypatch: Any, job_count: Any) -> None:
    monkeypatch.setattr(session, "is_local_master", lambda master: False)
    before = job_count()
    spark.conf.set("spark.ssl.enabled", "true")
    try:
        with pytest.raises(PlainTextRefused, match=r"spark\.ssl\.enabled=true .*HVD_PLAIN_TEXT=1"):
            hvd_spark.run(_prefix, num_proc=2)
        assert job_count() == before
        monkeypatch.setenv("HVD_PLAIN_TEXT", "1")
        assert hvd_spark.run(_prefix, num_proc=2) == [sys.prefix] * 2
    finally:
        spark.conf.unset("spark.ssl.enabled")


def test_what_cannot_work_is_told_within_a_second(spark: Any, job_count: Any) -> None:
    """The best of three tries, as the machine may be busy; Spark is in use already."""
    from torch import nn

    from . import nets

    df = spark.createDataFrame([(1.0, 2.0)], ["x", "y"])
    lock = threading.Lock()

    def estimator(**options: Any) -> HorovodEstimator:
        defaults = {
            "model": nets.OneInput(1), "optimizer": nets.sgd, "loss": nn.MSELoss(), "feature_cols": "x",
            "label_cols": "y", "num_proc": 2,
        }  # fmt: skip
        return HorovodEstimator(**{**defaults, **options})

    wrong: list[tuple[dict[str, Any], type[Exception]]] = [
        ({"num_proc": 9}, NotEnoughSlots),
        ({"feature_cols": "z"}, ColumnError),
        ({"model": nets.TwoInputs()}, ColumnError),
        ({"callbacks": [lambda run, logs: lock.acquire()]}, NotPicklable),
        ({"checkpoint_dir": "/proc/nowhere"}, CheckpointError),
    ]
    before = job_count()
    for options, kind in wrong:

        def refused(options: dict[str, Any] = options, kind: type[Exception] = kind) -> None:
            with pytest.raises(kind):
                estimator(**options).fit(df)

        assert _shortest_s(refused) < 1, options
    assert _shortest_s(lambda: _planned(df, [estimator()])) < 1, "and so is what can"
    assert job_count() == before


def _shortest_s(call: Any) -> float:
    took_s = []
    for _ in range(3):
        start = time.monotonic()
        call()
        took_s.append(time.monotonic() - start)
    return min(took_s)


def test_slots_unknown_as_in_connect(spark: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(session, "context_of", lambda spark: None)
    assert preflight.check_cluster(spark, None) == 2, "what local[2] says"
    with pytest.raises(NotEnoughSlots, match="7 ranks need 7 slots"):
        preflight.check_cluster(spark, 7)
    monkeypatch.setattr(session, "setting", lambda spark, key, default="": default)
    assert preflight.check_cluster(spark, 7) == 7
    with pytest.raises(PreflightError, match="set num_proc"):
        preflight.check_cluster(spark, None)


def test_slots_that_come_late(spark: Any, monkeypatch: Any) -> None:
    """Executors that register a moment after the session has started are waited for."""
    monkeypatch.setattr(session, "is_local", lambda context: False)
    monkeypatch.setattr(session, "_SLOTS_WAIT_S", 0.3)
    assert session.slots(spark, 2) == 2
    with pytest.raises(NotEnoughSlots):
        preflight.check_cluster(spark, 3)


def test_rows_that_get_lost_on_the_way(spark: Any, monkeypatch: Any) -> None:
    from torch import nn

    from . import nets

    def read(collected: Any) -> rows.Collected:
        found = whole(collected)
        found.rows[0] -= 1
        return found

    whole = rows.read
    monkeypatch.setattr(launcher.rows, "read", read)
    est = hvd_spark.HorovodEstimator(
        model=nets.OneInput(1), optimizer=nets.sgd, loss=nn.MSELoss(), feature_cols="x", label_cols="x",
        num_proc=1,
    )  # fmt: skip
    with pytest.raises(RowsLost, match="sent 3 rows, the ranks took 2"):
        est.fit(spark.createDataFrame([(1.0,), (2.0,), (3.0,)], ["x"]))


def test_columns_of_a_schema() -> None:
    from pyspark.ml.linalg import DenseVector, VectorUDT

    schema = T.StructType(
        [
            T.StructField("flag", T.BooleanType()),
            T.StructField("price", T.DecimalType(10, 2)),
            T.StructField("grid", T.ArrayType(T.ArrayType(T.FloatType()))),
            T.StructField("free", VectorUDT()),
            T.StructField("known", VectorUDT(), True, {"ml_attr": {"num_attrs": 4}}),
            T.StructField("tags", T.MapType(T.StringType(), T.LongType())),
            T.StructField("span", T.DayTimeIntervalType()),
        ]
    )
    found = columns.columns_of(schema)
    kinds = {c.name: (c.kind, c.shape) for c in found}
    assert kinds == {
        "flag": ("scalar", ()),
        "price": ("scalar", ()),
        "grid": ("array", None),
        "free": ("vector", None),
        "known": ("vector", (4,)),
        "tags": ("unsupported", None),
        "span": ("unsupported", None),
    }
    row = Row(True, None, [[1.0, 2.0, 3.0]], DenseVector([0.0, 1.0]), None, {}, None)
    shapes = {c.name: c.shape for c in columns.with_shapes_of(found, row)}
    assert shapes["grid"] == (1, 3)
    assert shapes["free"] == (2,)
    assert shapes["known"] == (4,)


def test_shape_of_a_null_stays_open() -> None:
    column = Column.of("x", columns.arrow_type(T.ArrayType(T.DoubleType())))
    assert columns.with_shapes_of([column], Row(None))[0].shape is None


def test_predictions_keep_their_type() -> None:
    assert columns.spark_type(pa.float64()) == T.DoubleType()
    assert columns.spark_type(pa.int64()) == T.LongType()
    specs = [OutputSpec("float16", ()), OutputSpec("float32", (2, 3)), OutputSpec("uint8", ())]
    wanted = Wanted("prediction", "", "", [], None, False)
    assert [field.dataType.simpleString() for field, _ in fields_for(specs, wanted)] == [
        "float",
        "array<array<float>>",
        "smallint",
    ]
