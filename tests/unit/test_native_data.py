"""Bindings of core/src/data: conversions and refusals. The algorithms: tests/cpp/test_data.cc."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_core import _native

pytestmark = pytest.mark.timeout(60)


def rows(count: int, row_nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, row_nbytes), dtype=np.uint8)


@pytest.mark.parametrize("row_nbytes", [1, 4, 7, 16, 32, 100])
def test_gather_rows_is_numpy_indexing(row_nbytes):
    base = rows(50, row_nbytes)
    base.flags.writeable = False
    index = np.random.default_rng(1).integers(0, 50, 200)
    out = np.zeros((200, row_nbytes), np.uint8)
    _native.gather_rows(base.reshape(-1), row_nbytes, index, out.reshape(-1))
    np.testing.assert_array_equal(out, base[index])


@pytest.mark.parametrize("wrong", [-1, 10, 2**62, -(2**63)])
def test_gather_rows_writes_nothing_when_an_index_is_outside(wrong):
    index = np.array([0, 9, wrong], np.int64)
    out = np.full(12, 7, np.uint8)
    with pytest.raises(IndexError, match=rf"index {wrong} at position 2 is not in \[0, 10\)"):
        _native.gather_rows(rows(10, 4).reshape(-1), 4, index, out)
    assert (out == 7).all()


def test_gather_rows_refuses_what_does_not_fit():
    base, index = rows(10, 4).reshape(-1), np.arange(3)
    with pytest.raises(ValueError, match="out has 11 bytes for 3 rows of 4"):
        _native.gather_rows(base, 4, index, np.zeros(11, np.uint8))
    with pytest.raises(ValueError, match="40 bytes are not whole rows of 7 bytes"):
        _native.gather_rows(base, 7, index, np.zeros(21, np.uint8))
    with pytest.raises(ValueError, match="whole rows of 0"):
        _native.gather_rows(base, 0, index, np.zeros(0, np.uint8))
    # Never a silent copy, into which the result would vanish.
    for out in (np.zeros(24, np.uint8)[::2], np.zeros(12, np.int8), np.zeros((3, 4), np.uint8)):
        with pytest.raises(TypeError):
            _native.gather_rows(base, 4, index, out)
    read_only = np.zeros(12, np.uint8)
    read_only.flags.writeable = False
    with pytest.raises(TypeError):
        _native.gather_rows(base, 4, index, read_only)
    with pytest.raises(TypeError):
        _native.gather_rows(base, 4, index.astype(np.int32), np.zeros(12, np.uint8))


def test_gather_rows_takes_nothing():
    _native.gather_rows(np.zeros(0, np.uint8), 4, np.zeros(0, np.int64), np.zeros(0, np.uint8))


def test_hash_order_does_not_depend_on_arrival():
    a, b = rows(40, 8, 1), rows(40, 3, 2)
    shuffle = np.random.default_rng(3).permutation(40)

    def ordered(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        hashes = _native.hash_rows([(a.reshape(-1), 8), (b.reshape(-1), 3)], 40, 5)
        assert hashes.shape == (40, 2)
        assert hashes.dtype == np.uint64
        order = _native.sort_by_hash(hashes)
        assert order.dtype == np.int64
        np.testing.assert_array_equal(order, np.lexsort((hashes[:, 1], hashes[:, 0])))
        return a[order], b[order]

    for before, after in zip(ordered(a, b), ordered(a[shuffle], b[shuffle]), strict=True):
        np.testing.assert_array_equal(before, after)


def test_hash_rows_refuses_a_short_block():
    with pytest.raises(ValueError, match="a block has 10 rows, not 11"):
        _native.hash_rows([(rows(10, 4).reshape(-1), 4)], 11, 0)
    assert _native.hash_rows([(rows(10, 4).reshape(-1), 4)], 0, 0).shape == (0, 2)


def test_permutation_in_pieces_is_the_whole():
    whole = _native.permutation(1000, 3, 4, 0, 1000)
    assert whole.dtype == np.int64
    np.testing.assert_array_equal(np.sort(whole), np.arange(1000))
    pieces = [_native.permutation(1000, 3, 4, begin, 250) for begin in range(0, 1000, 250)]
    np.testing.assert_array_equal(np.concatenate(pieces), whole)
    assert (_native.permutation(1000, 3, 5, 0, 1000) != whole).any()
    # The result owns its memory.
    del pieces
    whole[:] = 0


def test_permutation_refuses_what_is_outside():
    assert _native.permutation(0, 1, 1, 0, 0).size == 0
    with pytest.raises(IndexError):
        _native.permutation(10, 1, 1, 5, 6)
    with pytest.raises(IndexError):
        _native.permutation(10, 1, 1, 11, 0)
    with pytest.raises(ValueError):
        _native.permutation(2**62 + 1, 1, 1, 0, 1)
