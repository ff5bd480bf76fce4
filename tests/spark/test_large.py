"""R15: weights of 240 MB, from fit to transform in another process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from . import large_job
from .drivers import facts, started

pytest.importorskip("pyspark")


@pytest.mark.slow
@pytest.mark.timeout(370)
def test_r15_large_weights(tmp_path: Path) -> None:
    found = facts(started(large_job.__file__, "fit", str(tmp_path)), 180)
    weights = large_job.WEIGHTS_NBYTES
    fit = found["fit"]
    assert found["wanted"]["changed"]
    assert fit["peak"] - fit["libraries"] < 4 * weights, "the user's own model included"
    assert fit["peak"] - fit["before"] < 2.5 * weights
    assert found["save"]["peak"] - fit["libraries"] < 4 * weights
    sizes = {path: path.stat().st_size for path in (tmp_path / "model").rglob("*") if path.is_file()}
    assert sum(sizes.values()) < 1.1 * weights
    assert all(size < 100_000 for path, size in sizes.items() if path.parent.name in ("metadata", "objects"))

    used = facts(started(large_job.__file__, "use", str(tmp_path)), 180)["use"]
    assert used["got"] == pytest.approx(found["wanted"]["wanted"], rel=1e-4)
    assert used["peak"] - used["before"] < 4 * weights
    assert os.listdir(tmp_path) == ["model"]
