"""Every Python example of the README and of docs/ that is not Ray's runs as it stands there."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from . import nets

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", *(f"docs/{p.name}" for p in sorted((ROOT / "docs").glob("*.md")) if p.stem != "ray")]
#: Run in tests/ranks/test_readme.py without Spark, and with Ray.
ELSEWHERE = ("hvd_core.run(train", "from hvd_ray import")


def examples() -> list[tuple[str, str]]:
    """(page, code)"""
    return [
        (page, code)
        for page in PAGES
        for code in re.findall(r"^```python[^\n]*\n(.*?)^```", (ROOT / page).read_text(), flags=re.M | re.S)
        if not any(words in code for words in ELSEWHERE)
    ]


def on_a_rank() -> nn.Module:
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # a server would need none
    return nets.OneInput(3)


@pytest.mark.slow
@pytest.mark.timeout(500, func_only=True)
@pytest.mark.filterwarnings("ignore")
def test_examples_run(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    import mlflow

    from hvd_spark import HorovodEstimator, HorovodModel

    df = spark.range(40).selectExpr(
        "id / 4.0d AS distance", "id % 24 AS hour", "id / 2.0d AS temp", "id / 10.0d AS arr_delay"
    )
    net = nets.OneInput(3)
    saved = net.lin.weight.detach().clone()  # one example loads other weights into net
    settings = {
        "model_fn": on_a_rank, "optimizer": nets.sgd, "loss": nn.MSELoss(),
        "learning_rate": 1e-4, "num_proc": 2, "feature_cols": ["distance", "hour", "temp"],
        "label_cols": "arr_delay", "verbose": 0,
    }  # fmt: skip
    HorovodModel(model=net, feature_cols=settings["feature_cols"]).save(f"file:{tmp_path}/model")
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    names: dict[str, Any] = {
        "spark": spark, "df": df, "df2": df, "net": net, "settings": settings, "mlflow": mlflow,
        "HorovodEstimator": HorovodEstimator, "HorovodModel": HorovodModel, "torch": torch, "nn": nn,
    }  # fmt: skip
    ran = []
    try:
        for page, code in examples():
            code = code.replace("s3://bucket", f"file://{tmp_path}")
            exec(compile(code, page, "exec"), scope := {**names, "__name__": "__main__"})
            ran.append((page, scope))
    finally:
        mlflow.set_tracking_uri(before)
    (told,) = [scope for page, scope in ran if page == "README.md" and "estimator" in scope]
    assert len(told["model"].history) == 3
    (served,) = [scope["served"] for page, scope in ran if "served" in scope]
    assert len(served) == 40
    (state,) = [scope["state"] for page, scope in ran if "state" in scope]
    assert torch.equal(state["lin.weight"], saved)
    assert len(ran) == 5
