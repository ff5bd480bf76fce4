"""What two ranks do beyond the numbers of a step: rows, decisions, divergence, errors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

torch = pytest.importorskip("torch")
from torch import Tensor, nn  # noqa: E402

import hvd_core  # noqa: E402
from hvd_core import basics, errors  # noqa: E402
from hvd_core.train import EarlyStopping, FitResult, TrainSpec, fit_local  # noqa: E402
from hvd_core.train.torch_model import load_weights  # noqa: E402

pytestmark = pytest.mark.timeout(120)

FEATURES = ["a", "b", "id"]


def table(ids: Sequence[int], seed: int = 0) -> pa.Table:
    rng = np.random.default_rng(seed)
    n = len(ids)
    a, b = rng.normal(size=n), rng.normal(size=n)
    return pa.table(
        {"a": a, "b": b, "id": np.array(ids, np.int64), "y": a - b, "held": np.arange(n) % 4 == 0}
    )


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Linear(2, 1)

    def forward(self, a: Tensor, b: Tensor, id: Tensor) -> Tensor:
        return self.net(torch.stack([a, b], 1))


def spec_of(**changes: Any) -> TrainSpec:
    base: dict[str, Any] = {
        "model": Net(), "optimizer": adam, "loss": nn.MSELoss(), "feature_cols": FEATURES, "label_cols": "y",
        "batch_size": 8, "epochs": 2, "seed": 4,
    }  # fmt: skip
    return TrainSpec(**{**base, **changes})


def adam(params: Any) -> Any:
    return torch.optim.Adam(params, lr=0.01)


def sgd(params: Any) -> Any:
    return torch.optim.SGD(params, lr=0.1)


def in_ranks(fn: Callable[..., Any], *args: Any) -> list[Any]:
    return hvd_core.run(fn, args, num_proc=2, timeout_s=100)


def start() -> Any:
    torch.set_num_threads(1)
    basics.init()
    return basics.default_group()


class Recorder:
    """Row ids by epoch, as this rank used them."""

    ids: dict[int, list[int]] = {}

    def on_batch_end(self, run: Any, batch: Any) -> None:
        self.ids.setdefault(run.epoch, []).extend(batch.inputs[2].tolist())


def record(
    tables: list[list[pa.Table]], specs: list[TrainSpec]
) -> list[tuple[dict[int, list[int]], FitResult]]:
    group = start()
    found = []
    for spec, parts in zip(specs, tables, strict=True):
        Recorder.ids = {}
        result = fit_local(spec, parts[group.rank], group)
        found.append((Recorder.ids, result))
    return found


def test_r05_each_row_once_in_each_epoch() -> None:
    tables = [
        [table(range(100)), table(range(100, 103))],
        [table(range(430)), table(range(430, 858))],
        [table(range(13)), table(range(13, 25))],
        [table(range(0)), table(range(5))],
        [table(range(40)), table(range(40, 60))],
    ]
    specs = [spec_of(callbacks=[Recorder()]) for _ in tables]
    specs[-1] = spec_of(callbacks=[Recorder()], validation=0.25)
    both = in_ranks(record, tables, specs)
    for (ids0, result), (ids1, _), parts in zip(both[0], both[1], tables, strict=True):
        sent = [i for t in parts for i in t["id"].to_pylist()]
        for epoch in range(2):
            used = [*ids0.get(epoch, []), *ids1.get(epoch, [])]
            assert len(used) == len(set(used)) == result.train_rows
            assert set(used) <= set(sent)
            assert result.validation_rows or sorted(used) == sent
        assert result.rows_seen == result.rows_sent == len(sent)
        if result.validation_rows:
            assert result.validation_rows == 15
            assert sorted([*ids0[0], *ids1[0]]) == sorted([*ids0[1], *ids1[1]])
        if len(ids0.get(0, [])) > 20:
            assert ids0[0] != ids0[1]


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def forward(self, a: Tensor, b: Tensor, id: Tensor) -> Tensor:
        return self.net(torch.stack([a, b, a * b], 1))


def twice(spec: TrainSpec, shuffled: list[pa.Table]) -> list[FitResult]:
    group = start()
    return [fit_local(spec, t, group) for t in shuffled[2 * group.rank : 2 * group.rank + 2]]


def test_r33_two_runs_are_identical_however_the_rows_arrive() -> None:
    """Same rows per rank in another order: the sorted shard makes them the same run, dropout included."""
    rng = np.random.default_rng(0)
    parts = [table(range(50), 1), table(range(50, 87), 2)]
    arrivals = [t.take(rng.permutation(t.num_rows)) for t in parts for _ in range(2)]
    spec = spec_of(model=Dropped(), validation=0.2, batch_size=4, epochs=3)
    first, second = in_ranks(twice, spec, arrivals)[0]
    a, b = (load_weights(Dropped(), r.weights).state_dict() for r in (first, second))
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert [e["val_loss"] for e in first.history] == [e["val_loss"] for e in second.history]


class Optional(nn.Module):
    """`odd` works on the rank whose ids are odd only, `never` nowhere."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net, self.odd, self.never = (nn.Linear(2, 1) for _ in range(3))

    def forward(self, a: Tensor, b: Tensor, id: Tensor) -> Tensor:
        x = torch.stack([a, b], 1)
        return self.net(x) + self.odd(x) if bool((id % 2).any()) else self.net(x)


