"""N ranks equal one rank on the joined batch: parameters in float64 against plain torch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

torch = pytest.importorskip("torch")
from torch import Tensor, nn  # noqa: E402

import hvd_core  # noqa: E402
from hvd_core import basics  # noqa: E402
from hvd_core.train import FitResult, TrainSpec, fit_local, plan_layout  # noqa: E402
from hvd_core.train.columns import columns_of  # noqa: E402
from hvd_core.train.order import EpochPlan, rows_in_use, split_rows  # noqa: E402
from hvd_core.train.shard import Shard, ShardWriter  # noqa: E402
from hvd_core.train.torch_model import load_weights  # noqa: E402

pytestmark = pytest.mark.timeout(120)


def table(rows: int, seed: int = 0, wide: int = 4) -> pa.Table:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, wide))
    y = x.sum(1) * 2 + rng.normal(size=rows)
    columns = {f"x{i}": x[:, i] for i in range(wide)}
    extra = {
        "y": y,
        "z": x[:, 0] - y,
        "k": rng.integers(0, 3, rows),
        "b": (y > 0).astype(np.int64),
        "w": rng.random(rows),
        "id": np.arange(rows) + 1000 * seed,
    }
    return pa.table({**columns, **extra})


FEATURES = [f"x{i}" for i in range(4)]


def mlp(outputs: int = 1, last: nn.Module | None = None) -> nn.Module:
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs), last or nn.Identity()).double()


def sgd(params: Any) -> Any:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def adam(params: Any) -> Any:
    return torch.optim.Adam(params, lr=0.01)


def spec_of(**changes: Any) -> TrainSpec:
    base: dict[str, Any] = {
        "model": mlp(), "optimizer": sgd, "loss": nn.MSELoss(), "feature_cols": FEATURES, "label_cols": "y",
        "batch_size": 8, "epochs": 2, "seed": 4,
    }  # fmt: skip
    return TrainSpec(**{**base, **changes})


def fit_each(cases: Sequence[tuple[TrainSpec, Sequence[pa.Table]]]) -> list[FitResult]:
    """In a rank: one fit after another in one Group."""
    torch.set_num_threads(1)
    basics.init()
    group = basics.default_group()
    return [fit_local(spec, tables[group.rank], group) for spec, tables in cases]


def run_each(cases: Sequence[tuple[TrainSpec, Sequence[pa.Table]]]) -> list[FitResult]:
    """Rank 0's results; the others must agree in all but the weights."""
    by_rank = hvd_core.run(fit_each, (cases,), num_proc=2, timeout_s=100)
    for a, b in zip(*by_rank, strict=True):
        for mine, other in zip(a.history, b.history, strict=True):
            measured = ("seconds", "data", "compute", "communication")
            assert {k: v for k, v in mine.items() if k not in measured} == pytest.approx(
                {k: v for k, v in other.items() if k not in measured}, abs=0, nan_ok=True
            )
        assert (a.best_epoch, a.rows_seen, a.output_spec) == (b.best_epoch, b.rows_seen, b.output_spec)
        assert b.weights == b""
    return by_rank[0]


def joined_batches(
    spec: TrainSpec, tables: Sequence[pa.Table], epochs: int
) -> list[tuple[int, list[Tensor]]]:
    """(epoch, blocks) of each step: the rows of all ranks, as the plan deals them."""
    shards = []
    for t in tables:
        layout = plan_layout(columns_of(t.schema), spec)
        writer = ShardWriter(layout)
        for batch in t.select(layout.schema.names).to_batches():
            writer.write(batch)
        packed = writer.finish()
        shards.append(Shard.attach(packed.fds, packed.description))
        packed.close()
    plan = EpochPlan(
        tuple(s.rows for s in shards),
        (spec.batch_size or spec.global_batch_size or 1) * spec.accumulate_steps,
        per_rank=spec.batch_size is not None,
    )
    steps = []
    filled = [r for r, s in enumerate(shards) if s.rows]
    for epoch in range(epochs):
        for step in range(plan.steps):
            parts = []
            for r in filled:
                split = split_rows(shards[r].rows, shards[r].sorted_order())
                span = plan.span(r, step)
                index = rows_in_use(split, span, seed=spec.seed, epoch=epoch, shuffle=True)
                parts.append([shards[r].block(i)[index] for i in range(len(shards[r].blocks))])
            blocks = [torch.from_numpy(np.concatenate(b)) for b in zip(*parts, strict=True)]
            steps.append((epoch, blocks))
    return steps


