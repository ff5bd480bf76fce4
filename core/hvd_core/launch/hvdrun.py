"""`hvdrun -np 4 python train.py --lr 0.1`: a Python script on N ranks of this machine.

The script is run as it is; in it `hvd.init()` finds the other ranks. Ranks are forked from one process that
has imported torch, if the script does, so N ranks start as fast as one.
"""

from __future__ import annotations

import argparse
import os
import re
import runpy
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from ..errors import HvdError, InvalidArgument, RankFailed
from .cpus import threads_per_rank, usable_cpus
from .local import PRELOAD, run_payload
from .pickling import dumps

_USAGE = "hvdrun -np N [options] [--] [python] script.py | -m module | -c code  [arguments]"


@dataclass(frozen=True)
class Command:
    """What `python` would be asked to run. kind: "file", "-m" or "-c"; target: path, module or code."""

    kind: str
    target: str
    arguments: tuple[str, ...]

    @classmethod
    def parse(cls, words: Sequence[str]) -> Command:
        """From the words of a command line. Raises InvalidArgument for what is not Python, or another one."""
        rest = list(words)
        if rest and re.fullmatch(r"python[\d.]*", os.path.basename(rest[0])):
            _check_interpreter(rest.pop(0))
        while rest and rest[0] == "-u":  # the ranks' lines come at once anyway
            rest.pop(0)
        if not rest:
            raise InvalidArgument(f"nothing to run. Usage: {_USAGE}")
        if rest[0] in ("-m", "-c"):
            if len(rest) < 2:
                raise InvalidArgument(f"{rest[0]} needs a {'module' if rest[0] == '-m' else 'program'}")
            return cls(rest[0], rest[1], tuple(rest[2:]))
        if rest[0].startswith("-"):
            raise InvalidArgument(f"python's option {rest[0]} cannot be passed on to ranks")
        if not Path(rest[0]).is_file():
            raise InvalidArgument(f"there is no file {rest[0]!r}")
        if not rest[0].endswith(".py"):
            raise InvalidArgument(f"{rest[0]!r} is not a Python script: {_USAGE}")
        return cls("file", str(Path(rest[0]).resolve()), tuple(rest[1:]))

    def source(self) -> str:
        """The code, as far as it is at hand without importing anything."""
        if self.kind == "file":
            return Path(self.target).read_text(errors="replace")
        return self.target if self.kind == "-c" else "import torch"

    def run(self) -> None:
        """Runs it in this process as `__main__`, with its own sys.argv and the first entry of sys.path."""
        sys.path.insert(0, os.path.dirname(self.target) if self.kind == "file" else os.getcwd())
        sys.argv[:] = [self.target if self.kind == "file" else self.kind, *self.arguments]
        if self.kind == "file":
            runpy.run_path(self.target, run_name="__main__")
        elif self.kind == "-m":
            runpy.run_module(self.target, run_name="__main__", alter_sys=True)
        else:
            exec(compile(self.target, "<string>", "exec"), {"__name__": "__main__"})


def _check_interpreter(name: str) -> None:
    path = shutil.which(name)
    # A venv's python is a link to its base's: the folder tells them apart.
    if path is None or Path(path).parent.resolve() != Path(sys.executable).parent.resolve():
        raise InvalidArgument(
            f"{name} is {path or 'not there'}; this hvdrun starts ranks with {sys.executable}. "
            f"Use the hvdrun of that Python, or leave {name!r} out"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0; that of the rank that failed first; 130 after Ctrl-C; 2 for a bad command line."""
    own, words = _split(sys.argv[1:] if argv is None else list(argv))
    options = _options().parse_args(own)
    try:
        if options.num_proc < 1:
            raise InvalidArgument(f"-np must be at least 1, not {options.num_proc}")
        command = Command.parse(words)
        threads = threads_per_rank(options.cpus_per_rank, options.num_proc, os.environ, usable_cpus())
        run_payload(
            dumps(command.run),
            [{}] * options.num_proc,
            threads=threads,
            preload=PRELOAD
            if re.search(r"\b(import|from)\s+(torch|hvd_core\.torch)\b", command.source())
            else (),
            timeout_s=options.timeout_s,
        )
    except InvalidArgument as error:
        print(f"hvdrun: {error}", file=sys.stderr)
        return 2
    except RankFailed as error:
        print(f"hvdrun: {error}", file=sys.stderr)
        failure = error.failure
        return 128 + failure.signal if failure.signal else failure.exit_status or 1
    except HvdError as error:
        print(f"hvdrun: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("hvdrun: interrupted; all ranks are ended", file=sys.stderr)
        return 130
    return 0


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """hvdrun's own options, and the command that follows them."""
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] not in ("--", "-m", "-c", "-u"):
        at += 1 if "=" in words[at] or words[at] in ("-h", "--help", "--version") else 2
    return words[:at], words[at + 1 :] if words[at : at + 1] == ["--"] else words[at:]


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("hvdrun", usage=_USAGE, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-np", "--num-proc", type=int, required=True, help="number of ranks")
    parser.add_argument(
        "--cpus-per-rank", type=int, help="compute threads of a rank; default: an equal share"
    )
    parser.add_argument("--timeout-s", type=float, help="end the ranks after so many seconds")
    parser.add_argument("--version", action="version", version=f"hvd {version('hvd')}")
    return parser


if __name__ == "__main__":
    sys.exit(main())
