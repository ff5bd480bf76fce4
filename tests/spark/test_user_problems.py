"""What people of such systems suffer from, as far as no other test asks. Ids: tests/COVERAGE.md."""

from __future__ import annotations

import os
import platform
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hvd_spark
from hvd_spark import DataError, HorovodEstimator, InvalidArgument, preflight

from . import nets

pytestmark = pytest.mark.timeout(300, func_only=True)


def given(**options: Any) -> HorovodEstimator:
    return HorovodEstimator(**{"num_proc": 2, "optimizer": nets.adam, "verbose": 0, **options})


class Footprint:
    """Of each rank after each epoch: resident bytes, bytes written to storage, files open for writing."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.seen: list[str] = []

    def on_epoch_end(self, run: Any, logs: Any) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        io = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        files = []
        for fd in os.listdir("/proc/self/fd"):
            try:
                path, about = os.readlink(f"/proc/self/fd/{fd}"), Path(f"/proc/self/fdinfo/{fd}").read_text()
            except FileNotFoundError:  # that of the listing
                continue
            writes = int(about.split("flags:")[1].split()[0], 8) & (os.O_WRONLY | os.O_RDWR)
            if writes and path.startswith("/") and not path.startswith(("/dev/", "/memfd:")):
                files.append(path)
        self.seen.append(f"{pages * resource.getpagesize()} {io['write_bytes']} {files}")

    def on_train_end(self, run: Any) -> None:
        (self.folder / f"rank-{run.rank}").write_text("\n".join(self.seen))


def test_c1_c3_c5_c11_many_rows_write_nothing_and_need_no_more_memory_each_epoch(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also i5 and h7: the result says where the time went and what the learning rate was."""
    monkeypatch.chdir(tmp_path)
    df = spark.range(200_000).selectExpr("1.0f AS same", "id % 97 / 97.0f AS x", "id % 89 / 89.0f AS y")
    model = given(
        model=nets.OneInput(2), loss=nn.MSELoss(), feature_cols=["same", "x"], label_cols="y",
        batch_size=2000, epochs=6, callbacks=[Footprint(tmp_path)], validation=0.1, learning_rate=0.003,
    ).fit(df)  # fmt: skip
    assert model.summary.rows_seen == 200_000 and model.history[0]["rows"] == 180_000
    ranks = [path.read_text().splitlines() for path in sorted(tmp_path.iterdir())]
    assert len(ranks) == 2, "the callback's two files and nothing else"
    for lines in ranks:
        resident, written, files = zip(*(line.split(" ", 2) for line in lines), strict=True)
        assert float(resident[5]) <= 1.1 * float(resident[1])
        assert set(written) == {"0"} and set(files) == {"[]"}
    assert {entry["lr"] for entry in model.history} == {0.003}
    said = model.summary.summary
    assert "learning rate 0.003" in said and "up to 4000 rows in a step" in said
    assert f"ranks 0 to 1 on {platform.node()} (cpu)" in said
    for part in ("data", "compute", "communication"):
        assert all(entry[part] >= 0 for entry in model.history) and f"{part} " in said
    share = sum(e["data"] for e in model.history) / sum(e["seconds"] for e in model.history)
    assert share < 0.3, "waited for data"


class WritesColour:
    def __init__(self, folder: Path):
        self.folder = folder

    def on_train_begin(self, run: Any) -> None:
        (self.folder / f"rank-{run.rank}").write_text(os.environ["COLOUR"])


def test_b13_ranks_of_a_fit_have_an_environment_of_their_own(spark: Any, tmp_path: Path) -> None:
    df = spark.range(40).selectExpr("id / 40.0d AS x")
    est = given(
        model=nets.OneInput(1), loss=nn.MSELoss(), feature_cols="x", label_cols="x",
        callbacks=[WritesColour(tmp_path)], env=lambda rank: {"COLOUR": ("red", "blue")[rank]},
    )  # fmt: skip
    est.fit(df)
    assert [path.read_text() for path in sorted(tmp_path.iterdir())] == ["red", "blue"]
    est.setBackendEnv({"COLOUR": "green"}).fit(df)
    assert [path.read_text() for path in sorted(tmp_path.iterdir())] == ["green", "green"]
    with pytest.raises(InvalidArgument, match="env of rank 0: 'COLOUR': 5 is not a name and a string"):
        est.setEnv({"COLOUR": 5}).fit(df)


def test_the_rows_are_looked_at_before_training(spark: Any) -> None:
    rows = [(1.0, "a", [1.0]), (float("nan"), None, [float("-inf")]), (None, "b", None), (-3.0, "c", [2.0])]
    df = spark.createDataFrame(rows, "`x, y` double, s string, l array<double>").repartition(2)
    reports = hvd_spark.examine(df)
    assert [r.column for r in reports] == ["x, y", "x, y", "s", "s", "l", "l"]
    assert sorted({r.rank for r in reports}) == [0, 1]
    x = [r for r in reports if r.column == "x, y"]
    assert [sum(getattr(r, name) for r in x) for name in ("rows", "nulls", "nans")] == [4, 1, 1]
    assert np.nanmin([r.low for r in x]) == -3 and np.nanmax([r.high for r in x]) == 1
    assert sum(r.infinities for r in hvd_spark.examine(df, ["l"])) == 1