def plain(spec: TrainSpec, tables: Sequence[pa.Table], loss_of: Any = None) -> nn.Module:
    """One process on the joined batches, with the user's loss on the whole batch."""
    model = copy.deepcopy(spec.model)
    optimizer = spec.optimizer(model.parameters())

    def default(out: Any, labels: list[Tensor], weight: Tensor | None) -> Tensor:
        label = labels[0]
        return spec.loss(out, label.view(out.shape) if label.numel() == out.numel() else label)

    for _, blocks in joined_batches(spec, tables, spec.epochs or 1):
        n = len(spec.label_cols)
        optimizer.zero_grad()
        weight = blocks[1 + n] if spec.sample_weight_col else None
        (loss_of or default)(model(blocks[0]), blocks[1 : 1 + n], weight).backward()
        if spec.grad_clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), spec.grad_clip_norm)
        optimizer.step()
    return model


def assert_same(own: FitResult, spec: TrainSpec, oracle: nn.Module, tolerance: float = 1e-9) -> None:
    fitted = load_weights(copy.deepcopy(spec.model), own.weights)
    assert not all(
        torch.equal(p, q) for p, q in zip(fitted.parameters(), spec.model.parameters(), strict=True)
    )
    for (name, p), q in zip(fitted.state_dict().items(), oracle.state_dict().values(), strict=True):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def test_r05_uneven_shards() -> None:
    shapes = [(60, 7), (1000, 10), (20, 0), (0, 5), (2, 1), (1, 0), (0, 1), (13, 12)]
    cases = []
    for a, b in shapes:
        batch = 200 if a == 1000 else 8
        cases.append((spec_of(batch_size=batch), [table(a, 1), table(b, 2)]))
    cases.append((spec_of(batch_size=None, global_batch_size=11), [table(30, 1), table(9, 2)]))
    cases.append((spec_of(accumulate_steps=3, batch_size=2), [table(30, 1), table(9, 2)]))
    cases.append((spec_of(optimizer=adam), [table(40, 1), table(33, 2)]))
    for (spec, tables), own in zip(cases, run_each(cases), strict=True):
        assert_same(own, spec, plain(spec, tables), 1e-7 if spec.optimizer is adam else 1e-9)
        rows = sum(t.num_rows for t in tables)
        assert (own.rows_seen, own.rows_sent) == (rows, rows)
        assert np.isfinite([e["loss"] for e in own.history]).all()


def test_r05_full_batch_needs_no_plan() -> None:
    """An oracle that shares nothing with the product: SGD on all rows."""
    tables = [table(1000, 1), table(11, 2)]
    spec = spec_of(batch_size=1000, epochs=5)
    own = run_each([(spec, tables)])[0]
    joined = pa.concat_tables(tables)
    x = torch.tensor(np.stack([joined[c].to_numpy() for c in FEATURES], 1))
    y = torch.tensor(joined["y"].to_numpy())[:, None]
    model = copy.deepcopy(spec.model)
    optimizer = sgd(model.parameters())
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert_same(own, spec, model)
    assert [e["loss"] for e in own.history] == pytest.approx(losses, rel=1e-9)


def ignored(t: pa.Table) -> pa.Table:
    k = t["k"].to_numpy().copy()
    k[::3] = -100
    return t.set_column(t.schema.names.index("k"), "k", pa.array(k))


