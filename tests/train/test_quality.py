"""The report on the data against numpy, and where it is told."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest

torch = pytest.importorskip("torch")
from hvd_core import basics, errors  # noqa: E402
from hvd_core.train import FitResult, examine, fit_local  # noqa: E402

from ..unit.thread_ranks import run_ranks  # noqa: E402
from .runs import net, spec_of, table  # noqa: E402

pytestmark = pytest.mark.timeout(60)


def spoiled(rows: int = 3000) -> pa.Table:
    """Longer than a piece; trouble in "b"."""
    found = table(rows)
    b = found["b"].to_numpy().copy()
    b[[1, 2000]] = np.nan
    b[7] = -np.inf
    return found.set_column(1, "b", pa.array(b))


def test_examine_counts_what_is_there() -> None:
    data = pa.table(
        {
            "x": pa.array([1.5, None, math.nan, -2.0]),
            "n": pa.array([3, None, None, -9]),
            "l": pa.array([[1.0, math.inf], None, [2.0, -3.0], [None, 0.0]]),
            "s": ["a", None, "b", "c"],
            "e": pa.array([None] * 4, pa.float32()),
        }
    )
    x, n, array, s, e = examine(data, rank=3)
    assert (x.rows, x.rank, x.nulls, x.nans, x.infinities, x.low, x.high) == (4, 3, 1, 1, 0, -2.0, 1.5)
    assert (n.nulls, n.low, n.high) == (2, -9, 3)
    assert (array.nulls, array.infinities, array.low, array.high) == (2, 1, -3.0, 2.0)
    assert (s.nulls, s.rows, math.isnan(s.low)) == (1, 4, True)
    assert (e.nulls, math.isnan(e.high)) == (4, True)
    assert str(x) == "column 'x' on rank 3: 4 rows, -2 to 1.5, 1 null, 1 NaN"
    assert "no finite numbers" in str(e)


def test_a_fit_reports_each_column_and_rank() -> None:
    parts = [table(40), table(3000, seed=1)]
    nulls = parts[1]["a"].to_pylist()
    nulls[:3] = [None] * 3
    parts[1] = parts[1].set_column(0, "a", pa.array(nulls))
    spec = spec_of(model=net(0.0), epochs=1, batch_size=500, null_value={"a": 0.0})

    def fit(rank: int) -> FitResult:
        return fit_local(spec, parts[rank], basics.default_group())

    result, other = run_ranks(2, fit)
    assert result.data == other.data
    by_key = {(r["column"], r["rank"]): r for r in result.data}
    assert set(by_key) == {(c, r) for c in "abcy" for r in (0, 1)}
    for (column, rank), report in by_key.items():
        values = parts[rank][column].to_numpy(zero_copy_only=False)
        assert (report["rows"], report["nans"], report["infinities"]) == (len(values), 0, 0)
        assert report["low"] == np.nanmin(values)
        assert report["high"] == np.nanmax(values)
    assert by_key["a", 1]["nulls"] == 3
    assert "column 'a' on rank 1: 3000 rows" in result.summary


def test_a_comma_in_a_name_is_no_separator() -> None:
    rows = table(30).rename_columns(["a, b", "b", "c", "y", "id"])
    nulls = [None, None, *rows["a, b"].to_pylist()[2:]]
    rows = rows.set_column(0, "a, b", pa.array(nulls))
    spec = spec_of(model=net(0.0), epochs=1, feature_cols=["a, b", "b", "c"], null_value=0.0)
    assert {r["column"]: r["nulls"] for r in fit_local(spec, rows).data} == {
        "a, b": 2,
        "b": 0,
        "c": 0,
        "y": 0,
    }


def test_a_loss_that_became_nan_says_which_columns_are_not_clean() -> None:
    with pytest.raises(errors.LossError) as caught:
        fit_local(spec_of(), spoiled())
    first, second, *others = str(caught.value).splitlines()
    assert "the loss is nan" in first
    b = spoiled()["b"].to_numpy()
    b = b[np.isfinite(b)]
    assert second == f"column 'b' on rank 0: 3000 rows, {b.min():g} to {b.max():g}, 2 NaN, 1 infinity"
    assert [line.partition(":")[0] for line in others] == [f"column {n!r} on rank 0" for n in ("a", "c", "y")]


def test_all_columns_with_nulls_are_named() -> None:
    data = table(5).set_column(0, "a", pa.array([None, 1.0, None, 2.0, 3.0]))
    data = data.set_column(3, "y", pa.array([None, 1.0, 2.0, 2.0, 3.0]))
    with pytest.raises(errors.DataError, match=r"'a' has 2 nulls, column 'y' has 1 null in 5 rows"):
        fit_local(spec_of(), data)
