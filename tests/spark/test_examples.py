"""The examples run as they are read: as scripts, each with a Spark of its own, and do better than what they
compare themselves with."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sklearn")
pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"


def printed(name: str, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def number(text: str, after: str) -> float:
    """The one that stands behind `after` in a line of its own."""
    found = re.search(rf"^ *{re.escape(after)} +([\d.]+)%?$", text, re.MULTILINE)
    assert found is not None, text
    return float(found[1])


@pytest.mark.timeout(300)
def test_images_as_files_and_as_arrays() -> None:
    text = printed("digits")
    files, arrays = number(text, "hvd, PNG files"), number(text, "hvd, arrays")
    assert files == arrays, "the same pixels, so the same net"
    assert files > number(text, "logistic regression")
    assert files > 95


@pytest.mark.timeout(300)
def test_words_in_their_order() -> None:
    text = printed("text_ids")
    assert number(text, "hvd, embedding and word pairs") > 95
    assert number(text, "logistic regression on word counts") < 85


@pytest.mark.timeout(300)
def test_ratings_of_items_by_users() -> None:
    text = printed("recommender")
    error = number(text, "hvd, two inputs")
    assert error < number(text, "Spark's ALS") < number(text, "always the mean")
    assert number(text, "the noise") < error < 1.25 * number(text, "the noise")


@pytest.mark.timeout(300)
def test_flights(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    printed("flight_delays", "--epochs", "2", "--out", str(tmp_path))
    found = json.loads((tmp_path / "flight_delays.json").read_text())
    assert found["rows"]["sent"] == found["rows"]["seen"] > 200_000
    error = {name: kinds["mae"] for name, kinds in found["test"].items()}
    assert error["hvd"] < 0.97 * min(error["median"], error["linear"])
    assert (tmp_path / "flight_delays.png").stat().st_size > 20_000


def test_each_fits_a_screen_or_two() -> None:
    lengths = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    for name in ("flights.py", "flights_spark.py"):
        del lengths[name]  # what the demos share: two tables are joined, and a figure is drawn
    scripts = {name: lengths.pop(name) for name in list(lengths) if name.startswith("torch_")}
    assert len(lengths) >= 7 and max(lengths.values()) <= 100, lengths
    assert scripts and max(scripts.values()) <= 120, "those write the loop themselves"
    listed = (EXAMPLES / "README.md").read_text()
    assert all(f"({path.name})" in listed for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb"))