def l1(out: Tensor, label: Tensor) -> Tensor:
    return (out - label.view(out.shape)).abs().mean()


def l1_rows(out: Tensor, label: Tensor) -> Tensor:
    return (out - label.view(out.shape)).abs().sum(1)


def ratio(out: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    label = label.view(out.shape)
    return (label.abs() * (out - label) ** 2).sum(), label.abs().sum()


def total(out: Tensor, label: Tensor) -> Tensor:
    return 0.01 * ((out - label) ** 2).sum()


def test_losses_with_their_own_denominators() -> None:
    weights = torch.tensor([1.0, 5.0, 9.0]).double()
    tables = [table(37, 1), table(12, 2)]
    holes = [ignored(t) for t in tables]
    one_sided = [ignored(tables[0]), tables[1]]
    classes = {"model": mlp(3), "label_cols": "k"}
    logs = {"model": mlp(3, nn.LogSoftmax(1)), "label_cols": "k"}
    cases = [
        (spec_of(**classes, loss=nn.CrossEntropyLoss()), tables),
        (spec_of(**classes, loss=nn.CrossEntropyLoss(weight=weights)), tables),
        (spec_of(**classes, loss=nn.CrossEntropyLoss(weight=weights, label_smoothing=0.2)), holes),
        (spec_of(**classes, loss=nn.CrossEntropyLoss()), one_sided),
        (spec_of(**classes, loss=nn.functional.cross_entropy), tables),
        (spec_of(**classes, loss=nn.MultiMarginLoss()), tables),
        (spec_of(**logs, loss=nn.NLLLoss(weight=weights)), holes),
        (spec_of(loss=nn.L1Loss()), tables),
        (spec_of(loss=nn.HuberLoss()), tables),
        (spec_of(loss=nn.MSELoss(reduction="sum"), optimizer=slow), tables),
        (spec_of(model=mlp(1, nn.Sigmoid()), loss=nn.BCELoss(), label_cols="b"), tables),
        (spec_of(loss=nn.BCEWithLogitsLoss(pos_weight=torch.tensor([3.0]).double()), label_cols="b"), tables),
        (spec_of(loss=l1, loss_reduction="mean"), tables),
        (spec_of(loss=total, loss_reduction="sum"), tables),
    ]
    for (spec, parts), own in zip(cases, run_each(cases), strict=True):
        assert_same(own, spec, plain(spec, parts))


def slow(params: Any) -> Any:
    return torch.optim.SGD(params, lr=1e-3)


def test_custom_and_per_row_losses() -> None:
    tables = [table(37, 1), table(5, 2)]
    cases = [
        (spec_of(loss=ratio, loss_reduction="custom"), tables),
        (spec_of(loss=l1_rows, loss_reduction="mean"), tables),
        (spec_of(loss=ratio, loss_reduction="custom"), [table(20, 1), table(0, 2)]),
    ]
    own = run_each(cases)
    for i in (0, 2):
        oracle = plain(*cases[i], lambda out, y, w: ratio(out, y[0])[0] / ratio(out, y[0])[1])
        assert_same(own[i], cases[i][0], oracle)
    assert_same(own[1], cases[1][0], plain(*cases[1], lambda out, y, w: l1_rows(out, y[0]).mean()))


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.a, self.b = nn.Linear(4, 1), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), self.b(x)


