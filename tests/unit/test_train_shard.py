"""Packing against numpy and pyarrow, and batches gathered from the pack."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow")
from hvd_core.errors import DataError  # noqa: E402
from hvd_core.train import Column, Shard, ShardWriter, columns_of, plan_layout  # noqa: E402
from hvd_core.train import batches as batches_module  # noqa: E402
from hvd_core.train.batches import Batches  # noqa: E402
from hvd_core.train.columns import Layout  # noqa: E402
from hvd_core.train.order import Request  # noqa: E402
from hvd_core.train.pack import to_rows  # noqa: E402

from .test_train_columns import VECTOR, facts, spec_of  # noqa: E402

pytestmark = pytest.mark.timeout(60)


def plan(table: pa.Table, features: Any = "x", classes: bool = False, **options: Any) -> Layout:
    spec = spec_of(feature_cols=features, **options)
    return plan_layout(columns_of(table.schema), spec, facts("x", classes=classes))


def pack(layout: Layout, *tables: pa.Table, **options: Any) -> Shard:
    writer = ShardWriter(layout, **options)
    try:
        for table in tables:
            for batch in table.select(layout.schema.names).to_batches():
                writer.write(batch)
        packed = writer.finish()
    finally:
        writer.close()
    shard = Shard.attach(packed.fds, packed.description)
    packed.close()
    return shard


def with_y(x: pa.Array, y: Any = None) -> pa.Table:
    return pa.table({"x": x, "y": np.zeros(len(x)) if y is None else y})


SCALARS = [
    pa.array([1, -2, 3], pa.int8()), pa.array([1, 2**31], pa.int64()), pa.array([1, 255], pa.uint8()),
    pa.array([True, False]), pa.array([0.5, 2.5], pa.float16()), pa.array([0.1, 1e300], pa.float64()),
    pa.array([Decimal("1.25"), Decimal("-3.50")]),
]  # fmt: skip


@pytest.mark.parametrize("values", SCALARS, ids=lambda v: str(v.type))
def test_scalars_match_python(values: Any) -> None:
    rows, nulls = to_rows(Column.of("x", values.type), values, None)
    assert nulls == 0
    assert [float(v) for v in rows] == [float(v) for v in values.to_pylist()]
    # A slice does not start at the first byte.
    rows, _ = to_rows(Column.of("x", values.type), values.slice(1), None)
    assert [float(v) for v in rows] == [float(v) for v in values.to_pylist()[1:]]


NESTED = np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4)
LISTS = [
    pa.array(NESTED.tolist(), pa.list_(pa.list_(pa.float32()))),
    pa.array(NESTED.tolist(), pa.list_(pa.list_(pa.float32(), 4), 3)),
    pa.array(NESTED.tolist(), pa.large_list(pa.list_(pa.float32()))),
    pa.FixedShapeTensorArray.from_numpy_ndarray(NESTED),
]


@pytest.mark.parametrize("values", LISTS, ids=lambda v: str(v.type)[:40])
def test_nested_lists_are_rows_of_one_shape(values: Any) -> None:
    column = Column.of("x", values.type)
    rows, _ = to_rows(column, values, None)
    assert np.array_equal(rows, NESTED)
    rows, _ = to_rows(column, values.slice(1), None)
    assert np.array_equal(rows, NESTED[1:])
    rows, _ = to_rows(column, values, None, (2, 6))
    assert np.array_equal(rows, NESTED.reshape(2, 2, 6))


def test_a_tensor_type_may_store_its_axes_in_another_order() -> None:
    storage = pa.array(NESTED.reshape(2, 12).tolist(), pa.list_(pa.float32(), 12))
    kind = pa.fixed_shape_tensor(pa.float32(), (3, 4), permutation=[1, 0])
    values = pa.ExtensionArray.from_storage(kind, storage)
    rows, _ = to_rows(Column.of("x", kind), values, None)
    assert np.array_equal(rows, values.to_numpy_ndarray())
    assert np.array_equal(rows, NESTED.transpose(0, 2, 1))
    assert Column.of("x", kind).shape == (4, 3)


def vector_array(rows: list[Any]) -> Any:
    made = []
    for row in rows:
        if row is None:
            made.append(None)
        elif isinstance(row, dict):
            made.append({"type": 0, "size": row["n"], "indices": row["i"], "values": row["v"]})
        else:
            made.append({"type": 1, "size": None, "indices": None, "values": row})
    return pa.array(made, VECTOR)


def test_vectors_dense_sparse_and_mixed() -> None:
    values = vector_array(
        [[1.0, 2.0, 3.0], {"n": 3, "i": [1], "v": [5.0]}, {"n": 3, "i": [], "v": []}, [0.0, 0.0, 9.0]]
    )
    column = Column.of("x", values.type)
    expected = [[1, 2, 3], [0, 5, 0], [0, 0, 0], [0, 0, 9]]
    for begin, end in ((0, 4), (1, 3), (0, 1), (2, 4), (3, 4)):
        rows, _ = to_rows(column, values.slice(begin, end - begin), None)
        assert rows.tolist() == expected[begin:end]
    with pytest.raises(DataError, match=r"'x'.*\(3,\).*\(2,\)"):
        to_rows(column, vector_array([[1.0, 2.0, 3.0], {"n": 2, "i": [0], "v": [1.0]}]), None)


def test_joined_columns_keep_order_and_take_the_block_dtype() -> None:
    table = pa.table(
        {
            "i": pa.array([1, 2], pa.int32()),
            "v": vector_array([[3.0, 4.0]] * 2),
            "f": [True, False],
            "y": [0.0, 1.0],
        }
    )
    shard = pack(plan(table, ["v", "i", "f"]), table, table.slice(0, 1))
    assert shard.rows == 3
    assert shard.block(0).dtype == np.float32
    assert shard.block(0).tolist() == [[3, 4, 1, 1], [3, 4, 2, 0], [3, 4, 1, 1]]
    assert shard.block(1).tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("x", "filled"),
    [
        (pa.array([1.0, None, 3.0]), [[1.0], [7.0], [3.0]]),
        (pa.array([1, None, 3]), [[1], [7], [3]]),
        (pa.array([[1.0, 2.0], None, [3.0, None]]), [[1, 2], [7, 7], [3, 7]]),
        (vector_array([[1.0, 2.0], None, {"n": 2, "i": [1], "v": [4.0]}]), [[1, 2], [7, 7], [0, 4]]),
        (pa.array([None, 1.5, None], pa.float16()), [[7], [1.5], [7]]),
        (pa.array([None, Decimal("1.5"), None]), [[7], [1.5], [7]]),
    ],
)
def test_nulls_are_counted_or_filled(x: Any, filled: Any) -> None:
    table = with_y(x)
    nulls = x.null_count + (1 if "3.0, None" in str(x.to_pylist()) else 0)
    with pytest.raises(DataError, match=f"'x' has {2 * nulls} nulls in 6 rows"):
        pack(plan(table), table, table)
    for value in (7, {"x": 7}):
        assert pack(plan(table, null_value=value), table).block(0).tolist() == filled
    with pytest.raises(DataError, match="'x'"):
        pack(plan(table, null_value={"y": 7}), table)


def test_one_column_as_input_and_label_in_several_batches() -> None:
    table = pa.table({"y": [1.0, 2.0]})
    shard = pack(plan(table, "y"), table, table)
    assert shard.block(0).tolist() == [[1], [2], [1], [2]]
    assert shard.block(1).tolist() == [1, 2, 1, 2]


@pytest.mark.parametrize("kind", [pa.list_(pa.float32()), VECTOR])
def test_a_batch_of_nothing_but_null_rows(kind: Any) -> None:
    one = vector_array([[1.0, 2.0]]) if kind == VECTOR else pa.array([[1.0, 2.0]], kind)
    some, none = with_y(one), with_y(pa.array([None, None], kind))
    with pytest.raises(DataError, match=r"'x' has 2 nulls in 2 rows"):
        pack(plan(none), none)
    rows = pack(plan(some, null_value=5), some, none).block(0)
    assert rows.tolist() == [[1, 2], [5, 5], [5, 5]]
    with pytest.raises(DataError, match=r"'x' begins with 2 nulls.*shapes="):
        pack(plan(none, null_value=5), none)
    rows = pack(plan(none, null_value=5, shapes={"x": (2,)}), none, some).block(0)
    assert rows.tolist() == [[5, 5], [5, 5], [1, 2]]


def test_a_null_value_need_not_fit_the_type_of_the_column() -> None:
    small = with_y(pa.array([None, 200], pa.uint8()))
    assert pack(plan(small, null_value=-1), small).block(0).tolist() == [[-1], [200]]
    large = with_y(pa.array([None, 2], pa.uint64()))
    with pytest.raises(DataError, match="'x' with null_value -1"):
        pack(plan(large, null_value=-1), large)


def test_ragged_rows_name_the_column_and_both_shapes() -> None:
    ragged = with_y(pa.array([[1.0, 2.0], [3.0]]))
    with pytest.raises(DataError, match=r"'x'.*\(2,\).*\(1,\)"):
        pack(plan(ragged), ragged)
    first, second = with_y(pa.array([[1.0, 2.0]])), with_y(pa.array([[1.0]]))
    with pytest.raises(DataError, match=r"'x'.*\(1,\).*\(2,\)"):
        pack(plan(first), first, second)
    nested = with_y(pa.array([[[1.0, 2.0], [3.0]]]))
    with pytest.raises(DataError, match=r"'x'.*\(2, 2\).*\(2, 1\)"):
        pack(plan(nested), nested)
    with pytest.raises(DataError, match=r"'x'.*\(2,\).*\(3,\)"):
        pack(plan(first, shapes={"x": (3,)}), first)
    empty = with_y(pa.array([[], []], pa.list_(pa.float32())))
    with pytest.raises(DataError, match=r"'x'.*empty"):
        pack(plan(empty), empty)
    inner = with_y(pa.array([[[1.0], None]]))
    with pytest.raises(DataError, match=r"'x'.*inside"):
        pack(plan(inner), inner)


def test_values_that_do_not_fit_are_named() -> None:
    table = pa.table({"x": [1.0, 2.0], "y": [0.0, 1.5], "w": [1.0, -1.0], "v": [0, 2]})
    with pytest.raises(DataError, match=r"'y'.*1.5"):
        pack(plan(table, classes=True), table)
    with pytest.raises(DataError, match=r"'w'.*-1"):
        pack(plan(table, sample_weight_col="w"), table)
    for value in (math.inf, 1e300):
        wide = table.set_column(1, "y", pa.array([0.0, value]))
        with pytest.raises(DataError, match=r"'y' must hold whole numbers.*(inf|1e\+300)"):
            pack(plan(wide, classes=True), wide)
    wide = table.set_column(2, "w", pa.array([1.0, math.inf]))
    with pytest.raises(DataError, match=r"'w'.*inf"):
        pack(plan(wide, sample_weight_col="w"), wide)
    with pytest.raises(DataError, match=r"'v'.*2"):
        pack(plan(table, validation="v"), table)
    big = with_y(pa.array([2**63], pa.uint64()))
    with pytest.raises(DataError, match=r"'x'.*9223372036854775808"):
        pack(plan(big), big)


def test_r06_bytes_through_a_transform() -> None:
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (6, 192), dtype=np.uint8)
    table = pa.table({"content": [r.tobytes() for r in raw], "class": np.arange(6)})
    seen = []

    def decode(batch: dict[str, Any]) -> dict[str, Any]:
        seen.append(sorted(batch))
        images = [np.frombuffer(b, np.uint8).reshape(8, 8, 3) / np.float32(255) for b in batch["content"]]
        return {"content": images}

    options = {"transform_fn": decode, "label_cols": "class"}
    shard = pack(plan(table, "content", classes=True, **options), table)
    assert np.array_equal(shard.block(0), (raw.reshape(6, 8, 8, 3) / np.float32(255)).astype(np.float32))
    assert shard.block(1).dtype == np.int64
    assert shard.block(1).tolist() == list(range(6))
    assert seen == [["class", "content"]]

    def ragged(batch: dict[str, Any]) -> dict[str, Any]:
        return {"content": [np.zeros(len(b) - i) for i, b in enumerate(batch["content"])]}

    for fn, words in (
        (ragged, r"\(192,\) and \(191,\) for column 'content'"),
        (lambda b: 3, "dict"),
        (lambda b: {}, "'content'.*missing after transform_fn"),
        (lambda b: {"content": np.zeros((2, 1))}, r"'content' of shape \(2, 1\) for 6 rows"),
        (lambda b: {"content": np.array(["a"] * 6)}, "'content'.*not numbers"),
    ):
        with pytest.raises(DataError, match=words):
            pack(plan(table, "content", **{**options, "transform_fn": fn}), table)


def random_table(rows: int, seed: int = 0) -> pa.Table:
    rng = np.random.default_rng(seed)
    return pa.table(
        {"x": rng.normal(size=(rows, 3)).tolist(), "y": rng.normal(size=rows), "w": rng.random(rows)}
    )


def test_memory_spills_to_a_file_that_has_no_name(tmp_path: Path) -> None:
    table = random_table(500)
    layout = plan(table)
    parts = [table.slice(i, 100) for i in range(0, 500, 100)]
    kept, spilled = pack(layout, *parts), pack(layout, *parts, memory_bytes=3000, directory=str(tmp_path))
    assert all(np.array_equal(kept.block(i), spilled.block(i)) for i in range(2))
    writer = ShardWriter(layout, memory_bytes=0, directory=str(tmp_path))
    for part in parts:
        writer.write(part.select(layout.schema.names).to_batches()[0])
    packed = writer.finish()
    assert packed.spilled
    attached, hold = Shard.attach(packed.fds, packed.description), threading.Event()
    requests = (Request(0, np.zeros(1, np.int64), 1) for _ in range(1) if hold.wait(30))
    with Batches(attached, requests, largest=1):  # a row may have to be read from the disk
        assert "hvd-prefetch" in [thread.name for thread in threading.enumerate()]
        hold.set()
    assert packed.nbytes == 500 * 16
    assert os.listdir(tmp_path) == []
    assert all(os.readlink(f"/proc/self/fd/{fd}").startswith(str(tmp_path)) for fd in packed.fds)
    packed.close()
    before = len(os.listdir("/proc/self/fd"))
    dropped = ShardWriter(layout)
    dropped.close()
    dropped.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_empty_shards_and_truncated_files() -> None:
    table = random_table(10).slice(0, 0)
    shard = pack(plan(table), table)
    assert shard.rows == 0
    assert len(shard.sorted_order()) == 0
    full = random_table(10)
    writer = ShardWriter(plan(full))
    for batch in full.select(["x", "y"]).to_batches():
        writer.write(batch)
    packed = writer.finish()
    os.ftruncate(packed.fds[0], 8)
    with pytest.raises(DataError, match="8 bytes instead of 120"):
        Shard.attach(packed.fds, packed.description)
    packed.close()


def test_sorted_order_and_fingerprint_do_not_depend_on_arrival() -> None:
    table = random_table(200)
    layout = plan(table, sample_weight_col="w")
    moved = table.take(np.random.default_rng(1).permutation(200))
    a, b = pack(layout, table), pack(layout, moved)
    for i in range(3):
        assert np.array_equal(a.block(i)[a.sorted_order()], b.block(i)[b.sorted_order()])
    assert sorted(a.sorted_order()) == list(range(200))
    assert a.fingerprint(a.sorted_order()) == b.fingerprint(b.sorted_order())
    assert a.fingerprint(None) != b.fingerprint(None)
    other = pack(layout, random_table(200, 1))
    assert a.fingerprint(a.sorted_order()) != other.fingerprint(other.sorted_order())


@pytest.fixture(params=["ahead", "in place"])
def ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a thread gathers ahead, as it does for large batches."""
    monkeypatch.setattr(batches_module, "_WORTH_A_THREAD_NBYTES", 0 if request.param == "ahead" else 1 << 40)
    return bool(request.param == "ahead")


