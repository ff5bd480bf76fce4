"""In a real kernel: the quickstart; progress and what ranks print are in the cell; an interrupt ends them."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from hvd_core.launch.cell import as_html

from ..notebooks import Notebook, errors, run_all, said
from . import jobs

pytestmark = pytest.mark.slow

QUICKSTART = Path(__file__).parents[2] / "examples" / "spark_quickstart.ipynb"

SETUP = """
import os, sys, warnings
warnings.simplefilter("ignore")
import torch
from torch import nn
from pyspark.sql import SparkSession
import hvd_spark

spark = (SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
         .config("spark.driver.bindAddress", "127.0.0.1").config("spark.driver.host", "127.0.0.1")
         .config("spark.ui.showConsoleProgress", "false").getOrCreate())
spark.sparkContext.setLogLevel("OFF")
df = spark.range(400).selectExpr("id / 400.0d AS x", "id / 200.0d AS y")

class Say:
    def on_epoch_end(self, run, logs):
        if run.epoch == 0:
            print(f"rank {run.rank} is {os.getpid()}", flush=True)

def fit(epochs):
    return hvd_spark.HorovodEstimator(
        model=nn.Linear(1, 1), optimizer=lambda p: torch.optim.SGD(p, 0.01), loss=nn.MSELoss(),
        feature_cols="x", label_cols="y", num_proc=2, batch_size=4, epochs=epochs, callbacks=[Say()],
    ).fit(df)
"""


def pids(text: str) -> list[int]:
    return [int(line.split()[-1]) for line in text.splitlines() if " is " in line]


@pytest.mark.timeout(400, func_only=True)
@pytest.mark.filterwarnings("ignore")
def test_an_interrupted_fit_leaves_no_rank_and_a_kernel_that_goes_on(notebook: Notebook) -> None:
    assert errors(notebook.cell(SETUP)) == []
    running = notebook.cell("fit(epochs=10**6)", until=" is ")
    while len(ranks := pids(said(running))) < 2:
        running += notebook.messages(until=" is ")
    assert len(ranks) == 2 and all(Path(f"/proc/{pid}").exists() for pid in ranks)
    notebook.manager.interrupt_kernel()
    begun = time.monotonic()
    assert errors(notebook.messages(timeout_s=60)) == ["KeyboardInterrupt"]
    assert time.monotonic() - begun < 30  # Spark alone takes 2 s to end a worker
    assert all(jobs.ended(pid, 0.5) for pid in ranks), "gone with the end of the cell"

    done = notebook.cell("model = fit(epochs=3); model")
    assert errors(done) == [] and notebook.manager.is_alive()
    assert sorted(line[:13] for line in said(done).splitlines()) == ["[0] rank 0 is", "[1] rank 1 is"]
    (first, *_) = [m["content"] for m in done if m["msg_type"] == "display_data"]
    updates = [m["content"] for m in done if m["msg_type"] == "update_display_data"]
    assert {u["transient"]["display_id"] for u in updates} == {first["transient"]["display_id"]}
    last = updates[-1]["data"]
    assert last["text/plain"].startswith("epoch 3/3") and 'value="1.0000"' in last["text/html"]
    assert "polyline" in last["text/html"] and "epoch 1/3" not in said(done, "stderr")
    (shown,) = [m["content"]["data"] for m in done if m["msg_type"] == "execute_result"]
    assert "<td>3 (best)</td>" in shown["text/html"], "the fitted model as a table"

    failed = notebook.cell("hvd_spark.run(lambda: undefined_name, num_proc=2)")
    assert errors(failed) == ["RankFailed"]
    again = notebook.cell("print(hvd_spark.run(lambda: 7, num_proc=2))")
    assert said(again) == "[7, 7]\n"


@pytest.mark.timeout(300, func_only=True)
@pytest.mark.filterwarnings("ignore")
def test_the_quickstart(notebook: Notebook) -> None:
    pytest.importorskip("sklearn")
    codes, done = run_all(notebook, QUICKSTART)
    text = said(done)
    found = re.search(r"right: ([\d.]+)%; who always says the same is right in ([\d.]+)%", text)
    assert found is not None and float(found[1]) > 94 > 75 > float(found[2]), text
    areas = [float(area) for area in re.findall(r"area under ROC ([\d.]+)", text)]
    assert len(areas) == 3 and max(areas) > 0.97
    assert "the same predictions after saving and loading: True" in text
    assert sorted(re.findall(r"\[\d\] I am rank \d of 2", text)) == [
        "[0] I am rank 0 of 2",
        "[1] I am rank 1 of 2",
    ]
    shown = [m["content"]["data"] for m in done if m["msg_type"] in ("display_data", "execute_result")]
    assert any(
        "<td>12" in data.get("text/html", "") and "data:image/png" in data["text/html"] for data in shown
    )
    assert any("image/png" in data for data in shown)
    assert shown[-1]["text/plain"] == "[[5.0, 5.0, 5.0], [5.0, 5.0, 5.0]]"
    assert all(cell["outputs"] for cell in codes[1:-1]), "who looks at it on a page sees what it prints"


def test_what_a_cell_shows() -> None:
    assert as_html("epoch <1>", 0.5, [1.0]) == (
        '<div><progress value="0.5000" max="1"></progress> <code>epoch &lt;1&gt;</code> </div>'
    )
    drawn = as_html("", 1.0, [3.0, float("nan"), 1.0])
    assert 'points="0.0,1.0 160.0,23.0"' in drawn
