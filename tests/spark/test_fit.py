"""What `fit` computes, against independent numbers. Test names carry the ids of the acceptance cases."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hvd_spark import ColumnError, DataError, HorovodEstimator, LossError, RankFailed

from . import nets

pyspark = pytest.importorskip("pyspark")


def frame(spark: Any, names: list[str], columns: list[Any], partitions: int = 2) -> Any:
    """A DataFrame of these columns (numpy arrays or lists) in this many partitions."""
    rows = list(zip(*(c.tolist() if isinstance(c, np.ndarray) else c for c in columns), strict=True))
    return spark.createDataFrame(rows, names).repartition(partitions)


def given(**options: Any) -> dict[str, Any]:
    """Options that several estimators share."""
    return options


def plain_sgd(model: nn.Module, x: torch.Tensor, y: torch.Tensor, epochs: int, lr: float = 0.1) -> nn.Module:
    """The oracle: full-batch SGD on all rows in this process."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    for _ in range(epochs):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x).reshape(-1), y).backward()
        optimizer.step()
    return model


def test_r02_five_columns_as_five_inputs_or_one(spark: Any) -> None:
    rng = np.random.default_rng(2)
    columns = [rng.random(1000) for _ in range(5)]
    df = frame(spark, [*"abcde", "y"], [*columns, sum(columns)])
    x = torch.tensor(np.stack(columns, 1), dtype=torch.float32)
    weights = {}
    for model in (nets.FiveInputs(), nets.OneInput()):
        for label in ("y", ["y"]):
            est = HorovodEstimator(
                model=model, optimizer=nets.sgd, loss=nn.MSELoss(), feature_cols=list("abcde"),
                label_cols=label, num_proc=2, batch_size=500, epochs=3,
            )  # fmt: skip
            fitted = est.fit(df).getModel()
            weights[type(model).__name__, str(label)] = nets.parameters_of(fitted)
        assert torch.equal(weights[type(model).__name__, "y"], weights[type(model).__name__, "['y']"])
        joined = nets.OneInput()
        joined.load_state_dict(model.state_dict())
        want = plain_sgd(joined, x, x.sum(1), epochs=3)
        got = weights[type(model).__name__, "y"]
        torch.testing.assert_close(got, nets.parameters_of(want), rtol=1e-5, atol=1e-5)


def test_r02_two_inputs_and_five_columns(spark: Any, job_count: Any) -> None:
    df = spark.createDataFrame([(1.0,) * 6], [*"abcde", "y"])
    est = HorovodEstimator(
        model=nets.TwoInputs(), optimizer=nets.sgd, loss=nn.MSELoss(), feature_cols=list("abcde"),
        label_cols="y"
    )  # fmt: skip
    before = job_count()
    with pytest.raises(ColumnError, match=r"(?s)takes 2 inputs.*5 feature columns.*input_columns"):
        est.fit(df)
    assert job_count() == before


def test_r03_25_rows_in_one_partition(spark: Any, tmp_path: Any) -> None:
    rng = np.random.default_rng(3)
    x = rng.random(25)
    df = frame(spark, ["id", "x", "y"], [np.arange(25), x, 2 * x]).coalesce(1)
    recorder = nets.Recorder(tmp_path)
    model = HorovodEstimator(
        model=nets.WithId(), optimizer=nets.sgd, loss=nn.MSELoss(), feature_cols=["id", "x"],
        label_cols=["y"],
        input_columns=[["id", "x"]], callbacks=[recorder], num_proc=2, batch_size=4, epochs=3,
    ).fit(df)  # fmt: skip
    shards = [recorder.epochs(rank) for rank in (0, 1)]
    for epoch in range(3):
        assert sorted(len(shard[epoch]) for shard in shards) == [12, 13]
        assert sorted(shards[0][epoch] + shards[1][epoch]) == list(range(25))
    assert [entry["rows"] for entry in model.history] == [25] * 3


