"""One rank against plain torch: the same bits."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

torch = pytest.importorskip("torch")
from torch import Tensor, nn  # noqa: E402

from hvd_core import errors  # noqa: E402
from hvd_core.train import EarlyStopping, Scheduler, TrainSpec, fit_local, plan_layout  # noqa: E402
from hvd_core.train.columns import columns_of  # noqa: E402
from hvd_core.train.local import shard_of  # noqa: E402
from hvd_core.train.order import rows_in_use, split_rows  # noqa: E402
from hvd_core.train.shard import Shard, ShardWriter  # noqa: E402
from hvd_core.train.torch_model import load_weights  # noqa: E402

pytestmark = pytest.mark.timeout(60)


def table_of(**columns: Any) -> pa.Table:
    return pa.table({k: pa.array(list(v) if np.ndim(v) > 1 else v) for k, v in columns.items()})


def regression(rows: int = 50, seed: int = 0) -> pa.Table:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 4))
    y = x @ [1.0, -2.0, 0.5, 3.0] + rng.normal(size=rows)
    return table_of(
        a=x[:, 0], b=x[:, 1], c=x[:, 2], d=x[:, 3], y=y, k=(y > 0).astype(np.int64), w=(y > 0) + 0.5
    )


def mlp(outputs: int = 1, *, sigmoid: bool = False, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(3)
    layers: list[nn.Module] = [nn.Linear(4, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, outputs)]
    return nn.Sequential(*layers, nn.Sigmoid()) if sigmoid else nn.Sequential(*layers)


class Keep:
    """Keeps the trained objects, which the result does not hold."""

    kept: list[Any] = []

    def on_train_end(self, run: Any) -> None:
        type(self).kept.append((run.model, run.optimizer))


def rows_in_order(spec: TrainSpec, table: pa.Table, epoch: int) -> list[np.ndarray]:
    """The epoch's rows as the product orders them: blocks (inputs, labels), in order of use."""
    shard = shard_of(table, plan_layout(columns_of(table.schema), spec))
    split = split_rows(shard.rows, shard.sorted_order())
    index = rows_in_use(split, (0, shard.rows), seed=spec.seed, epoch=epoch, shuffle=spec.shuffle)
    return [shard.block(i)[index] for i in range(len(shard.blocks))]


def batches(spec: TrainSpec, table: pa.Table, epochs: int, size: int) -> Iterator[list[Tensor]]:
    for epoch in range(epochs):
        blocks = rows_in_order(spec, table, epoch)
        for i in range(0, len(blocks[0]), size):
            yield [torch.from_numpy(b[i : i + size].copy()) for b in blocks]


def same(a: nn.Module, b: nn.Module) -> bool:
    pairs = zip(a.state_dict().items(), b.state_dict().items(), strict=True)
    return all(n == m and torch.equal(x, y) for (n, x), (m, y) in pairs)


def sgd(params: Any) -> Any:
    return torch.optim.SGD(params, lr=0.05, momentum=0.5)


def adam(params: Any) -> Any:
    return torch.optim.Adam(params, lr=0.01)


CASES: list[tuple[str, Callable[[], nn.Module], Any, str]] = [
    ("mse", lambda: mlp(), nn.MSELoss(), "y"),
    ("bce", lambda: mlp(sigmoid=True), nn.BCELoss(), "k"),
    ("ce", lambda: mlp(2), nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0])), "k"),
    ("dropout", lambda: mlp(dropout=0.5), nn.SmoothL1Loss(), "y"),
    ("sum", lambda: mlp(), nn.L1Loss(reduction="sum"), "y"),
]