def fit_one(spec: TrainSpec, parts: list[pa.Table]) -> FitResult:
    group = start()
    return fit_local(spec, parts[group.rank], group)


def test_parameters_without_gradient_on_some_ranks_count_as_zero() -> None:
    spec = spec_of(model=Optional(), optimizer=sgd, epochs=1, batch_size=50)
    parts = [table(range(0, 20, 2), 1), table(range(1, 11, 2), 2)]
    own = load_weights(Optional(), in_ranks(fit_one, spec, parts)[0].weights)
    plain = Optional()
    a, b, y = (torch.cat([torch.tensor(t[c].to_numpy()) for t in parts]).float() for c in ("a", "b", "y"))
    x = torch.stack([a, b], 1)
    odd = torch.cat([torch.zeros(10), torch.ones(5)])[:, None]
    loss = ((plain.net(x) + odd * plain.odd(x) - y[:, None]) ** 2).mean()
    loss.backward()
    sgd(plain.parameters()).step()
    for p, q in zip(own.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    assert torch.equal(own.never.weight, Optional().never.weight)


def fit_each(specs: list[TrainSpec], tables: list[list[pa.Table]]) -> list[FitResult]:
    group = start()
    return [fit_local(s, parts[group.rank], group) for s, parts in zip(specs, tables, strict=True)]


def own_loss(output: Tensor, label: Tensor) -> Tensor:
    """Rises with the epochs on rank 0, falls on rank 1."""
    at = float(Clock.epoch)
    return torch.tensor(at if basics.rank() == 0 else 10.0 - 3 * at)


class Clock:
    epoch = 0

    def on_batch_end(self, run: Any, batch: Any) -> None:
        Clock.epoch = run.epoch


def test_r27_all_ranks_stop_at_the_same_epoch() -> None:
    rising = EarlyStopping("val_m", patience=1)
    spec = spec_of(
        metrics={"m": own_loss}, validation="held", early_stopping=rising, callbacks=[Clock()], epochs=8
    )
    # 8 validation rows rise by 1, 2 fall by 3: the reduced metric (8 t + 2 (10 - 3 t)) / 10 rises by 0.2.
    parts = [table(range(32)), table(range(32, 40))]
    turned = [table(range(8)), table(range(8, 40))]
    both = in_ranks(fit_each, [spec, spec], [parts, turned])
    for result, _ in both:
        assert [e["val_m"] for e in result.history] == pytest.approx([2.0, 2.2])
        assert (result.best_epoch, result.stopped_early) == (0, True)
    # The other way round it falls for ever on both, though it rises on rank 0.
    assert [len(r.history) for _, r in both] == [8, 8]


class Tamper:
    def on_batch_end(self, run: Any, batch: Any) -> None:
        if run.rank == 1 and run.step == 2:
            with torch.no_grad():
                run.model.net.bias.add_(1e-3)


def diverge(specs: list[TrainSpec], parts: list[pa.Table]) -> list[str]:
    group = start()
    texts = []
    for spec in specs:
        with pytest.raises(errors.RanksDiverged) as caught:
            fit_local(spec, parts[group.rank], group)
        texts.append(str(caught.value))
    return texts


def test_divergence_names_parameter_and_rank_on_every_rank() -> None:
    parts = [table(range(20)), table(range(20, 40))]
    specs = [spec_of(callbacks=[Tamper()], checksum_steps=every) for every in (None, 1)]
    for texts in in_ranks(diverge, specs, parts):
        assert all("net.bias of rank 1 differs" in text for text in texts)


def test_a_nan_on_one_rank_is_the_first_cause() -> None:
    bad = table(range(20, 40))
    values = bad["a"].to_numpy().copy()
    values[3] = np.nan
    parts = [table(range(20)), bad.set_column(0, "a", pa.array(values))]
    with pytest.raises(
        errors.RankFailed, match=r"rank 1 raised .*LossError: rank 1, epoch 0, step \d: .*'a'"
    ) as caught:
        in_ranks(fit_one, spec_of(), parts)
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, errors.LossError)


