"""Numerators and denominators of parts add up to the user's loss on the whole, and so do gradients."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

torch = pytest.importorskip("torch")
from torch import Tensor, nn  # noqa: E402

from hvd_core.errors import DataError, InvalidArgument, LossError  # noqa: E402
from hvd_core.train import Predictor, TrainSpec, columns_of, fit_local, plan_layout  # noqa: E402
from hvd_core.train.torch_losses import Term  # noqa: E402
from hvd_core.train.torch_model import load_weights  # noqa: E402

pytestmark = [
    pytest.mark.timeout(60),
    # torch advises against KLDivLoss(reduction="mean"), which is right all the same.
    pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss"),
]

G = torch.Generator().manual_seed(0)
W3 = torch.tensor([1.0, 5.0, 9.0]).double()


def rand(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=G, dtype=torch.float64)


CLASSES = torch.tensor([0, 1, 2, 0, 0, 2, 2, 1, 1])
HOLES = torch.tensor([0, -100, 2, 0, -100, 2, -100, -100, 1])
PIXELS = torch.randint(0, 3, (9, 2, 2), generator=G)

CASES: list[tuple[str, Any, tuple[int, ...], Tensor]] = [
    ("mse", nn.MSELoss(), (9, 2), rand(9, 2)),
    ("mse column", nn.MSELoss(), (9, 1), rand(9)),
    ("l1", nn.L1Loss(), (9, 2, 3), rand(9, 2, 3)),
    ("huber", nn.HuberLoss(delta=0.3), (9,), rand(9)),
    ("smooth", nn.SmoothL1Loss(), (9,), rand(9, 1)),
    ("poisson", nn.PoissonNLLLoss(), (9, 2), rand(9, 2)),
    ("soft margin", nn.SoftMarginLoss(), (9, 2), rand(9, 2).sign()),
    ("bce", nn.BCELoss(weight=rand(9, 1)[0]), (9, 1), rand(9)),
    ("bce logits", nn.BCEWithLogitsLoss(pos_weight=W3), (9, 3), rand(9, 3).round()),
    ("kl mean", nn.KLDivLoss(reduction="mean"), (9, 3), rand(9, 3)),
    ("kl batchmean", nn.KLDivLoss(reduction="batchmean"), (9, 3), rand(9, 3)),
    ("multilabel soft", nn.MultiLabelSoftMarginLoss(weight=W3), (9, 3), rand(9, 3).round()),
    ("hinge", nn.HingeEmbeddingLoss(), (9,), rand(9).round() * 2 - 1),
    ("ce", nn.CrossEntropyLoss(), (9, 3), CLASSES),
    ("ce column", nn.CrossEntropyLoss(), (9, 3), CLASSES[:, None]),
    ("ce weights", nn.CrossEntropyLoss(weight=W3), (9, 3), CLASSES),
    ("ce holes", nn.CrossEntropyLoss(), (9, 3), HOLES),
    ("ce both smooth", nn.CrossEntropyLoss(weight=W3, label_smoothing=0.3), (9, 3), HOLES),
    ("ce ignore 2", nn.CrossEntropyLoss(weight=W3, ignore_index=2), (9, 3), CLASSES),
    ("ce pixels", nn.CrossEntropyLoss(weight=W3), (9, 3, 2, 2), PIXELS),
    ("ce probabilities", nn.CrossEntropyLoss(weight=W3), (9, 3), rand(9, 3)),
    ("ce pixel probabilities", nn.CrossEntropyLoss(weight=W3), (9, 3, 2, 2), rand(9, 3, 2, 2)),
    ("nll", nn.NLLLoss(weight=W3), (9, 3), HOLES),
    ("multi margin", nn.MultiMarginLoss(weight=W3), (9, 3), CLASSES),
    (
        "multilabel margin",
        nn.MultiLabelMarginLoss(),
        (9, 3),
        torch.tensor([[1, -1, 0], [2, 0, -1], [0, 1, 2]] * 3),
    ),
    ("sum", nn.MSELoss(reduction="sum"), (9, 2), rand(9, 2)),
    ("ce sum", nn.CrossEntropyLoss(weight=W3, reduction="sum"), (9, 3), HOLES),
]


def shared(
    term: Term, output: Tensor, label: Tensor, cuts: list[int], weight: Tensor | None = None
) -> Tensor:
    """The loss as the parts between `cuts` make it together."""
    parts = [slice(a, b) for a, b in pairwise(cuts) if b > a]
    weights = [None if weight is None else weight[p] for p in parts]
    bases = [term.base(label[p], w) for p, w in zip(parts, weights, strict=True)]
    base = sum(p.stop - p.start if b is None else float(b) for p, b in zip(parts, bases, strict=True))
    total = torch.zeros((), dtype=torch.float64)
    for p, w in zip(parts, weights, strict=True):
        out = output[p]
        numerator, elements = term.terms(out, term.match(out, label[p]), w)
        total = total + (numerator if term.how in ("sum", "total") else numerator / (elements * base))
    return total


@pytest.mark.parametrize(("name", "loss", "shape", "label"), CASES, ids=[c[0] for c in CASES])
def test_parts_add_up_to_the_loss_on_the_whole(
    name: str, loss: Any, shape: tuple[int, ...], label: Tensor
) -> None:
    term = Term(loss, None, "y")
    if term.see_labels(label.numpy()):
        term.count_targets()
    output = rand(*shape).requires_grad_()
    whole = loss(output, term.match(output, label))
    (oracle,) = torch.autograd.grad(whole, output)
    for cuts in ([0, 9], [0, 5, 9], [0, 1, 1, 2, 9]):
        value = shared(term, output, label, cuts)
        (gradient,) = torch.autograd.grad(value, output)
        torch.testing.assert_close(value, whole, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradient, oracle, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("name", "loss", "shape", "label"), CASES, ids=[c[0] for c in CASES])
def test_weights_of_zero_and_one_leave_rows_out(
    name: str, loss: Any, shape: tuple[int, ...], label: Tensor
) -> None:
    term = Term(loss, None, "y")
    if term.see_labels(label.numpy()):
        term.count_targets()
    keep = torch.tensor([1, 0, 1, 1, 0, 0, 1, 0, 1], dtype=torch.bool)
    output = rand(*shape).requires_grad_()
    oracle = loss(output[keep], term.match(output[keep], label[keep]))
    value = shared(term, output, label, [0, 2, 9], keep.double())
    torch.testing.assert_close(value, oracle, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_in_a_row_of_weight_0_reaches_nothing(bad: float) -> None:
    term, output, label = Term(nn.MSELoss(), None, "y"), rand(4, 1).requires_grad_(), rand(4)
    label[1] = bad
    keep = torch.tensor([1.0, 0.0, 0.5, 0.0]).double()
    value, _ = term.terms(output, term.match(output, label), keep)
    (gradient,) = torch.autograd.grad(value, output)
    errors = (output[:, 0] - label).detach() * keep
    torch.testing.assert_close(gradient[[0, 2], 0], 2 * errors[[0, 2]])
    assert gradient[[1, 3], 0].tolist() == [0.0, 0.0]
    nothing, _ = term.terms(output, term.match(output, label), torch.zeros(4))
    assert nothing.item() == 0.0
    assert torch.autograd.grad(nothing, output)[0].abs().sum() == 0.0


def test_class_numbers_that_came_as_floats_or_do_not_exist_are_explained() -> None:
    def focal(output: Tensor, label: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, label)

    with pytest.raises(LossError, match=r"dtypes=\{'y': 'int64'\}"):
        Term(focal, "mean", "y").match(rand(9, 3), CLASSES.double())
    with pytest.raises(LossError, match=r"Long.*dtypes=\{'y': 'int64'\}"):
        Term(focal, "custom", "y").terms(rand(9, 3), CLASSES.double(), None)
    with pytest.raises(
        LossError, match=r"CrossEntropyLoss of label column 'y' \(torch.int64, 0 to 2\).*\(9, 2\)"
    ):
        Term(nn.CrossEntropyLoss(), None, "y").terms(rand(9, 2), CLASSES, None)


def test_shapes_that_would_broadcast_are_errors_naming_both() -> None:
    for shape, label in (((9, 2), rand(9)), ((9, 3), rand(9, 2)), ((9,), rand(9, 9))):
        with pytest.raises(LossError) as caught:
            Term(nn.MSELoss(), None, "y").match(rand(*shape), label)
        assert str(tuple(shape)) in str(caught.value)
        assert str(tuple(label.shape)) in str(caught.value)
    with pytest.raises(LossError, match="'y'"):
        Term(nn.CrossEntropyLoss(), None, "y").match(rand(9, 3), torch.zeros(9, 2, dtype=torch.long))
    free = Term(lambda o, y: (o.sum(), 1), "custom", "y")
    assert free.match(rand(9, 2), rand(9)).shape == (9,)


def test_labels_take_the_dtype_the_loss_needs() -> None:
    out = rand(9, 1).float()
    assert Term(nn.BCELoss(), None, "y").match(out, CLASSES).dtype == torch.float32
    assert Term(nn.CrossEntropyLoss(), None, "y").match(rand(9, 3), CLASSES).dtype == torch.int64
    assert Term(nn.MSELoss(), None, "y").match(out.double(), rand(9).float()).dtype == torch.float64


def test_a_subclass_with_its_own_forward_is_a_function_of_the_user() -> None:
    class Mine(nn.MSELoss):
        def forward(self, input: Tensor, target: Tensor) -> Tensor:
            return super().forward(input, target) * 2

    with pytest.raises(InvalidArgument, match=r"Mine.*loss_reduction"):
        Term(Mine(), None, "y")
    assert Term(Mine(), "mean", "y").how == "mean"

    class Focal(nn.CrossEntropyLoss):
        def forward(self, input: Tensor, target: Tensor) -> Tensor:
            losses = nn.functional.cross_entropy(input, target, reduction="none")
            return ((1 - torch.exp(-losses)) ** 2 * losses).mean()

    assert Term(Focal(), "mean", "y").class_numbers
    for loss in (nn.CTCLoss(), nn.TripletMarginLoss(), nn.CosineEmbeddingLoss()):
        with pytest.raises(InvalidArgument, match="more than"):
            Term(loss, None, "y")


# -- prediction --


def features(rows: int) -> pa.Table:
    rng = np.random.default_rng(0)
    return pa.table({"a": rng.normal(size=rows), "b": rng.normal(size=rows), "k": rng.integers(0, 2, rows)})


def test_r09_probabilities_are_not_rounded() -> None:
    table = features(1000)
    model = nn.Sequential(nn.Linear(2, 1), nn.Sigmoid())
    spec = TrainSpec(
        model=model, optimizer=torch.optim.Adam(model.parameters()), loss=nn.BCELoss(),
        feature_cols=["a", "b"], label_cols="k", batch_size=100,
    )  # fmt: skip
    result = fit_local(spec, table)
    layout = plan_layout(columns_of(table.schema), spec)
    assert layout.input_columns == ("a", "b")
    fitted = load_weights(model, result.weights)
    batch = table.select(["b", "a"]).to_batches()[0]  # by name, without the label
    predictor = Predictor(fitted, layout, batch_size=300)
    (predicted,) = predictor.predict(batch)
    x = torch.tensor(np.stack([table["a"].to_numpy(), table["b"].to_numpy()], 1)).float()
    np.testing.assert_allclose(predicted, fitted(x).detach().numpy(), rtol=1e-6)
    assert (predicted.dtype, predicted.shape) == (np.float32, (1000, 1))
    assert [(o.dtype, o.shape) for o in result.output_spec] == [("float32", (1,))]
    assert ((predicted > 0) & (predicted < 1)).all()
    assert len(np.unique(predicted)) > 100
    assert predictor.predict(batch.slice(0, 0)) == []
    with pytest.raises(DataError, match="'a' has 1 null in 1 rows"):
        predictor.predict(pa.record_batch({"a": pa.array([None], pa.float64()), "b": [1.0]}))
    # The error is about that batch; the next one is fine.
    assert len(predictor.predict(batch.slice(0, 3))[0]) == 3
