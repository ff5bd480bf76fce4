"""The table of known problems names tests that exist, and leaves no problem out."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
TABLE = (TESTS / "COVERAGE.md").read_text()
#: How many problems each theme has.
PROBLEMS = {
    "A": 7,
    "B": 13,
    "C": 15,
    "D": 10,
    "E": 10,
    "F": 3,
    "G": 5,
    "H": 10,
    "I": 7,
    "J": 10,
    "K": 6,
    "L": 8,
    "Z": 14,
}


def test_the_tests_exist() -> None:
    missing, file, named = [], "", 0
    for place, test in re.findall(r"`([\w/]+\.py)?::(test_\w+)`", TABLE):
        file = place or file
        named += 1
        if not re.search(rf"^def {test}\(", (TESTS / file).read_text(), flags=re.MULTILINE):
            missing.append(f"{file}::{test}")
    assert named > 80
    assert missing == []


def test_every_problem_has_a_row() -> None:
    told = set()
    for cell in re.findall(r"^\| ([A-Z]\d+[^|]*) \|", TABLE, flags=re.MULTILINE):
        for part in cell.split(", "):
            first, _, last = part.strip().partition("–")
            told |= {f"{first[0]}{n}" for n in range(int(first[1:]), int((last or first)[1:]) + 1)}
    assert told == {f"{theme}{n}" for theme, count in PROBLEMS.items() for n in range(1, count + 1)}


def test_a6_nothing_is_capped() -> None:
    """What users install may be as new as they like."""
    text = (TESTS.parent / "pyproject.toml").read_text()
    required = text[text.index("\ndependencies = [") : text.index("\ndev = [")]
    assert '"numpy>=' in required and '"pyspark>=' in required
    assert re.findall(r'"[^"]*(?:[<~!]|==)[^"]*"', required) == []