def data_errors(specs: list[TrainSpec], tables: list[list[pa.Table]]) -> list[str]:
    group = start()
    texts = []
    for spec, parts in zip(specs, tables, strict=True):
        with pytest.raises(errors.DataError) as caught:
            fit_local(spec, parts[group.rank], group)
        texts.append(str(caught.value))
    return texts


def vectors(n: int, rows: int) -> pa.Table:
    return pa.table({"v": pa.array(np.ones((rows, n)).tolist()), "y": np.ones(rows)})


def test_shapes_must_agree_between_ranks_and_there_must_be_rows() -> None:
    spec = spec_of(model=nn.Linear(3, 1), feature_cols="v")
    tables = [[vectors(3, 4), vectors(2, 4)], [table([]), table([])]]
    for ragged, empty in in_ranks(data_errors, [spec, spec_of()], tables):
        assert all(word in ragged for word in ("'v'", "(3,)", "(2,)"))
        assert "no rows" in empty


def scaled_loss(output: Tensor, label: Tensor) -> Tensor:
    """Overflows fp16's backward on rank 1 in its first step."""
    loss = ((output - label.view(output.shape)) ** 2).mean()
    Blast.calls += 1
    return loss * 1e36 if basics.rank() == 1 and Blast.calls == 1 else loss


class Blast:
    calls = 0
    scales: list[float] = []
    weights: list[Any] = []

    def on_train_begin(self, run: Any) -> None:
        Blast.weights.append(copy.deepcopy(run.model.state_dict()))

    def on_batch_end(self, run: Any, batch: Any) -> None:
        Blast.weights.append(copy.deepcopy(run.model.state_dict()))


def overflow(spec: TrainSpec, parts: list[pa.Table]) -> list[Any]:
    group = start()
    fit_local(spec, parts[group.rank], group)
    return Blast.weights


def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    spec = spec_of(
        precision="fp16", loss=scaled_loss, loss_reduction="mean", callbacks=[Blast()], epochs=1, batch_size=5
    )
    both = in_ranks(overflow, spec, [table(range(20)), table(range(20, 40))])
    for weights in both:
        unchanged = [all(torch.equal(a[k], b[k]) for k in a) for a, b in pairwise(weights)]
        assert unchanged == [True, False, False, False]
    for a, b in zip(*both, strict=True):
        assert all(torch.equal(a[k], b[k]) for k in a)