@pytest.mark.parametrize("count", [3, 1])
def test_r04_fewer_rows_than_a_batch(spark: Any, count: int) -> None:
    net = nets.OneInput(1)
    x = np.arange(1.0, count + 1)
    model = HorovodEstimator(
        model=net, optimizer=nets.sgd, loss=nn.MSELoss(), feature_cols="x", label_cols="y",
        num_proc=2, batch_size=32, epochs=1,
    ).fit(frame(spark, ["x", "y"], [x, 3 * x]))  # fmt: skip
    assert model.history[0]["steps"] == 1
    tensor = torch.tensor(x, dtype=torch.float32)
    want = plain_sgd(net, tensor[:, None], 3 * tensor, epochs=1)
    torch.testing.assert_close(
        nets.parameters_of(model.getModel()), nets.parameters_of(want), rtol=1e-5, atol=1e-5
    )
    with torch.no_grad():
        first = float(nn.functional.mse_loss(net(tensor[:, None])[:, 0], 3 * tensor))
    assert model.history[0]["loss"] == pytest.approx(first, rel=1e-5)


def test_r04_no_rows(spark: Any) -> None:
    est = HorovodEstimator(
        model=nets.OneInput(1), optimizer=nets.sgd, loss=nn.MSELoss(), feature_cols="x", label_cols="y",
        num_proc=2
    )  # fmt: skip
    with pytest.raises(DataError, match="no rows"):
        est.fit(spark.createDataFrame([], "x double, y double"))


def test_r05_skewed_partitions(spark: Any, tmp_path: Any) -> None:
    sizes = [1000, 10, 0, 1]
    starts = np.cumsum([0, *sizes])

    def rows(index: int, _: Any) -> Any:
        return ((i, (i % 101) / 100, (i % 7) / 7) for i in range(int(starts[index]), int(starts[index + 1])))

    rdd = spark.sparkContext.parallelize(range(4), 4).mapPartitionsWithIndex(rows)
    df = spark.createDataFrame(rdd, "id bigint, x double, y double")
    recorder = nets.Recorder(tmp_path)
    net = nets.WithId()
    model = HorovodEstimator(
        model=net, optimizer=nets.sgd, loss=nn.MSELoss(), feature_cols=["id", "x"], label_cols="y",
        callbacks=[recorder], num_proc=2, batch_size=2000, epochs=4,
    ).fit(df)  # fmt: skip
    for epoch in range(4):
        assert sorted(recorder.epochs(0)[epoch] + recorder.epochs(1)[epoch]) == list(range(1011))
    ids = torch.arange(1011)
    x = torch.stack([ids.float(), (ids % 101) / 100], 1)
    want = plain_sgd(net, x, (ids % 7) / 7, epochs=4)
    torch.testing.assert_close(
        nets.parameters_of(model.getModel()), nets.parameters_of(want), rtol=1e-5, atol=1e-5
    )


def test_r05_count_that_does_not_divide(spark: Any, tmp_path: Any) -> None:
    recorder = nets.Recorder(tmp_path)
    df = frame(spark, ["id", "x", "y"], [np.arange(858), np.linspace(0, 1, 858), np.linspace(0, 1, 858)], 3)
    HorovodEstimator(
        model=nets.WithId(), optimizer=nets.sgd, loss=nn.MSELoss(), feature_cols=["id", "x"], label_cols="y",
        callbacks=[recorder], num_proc=2, batch_size=8, epochs=2,
    ).fit(df)  # fmt: skip
    for epoch in range(2):
        assert sorted(recorder.epochs(0)[epoch] + recorder.epochs(1)[epoch]) == list(range(858))
    assert recorder.epochs(0)[0] == recorder.epochs(0)[1]
    order = [[i for e, ids in recorder.batches(0) if e == epoch for i in ids] for epoch in range(2)]
    assert order[0] != order[1], "shuffle: another order in each epoch"


