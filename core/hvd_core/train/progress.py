"""Where a run stands, as values: what a checkpoint keeps of the loop, and whether it can go on from there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from .spec import EarlyStopping, Scheduler, TrainSpec

#: Fields that decide which rows a rank uses in a step.
_ORDER = (
    "batch_size", "global_batch_size", "accumulate_steps", "seed", "shuffle", "row_order", "validation",
)  # fmt: skip
#: Fields that do not change what is trained, or that may change from one run to the next.
_FREE = frozenset(
    {
        "epochs", "max_steps", "callbacks", "inference_batch_size", "checksum_steps", "prefetch", "verbose",
        "shard_memory_bytes", "shard_dir", "checkpoint_dir", "checkpoint_every", "keep_checkpoints", "resume",
        "framework",
    }
)  # fmt: skip


@dataclass
class Best:
    """The best epoch so far by `metric` ("min" or "max" is best), and the checkpoint that has its weights
    ("": none)."""

    epoch: int
    value: float
    metric: str
    mode: str
    checkpoint: str = ""


@dataclass
class Progress:
    """Equal on all ranks. step: optimizer steps in all; position: those of the epoch under way, whose sums
    begin at `counted_from`. ended: None, or "done", "early" (stopping), "callback"."""

    epoch: int = 0
    position: int = 0
    counted_from: int = 0
    step: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)
    best: Best | None = None
    since_better: int = 0
    seconds: dict[str, float] = field(
        default_factory=lambda: {"data": 0.0, "compute": 0.0, "communication": 0.0, "total": 0.0}
    )
    ended: str | None = None

    def restart_epoch(self) -> None:
        self.position = self.counted_from = 0

    def stop_at(self, spec: TrainSpec, steps: int) -> int:
        """Up to which of its `steps` the epoch goes; `position` when there is nothing to do any more."""
        if self.has_ended(spec):
            return self.position
        return steps if spec.max_steps is None else min(steps, self.position + spec.max_steps - self.step)

    def has_ended(self, spec: TrainSpec) -> bool:
        """Whether a run of this spec would have nothing more to train, with whatever rows."""
        return self.ended in ("early", "callback") or (spec.epochs is not None and self.epoch >= spec.epochs)

    def to_facts(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> Progress:
        values = {f.name: facts[f.name] for f in fields(cls)}
        values["best"] = None if values["best"] is None else Best(**values["best"])
        return cls(**values)


def describe(spec: TrainSpec) -> dict[str, str]:
    """The spec as text, to be compared with another run's: plain values, and objects by their type."""
    return {f.name: _text(getattr(spec, f.name)) for f in fields(spec) if f.name not in _FREE}


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{k}: {_text(v)}' for k, v in value.items())}}}"
    if value is None or isinstance(value, (str, int, float)):
        return repr(value)
    if isinstance(value, (EarlyStopping, Scheduler)):
        return f"{type(value).__name__}({', '.join(f'{k}={_text(v)}' for k, v in vars(value).items())})"
    named = value if hasattr(value, "__qualname__") else type(value)
    return str(named.__qualname__)


def differences(
    then: Mapping[str, Any], spec: Mapping[str, str], shards: Sequence[str]
) -> tuple[list[str], list[str]]:
    """(why the position in the data is lost, which other settings changed). `then`: facts of a checkpoint;
    shards: fingerprint of each rank's rows now."""
    lost = []
    if then["size"] != len(shards):
        lost.append(f"there were {then['size']} ranks and now {len(shards)}")
    elif then["shards"] != list(shards):
        others = [r for r, (a, b) in enumerate(zip(then["shards"], shards, strict=True)) if a != b]
        lost.append(f"the rows of rank {others[0]} are others" + (" (and of more ranks)" * (len(others) > 1)))
    changed = [k for k in spec if then["spec"].get(k) != spec[k]]
    said = {n: f"{n} was {then['spec'].get(n)} and is {spec[n]}" for n in changed}
    # A function of the epoch and a warm-up set the rate in each step, from the one the spec gives.
    if spec["warmup_epochs"] == "0.0" and spec["lr_schedule"].partition("(")[0] in ("None", "Scheduler"):
        for name in said.keys() & {"learning_rate", "lr_scaling"}:
            said[name] += ", which is not used: the optimizer goes on with the rate that was saved"
    lost += [said[n] for n in changed if n in _ORDER]
    return lost, [said[n] for n in changed if n not in _ORDER]
