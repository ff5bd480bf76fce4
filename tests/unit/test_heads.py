"""What outputs of a model mean: pure arithmetic, against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from hvd_core.errors import InvalidArgument
from hvd_core.train import OutputSpec, TrainSpec, heads, predict
from hvd_core.train.framework import framework_for
from hvd_spark.serve import gpu_index


@pytest.mark.parametrize(
    ("loss", "head"),
    [
        (nn.CrossEntropyLoss(), "softmax"),
        (nn.functional.cross_entropy, "softmax"),
        (nn.NLLLoss(), "log_softmax"),
        (nn.MultiMarginLoss(), "scores"),
        (nn.BCELoss(), "probability"),
        (nn.BCEWithLogitsLoss(), "sigmoid"),
        (nn.MSELoss(), "output"),
        (lambda out, y: (out - y).abs(), "output"),
    ],
)
def test_losses(loss: object, head: str) -> None:
    spec = TrainSpec(
        model=nn.Linear(1, 1), optimizer=torch.optim.Adam, loss=loss, loss_reduction="mean",
        feature_cols="x", label_cols="y",
    )  # fmt: skip
    assert framework_for(spec).facts(spec).heads == (head,)


def test_only_where_the_form_fits() -> None:
    several, one, image = (
        OutputSpec("float32", (3,)),
        OutputSpec("float32", (1,)),
        OutputSpec("float32", (3, 8, 8)),
    )
    assert predict.head_for("softmax", several) == "softmax"
    assert predict.head_for("softmax", image) == predict.head_for("softmax", one) == "output"
    assert predict.head_for("sigmoid", one) == "sigmoid"
    assert predict.head_for("sigmoid", several) == "output", "several labels of two classes each"
    with pytest.raises(InvalidArgument, match="none of output, softmax"):
        predict.head_for("logits", several)


def test_large_logits_do_not_overflow() -> None:
    x = np.array([[-1e4, 0.0, 1e4], [3.0, 3.0, 3.0]], np.float32)
    want = torch.softmax(torch.tensor(x, dtype=torch.float64), 1).numpy()
    np.testing.assert_allclose(heads.probability("softmax", x), want)
    with np.errstate(over="raise", invalid="raise"):
        one = heads.probability("sigmoid", np.array([-1e4, 0.0, 1e4], np.float32))
    np.testing.assert_array_equal(one[:, 1], [0.0, 0.5, 1.0])
    np.testing.assert_allclose(one.sum(1), 1.0)


def test_which_gpu() -> None:
    assert gpu_index([], {}, 4) == 0
    assert gpu_index(["2"], {}, 4) == 2
    assert gpu_index(["5"], {"CUDA_VISIBLE_DEVICES": "4,5,6"}, 3) == 1
    assert gpu_index(["1"], {"CUDA_VISIBLE_DEVICES": "4,5,6"}, 3) == 1
    assert gpu_index(["7"], {"CUDA_VISIBLE_DEVICES": "4,5"}, 2) == 0
