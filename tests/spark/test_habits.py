"""What people bring along from Horovod and from other Spark packages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hvd_spark import ColumnError, HorovodModel, InvalidArgument, TorchEstimator, TorchModel

from . import nets


def test_a_validation_frame_of_its_own_and_a_warm_start(spark: Any, tmp_path: Path) -> None:
    torch.manual_seed(6)
    train = spark.range(60).selectExpr("id / 60.0d AS a", "id", "(id % 7) / 7.0d AS b", "id / 30.0d AS y")
    other = spark.range(9).selectExpr("id / 9.0d AS y", "(id % 4) / 4.0d AS a", "(id % 3) / 3.0d AS b")
    est = TorchEstimator(
        model=nets.OneInput(2), optimizer=nets.sgd, loss=nn.MSELoss(), feature_columns=["a", "b"],
        labelCol="y", validation_df=other, num_proc=2, batch_size=30, epochs=2, random_seed=5,
    )  # fmt: skip
    first = est.fit(train)
    assert isinstance(first, TorchModel)
    assert (first.result.train_rows, first.result.validation_rows) == (60, 9)
    rows = other.collect()
    x = torch.tensor([[row.a, row.b] for row in rows], dtype=torch.float32)
    y = torch.tensor([row.y for row in rows], dtype=torch.float32)
    with torch.no_grad():
        want = float(nn.functional.mse_loss(first.getModel()(x)[:, 0], y))
    assert first.history[-1]["val_loss"] == pytest.approx(want, rel=1e-5)

    again = est.copy().setParams(model=first, learning_rate=1e-9, epochs=1, validation_df=None).fit(train)
    torch.testing.assert_close(
        nets.parameters_of(again.getModel()), nets.parameters_of(first.getModel()), rtol=0, atol=1e-6
    )
    assert again.result.validation_rows == 0

    with pytest.raises(ColumnError, match="'b' is double in the DataFrame to fit and not there"):
        est.copy().setValidationDf(other.drop("b")).fit(train)
    with pytest.raises(InvalidArgument, match="one of validation and validation_df"):
        est.copy().setValidation(0.5).fit(train)
    est.save(f"{tmp_path}/e")  # without the frame
    assert TorchEstimator.load(f"{tmp_path}/e").getValidationDf() is None
    wrapped = TorchModel(model=first.getModel(), feature_columns=["a", "b"])
    assert isinstance(wrapped, HorovodModel)
    assert wrapped.transform(other).count() == 9
