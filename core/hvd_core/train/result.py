"""What `fit` gives back: a value that pickles, and whose weights can be read without running code."""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class OutputSpec:
    """One output of the model: numpy dtype name ("float32", ...) and the shape of one row (() for a
    scalar)."""

    dtype: str
    shape: tuple[int, ...]


@dataclass
class FitResult:
    """The fitted weights and how they came about. Equal on all ranks, apart from `weights` (rank 0 only).

    weights: the state dict as a safetensors file, which is read without running code. b"" on ranks other
    than 0. history: a dict for each
    epoch: epoch, loss, metrics, val_*, rows, steps, lr, seconds, and the split data / compute /
    communication in seconds (mean over ranks). best_epoch: 0-based; by the early-stopping metric, else
    val_loss, else loss. rows_seen: rows used in each epoch, training and validation together, over all
    ranks; rows_sent: rows in the shards. They are equal unless max_steps cut an epoch short. timeline_path:
    of HVD_TIMELINE, on rank 0's host. data: for each column and rank rows, nulls, nans, infinities, low,
    high, as in `quality.ColumnReport`.
    """

    weights: bytes
    history: list[dict[str, Any]]
    best_epoch: int
    rows_seen: int
    rows_sent: int
    train_rows: int
    validation_rows: int
    seconds: dict[str, float]
    summary: str
    output_spec: tuple[OutputSpec, ...] = field(default_factory=tuple)
    stopped_early: bool = False
    size: int = 1
    timeline_path: str | None = None
    data: list[dict[str, Any]] = field(default_factory=list)

    def to_bytes(self) -> bytes:
        """The length-prefixed `to_json()` followed by the weights: nothing in it runs code."""
        text = self.to_json().encode()
        return struct.pack("<Q", len(text)) + text + self.weights

    @classmethod
    def from_bytes(cls, data: bytes) -> FitResult:
        (n,) = struct.unpack_from("<Q", data)
        return cls.from_json(bytes(data[8 : 8 + n]), bytes(data[8 + n :]))

    def plot(self, path: Any = None) -> Any:
        """Losses, metrics, rows/s and where the time went, by epoch: a matplotlib Figure, also written to
        `path` (a file name or an open file) if given. Needs matplotlib."""
        from .picture import draw

        figure = draw(self.history, self.best_epoch)
        if path is not None:
            figure.savefig(path)
        return figure

    def _repr_html_(self) -> str:
        from .picture import as_html

        return as_html(self.history, self.summary, self.best_epoch)

    def to_json(self) -> str:
        """All but the weights."""
        head = {k: v for k, v in self.__dict__.items() if k != "weights"}
        head["output_spec"] = [asdict(o) for o in self.output_spec]
        return json.dumps(head)

    @classmethod
    def from_json(cls, text: str | bytes, weights: bytes = b"") -> FitResult:
        head = json.loads(text)
        head["output_spec"] = tuple(OutputSpec(o["dtype"], tuple(o["shape"])) for o in head["output_spec"])
        return cls(weights=weights, **head)