def test_batches_are_the_rows_asked_for(ahead: bool) -> None:
    table = random_table(100)
    shard = pack(plan(table, sample_weight_col="w"), table)
    rng = np.random.default_rng(0)
    index = [rng.integers(0, 100, n) for n in (5, 0, 7, 1, 7)]
    requests = (Request(i, x, 99) for i, x in enumerate(index))
    threads = threading.active_count()
    with Batches(shard, requests, largest=7, prefetch=2) as batches:
        assert threading.active_count() == threads + ahead
        for i, batch in enumerate(batches):
            assert (batch.step, batch.rows, batch.global_rows) == (i, len(index[i]), 99)
            assert np.array_equal(batch.inputs[0], shard.block(0)[index[i]])
            assert np.array_equal(batch.labels[0], shard.block(1)[index[i]])
            assert batch.weight is not None
            assert np.array_equal(batch.weight, shard.block(2)[index[i]])
            assert not any(x.ctypes.data % 64 for x in (*batch.inputs, *batch.labels)), (
                "as torch's own tensors"
            )
        assert i == 4
        with pytest.raises(StopIteration):
            next(batches)
    assert threading.active_count() == threads


def test_batches_end_early_and_hand_errors_on(ahead: bool) -> None:
    table = random_table(100)
    shard = pack(plan(table), table)
    threads = threading.active_count()

    def endless() -> Iterator[Request]:
        while True:
            yield Request(0, np.zeros(3, np.int64), 3)

    with Batches(shard, endless(), largest=3, prefetch=3) as batches:
        next(batches)
    assert threading.active_count() == threads

    def failing() -> Iterator[Request]:
        yield Request(0, np.zeros(1, np.int64), 1)
        raise KeyError("mine")

    with Batches(shard, failing(), largest=3) as batches:
        next(batches)
        with pytest.raises(KeyError, match="mine"):
            next(batches)
    with Batches(shard, iter([Request(0, np.full(1, 100), 1)]), largest=3) as batches:
        with pytest.raises(IndexError):
            next(batches)
    assert threading.active_count() == threads


