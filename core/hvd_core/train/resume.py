"""Writing checkpoints of a run, and going on from the last one: what all ranks do together."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import CheckpointError
from . import tree
from .checkpoint import RANKS, STATE, Checkpoint, CheckpointDir, Damaged, name_of
from .framework import Framework, Totals
from .progress import Progress, describe, differences
from .ranks import Ranks
from .spec import TrainSpec

#: How long the others wait for rank 0 to read or write before they take it for stalled.
_LONGEST_S = 3600.0


class CheckpointWarning(UserWarning):
    """A checkpoint was skipped, or training does not go on exactly where it stopped."""


@dataclass(frozen=True)
class Attempt:
    """One attempt at a run. A further one (`number` > 0) goes on from the checkpoints that the earlier ones
    have left, which carry the name `run`, whatever `TrainSpec.resume` says."""

    run: str = ""
    number: int = 0


@dataclass
class EpochSums:
    """What this rank has added up in the epoch under way, before a resume too. rate: of its first step."""

    totals: Totals = field(default_factory=Totals)
    rate: float | None = None
    elapsed_s: float = 0.0
    data_s: float = 0.0


class Checkpoints:
    """All ranks call each method at the same time; rank 0 reads, writes and decides. Without a
    `checkpoint_dir` nothing happens."""

    def __init__(self, spec: TrainSpec, ranks: Ranks, framework: Framework, attempt: Attempt):
        self._spec, self._ranks, self._framework, self._attempt = spec, ranks, framework, attempt
        self._goes_on = spec.resume or attempt.number > 0
        self._enabled = spec.checkpoint_dir is not None
        self._directory: CheckpointDir | None = None
        self._shards: list[str] = []
        #: Weights of the best epoch, found again on resume; rank 0.
        self.best_weights: bytes | None = None
        #: What the summary says of a resume.
        self.notes: list[str] = []

    def open(self) -> None:
        """Before anything costs time: whether the directory can be written and is free for this run."""
        if not self._enabled or self._ranks.rank:
            return
        assert self._spec.checkpoint_dir is not None
        self._directory = CheckpointDir(self._spec.checkpoint_dir)
        self._directory.check_writable()
        names = self._directory.names()
        if names and not self._spec.resume and not self._are_ours(self._directory):
            raise CheckpointError(
                f"{self._directory.url} has the checkpoints of an earlier run ({names[-1]}): set "
                "resume=True to go on with it, or give another directory"
            )

    def _are_ours(self, directory: CheckpointDir) -> bool:
        """Whether an earlier attempt at this run has written all of them; one cut short tells nothing."""
        return self._attempt.number > 0 and directory.runs() <= {self._attempt.run}

    @property
    def enabled(self) -> bool:
        return self._enabled

    # -- back --

    def restore(self, fingerprint: str) -> tuple[Progress, EpochSums]:
        """Where to begin: at the last checkpoint that verifies, if the spec says so. fingerprint: of this
        rank's rows in their order."""
        if not self._enabled:
            return Progress(), EpochSums()
        self._shards = [d.decode() for d in self._ranks.gather(fingerprint.encode(), "fingerprints")]
        if not self._goes_on:
            return Progress(), EpochSums()
        found = self._agree()
        if found is None:
            return Progress(), EpochSums()
        progress = Progress.from_facts(found.facts)
        own = self._load(found)
        lost, changed = differences(found.facts, describe(self._spec), self._shards)
        at = f"epoch {progress.epoch}, step {progress.position}"
        self.notes.append(f"resumed at {at} from {found.url}")
        if changed:
            self._warn(f"{found.url}: the settings are others now: {'; '.join(changed)}")
        if lost:
            then = f"epoch {progress.epoch} starts from its beginning"
            if progress.has_ended(self._spec):
                then = "but that run had ended, so its result is given back and nothing is trained"
            self._warn(f"{found.url}: {'; '.join(lost)}: {then}")
            progress.restart_epoch()
        self._find_best(progress, found)
        sums = EpochSums()
        if own is not None and not lost:
            sums = EpochSums(Totals(**own["totals"]), own["rate"], own["elapsed_s"], own["data_s"])
        return progress, sums

    def _agree(self) -> Checkpoint | None:
        """Rank 0's choice and its files, on all ranks."""
        found: Checkpoint | None = None
        wrong: list[str] = []
        if self._directory is not None:
            with self._ranks.long_phase("read a checkpoint", _LONGEST_S):
                found, wrong = self._directory.last()
        about = None
        if found is not None:
            about = {"url": found.url, "name": found.name, "facts": dict(found.facts)}
        text = json.dumps({"found": about, "wrong": wrong}).encode()
        choice = json.loads(self._ranks.broadcast(text, 0, "checkpoint"))
        for damage in choice["wrong"]:
            self._warn(f"skipped a damaged checkpoint: {damage}")
        about = choice["found"]
        if about is None:
            return None
        files = {}
        for path in about["facts"]["files"]:
            data = None if found is None else found.files[path]
            files[path] = self._ranks.broadcast(data, 0, f"checkpoint.{path}")
        return Checkpoint(files=files, **about)

    def _load(self, found: Checkpoint) -> dict[str, Any] | None:
        """This rank's own state, if the ranks are the same."""
        own = None
        if found.facts["size"] == self._ranks.size:
            own = found.ranks(trust=True)[self._ranks.rank]
        try:
            state = found.state(trust=True)
            self._framework.load(found.weights, state, None if own is None else own["framework"])
        except CheckpointError as error:
            raise CheckpointError(f"cannot resume from {found.url}: {error}") from error
        if own is not None:
            random.setstate(own["python"])
            np.random.set_state(own["numpy"])
        return own

    def _find_best(self, progress: Progress, found: Checkpoint) -> None:
        best, rule = progress.best, self._spec.early_stopping
        if best is None or rule is None or not rule.restore_best:
            return
        wrong = ""
        if best.checkpoint == found.name:
            self.best_weights = found.weights
        elif self._directory is not None:
            try:
                self.best_weights = self._directory.read_file(best.checkpoint, self._framework.weights_file)
            except Damaged as error:
                wrong = str(error)
        wrong = self._ranks.broadcast(wrong.encode(), 0, "best").decode()
        if wrong:
            self._warn(f"the best epoch's weights are lost, the next epoch counts as the best: {wrong}")
            progress.best, progress.since_better = None, 0

    def _warn(self, text: str) -> None:
        self.notes.append(text)
        if self._ranks.rank == 0:
            warnings.warn(text, CheckpointWarning, stacklevel=2)

    # -- forth --

    def save(self, progress: Progress, sums: EpochSums) -> None:
        own = tree.dumps(
            {
                "framework": self._framework.own_state(),
                "totals": sums.totals.__dict__,
                "rate": sums.rate,
                "elapsed_s": sums.elapsed_s,
                "data_s": sums.data_s,
                "python": random.getstate(),
                "numpy": np.random.get_state(),
            }
        )
        everyones = self._ranks.gather(own, "own_states")
        if self._directory is None:
            return
        with self._ranks.long_phase("write a checkpoint", _LONGEST_S):
            self._write(self._directory, progress, everyones)

    def _write(self, directory: CheckpointDir, progress: Progress, everyones: Sequence[bytes]) -> None:
        framework, name = self._framework, name_of(progress.step)
        files = {
            framework.weights_file: framework.weights(),
            STATE: tree.dumps(framework.state()),
            RANKS: tree.dumps([tree.loads(own, trust=True) for own in everyones]),
        }
        facts = {
            **progress.to_facts(),
            "run": self._attempt.run,
            "size": self._ranks.size,
            "shards": self._shards,
            "spec": describe(self._spec),
            "weights_file": framework.weights_file,
        }
        directory.write(name, files, facts)
        kept = [] if progress.best is None else [progress.best.checkpoint]
        directory.prune(self._spec.keep_checkpoints or 1, kept, name)