def test_sample_weights_and_several_labels() -> None:
    tables = [table(31, 1), table(14, 2)]
    w = tables[1].schema.names.index("w")
    silent = [tables[0], tables[1].set_column(w, "w", pa.array(np.zeros(14)))]
    weights = torch.tensor([1.0, 5.0, 9.0]).double()
    heads = Heads().double()
    cases = [
        (spec_of(sample_weight_col="w"), tables),
        (spec_of(sample_weight_col="w"), silent),
        (
            spec_of(sample_weight_col="w", model=mlp(3), label_cols="k", loss=nn.CrossEntropyLoss(weights)),
            tables,
        ),
        (spec_of(sample_weight_col="w", loss=l1_rows, loss_reduction="mean"), silent),
        (
            spec_of(
                model=heads, label_cols=["y", "k"], loss=[nn.MSELoss(), nn.CrossEntropyLoss(weights)],
                loss_weights=[0.5, 2.0],
            ),
            tables,
        ),
        (spec_of(model=mlp(2), label_cols=["y", "z"]), tables),
    ]  # fmt: skip

    def mse(out: Tensor, y: list[Tensor], w: Tensor) -> Tensor:
        return (w * (out[:, 0] - y[0]) ** 2).sum() / w.sum()

    def ce(out: Tensor, y: list[Tensor], w: Tensor) -> Tensor:
        losses = nn.functional.cross_entropy(out, y[0], weights, reduction="none")
        return (w * losses).sum() / (w * weights[y[0]]).sum()

    def rows(out: Tensor, y: list[Tensor], w: Tensor) -> Tensor:
        return (w * (out[:, 0] - y[0]).abs()).sum() / w.sum()

    def two(out: tuple[Tensor, Tensor], y: list[Tensor], w: Any) -> Tensor:
        return 0.5 * ((out[0][:, 0] - y[0]) ** 2).mean() + 2.0 * nn.functional.cross_entropy(
            out[1], y[1], weights
        )

    def joined(out: Tensor, y: list[Tensor], w: Any) -> Tensor:
        return ((out - torch.stack(y, 1)) ** 2).mean()

    for case, own, loss in zip(cases, run_each(cases), (mse, mse, ce, rows, two, joined), strict=True):
        assert_same(own, case[0], plain(*case, loss))


def test_r32_clipping_sees_the_global_gradient() -> None:
    tables = [table(40, 1), table(9, 2)]
    cases = [
        (spec_of(grad_clip_norm=0.1), tables),
        (spec_of(grad_clip_norm=0.1, accumulate_steps=2, batch_size=3), tables),
    ]
    for case, own in zip(cases, run_each(cases), strict=True):
        assert_same(own, case[0], plain(*case))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def test_sync_batchnorm_is_batchnorm_on_the_joined_batch() -> None:
    model = Normed().double()
    cases = [
        (spec_of(model=model, sync_batchnorm=True), [table(40, 1), table(13, 2)]),
        (spec_of(model=model, sync_batchnorm=True), [table(20, 1), table(0, 2)]),
    ]
    plain_norm = (
        spec_of(model=model, epochs=1),
        [table(9, 1), table(4, 2)],
    )  # 1 + 1 rows in a step would not do
    results = run_each([*cases, plain_norm])
    for case, own in zip(cases, results, strict=False):
        assert_same(own, case[0], plain(*case))


def test_clean_results_for_scaling_and_narrow_types() -> None:
    tables = [table(40, 1), table(30, 2)]
    model = mlp().float()
    cases = [
        (spec_of(lr_scaling="linear"), tables),
        (spec_of(lr_scaling="sqrt", learning_rate=0.5), tables),
        (spec_of(model=model, precision="bf16", epochs=8), tables),
        (spec_of(model=model, precision="fp16", epochs=8), tables),
        (spec_of(model=model, wire_dtype="bf16", epochs=8), tables),
        (spec_of(model=model, ema_decay=0.5, epochs=8), tables),
        (spec_of(model=model, epochs=8), [*tables[:1], table(0)]),
    ]
    results = run_each(cases)
    assert results[0].history[0]["lr"] == pytest.approx(0.1)
    assert results[1].history[0]["lr"] == pytest.approx(0.5 * 2**0.5)
    for own in results[2:]:
        assert own.history[-1]["loss"] < own.history[0]["loss"]