@pytest.mark.parametrize("optimizer", [sgd, adam])
@pytest.mark.parametrize(("name", "model", "loss", "label"), CASES, ids=[c[0] for c in CASES])
def test_r33_one_rank_is_plain_training_bit_for_bit(
    name: str, model: Callable[[], nn.Module], loss: Any, label: str, optimizer: Any
) -> None:
    table = regression()
    spec = TrainSpec(
        model=model(), optimizer=optimizer, loss=loss, feature_cols="abcd", label_cols=label, batch_size=8,
        epochs=8, seed=5, callbacks=[Keep()],
    )  # fmt: skip
    spec = spec_with(spec, feature_cols=list("abcd"))
    plain = model()
    plain_optimizer = optimizer(plain.parameters())
    torch.manual_seed(spec.seed)
    for x, y in batches(spec, table, 8, 8):
        plain_optimizer.zero_grad()
        out = plain(x)
        loss(out, y.view(-1, 1) if out.shape[1] == 1 else y).backward()
        plain_optimizer.step()

    result = fit_local(spec, table)

    fitted, fitted_optimizer = Keep.kept.pop()
    assert same(fitted, plain)
    assert same(load_weights(model(), result.weights), plain)
    own, oracle = fitted_optimizer.state_dict()["state"], plain_optimizer.state_dict()["state"]
    assert own.keys() == oracle.keys()
    for i in own:
        for key in own[i]:
            assert own[i][key] is None or torch.equal(
                torch.as_tensor(own[i][key]), torch.as_tensor(oracle[i][key])
            )
    assert result.rows_seen == result.rows_sent == 50
    assert [e["steps"] for e in result.history] == [7] * 8


def spec_with(spec: TrainSpec, **changes: Any) -> TrainSpec:
    from dataclasses import replace

    return replace(spec, **changes)


def quick(**changes: Any) -> TrainSpec:
    """A valid spec over `regression()`."""
    base: dict[str, Any] = {
        "model": mlp(), "optimizer": sgd, "loss": nn.MSELoss(), "feature_cols": list("abcd"),
        "label_cols": "y",
        "batch_size": 16, "epochs": 2, "seed": 1,
    }  # fmt: skip
    return TrainSpec(**{**base, **changes})


def fitted(spec: TrainSpec, table: pa.Table) -> tuple[nn.Module, Any]:
    result = fit_local(spec, table)
    model = spec.model if spec.model is not None else spec.model_fn()
    import copy

    return load_weights(copy.deepcopy(model), result.weights), result


def test_an_optimizer_instance_stays_bound_to_its_model() -> None:
    model = mlp()
    own, _ = fitted(quick(model=model, optimizer=sgd(model.parameters())), regression())
    made, _ = fitted(quick(), regression())
    assert same(own, made)
    assert not same(own, model)  # trained a copy, and trained it


def test_a_model_fn_is_seeded() -> None:
    def build() -> nn.Module:
        return nn.Linear(4, 1)

    spec = quick(model_fn=build, model=None, seed=9)
    torch.manual_seed(9)
    plain = build()
    optimizer = sgd(plain.parameters())
    for x, y in batches(spec, regression(), 2, 16):
        optimizer.zero_grad()
        nn.MSELoss()(plain(x), y[:, None]).backward()
        optimizer.step()
    assert same(fitted(spec, regression())[0], plain)


@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.MSELoss(reduction="sum")])
def test_accumulation_equals_the_joined_batch(loss: Any) -> None:
    table = regression(50)
    model = mlp().double()
    small, _ = fitted(quick(model=model, loss=loss, batch_size=4, accumulate_steps=4, optimizer=slow), table)
    large, _ = fitted(quick(model=model, loss=loss, batch_size=16, optimizer=slow), table)
    for p, q in zip(small.parameters(), large.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


def slow(params: Any) -> Any:
    return torch.optim.SGD(params, lr=1e-3)


def test_accumulation_counts_class_weights_over_the_whole_step() -> None:
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 9.0]).double(), label_smoothing=0.1)
    model = mlp(2).double()
    table = regression(40)
    small, _ = fitted(quick(model=model, loss=loss, label_cols="k", batch_size=4, accumulate_steps=4), table)
    large, _ = fitted(quick(model=model, loss=loss, label_cols="k", batch_size=16), table)
    for p, q in zip(small.parameters(), large.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


def test_clipping_learning_rate_and_schedules_against_plain_torch() -> None:
    table = regression(48)
    spec = quick(
        learning_rate=0.2,
        grad_clip_norm=0.1,
        lr_schedule=lambda epoch: 1.0 / (1.0 + epoch),
        warmup_epochs=1.0,
    )
    plain = mlp()
    optimizer = sgd(plain.parameters())
    for step, (x, y) in enumerate(batches(spec, table, 2, 16)):
        epoch = step / 3
        optimizer.param_groups[0]["lr"] = 0.2 * (1.0 / (1.0 + epoch) * min(1.0, epoch + 1 / 3))
        optimizer.zero_grad()
        nn.MSELoss()(plain(x), y[:, None]).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        optimizer.step()
    own, result = fitted(spec, table)
    for p, q in zip(own.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
    # Of the first step of each epoch.
    assert [e["lr"] for e in result.history] == pytest.approx([0.2 / 3, 0.2 / 2])


def test_a_torch_scheduler_is_stepped_by_epoch_step_or_metric() -> None:
    halve = Scheduler(lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5))
    _, result = fitted(quick(lr_schedule=halve, epochs=3), regression())
    assert [e["lr"] for e in result.history] == pytest.approx([0.05, 0.025, 0.0125])
    each = Scheduler(lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5), every="step")
    _, result = fitted(quick(lr_schedule=each, epochs=2, batch_size=25), regression())
    assert [e["lr"] for e in result.history] == pytest.approx([0.05, 0.0125])
    plateau = Scheduler(
        lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.1, threshold=1e9),
        metric="loss",
    )
    _, result = fitted(quick(lr_schedule=plateau, epochs=4), regression())
    assert result.history[-1]["lr"] < result.history[0]["lr"]