_FULL = """
import resource, sys
import numpy as np
from hvd_core.errors import StorageFull
from hvd_core.train.shard import BlockFiles

limit = int(sys.argv[2])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
files = BlockFiles(["input"], int(sys.argv[3]), sys.argv[1])
try:
    for _ in range(100):
        files.write([np.ones((1000, 10))])
except StorageFull as error:
    print(error)
files.close()
"""


def _until_full(directory: Path, limit: int, memory_nbytes: int, *, around: tuple[str, ...] = ()) -> str:
    command = [*around, sys.executable, "-c", _FULL, str(directory), str(limit), str(memory_nbytes)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def test_a_file_that_cannot_grow_names_directory_size_and_settings(tmp_path: Path) -> None:
    said = _until_full(tmp_path, 250_000, 100_000)
    assert "320,000 bytes of rows" in said and f"do not fit into {tmp_path} (File too large" in said
    assert "shard_dir" in said and "HVD_SHARD_MEMORY_BYTES, now 100,000" in said
    assert list(tmp_path.iterdir()) == []


def test_memory_that_is_used_up_names_the_setting(tmp_path: Path) -> None:
    said = _until_full(tmp_path, 250_000, 1 << 30)
    assert "320,000 bytes of rows do not fit into memory" in said and "lower shard_memory_bytes" in said


def test_a_full_disk(tmp_path: Path) -> None:
    """A disk of 256 KiB, in a mount namespace of its own."""
    mount = f'mount -t tmpfs -o size=256k none {tmp_path} && exec "$0" "$@"'
    around = ("unshare", "--mount", "--map-root-user", "sh", "-c", mount)
    try:
        subprocess.run([*around, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no mount namespaces here")
    said = _until_full(tmp_path, 0, 100_000, around=around)
    assert f"do not fit into {tmp_path} (No space left on device" in said