def test_shards_on_disk(spark: Any, tmp_path: Any) -> None:
    directory, seen = tmp_path / "shards", tmp_path / "seen"
    directory.mkdir()
    options: Any = given(
        model=nets.OneInput(1), optimizer=nets.sgd, loss=nn.MSELoss(), feature_cols="x", label_cols="y",
        num_proc=2, shard_memory_bytes=1,
    )  # fmt: skip
    df = frame(spark, ["x", "y"], [np.arange(20.0) / 20, np.arange(20.0) / 20])
    HorovodEstimator(callbacks=[nets.Shards(seen)], shard_dir=str(directory), **options).fit(df)
    # Features and labels of two ranks, each mapped and held open by its mapping, and by nothing else.
    assert seen.read_text().splitlines() == [str(directory)] * 8
    assert not list(directory.iterdir())
    for order in ("shard", "global"):  # also rows that were dealt out again, and then once
        elsewhere = tmp_path / order
        HorovodEstimator(callbacks=[nets.Shards(elsewhere)], row_order=order, **options).fit(df)
        places = elsewhere.read_text().splitlines()
        assert len(places) == 8, order
        assert all("blockmgr" in place for place in places), "Spark's local directory"
    with pytest.raises(RankFailed, match="/no/such/place"):
        HorovodEstimator(shard_dir="/no/such/place", **options).fit(df)


def test_r07_integers_stay_integers_and_strings_are_refused(spark: Any, job_count: Any) -> None:
    rng = np.random.default_rng(7)
    dow, km = rng.integers(0, 7, 200), rng.random(200)
    cities = ["Ulm", "Bonn"] * 100
    df = frame(spark, ["city", "dow", "km", "target"], [cities, dow, km, km + dow])
    df = df.selectExpr("city", "cast(dow as int) dow", "cast(km as float) km", "cast(target as float) target")
    est = HorovodEstimator(
        model=nets.Embedded(), optimizer=nets.adam, loss=nn.MSELoss(), feature_cols=["dow", "km"],
        label_cols="target", num_proc=2, batch_size=32, epochs=2,
    )  # fmt: skip
    assert est.fit(df).history[-1]["loss"] < 30
    before = job_count()
    with pytest.raises(ColumnError, match=r"(?s)'city'.*string.*Accepted are: boolean, integers, floats"):
        est.copy().setFeatureCols(["dow", "km", "city"]).setInputColumns(["dow", ["km", "city"]]).fit(df)
    assert job_count() == before


def test_r09_probabilities_are_not_rounded(spark: Any) -> None:
    rng = np.random.default_rng(9)
    x = rng.random((1000, 2))
    df = frame(spark, ["a", "b", "y"], [x[:, 0], x[:, 1], (x.sum(1) > 1).astype(int)])
    model = HorovodEstimator(
        model=nets.sigmoid_net(2), optimizer=nets.adam, loss=nn.BCELoss(), feature_cols=["a", "b"],
        label_cols="y",
        num_proc=2, batch_size=100, epochs=2,
    ).fit(df)  # fmt: skip
    out = model.transform(df)
    assert dict(out.dtypes)["prediction"] == "float"
    found = [row.prediction for row in out.select("prediction").collect()]
    assert len(found) == 1000
    assert all(0 < p < 1 for p in found)
    assert len(set(found)) > 100
    with torch.no_grad():
        want = model.getModel()(torch.tensor(x, dtype=torch.float32)).numpy().ravel()
    np.testing.assert_allclose(sorted(found), sorted(want), rtol=1e-5)


def test_r10_output_b1_against_label_b(spark: Any) -> None:
    rng = np.random.default_rng(10)
    x = rng.random((64, 4))
    y = rng.random(64)
    df = frame(spark, [*"abcd", "y"], [*x.T, y])
    net = nets.OneInput(4)
    options: Any = given(
        optimizer=nets.sgd, loss=nn.MSELoss(), feature_cols=list("abcd"), label_cols="y", num_proc=2,
        batch_size=64
    )  # fmt: skip
    model = HorovodEstimator(model=net, **options).fit(df)
    weight, bias = net.lin.weight.detach().numpy()[0], net.lin.bias.item()
    assert model.history[0]["loss"] == pytest.approx(np.mean((x @ weight + bias - y) ** 2), rel=1e-5)

    with pytest.raises(LossError, match=r"output of shape \(32, 2\) against label 'y' of shape \(32,\)"):
        HorovodEstimator(model=nets.OneInput(4, 2), **options).fit(df)


