"""Checkpoints of a run below one URL: data files first, then a manifest with their checksums.

A checkpoint exists only if its manifest verifies, so a write may be cut short anywhere and needs neither
rename nor append. Names are `step-0000000012`: the optimizer steps done.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import CheckpointError
from . import tree
from .storage import Storage, child, shown

_MANIFEST = "manifest.json"
_FORMAT = 1
_NAME = re.compile(r"^step-\d{10}$")

STATE, RANKS = "state.safetensors", "ranks.safetensors"


class Damaged(CheckpointError):
    """A checkpoint that does not verify; the text says what is wrong with it."""


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint, verified and read whole.

    facts: the manifest's: step, epoch, position (steps done in that epoch), history, best ({"epoch",
    "value", "checkpoint"} or None), ended, size, spec, ... weights: as in `FitResult.weights`.
    """

    url: str
    name: str
    facts: Mapping[str, Any]
    files: Mapping[str, bytes] = field(repr=False)

    @property
    def weights(self) -> bytes:
        return self.files[self.facts["weights_file"]]

    def state(self, *, trust: bool = False) -> Any:
        """What else the framework keeps: optimizer, scaler, schedule, running means. trust: opens pickled
        values too; only for files from people you trust."""
        return tree.loads(self.files[STATE], trust=trust)

    def ranks(self, *, trust: bool = False) -> list[Any]:
        """What each rank keeps for itself: random states, the sums of the epoch under way."""
        found: list[Any] = tree.loads(self.files[RANKS], trust=trust)
        return found


def name_of(step: int) -> str:
    return f"step-{step:010d}"


class CheckpointDir:
    """The checkpoints of one run. Only one process writes. Raises CheckpointError naming URL and cause."""

    def __init__(self, url: str):
        self._url = url
        self._storage = Storage(url)
        self.url = self._storage.url

    def check_writable(self) -> None:
        self._storage.check_writable()

    def names(self) -> list[str]:
        """Of what looks like a checkpoint, oldest first."""
        return [name for name in self._storage.folders() if _NAME.match(name)]

    def runs(self) -> set[str]:
        """Which runs have written what is here, as far as manifests verify."""
        found = set()
        for name in self.names():
            try:
                found.add(str(self._manifest(name).get("run", "")))
            except Damaged:
                continue
        return found

    def write(self, name: str, files: Mapping[str, bytes], facts: Mapping[str, Any]) -> None:
        """What had this name before is replaced."""
        self._storage.delete(f"{name}/{_MANIFEST}")
        for path, data in files.items():
            self._storage.write(f"{name}/{path}", data)
        sums = {path: {"nbytes": len(d), "sha256": _sha256(d)} for path, d in files.items()}
        body = {"format": _FORMAT, **facts, "files": sums}
        text = json.dumps({**body, "sha256": _sha256(_canonical(body))}, indent=1)
        self._storage.write(f"{name}/{_MANIFEST}", text.encode())

    def read(self, name: str) -> Checkpoint:
        """Raises Damaged."""
        body = self._manifest(name)
        files = {path: self._verified(name, path, sums) for path, sums in body["files"].items()}
        return Checkpoint(child(self.url, name), name, body, files)

    def read_file(self, name: str, path: str) -> bytes:
        """One file of a checkpoint. Raises Damaged."""
        return self._verified(name, path, self._manifest(name)["files"].get(path))

    def last(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest one that verifies, and what is wrong with each newer one."""
        wrong: list[str] = []
        for name in reversed(self.names()):
            try:
                return self.read(name), wrong
            except Damaged as error:
                wrong.append(str(error))
        return None, wrong

    def prune(self, keep: int, also: Iterable[str], newest: str) -> None:
        """Deletes all but the `keep` newest up to `newest`, and `also`. Newer ones are left alone."""
        names = [n for n in self.names() if n <= newest]
        for name in set(names[:-keep]) - set(also):
            self._storage.delete(f"{name}/{_MANIFEST}")
            self._storage.delete_folder(name)

    def _manifest(self, name: str) -> dict[str, Any]:
        where = child(self.url, name)
        try:
            body = json.loads(self._storage.read(f"{name}/{_MANIFEST}"))
            stated = body.pop("sha256")
        except FileNotFoundError:
            raise Damaged(f"{where}: there is no {_MANIFEST}, so its write was not finished") from None
        except (ValueError, KeyError, AttributeError) as error:
            raise Damaged(f"{where}: {_MANIFEST} is not readable ({error})") from None
        if stated != _sha256(_canonical(body)):
            raise Damaged(f"{where}: {_MANIFEST} does not have the checksum it states")
        if body["format"] != _FORMAT:
            raise CheckpointError(f"{where} has format {body['format']}; this version of hvd reads {_FORMAT}")
        return dict(body)

    def _verified(self, name: str, path: str, sums: Mapping[str, Any] | None) -> bytes:
        where = child(self.url, f"{name}/{path}")
        try:
            data = self._storage.read(f"{name}/{path}")
        except FileNotFoundError:
            data = None
        if data is None or sums is None:
            raise Damaged(f"{where} is missing")
        if len(data) != sums["nbytes"]:
            raise Damaged(f"{where} has {len(data)} bytes instead of {sums['nbytes']}")
        if _sha256(data) != sums["sha256"]:
            raise Damaged(f"{where} does not have the checksum that the manifest states")
        return data


def load_checkpoint(url: str, *, best: bool = False) -> Checkpoint:
    """The checkpoint at `url` itself (".../step-0000000012"), or the last one that verifies of the run whose
    `checkpoint_dir` is `url`; with `best` that of its best epoch (by early_stopping's metric, else val_loss,
    else loss). Runs no code from it. Raises CheckpointError."""
    base, mark, query = url.partition("?")
    parent, _, name = base.rstrip("/").rpartition("/")
    if _NAME.match(name):
        return CheckpointDir(f"{parent}{mark}{query}").read(name)
    found, wrong = CheckpointDir(url).last()
    if found is None:
        raise CheckpointError("; ".join([f"there is no checkpoint that verifies at {shown(url)}", *wrong]))
    if not best:
        return found
    if found.facts["best"] is None:
        raise CheckpointError(f"no epoch of {shown(url)} has ended yet, so none is the best")
    return CheckpointDir(url).read(found.facts["best"]["checkpoint"])


def check_checkpoint_dir(url: str) -> None:
    """Whether checkpoints can be written to `url`: before a long training, also from a driver that sees the
    same storage. Raises CheckpointError."""
    CheckpointDir(url).check_writable()


def _canonical(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
