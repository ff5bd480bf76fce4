"""SyncBatchNorm: torch's BatchNorm of the joined batch, forward and backward."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import hvd_core
import hvd_core.torch as hvd

pytestmark = pytest.mark.timeout(120)

CHANNELS = 4
#: Rows of each rank, in three steps; the shape of what follows them.
SHARES = [(5, 3), (8, 0), (1, 7)]
SHAPES: list[tuple[int, ...]] = [(CHANNELS,), (CHANNELS, 6), (CHANNELS, 3, 5)]
PLAIN = {1: torch.nn.BatchNorm1d, 2: torch.nn.BatchNorm1d, 3: torch.nn.BatchNorm2d}
OPTIONS: list[dict[str, Any]] = [{}, {"affine": False, "momentum": None}, {"track_running_stats": False}]


def rows(step: int, shape: tuple[int, ...]) -> Any:
    x = torch.randn(8, *shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return x * 3 + 1000  # far from zero: sums of squares would lose it


def weighted(y: Any) -> Any:
    """A loss that no two elements enter alike."""
    weights = torch.arange(1, y.shape[1:].numel() + 1, dtype=y.dtype).sin()
    return (y * weights.reshape(y.shape[1:])).pow(2).sum()


def start(layer: Any) -> Any:
    layer = layer.double()
    if layer.affine:
        with torch.no_grad():
            layer.weight.copy_(torch.tensor([1.0, -2.0, 0.5, 3.0]))
            layer.bias.copy_(torch.tensor([0.0, 1.0, -1.0, 2.0]))
    return layer


def steps(layer: Any, shape: tuple[int, ...], rank: int | None) -> list[Any]:
    """Outputs and gradients of the input, then gradients of the parameters, buffers, and an evaluation."""
    seen = []
    for step, share in enumerate(SHARES):
        x = rows(step, shape)
        if rank is not None:
            x = x.split(share)[rank]
        x = x.requires_grad_(True)
        y = layer(x)
        weighted(y).backward()
        seen += [y.detach(), x.grad]
    return [seen, [p.grad for p in layer.parameters()], [b.clone() for b in layer.buffers()],
            layer.eval()(rows(9, shape)).detach()]  # fmt: skip


def on_rank() -> Any:
    torch.set_num_threads(1)
    hvd.init()
    results = [
        steps(start(hvd.SyncBatchNorm(CHANNELS, **options)), shape, hvd.rank())
        for shape in SHAPES
        for options in OPTIONS
    ]
    narrow = hvd.SyncBatchNorm(CHANNELS)
    assert narrow(torch.ones(2, CHANNELS).bfloat16()).dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"expected \(rows, 4, ...\), got \(2, 3\)"):
        narrow(torch.ones(2, 3))
    return results, converted(hvd.rank())


def converted(rank: int | None) -> list[Any]:
    """Two layers in a model, one of them twice in a forward; copied, pickled, and trained."""
    torch.manual_seed(0)
    first, norm, last = torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.BatchNorm1d(4)
    model = torch.nn.Sequential(first, norm, torch.nn.Tanh(), norm, torch.nn.Sequential(last)).double()
    if rank is not None:
        weight = norm.weight
        model = hvd.SyncBatchNorm.convert_sync_batchnorm(model)
        assert type(model[1]) is type(model[4][0]) is hvd.SyncBatchNorm and model[1].weight is weight
        model = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        assert type(hvd.SyncBatchNorm.convert_sync_batchnorm(torch.nn.BatchNorm1d(2))) is hvd.SyncBatchNorm
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if rank is not None:
        optimizer = hvd.DistributedOptimizer(optimizer)
    for step in range(4):
        optimizer.zero_grad()
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        model(x if rank is None else x[rank::2]).sin().mean().backward()
        optimizer.step()
    return [value.clone() for value in model.state_dict().values()]


def close(found: Any, oracle: Any) -> None:
    torch.testing.assert_close(found, oracle, rtol=1e-9, atol=1e-9)


def test_two_ranks_are_one_on_the_joined_batch() -> None:
    (first, first_model), (second, second_model) = hvd_core.run(on_rank, num_proc=2)
    cases = [(shape, options) for shape in SHAPES for options in OPTIONS]
    for (shape, options), mine, other in zip(cases, first, second, strict=True):
        oracle = steps(start(PLAIN[len(shape)](CHANNELS, **options)), shape, None)
        for a, b, joined in zip(mine[0], other[0], oracle[0], strict=True):
            close(torch.cat([a, b]), joined)
        for a, b, joined in zip(mine[1], other[1], oracle[1], strict=True):
            close(a + b, joined)  # each rank's are those of its rows
        for kind in (2, 3):
            close(mine[kind], oracle[kind])
            close(other[kind], oracle[kind])
    for found in (first_model, second_model):
        close(found, converted(None))


def test_one_rank_is_plain_batchnorm_bit_for_bit() -> None:
    hvd.init()
    try:
        for shape in SHAPES:
            mine = steps(start(hvd.SyncBatchNorm(CHANNELS)), shape, None)
            plain = steps(start(PLAIN[len(shape)](CHANNELS)), shape, None)
            torch.testing.assert_close(mine, plain, rtol=0, atol=0)
    finally:
        hvd.shutdown()