def test_r12_rows_of_weight_zero_do_not_count(spark: Any) -> None:
    rng = np.random.default_rng(12)
    x = rng.random(400)
    good = np.arange(400) % 2
    y = np.where(good, 2 * x, -50.0)
    df = frame(spark, ["x", "y", "w"], [x, y, good.astype(float)])
    net = nets.OneInput(1)
    options: Any = given(
        model=net, optimizer=nets.sgd, loss=nn.MSELoss(), feature_cols="x", label_cols="y", num_proc=2,
        batch_size=400, epochs=4,
    )  # fmt: skip
    weighted = HorovodEstimator(sample_weight_col="w", **options).fit(df).getModel()
    only = HorovodEstimator(**options).fit(df.where("w > 0")).getModel()
    torch.testing.assert_close(nets.parameters_of(weighted), nets.parameters_of(only), rtol=1e-5, atol=1e-5)
    tensor = torch.tensor(x[good == 1], dtype=torch.float32)
    want = plain_sgd(net, tensor[:, None], 2 * tensor, epochs=4)
    torch.testing.assert_close(nets.parameters_of(weighted), nets.parameters_of(want), rtol=1e-5, atol=1e-5)


def test_r12_one_rank_with_weights_zero_only(spark: Any) -> None:
    df = spark.createDataFrame([(1.0, 2.0, 1.0), (5.0, -50.0, 0.0)], ["x", "y", "w"]).coalesce(1)
    net = nets.OneInput(1)
    model = HorovodEstimator(
        model=net, optimizer=nets.sgd, loss=nn.MSELoss(), feature_cols="x", label_cols="y",
        sample_weight_col="w",
        num_proc=2, epochs=2,
    ).fit(df)  # fmt: skip
    want = plain_sgd(net, torch.tensor([[1.0]]), torch.tensor([2.0]), epochs=2)
    torch.testing.assert_close(
        nets.parameters_of(model.getModel()), nets.parameters_of(want), rtol=1e-5, atol=1e-5
    )


def test_r33_one_rank_is_plain_training_and_two_runs_are_alike(spark: Any, tmp_path: Any) -> None:
    rng = np.random.default_rng(33)
    x = rng.random((100, 3)).astype(np.float32)
    y = x.sum(1)
    df = frame(spark, ["id", *"abc", "y"], [np.arange(100), *x.astype(float).T, y.astype(float)])
    torch.manual_seed(33)
    net = nets.WithId(3)
    recorder = nets.Recorder(tmp_path)
    options: Any = given(
        model=net, optimizer=nets.adam, loss=nn.MSELoss(), feature_cols=["id", *"abc"], label_cols="y",
        batch_size=10, epochs=5, seed=5,
    )  # fmt: skip
    product = HorovodEstimator(num_proc=1, callbacks=[recorder], **options).fit(df).getModel()

    plain = copy.deepcopy(net)
    optimizer = nets.adam(plain.parameters())
    batches = recorder.batches(0)
    assert len(batches) == 50
    rows = np.concatenate([np.arange(100, dtype=np.float32)[:, None], x], 1)
    for _, ids in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(plain(torch.from_numpy(rows[ids]))[:, 0], torch.from_numpy(y[ids])).backward()
        optimizer.step()
    assert torch.equal(nets.parameters_of(product), nets.parameters_of(plain))

    two = [HorovodEstimator(num_proc=2, **options).fit(df).getModel() for _ in range(2)]
    assert torch.equal(nets.parameters_of(two[0]), nets.parameters_of(two[1]))
    assert not torch.equal(nets.parameters_of(two[0]), nets.parameters_of(net))