class Untrained:
    def on_train_begin(self, run: Any) -> None:
        raise AssertionError("an epoch of training before the mistake was found")


def test_a_metric_that_does_not_exist_is_named_before_the_first_epoch() -> None:
    halve = Scheduler(lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5), metric="nothing")
    own: dict[str, Any] = {"callbacks": [Untrained()], "metrics": {"m": nn.functional.l1_loss}}
    with pytest.raises(errors.InvalidArgument, match=r"lr_schedule: .*'nothing', only loss, m$"):
        fit_local(quick(lr_schedule=halve, **own), regression())
    stop = EarlyStopping("val_n")
    with pytest.raises(errors.InvalidArgument, match=r"early_stopping: .*'val_n', only .*val_loss, val_m$"):
        fit_local(quick(early_stopping=stop, validation=0.2, **own), regression())


def test_ema_is_the_running_mean_of_the_parameters() -> None:
    table = regression()
    spec = quick(ema_decay=0.9)
    plain = mlp()
    optimizer = sgd(plain.parameters())
    means = [p.detach().clone() for p in plain.parameters()]
    for x, y in batches(spec, table, 2, 16):
        optimizer.zero_grad()
        nn.MSELoss()(plain(x), y[:, None]).backward()
        optimizer.step()
        for mean, p in zip(means, plain.parameters(), strict=True):
            mean.mul_(0.9).add_(p.detach(), alpha=0.1)
    own, _ = fitted(spec, table)
    for p, q in zip(own.parameters(), means, strict=True):
        torch.testing.assert_close(p.detach(), q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_is_plain_autocast_bit_for_bit(precision: str) -> None:
    table = regression(100)
    spec = quick(precision=precision, epochs=3, optimizer=adam)
    plain = mlp()
    optimizer = adam(plain.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    for x, y in batches(spec, table, 3, 16):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype):
            output = plain(x)
        scaler.scale(nn.MSELoss()(output.float(), y[:, None])).backward()
        scaler.step(optimizer)
        scaler.update()
    own, result = fitted(spec, table)
    assert all(torch.equal(p, q) for p, q in zip(own.parameters(), plain.parameters(), strict=True))
    assert result.history[-1]["loss"] < result.history[0]["loss"]
    assert result.output_spec[0].dtype == "float32"


def test_a_bfloat16_model_takes_and_gives_float_columns() -> None:
    _, result = fitted(quick(model=mlp().bfloat16()), regression())
    assert result.output_spec[0].dtype == "float32"


# -- weights, metrics, validation, several labels --


def test_r12_weights_of_zero_leave_rows_out() -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(400, 4))
    right = np.arange(400) % 2 == 0
    y = np.where(right, x.sum(1), -99.0)
    table = table_of(a=x[:, 0], b=x[:, 1], c=x[:, 2], d=x[:, 3], y=y, w=right.astype(float))
    spec = quick(model=mlp().double(), sample_weight_col="w", batch_size=400, epochs=5)
    own, result = fitted(spec, table)
    half, half_result = fitted(
        quick(model=spec.model, batch_size=400, epochs=5), table.filter(pa.array(right))
    )
    for p, q in zip(own.parameters(), half.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)
    assert result.history[-1]["loss"] == pytest.approx(half_result.history[-1]["loss"])
    with pytest.raises(errors.DataError, match="'w'"):
        fit_local(spec, table.set_column(5, "w", pa.array(np.zeros(400))))


