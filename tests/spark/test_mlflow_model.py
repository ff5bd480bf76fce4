"""R17: out of Spark into MLflow, and back, where there is no hvd."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn

import hvd_spark.mlflow
from hvd_core.train import Column, TrainSpec, plan_layout
from hvd_core.train.result import OutputSpec
from hvd_core.train.torch_export import write_code, write_model
from hvd_spark import HorovodEstimator, HorovodModel, InvalidArgument

from . import nets

pytestmark = pytest.mark.slow

#: hvd cannot be imported; what is loaded must not even try.
WITHOUT_HVD = """
import json, sys, warnings
warnings.simplefilter("ignore")
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("hvd_core", "hvd_spark", "pyspark"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import mlflow, pandas, numpy as np
rows = json.loads(sys.stdin.read())
model = mlflow.pyfunc.load_model(sys.argv[1])
out = model.predict(pandas.DataFrame(rows, index=[10 + i for i in range(len(rows["a"]))]))
plain = mlflow.pytorch.load_model(sys.argv[2])
print(json.dumps({
    "columns": list(out.columns), "index": out.index.tolist(),
    **{name: np.stack(out[name].to_numpy()).tolist() for name in out.columns},
    "plain": type(plain).__name__, "device": {str(p.device) for p in plain.parameters()} and "cpu",
    "hvd": [m for m in sys.modules if m.startswith(("hvd_core", "hvd_spark"))],
}))
"""


@pytest.fixture
def mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    warnings.simplefilter("ignore")
    import mlflow
    import mlflow.pyfunc
    import mlflow.pytorch

    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    yield mlflow
    mlflow.set_tracking_uri(before)


@pytest.mark.filterwarnings("ignore")
def test_r17_a_model_goes_through_mlflow(spark: Any, mlflow: Any, tmp_path: Path) -> None:
    torch.manual_seed(5)
    rng = np.random.default_rng(5)
    x = rng.normal(size=(60, 2))
    rows = [(float(a), [float(b)], int(a > b)) for a, b in x]
    df = spark.createDataFrame(rows, "a double, b array<double>, kind long").repartition(2).cache()
    net = nets.OneInput(2, outputs=2)
    model = HorovodEstimator(
        model=net, optimizer=nets.adam, loss=nn.CrossEntropyLoss(), feature_cols=["a", "b"],
        label_cols="kind", num_proc=2, batch_size=15, epochs=2,
    ).fit(df)  # fmt: skip
    plain = model.getModel()
    assert type(plain) is nets.OneInput and {p.device.type for p in plain.parameters()} == {"cpu"}
    rows = model.transform(df).collect()
    with mlflow.start_run():
        info = hvd_spark.mlflow.log_model(model, "model")
        other = mlflow.pytorch.log_model(
            plain, name="plain", serialization_format="pickle", pip_requirements=["torch"]
        )
    assert [c.name for c in info.signature.inputs.inputs] == ["a", "b"]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_HVD, info.model_uri, other.model_uri],
        input=json.dumps({"a": [r.a for r in rows], "b": [r.b for r in rows]}),
        env={**os.environ, "MLFLOW_TRACKING_URI": mlflow.get_tracking_uri(), "PYTHONPATH": os.getcwd()},
        capture_output=True, text=True, timeout=80, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["columns"] == ["prediction", "probability", "rawPrediction"]
    assert told["index"] == [10 + i for i in range(60)]
    assert told["prediction"] == [r.prediction for r in rows]
    np.testing.assert_allclose(told["probability"], [r.probability.toArray() for r in rows], rtol=1e-6)
    np.testing.assert_allclose(told["rawPrediction"], [r.rawPrediction.toArray() for r in rows], rtol=1e-6)
    assert (told["plain"], told["hvd"]) == ("OneInput", [])
    # Back again: model and columns are all that is needed.
    loaded = mlflow.pytorch.load_model(other.model_uri)
    back = HorovodModel(model=loaded, feature_cols=["a", "b"], shapes={"b": [1]}, prediction_col="out")
    got = [row.out for row in back.transform(df).collect()]
    np.testing.assert_allclose(got, [r.rawPrediction.toArray() for r in rows], rtol=1e-6)
    with pytest.raises(InvalidArgument, match="not fitted by hvd: set like=df"):
        hvd_spark.mlflow.save_model(back, f"{tmp_path}/m")
    hvd_spark.mlflow.save_model(back, f"{tmp_path}/m", like=df)
    frame = mlflow.pyfunc.load_model(f"{tmp_path}/m").predict(df.select("a", "b").toPandas())
    np.testing.assert_allclose(np.stack(frame["out"]), got, rtol=1e-6)


class Exotic(nn.Module):
    """Two inputs, two outputs, bfloat16 and numbers of an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 1).bfloat16()
        self.ids = nn.Embedding(5, 4).bfloat16()

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.lin(x + self.ids(ids)), x.flatten(1).sum(1)


def test_what_a_pyfunc_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the Predictor on the same rows as Arrow."""
    import pandas

    from hvd_core.train.predict import Predictor

    torch.manual_seed(2)
    model = Exotic()
    spec = TrainSpec(
        model=model, optimizer=nets.sgd, loss=nn.MSELoss(), feature_cols=["x", "id"], label_cols="y",
        null_value={"id": 1}, shapes={"x": (4,)},
    )  # fmt: skip
    types = [pa.list_(pa.float64()), pa.int64(), pa.float64()]
    layout = plan_layout([Column.of(n, t) for n, t in zip(["x", "id", "y"], types, strict=True)], spec)
    rows = [[float(i + j) for j in range(4)] for i in range(5)]
    batch = pa.RecordBatch.from_arrays(
        [pa.array(rows, types[0]), pa.array([0, 4, None, 2, 3], types[1])], names=["x", "id"]
    )
    want = Predictor(model, layout, batch_size=2).predict(batch)
    common = {"what": "prediction", "head": "output", "threshold": None}
    outputs = [
        {"name": "p", "output": 0, "form": "flat", **common},
        {"name": "q", "output": 1, "form": "flat", **common},
    ]
    specs = [OutputSpec("float32", (1,)), OutputSpec("float32", ())]
    write_model(tmp_path / "data", model, layout, specs, outputs, batch_size=2)
    monkeypatch.syspath_prepend(str(write_code(tmp_path).parent))
    from hvd_pyfunc.torch_pyfunc import _load_pyfunc  # type: ignore[import-not-found]

    loaded = _load_pyfunc(str(tmp_path / "data"))
    frame = pandas.DataFrame({"x": rows, "id": [0, 4, np.nan, 2, 3]})
    for given in (frame, {"x": [np.array(r) for r in rows], "id": [0, 4, None, 2, 3]}):
        out = loaded.predict(given)
        np.testing.assert_allclose(out["p"], want[0][:, 0], rtol=1e-6)
        np.testing.assert_allclose(out["q"], want[1], rtol=1e-6)
    assert list(loaded.predict(frame.iloc[:0])["p"]) == []
    for bad, words in (
        ({"x": rows}, "column 'id' does not exist; needed are 'x', 'id'"),
        ({"x": [*rows[:4], None], "id": [0] * 5}, "column 'x' has 1 nulls in 5 rows"),
        ({"x": [*rows[:4], [1.0]], "id": [0] * 5}, "column 'x' has rows of different shapes"),
        ({"x": rows, "id": np.array([0.5] * 5)}, "column 'id' must hold whole numbers"),
        (np.zeros((2, 3)), r"shape \(2, 3\), but \(rows, 2\)"),
    ):
        with pytest.raises(ValueError, match=words):
            loaded.predict(bad)
