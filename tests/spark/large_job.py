"""R15: a driver with 240 MB of weights: `python large_job.py fit|use DIRECTORY`. Prints JSON lines."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import nn

from tests.spark.cluster_job import tell
from tests.spark.sessions import session

WEIGHTS_NBYTES = 240_000_000


def memory(key: str) -> int:
    """Bytes this process has (VmRSS), or had at most (VmHWM) since `forget`."""
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def forget() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def ten_rows(spark: Any) -> Any:
    return spark.createDataFrame([(i / 10, 1.0 - i / 10) for i in range(10)], "x double, y double")


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 1e-3)


def fit(spark: Any, directory: Path) -> None:
    from hvd_spark import HorovodEstimator

    df = ten_rows(spark)
    df.count()
    libraries = memory("VmRSS")
    torch.manual_seed(15)
    net = nn.Sequential(nn.Linear(1, 6000), nn.Linear(6000, 10_000, bias=False), nn.Linear(10_000, 1))
    est = HorovodEstimator(
        model=net, optimizer=sgd, loss=nn.MSELoss(), feature_cols="x", label_cols="y", num_proc=2,
        batch_size=10, verbose=0,
    )  # fmt: skip
    before = memory("VmRSS")
    forget()
    model = est.fit(df)
    tell(case="fit", libraries=libraries, before=before, peak=memory("VmHWM"), after=memory("VmRSS"))
    forget()
    model.save(str(directory / "model"))
    tell(case="save", peak=memory("VmHWM"))
    with torch.inference_mode():
        rows = torch.tensor([[row.x] for row in df.collect()], dtype=torch.float32)
        wanted = model.getModel().eval()(rows).flatten().tolist()
    tell(case="wanted", wanted=wanted, changed=not torch.equal(net[2].bias, model.getModel()[2].bias))


def use(spark: Any, directory: Path) -> None:
    from hvd_spark import HorovodModel

    before = memory("VmRSS")
    forget()
    model = HorovodModel.load(str(directory / "model"))
    rows = model.transform(ten_rows(spark)).sort("x").collect()
    tell(case="use", got=[row.prediction for row in rows], before=before, peak=memory("VmHWM"))


if __name__ == "__main__":
    what, where = sys.argv[1:]
    # Spark's defaults for sizes of messages and results; the heap is for driver and executor, one process.
    made = session(**{"spark.driver.memory": "3g"})
    try:
        {"fit": fit, "use": use}[what](made, Path(where))
    finally:
        made.stop()