def test_history_and_validation_against_numpy() -> None:
    table = regression(100)
    spec = quick(
        optimizer=frozen,
        validation=0.25,
        metrics={"mae": nn.L1Loss(), "worst": lambda o, y: (o - y).abs()[:, 0]},
    )
    model, result = fitted(spec, table)
    x = torch.tensor(np.stack([table[c].to_numpy() for c in "abcd"], 1)).float()
    error = (model(x)[:, 0].detach().numpy() - table["y"].to_numpy()).astype(np.float64)
    for entry in result.history:
        whole = (75 * entry["loss"] + 25 * entry["val_loss"]) / 100
        assert whole == pytest.approx(np.mean(error**2), rel=1e-5)
        whole = (75 * entry["mae"] + 25 * entry["val_mae"]) / 100
        assert whole == pytest.approx(np.mean(abs(error)), rel=1e-5)
        assert entry["mae"] == pytest.approx(entry["worst"])
    assert (result.train_rows, result.validation_rows, result.rows_seen, result.rows_sent) == (
        75,
        25,
        100,
        100,
    )
    for part in ("data", "compute", "communication", "seconds"):
        assert result.history[0][part] >= 0


def frozen(params: Any) -> Any:
    return torch.optim.SGD(params, lr=1e-30)


def test_validation_by_column() -> None:
    table = regression(60).append_column("held", pa.array(np.arange(60) % 3 == 0))
    _, result = fitted(quick(validation="held"), table)
    assert (result.train_rows, result.validation_rows) == (40, 20)
    with pytest.raises(errors.DataError, match="all 60"):
        fit_local(quick(validation="held"), table.set_column(7, "held", pa.array(np.ones(60, bool))))


def test_early_stopping_restores_the_best_epoch() -> None:
    losses = iter([3.0, 2.0, 1.0, 5.0, 6.0])
    now = {"value": 0.0}

    def metric(output: Tensor, label: Tensor) -> float:
        return now["value"]

    class Next:
        weights: list[Any] = []

        def on_train_begin(self, run: Any) -> None:
            now["value"] = next(losses)

        def on_epoch_end(self, run: Any, logs: Any) -> None:
            Next.weights.append({k: v.clone() for k, v in run.model.state_dict().items()})
            now["value"] = next(losses)

    stop = EarlyStopping("val_m", patience=1)
    spec = quick(metrics={"m": metric}, callbacks=[Next()], epochs=9, validation=0.2, early_stopping=stop)
    import hvd_core.train.local as local

    layout = plan_layout(columns_of(regression().schema), spec)
    result = local.fit_shard(spec, shard_of(regression(), layout), None)
    assert len(result.history) == 4
    assert result.best_epoch == 2
    assert result.stopped_early
    best = load_weights(mlp(), result.weights).state_dict()
    assert all(torch.equal(best[k], Next.weights[2][k]) for k in best)
    assert not all(torch.equal(best[k], Next.weights[3][k]) for k in best)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 1), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), self.b(x)


def test_several_labels_with_their_losses_and_weights() -> None:
    torch.manual_seed(0)
    model = TwoHeads().double()
    losses = [nn.MSELoss(), nn.CrossEntropyLoss()]
    spec = quick(model=model, loss=losses, label_cols=["y", "k"], loss_weights=[0.25, 2.0], optimizer=slow)
    own, result = fitted(spec, regression())
    import copy

    plain = copy.deepcopy(model)
    optimizer = slow(plain.parameters())
    for x, y, k in batches(spec, regression(), 2, 16):
        optimizer.zero_grad()
        a, b = plain(x)
        (0.25 * losses[0](a, y[:, None]) + 2.0 * losses[1](b, k)).backward()
        optimizer.step()
    for p, q in zip(own.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)
    entry = result.history[0]
    assert entry["loss"] == pytest.approx(0.25 * entry["y_loss"] + 2.0 * entry["k_loss"])
    assert [o.shape for o in result.output_spec] == [(1,), (2,)]


