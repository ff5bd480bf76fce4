"""Rows that are few, uneven, weightless or odd, on one rank and on two: each against plain torch on the rows
that count."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest

torch = pytest.importorskip("torch")
from torch import Tensor, nn  # noqa: E402

from hvd_core import basics  # noqa: E402
from hvd_core.train import FitResult, TrainSpec, fit_local  # noqa: E402
from hvd_core.train.torch_model import load_weights  # noqa: E402

from ..unit.thread_ranks import run_ranks  # noqa: E402
from .runs import COLUMNS, sgd, spec_of, table  # noqa: E402

pytestmark = pytest.mark.timeout(60)


def linear(outputs: int = 1) -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(3, outputs)).double()


def fit_on(spec: TrainSpec, parts: Sequence[pa.Table]) -> list[FitResult]:
    """On as many ranks as there are parts."""
    if len(parts) == 1:
        return [fit_local(spec, parts[0])]

    def fit(rank: int) -> FitResult:
        torch.set_num_threads(1)  # those of several ranks spin against each other
        return fit_local(spec, parts[rank], basics.default_group())

    return run_ranks(len(parts), fit)


def trained(spec: TrainSpec, result: FitResult) -> dict[str, Tensor]:
    state: dict[str, Tensor] = load_weights(copy.deepcopy(spec.model), result.weights).state_dict()
    return state


def assert_close(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        torch.testing.assert_close(value, b[name], rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def plain_sgd(rows: pa.Table, steps: int, outputs: Sequence[str] = ("y",)) -> dict[str, Tensor]:
    """Steps of SGD on all rows at once, in torch alone."""
    x = torch.tensor(np.stack([rows[c].to_numpy() for c in COLUMNS], 1))
    y = torch.tensor(np.stack([rows[c].to_numpy() for c in outputs], 1)).double()
    model = linear(len(outputs))
    optimizer = sgd(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()
    return model.state_dict()


# -- weights of 0 --


@pytest.mark.parametrize("cuts", [[0, 40], [0, 30, 40], [0, 40, 40]])
@pytest.mark.parametrize("column", ["y", "a"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_r12_rows_of_weight_0_may_hold_anything(cuts: list[int], column: str, bad: float) -> None:
    rows = table(40)
    silent = np.arange(40) % 3 == 0
    values = rows[column].to_numpy().copy()
    values[silent] = bad
    spoiled = rows.set_column(rows.schema.names.index(column), column, pa.array(values))
    spoiled = spoiled.append_column("w", pa.array(np.where(silent, 0.0, 1.0)))
    spec = spec_of(model=linear(), optimizer=sgd, batch_size=40, epochs=3, sample_weight_col="w")
    parts = [spoiled.slice(a, b - a) for a, b in pairwise(cuts)]
    result = fit_on(spec, parts)[0]
    assert_close(trained(spec, result), plain_sgd(rows.filter(pa.array(~silent)), 3))
    assert result.rows_seen == 40


# -- few rows --


def test_a_rank_without_rows_takes_part_with_several_labels_in_one_output() -> None:
    rows = table(21)
    for cuts, options in (
        ([0, 20, 20], {"batch_size": 20}),
        ([0, 1, 1], {"batch_size": 1}),
        ([0, 12, 21], {"batch_size": 1}),
        ([0, 6, 12], {"batch_size": None, "global_batch_size": 1}),
    ):
        parts = [rows.slice(a, b - a) for a, b in pairwise(cuts)]
        spec = spec_of(
            model=linear(2), optimizer=sgd, label_cols=["y", "id"], epochs=1, learning_rate=1e-3, **options
        )
        result = fit_on(spec, parts)[0]
        assert result.rows_seen == cuts[-1]
    few = table(20)
    spec = spec_of(model=linear(2), optimizer=sgd, label_cols=["y", "a"], epochs=2, batch_size=20)
    result = fit_on(spec, [few, few.slice(20)])[0]
    assert_close(trained(spec, result), plain_sgd(few, 2, ["y", "a"]))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.norm, self.out = nn.BatchNorm1d(3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x))


def in_lists(rows: pa.Table) -> pa.Table:
    x = np.stack([rows[c].to_numpy() for c in COLUMNS], 1)
    return pa.table({"x": pa.array(x.tolist(), pa.list_(pa.float64())), "y": rows["y"]})


def test_sync_batchnorm_knows_the_form_of_rows_that_other_ranks_have() -> None:
    rows = table(10)
    spec = spec_of(
        model=Normed().double(), optimizer=sgd, feature_cols=["x"], sync_batchnorm=True, batch_size=10,
        epochs=2,
    )  # fmt: skip
    lists = in_lists(rows)
    result = fit_on(spec, [lists, lists.slice(10)])[0]
    plain = copy.deepcopy(spec.model)
    optimizer = sgd(plain.parameters())
    x = torch.tensor(np.stack([rows[c].to_numpy() for c in COLUMNS], 1))
    for _ in range(2):
        optimizer.zero_grad()
        ((plain(x) - torch.tensor(rows["y"].to_numpy())[:, None]) ** 2).mean().backward()
        optimizer.step()
    assert_close(trained(spec, result), plain.state_dict())


def test_batchnorm_meets_no_single_row_in_a_part_of_a_step() -> None:
    rows = table(17)
    spec = spec_of(model=Normed().double(), optimizer=sgd, batch_size=2, accumulate_steps=2, epochs=1)
    assert fit_on(spec, [rows.slice(0, 9), rows.slice(9)])[0].rows_seen == 17


# -- buffers --


class Buffered(nn.Module):
    """`seen`: the mean of the inputs of the last batch; constants that must stay as they are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.net = nn.Linear(3, 1)
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("mask", torch.triu(torch.full((3, 3), float("-inf")), 1))
        self.register_buffer("third", torch.tensor([1 / 3]))
        self.register_buffer("turn", torch.tensor([1 + 2j, 3 - 1j]))
        self.register_buffer("rows", torch.zeros((), dtype=torch.int64))
        self.register_buffer("wide", torch.zeros((), dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.copy_(x.detach().mean(0))
            self.turn[0] = torch.complex(x.detach().mean(), x.detach().mean())
            self.rows.fill_(len(x))
            self.wide.fill_(len(x) > 5)
        return self.net(x)


@pytest.mark.parametrize("cut", [14, 20, 0])
def test_buffers_are_means_by_rows_and_constants_stay_as_they_are(cut: int) -> None:
    rows = table(20)
    parts = [rows.slice(0, cut), rows.slice(cut)]
    spec = spec_of(model=Buffered().double(), optimizer=sgd, batch_size=20, epochs=3)
    found = trained(spec, fit_on(spec, parts)[0])
    x = np.stack([rows[c].to_numpy() for c in COLUMNS], 1)
    # Each rank saw all its rows in its one batch, so the mean by rows is that of all rows.
    np.testing.assert_allclose(found["seen"].numpy(), x.mean(0), rtol=1e-12)
    assert found["turn"][0].item() == pytest.approx(complex(x.mean(), x.mean()))
    assert found["turn"][1].item() == 3 - 1j
    start = spec.model.state_dict()
    assert torch.equal(found["mask"], start["mask"])
    assert torch.equal(found["third"], start["third"])
    assert (found["rows"].item(), found["wide"].item()) == (cut, cut > 5)
