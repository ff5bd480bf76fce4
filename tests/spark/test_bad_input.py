"""Bad columns, rows, models and losses: a typed error that names the thing; the session works as before."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
import torch
from torch import nn

from hvd_spark import (
    ColumnError,
    DataError,
    HorovodEstimator,
    InvalidArgument,
    LossError,
    NotEnoughSlots,
    NotPicklable,
    RankFailed,
)

from . import nets

ROWS = [(float(i), i % 7 / 7, i % 3 / 3, str(i)) for i in range(60)]


@pytest.fixture(scope="module")
def df(spark: Any) -> Any:
    return spark.createDataFrame(ROWS, ["a", "b", "y", "name"]).repartition(2).cache()


def estimator(**changes: Any) -> HorovodEstimator:
    options: dict[str, Any] = {
        "model": nets.OneInput(2),
        "optimizer": nets.sgd,
        "loss": nn.MSELoss(),
        "feature_cols": ["a", "b"],
        "label_cols": "y",
        "num_proc": 2,
        "batch_size": 16,
    }
    return HorovodEstimator(**{**options, **changes})


def test_found_before_any_job(spark: Any, df: Any, job_count: Any) -> None:
    my_lock = threading.Lock()
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"feature_cols": ["a", "bb"]}, ColumnError, "'bb' does not exist"),
        ({"label_cols": "z"}, ColumnError, "'z' does not exist"),
        ({"feature_cols": ["a", "name"]}, ColumnError, "(?s)'name'.*string.*StringIndexer"),
        ({"sample_weight_col": "name"}, ColumnError, "(?s)'name'.*string"),
        ({"model": nets.FiveInputs()}, ColumnError, "(?s)takes 5 inputs.*2 feature columns"),
        ({"num_proc": 4}, NotEnoughSlots, "(?s)4.*2.*num_proc"),
        ({"num_proc": 0}, ValueError, "num_proc"),
        ({"batch_size": 0}, InvalidArgument, "batch_size"),
        ({"optimizer": None}, InvalidArgument, "optimizer"),
        ({"model": None}, InvalidArgument, "model"),
        ({"loss": lambda out, y, lock=my_lock: out, "loss_reduction": "mean"}, NotPicklable, "lock"),
        ({"callbacks": [lambda run, logs: my_lock]}, NotPicklable, "my_lock"),
    ]  # fmt: skip
    before = job_count()
    for changes, kind, text in wrong:
        with pytest.raises(kind, match=text):
            estimator(**changes).fit(df)
    assert job_count() == before
    frames: list[tuple[Any, type[Exception], str]] = [
        ([(0.0, 1.0, 2.0)], InvalidArgument, "expected a Spark DataFrame, not list"),
        (spark.readStream.format("rate").load(), DataError, "foreachBatch"),
    ]
    for frame, kind, text in frames:
        with pytest.raises(kind, match=text):
            estimator().fit(frame)
    with pytest.raises(TypeError, match="did you mean batch_size"):
        estimator(batchsize=3)
    assert estimator().fit(df).history


def test_nulls_are_named_and_counted(spark: Any, df: Any) -> None:
    with_nulls = df.selectExpr("if(a < 3, null, a) a", "b", "y")
    with pytest.raises(DataError) as caught:
        estimator().fit(with_nulls)
    counts = re.findall(r"column 'a' has (\d) nulls? in (\d+) rows", str(caught.value))
    assert 1 <= len(counts) <= 2, "one line for each rank that had some"
    assert sum(int(nulls) for nulls, _ in counts) == 3
    assert estimator(null_value=0.0).fit(with_nulls).history


def test_ragged_arrays(spark: Any) -> None:
    df = spark.createDataFrame([([1.0, 2.0], 1.0), ([1.0, 2.0, 3.0], 1.0)], ["x", "y"])
    with pytest.raises(DataError, match=r"(?s)'x'.*\(\d,\).*\(\d,\)"):
        estimator(feature_cols="x", num_proc=1).fit(df)


def test_duplicate_column_names(spark: Any, df: Any) -> None:
    with pytest.raises(ColumnError, match="more than one column named 'a'"):
        estimator().fit(df.join(df.select("a"), df["a"] == df["a"]))


def test_names_do_not_matter(spark: Any, df: Any) -> None:
    """Dots, backquotes, other alphabets, and names that differ in case only."""
    odd = ["a.b c", "\u00fc`x", "A.B C"]
    plain, net = ["a", "b", "y"], nets.OneInput(2)
    frame = df.select(*plain).coalesce(1)
    fitted = [
        estimator(model=net, feature_cols=names[:2], label_cols=names[2], num_proc=1).fit(frame.toDF(*names))
        for names in (plain, odd)
    ]
    assert torch.equal(*(nets.parameters_of(model.getModel()) for model in fitted))
    assert fitted[1].transform(frame.toDF(*odd)).columns == [*odd, "prediction"]


def not_a_scalar(output: Any, label: Any) -> Any:
    return torch.zeros(3, 2) * output.sum()


def not_a_number(output: Any, label: Any) -> Any:
    return (output.sum() * float("nan")).mean()


@pytest.mark.parametrize("loss", [not_a_scalar, not_a_number])
def test_losses_that_are_no_number(spark: Any, df: Any, loss: Any) -> None:
    with pytest.raises(LossError, match=r"rank \d, epoch 0, step 0: .*(not a scalar|nan)") as caught:
        estimator(loss=loss, loss_reduction="mean").fit(df)
    assert isinstance(caught.value.__cause__, RankFailed)
    assert estimator().fit(df).history


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 1)

    def forward(self, x: Any) -> Any:
        if self.training:
            raise ZeroDivisionError("in forward")
        return self.lin(x)


def test_a_model_that_raises(spark: Any, df: Any) -> None:
    with pytest.raises(
        RankFailed, match=r"raised ZeroDivisionError: in forward \(.*test_bad_input.py:\d+\)"
    ) as caught:
        estimator(model=Fails()).fit(df)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_what_the_user_gave_is_not_touched(spark: Any, df: Any) -> None:
    net = nets.OneInput(2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    before = nets.parameters_of(net).clone()
    first, second = (estimator(model=net, optimizer=optimizer).fit(df) for _ in range(2))
    assert torch.equal(nets.parameters_of(net), before)
    assert not torch.equal(nets.parameters_of(first.getModel()), before)
    assert torch.equal(nets.parameters_of(first.getModel()), nets.parameters_of(second.getModel()))
    assert not optimizer.state
    assert not net.lin.weight._backward_hooks