def test_several_labels_of_one_output_are_joined() -> None:
    spec = quick(model=mlp(2), label_cols=["y", "w"])
    own, _ = fitted(spec, regression())
    plain = mlp(2)
    optimizer = sgd(plain.parameters())
    for x, y, w in batches(spec, regression(), 2, 16):
        optimizer.zero_grad()
        nn.MSELoss()(plain(x), torch.stack([y, w], 1)).backward()
        optimizer.step()
    assert same(own, plain)


# -- what goes wrong --


def test_r10_shapes_that_do_not_fit_are_named() -> None:
    with pytest.raises(errors.LossError, match=r"\(16, 2\).*\(16,\)"):
        fit_local(quick(model=mlp(2)), regression())


def test_a_nan_loss_names_rank_epoch_step_and_column() -> None:
    table = regression()
    spoiled = table["b"].to_numpy().copy()
    spoiled[7] = np.nan
    with pytest.raises(
        errors.LossError, match=r"rank 0, epoch 0, step \d: the loss is nan; input column.*'b'"
    ):
        fit_local(quick(), table.set_column(1, "b", pa.array(spoiled)))


@pytest.mark.parametrize(
    ("loss", "reduction", "text"),
    [
        (lambda o, y: 1.0, "mean", "float 1.0, not a tensor"),
        (lambda o, y: o.mean(0).repeat(3), "mean", r"shape \(3,\)"),
        (lambda o, y: o.mean(), "custom", "numerator, denominator"),
        (lambda o, y: o.mean() * float("nan"), "mean", "loss is nan"),
        (lambda o, y: o.detach().mean(), "mean", "does not depend on the model's parameters"),
    ],
)
def test_losses_that_are_none_are_named(loss: Any, reduction: Any, text: str) -> None:
    with pytest.raises(errors.LossError, match=f"rank 0, epoch 0, step 0: .*{text}"):
        fit_local(quick(loss=loss, loss_reduction=reduction), regression())


def test_a_model_that_does_not_take_its_inputs_says_what_it_was_given() -> None:
    table = pa.table({"n": [1, 2, 3], "y": [0.0, 1.0, 2.0]})
    spec = quick(model=nn.Linear(1, 1), feature_cols=["n"])
    with pytest.raises(errors.ColumnError, match=r"int64 \(1, 1\): .*dtypes="):
        fit_local(spec, table)
    fit_local(quick(model=nn.Linear(1, 1), feature_cols=["n"], dtypes={"n": "float32"}), table)


def test_losses_that_cannot_be_reduced_are_refused_before_training() -> None:
    layout_of = columns_of(regression().schema)
    for loss, text in (
        (lambda o, y: o.sum(), "loss_reduction"),
        (nn.MSELoss(reduction="none"), "reduction='none'"),
        (nn.GaussianNLLLoss(), "more than"),
    ):
        with pytest.raises(errors.InvalidArgument, match=text):
            plan_layout(layout_of, quick(loss=loss))
    with pytest.raises(errors.InvalidArgument, match=r"loss_reduction='sum' beside MSELoss.*'mean'"):
        plan_layout(layout_of, quick(loss_reduction="sum"))
    plan_layout(layout_of, quick(loss_reduction="mean"))
    with pytest.raises(errors.InvalidArgument, match="custom"):
        plan_layout(
            layout_of, quick(loss=lambda o, y: (o, 1), loss_reduction="custom", sample_weight_col="w")
        )
    with pytest.raises(errors.LossError, match="one value for each"):
        fit_local(
            quick(loss=lambda o, y: o.mean(), loss_reduction="mean", sample_weight_col="w"), regression()
        )


class Drawing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * np.random.uniform(0.5, 1.5) + random.random()


def test_what_numpy_and_random_draw_is_seeded_too() -> None:
    spec = quick(model=Drawing())
    weights = []
    for other in (1, 2):
        np.random.seed(other)
        random.seed(other)
        weights.append(fit_local(spec, regression()).weights)
    assert weights[0] == weights[1]
    assert weights[0] != fit_local(spec_with(spec, seed=9), regression()).weights