def test_b5_the_number_of_ranks_is_that_of_the_slots(spark: Any) -> None:
    conf = spark.sparkContext._jsc.sc().conf()
    try:
        for parallelism in ("1", "7"):
            conf.set("spark.default.parallelism", parallelism)
            assert preflight.check_cluster(spark, None) == 2
    finally:
        conf.remove("spark.default.parallelism")


def test_a5_keras_says_that_it_is_not_there(spark: Any) -> None:
    with pytest.raises(ImportError, match="Keras is not supported yet"):
        from hvd_spark import KerasEstimator  # noqa: F401

    class Model:
        __module__ = "keras.src.models"

    with pytest.raises(InvalidArgument, match=r"must be a torch\.nn\.Module, not keras\.src\.models"):
        given(model=Model(), loss=print, loss_reduction="mean", feature_cols="x", label_cols="y").fit(
            spark.range(1).selectExpr("id AS x", "id AS y")
        )


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.lin = nn.Conv2d(3, 4, 3), nn.Linear(4 * 36, 4)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        assert image.shape[1:] == (8, 8, 3)
        return self.lin(self.conv(image.movedim(3, 1)).flatten(1))


def decoded(batch: dict[str, Any]) -> dict[str, Any]:
    pixels = np.stack([np.frombuffer(data, np.uint8) for data in batch["content"]])
    return {"content": pixels.reshape(-1, 8, 8, 3).astype(np.float32) / 255}


def ragged(batch: dict[str, Any]) -> dict[str, Any]:
    return {"content": [np.zeros((8, 8, 3 if len(data) % 2 else 4), np.float32) for data in batch["content"]]}


def test_r06_images_as_arrays_and_as_bytes(spark: Any) -> None:
    rng = np.random.default_rng(6)
    pixels = rng.integers(0, 256, (200, 8, 8, 3), np.uint8)
    kinds = rng.integers(0, 4, 200)
    torch.manual_seed(6)
    net = Images()
    options: dict[str, Any] = {"model": net, "loss": nn.CrossEntropyLoss(), "batch_size": 200, "epochs": 2}
    arrays = spark.createDataFrame(
        [((p / 255).tolist(), np.eye(4)[k].tolist()) for p, k in zip(pixels, kinds, strict=True)],
        "image array<array<array<float>>>, label array<float>",
    ).repartition(2)
    a = given(feature_cols="image", label_cols="label", **options).fit(arrays)
    content = spark.createDataFrame(
        [(p.tobytes(), int(k)) for p, k in zip(pixels, kinds, strict=True)],
        "content binary, class bigint",
    ).repartition(2)
    est = given(feature_cols="content", label_cols="class", transform_fn=decoded, **options)
    b = est.fit(content)
    # One-hot probabilities and class numbers are the same loss on the same rows, which are all in each step.
    assert [e["loss"] for e in b.history] == pytest.approx([e["loss"] for e in a.history], rel=1e-3)
    found = {bytes(row.content): row.rawPrediction.toArray() for row in b.transform(content).collect()}
    with torch.no_grad():
        want = b.getModel()(torch.tensor(pixels / 255, dtype=torch.float32)).numpy()
    for p, row in zip(pixels, want, strict=True):
        np.testing.assert_allclose(found[p.tobytes()], row, rtol=1e-3, atol=1e-4)
    odd = content.selectExpr("IF(class = 0, concat(content, X'00'), content) AS content", "class")
    words = r"(?s)(?=.*'content')(?=.*\(8, 8, 3\))(?=.*\(8, 8, 4\))"
    with pytest.raises(DataError, match=words):
        est.copy().setTransformFn(ragged).fit(odd)


class Groups(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, 3), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def test_z1_z10_nothing_is_kept_between_fits_and_parameter_groups_are_the_users(spark: Any) -> None:
    df = spark.range(60).selectExpr("id / 60.0d AS a", "(id % 7) / 7.0d AS b", "id / 30.0d AS y").cache()
    net = Groups()
    optimizer = torch.optim.SGD(
        [{"params": net.first.parameters(), "lr": 0.0}, {"params": net.second.parameters(), "lr": 0.5}]
    )
    options: dict[str, Any] = {
        "model": net, "optimizer": optimizer, "loss": nn.MSELoss(), "label_cols": "y", "epochs": 2,
        "batch_size": 30,
    }  # fmt: skip
    models = [given(feature_cols=name, **options).fit(df).getModel() for name in ("a", "b", "a")]
    assert torch.equal(models[0].second.weight, models[2].second.weight)
    assert not torch.equal(models[0].second.weight, models[1].second.weight)
    assert torch.equal(models[0].first.weight, net.first.weight), "its group has rate 0"
