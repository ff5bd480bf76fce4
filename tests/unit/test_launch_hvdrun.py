"""What `hvdrun` understands, and what it refuses before anything starts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hvd_core.errors import InvalidArgument
from hvd_core.launch.hvdrun import Command, main


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("import torch\n")
    return str(path)


def test_a_script_with_or_without_python(script: str) -> None:
    want = Command("file", script, ("--lr", "0.1", "-m"))
    for python in ([], [sys.executable], [sys.executable, "-u"]):
        assert Command.parse([*python, script, "--lr", "0.1", "-m"]) == want


def test_modules_and_code() -> None:
    assert Command.parse(["-m", "pkg.mod", "-x"]) == Command("-m", "pkg.mod", ("-x",))
    assert Command.parse([sys.executable, "-c", "print(1)", "a"]) == Command("-c", "print(1)", ("a",))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "nothing to run"),
        (["-m"], "-m needs a module"),
        (["-O", "x.py"], "-O cannot be passed on"),
        (["nowhere.py"], "no file 'nowhere.py'"),
        ([__file__ + "c"], "no file"),
        (["/bin/sh", "-c", "true"], "not a Python script"),
        (["/nowhere/python3", "x.py"], r"not there.*starts ranks with"),
    ],
)
def test_what_is_refused_is_named(words: list[str], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        Command.parse(words)


def test_another_python_is_refused(script: str, tmp_path: Path) -> None:
    other = tmp_path / "python3"
    other.symlink_to(Path(sys.executable).resolve())
    with pytest.raises(InvalidArgument, match="starts ranks with"):
        Command.parse([str(other), script])


def test_a_bad_command_line_is_status_2(capsys: Any) -> None:
    assert main(["-np", "0", "--", "-c", "1"]) == 2
    assert "at least 1" in capsys.readouterr().err
    with pytest.raises(SystemExit) as left:
        main(["train.py"])
    assert left.value.code == 2
    assert "-np" in capsys.readouterr().err


def test_a_command_sets_argv_path_and_main(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    (tmp_path / "beside.py").write_text("X = 5\n")
    (tmp_path / "it.py").write_text("import sys, beside\nprint(__name__, sys.argv[1:], beside.X)\n")
    monkeypatch.setattr(sys, "argv", ["hvdrun"])
    monkeypatch.setattr(sys, "path", sys.path[:])
    Command.parse([str(tmp_path / "it.py"), "a"]).run()
    assert capsys.readouterr().out == "__main__ ['a'] 5\n"