class Watch:
    weights: list[Tensor] = []
    #: That overflows.
    step = 0

    def on_train_begin(self, run: Any) -> None:
        self.on_batch_end(run, None)

    def on_batch_end(self, run: Any, batch: Any) -> None:
        Watch.weights.append(next(run.model.parameters()).detach().clone())


def overflows(output: Tensor, label: Tensor) -> Tensor:
    loss = ((output - label.view(output.shape)) ** 2).mean()
    return loss * float("inf") if len(Watch.weights) == Watch.step + 1 else loss


def test_fp16_skips_an_overflow_but_not_a_nan_column() -> None:
    table = regression()
    spoiled = table["b"].to_numpy().copy()
    spoiled[7] = np.nan
    spec = quick(precision="fp16", epochs=3)
    with pytest.raises(errors.LossError, match=r"the loss is nan; input column.*'b'"):
        fit_local(spec, table.set_column(1, "b", pa.array(spoiled)))
    # The scale begins so high that the first steps overflow by themselves.
    spec = spec_with(spec, loss=overflows, loss_reduction="mean", callbacks=[Watch()], epochs=5)
    changed = []
    for Watch.step in (1000, 15):
        Watch.weights = []
        fit_local(spec, table)
        changed.append([not torch.equal(a, b) for a, b in pairwise(Watch.weights)])
    assert [i for i in range(20) if changed[0][i] and not changed[1][i]] == [15]


@pytest.mark.parametrize("rows", [1, 3])
def test_r04_fewer_rows_than_a_batch_make_one_step(rows: int) -> None:
    model, result = fitted(quick(batch_size=32, epochs=1), regression(rows))
    assert not same(model, mlp())
    assert result.history[0]["steps"] == 1
    assert np.isfinite(result.history[0]["loss"])
    with pytest.raises(errors.DataError, match="no rows"):
        fit_local(quick(), regression(0))


def test_max_steps_ends_in_the_middle_of_an_epoch() -> None:
    _, result = fitted(quick(max_steps=6, epochs=None), regression())  # 4 steps an epoch
    assert [e["steps"] for e in result.history] == [4, 2]
    assert [e["rows"] for e in result.history] == [50, 32]


def test_callbacks_progress_and_stop() -> None:
    seen: list[Any] = []

    class Watch:
        def on_batch_end(self, run: Any, batch: Any) -> None:
            seen.append((run.epoch, batch.step, batch.rows))

        def on_epoch_end(self, run: Any, logs: Any) -> None:
            if logs["epoch"] == 1:
                run.stop()

    events: list[dict[str, Any]] = []
    import copy

    watch = Watch()
    spec = quick(callbacks=[watch], epochs=9)
    layout = plan_layout(columns_of(regression().schema), spec)
    writer = ShardWriter(layout)
    writer.write(regression().select(layout.schema.names).combine_chunks().to_batches()[0])
    packed = writer.finish()
    from hvd_core.train import fit_shard

    shard = Shard.attach(packed.fds, packed.description)
    packed.close()
    result = fit_shard(
        spec_with(spec, model=copy.deepcopy(spec.model)), shard, None, on_progress=events.append
    )
    assert len(result.history) == 2
    assert seen[:4] == [(0, 0, 16), (0, 1, 16), (0, 2, 16), (0, 3, 2)]
    ends = [e for e in events if "history" in e]
    assert [e["epoch"] for e in ends] == list(range(len(result.history)))
    assert {"epoch", "epochs", "step", "steps", "rows_per_s", "loss"} <= ends[0].keys()
    assert ends[0]["loss"] == result.history[0]["loss"]


def test_fit_leaves_no_thread_and_no_descriptor() -> None:
    import gc
    import os
    import threading

    fit_local(quick(), regression())
    gc.collect()  # what earlier tests left
    threads, fds = threading.active_count(), len(os.listdir("/proc/self/fd"))
    fit_local(quick(validation=0.2, epochs=5), regression())
    with pytest.raises(errors.LossError):
        fit_local(quick(model=mlp(2)), regression())
    gc.collect()
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == fds


def test_results_travel_as_bytes() -> None:
    _, result = fitted(quick(validation=0.2), regression())
    from hvd_core.train import FitResult

    assert FitResult.from_bytes(result.to_bytes()) == result
