"""Rows that are few, uneven, weightless or odd, on one rank and on two: each against plain torch on the rows
that count."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

torch = pytest.importorskip("torch")
from torch import Tensor, nn  # noqa: E402

from hvd_core import basics, errors  # noqa: E402
from hvd_core.train import FitResult, Scheduler, TrainSpec, fit_local  # noqa: E402
from hvd_core.train.framework import Batch, Totals  # noqa: E402
from hvd_core.train.torch_model import load_weights  # noqa: E402

from ..unit.thread_ranks import calls, run_ranks  # noqa: E402
from .runs import COLUMNS, sgd, spec_of, table  # noqa: E402
from .toy import Linear, ToyFramework  # noqa: E402

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


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.second = nn.Linear(1, 1).double(), nn.Linear(2, 1).double()

    def forward(self, a: Tensor, bc: Tensor) -> Tensor:
        return self.first(a) + torch.tanh(self.second(bc))


@pytest.mark.parametrize("cuts", [[0, 40], [0, 30, 40]])
def test_r12_two_inputs_of_which_one_is_no_number_where_the_weight_is_0(cuts: list[int]) -> None:
    rows = table(40)
    silent = np.arange(40) % 4 == 1
    b = rows["b"].to_numpy().copy()
    b[silent] = np.nan
    spoiled = rows.set_column(1, "b", pa.array(b)).append_column("w", pa.array(np.where(silent, 0.0, 2.0)))
    spec = spec_of(
        model=TwoInputs(), optimizer=sgd, batch_size=40, epochs=3, input_columns=[["a"], ["b", "c"]],
        sample_weight_col="w",
    )  # fmt: skip
    result = fit_on(spec, [spoiled.slice(x, y - x) for x, y in pairwise(cuts)])[0]
    kept = rows.filter(pa.array(~silent))
    a, bc = (torch.tensor(np.stack([kept[n].to_numpy() for n in names], 1)) for names in ("a", "bc"))
    y = torch.tensor(kept["y"].to_numpy())[:, None]
    plain = TwoInputs()
    optimizer = sgd(plain.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        ((plain(a, bc) - y) ** 2).mean().backward()
        optimizer.step()
    assert_close(trained(spec, result), plain.state_dict())


# -- what must not go unseen --


class Forgetful(ToyFramework):
    """Leaves the second batch out: of training, or of validation."""

    def __init__(self, where: str):
        super().__init__()
        self._where = where

    def train_epoch(self, batches: Iterator[Batch], epoch: int, steps: int, totals: Totals) -> None:
        super().train_epoch(self._some(batches, "train"), epoch, steps, totals)

    def evaluate(self, batches: Iterator[Batch]) -> Totals:
        return super().evaluate(self._some(batches, "evaluate"))

    def _some(self, batches: Iterator[Batch], where: str) -> Iterator[Batch]:
        return (batch for i, batch in enumerate(batches) if i != 1 or where != self._where)


def nothing() -> float:
    return 0.0


@pytest.mark.parametrize(
    ("where", "text"),
    [("train", "epoch 0 used 32 of 40 training rows"), ("evaluate", "validation used 6 of 10 rows")],
)
def test_rows_that_a_framework_loses_end_the_fit(where: str, text: str) -> None:
    spec = spec_of(
        model=Linear(3), optimizer=nothing, loss=nothing, validation=0.2, inference_batch_size=4,
        framework=lambda: Forgetful(where),
    )  # fmt: skip
    with pytest.raises(errors.RowsLost, match=text):
        fit_local(spec, table(50))


class Sized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.day, self.out = nn.Embedding(7, 3), nn.Linear(3, 1)

    def forward(self, day: Tensor) -> Tensor:
        return self.out(self.day(day).flatten(1))


def test_an_index_beyond_the_embedding_names_column_and_range() -> None:
    days = np.arange(40) % 7
    days[33] = 9
    rows = pa.table({"day": days, "y": days / 7})
    spec = spec_of(model=Sized(), feature_cols=["day"], shuffle=False, row_order="arrival", epochs=1)
    words = r"(?s)rank 0, epoch 0, step 4: an embedding is too small.*0 to 9.*column 'day' on rank 0.*0 to 9"
    with pytest.raises(errors.LossError, match=words):
        fit_local(spec, rows)
    with pytest.raises(errors.HvdError, match=r"an embedding is too small.*9 to 9"):
        fit_local(spec, rows.slice(33))


# -- two ranks against plain torch, where ranks round or remember --


def test_ema_on_two_ranks_is_the_running_mean() -> None:
    rows = table(40)
    spec = spec_of(model=linear(), optimizer=sgd, batch_size=40, epochs=4, ema_decay=0.5)
    result = fit_on(spec, [rows.slice(0, 29), rows.slice(29)])[0]
    mean = linear().state_dict()
    for steps in range(1, 5):
        now = plain_sgd(rows, steps)
        mean = {name: 0.5 * value + 0.5 * now[name] for name, value in mean.items()}
    assert_close(trained(spec, result), mean)


def one_step(parts: Sequence[pa.Table], **options: Any) -> Tensor:
    """The gradient that the ranks took a step by, in float32."""
    start = linear().float()
    spec = spec_of(model=linear().float(), optimizer=by_one, batch_size=40, epochs=1, **options)
    after = trained(spec, fit_on(spec, parts)[0])
    return torch.cat([(before - after[name]).flatten() for name, before in start.state_dict().items()])


def by_one(params: Any) -> Any:
    return torch.optim.SGD(params, lr=1.0)


def test_the_gradient_of_one_step_in_float32() -> None:
    """To 1e-6 of plain torch on all rows; in bfloat16 on the wire to its 8 bits, which it must show."""
    rows = table(40)
    parts = [rows.slice(0, 29), rows.slice(29)]
    model = linear().float()
    x = torch.tensor(np.stack([rows[c].to_numpy() for c in COLUMNS], 1), dtype=torch.float32)
    y = torch.tensor(rows["y"].to_numpy(), dtype=torch.float32)[:, None]
    ((model(x) - y) ** 2).mean().backward()
    want = torch.cat([p.grad.flatten() for p in model.parameters()])
    scale = float(want.abs().max())
    torch.testing.assert_close(one_step(parts), want, rtol=0, atol=1e-6 * scale)
    narrow = one_step(parts, wire_dtype="bf16")
    torch.testing.assert_close(narrow, want, rtol=0, atol=2**-7 * scale)
    assert float((narrow - want).abs().max()) > 1e-5 * scale


def test_metrics_cost_no_collective_and_a_scheduler_sees_the_mean_over_ranks() -> None:
    rows = table(40)
    parts = [rows.slice(0, 29), rows.slice(29)]
    many = {f"m{i}": nn.functional.l1_loss for i in range(5)}
    plateau = Scheduler(falling, metric="loss")

    def counted(metrics: dict[str, Any]) -> tuple[list[int], list[float]]:
        spec = spec_of(
            model=linear(), optimizer=sgd, batch_size=40, epochs=4, metrics=metrics, lr_schedule=plateau
        )

        def fit(rank: int) -> tuple[int, list[float]]:
            torch.set_num_threads(1)
            result = fit_local(spec, parts[rank], basics.default_group())
            return len(calls()), [e["lr"] for e in result.history]

        found = run_ranks(2, fit)
        assert found[0][1] == found[1][1]
        return [n for n, _ in found], found[0][1]

    assert counted({}) == counted(many)
    alone = fit_local(
        spec_of(model=linear(), optimizer=sgd, batch_size=40, epochs=4, lr_schedule=plateau), rows
    )
    assert counted({})[1] == [e["lr"] for e in alone.history] and alone.history[-1]["lr"] < 0.05


def falling(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.5)
