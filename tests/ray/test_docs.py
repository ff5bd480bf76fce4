"""Every Python example of docs/ray.md, and Ray's of the README, run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

ray_train = pytest.importorskip("ray.train")
torch = pytest.importorskip("torch")
import ray  # noqa: E402

import hvd_ray  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]


def examples(page: str) -> list[str]:
    return re.findall(r"^```python[^\n]*\n(.*?)^```", (ROOT / page).read_text(), flags=re.M | re.S)


@pytest.mark.slow
@pytest.mark.timeout(240, func_only=True)
def test_examples_run(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On two workers; the trainers of the README and of replacing, in local mode."""
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))  # Ray writes results there
    random = np.random.default_rng(0)
    a, b = random.normal(size=(2, 300)).astype(np.float32)
    ds = ray.data.from_arrow(pa.table({"a": a, "b": b, "y": 2 * a - b}))
    names: dict[str, Any] = {
        "torch": torch, "ray": ray, "hvd_ray": hvd_ray, "ds": ds, "net": torch.nn.Linear(2, 1),
        "ScalingConfig": ray_train.ScalingConfig, "FailureConfig": ray_train.FailureConfig,
        "RunConfig": ray_train.RunConfig,
    }  # fmt: skip

    def run(code: str, **more: Any) -> dict[str, Any]:
        scope = {**names, **more, "__name__": "__main__"}
        exec(compile(code, "ray.md", "exec"), scope)
        return scope

    def alone(code: str) -> str:
        assert "num_workers=2" in code
        return code.replace("num_workers=2", "num_workers=0")

    estimator, trainer, replacing, executor = examples("docs/ray.md")
    ran = run(estimator)
    assert len(ran["model"].history) == 3 and (tmp_path / "fit.png").exists()
    assert ran["model"].predict(ds).count() == 300
    loop = run(trainer)
    (weights,), _ = loop["result"].return_value
    assert weights[0] > 1 and weights[1] < -0.5, "on the way to 2 and -1"
    assert run(alone(replacing))["result"].metrics["loss"] < 1.5
    assert run(executor)["sums"] == pytest.approx([0.1, 0.1])
    (readme,) = [code for code in examples("README.md") if "hvd_ray import" in code]
    settings = {
        "model": torch.nn.Linear(2, 1), "optimizer": lambda p: torch.optim.SGD(p, 0.1),
        "loss": torch.nn.MSELoss(), "feature_cols": ["a", "b"], "label_cols": "y", "verbose": 0,
    }  # fmt: skip
    # The loop takes its learning rate from a config, which the README leaves out.
    shown = run(alone(readme), settings=settings, loop=lambda config: loop["loop"]({"lr": 0.1, **config}))
    assert shown["predictions"].count() == 300
