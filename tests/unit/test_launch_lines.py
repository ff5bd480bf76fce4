"""Bytes to lines: however they arrive, a line is whole."""

from __future__ import annotations

import pytest

from hvd_core.launch import lines
from hvd_core.launch.lines import LineSplitter

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_however_it_is_cut(size: int) -> None:
    text = "one\n\nthree é\r\nbad \udcff\nlast"
    data = text.encode("utf-8", "surrogateescape")
    splitter = LineSplitter()
    got = [line for i in range(0, len(data), size) for line in splitter.feed(data[i : i + size], 0.0)]
    assert got + splitter.finish() == ["one", "", "three é", "bad \\xff", "last"]
    assert splitter.finish() == []


def test_a_line_of_megabytes_is_one_line() -> None:
    splitter, piece = LineSplitter(), b"x" * 65536
    got = [line for _ in range(100) for line in splitter.feed(piece, 0.0)] + splitter.feed(b"\n", 0.0)
    assert [len(line) for line in got] == [6553600]


def test_an_endless_line_comes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINE_NBYTES", 10)
    splitter = LineSplitter()
    got = [line for _ in range(5) for line in splitter.feed(b"abcd", 0.0)] + splitter.finish()
    assert "".join(got) == "abcd" * 5
    assert max(map(len, got)) <= 14


def test_of_a_progress_bar_some_states_and_the_last() -> None:
    splitter = LineSplitter()
    got = []
    for percent in range(101):
        got += splitter.feed(f"\r{percent}%".encode(), now=percent * 0.1)
    got += splitter.feed(b"\n", 11.0)
    assert got[-1] == "100%"
    assert all(line.endswith("%") for line in got)
    assert 3 <= len(got) <= 2 + 10 / lines.PROGRESS_INTERVAL_S
