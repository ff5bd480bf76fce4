"""What a rank's supervisor hears, and what it tells the rank. Plain values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ..errors import RankFailure


@dataclass(frozen=True)
class Assignment:
    """A rank's place in the job. `endpoints` are by rank, `token` is the job's secret. env: changes to the
    environment that depend on the rank."""

    rank: int
    size: int
    endpoints: tuple[str, ...]
    token: bytes
    env: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self) | {"token": self.token.hex()})

    @classmethod
    def from_json(cls, text: str) -> Assignment:
        data = json.loads(text)
        return cls(
            data["rank"], data["size"], tuple(data["endpoints"]), bytes.fromhex(data["token"]), data["env"]
        )


@dataclass(frozen=True)
class Output:
    """One line the rank printed, without its end. `stream` is "stdout" or "stderr"."""

    line: str
    stream: str


@dataclass(frozen=True)
class Report:
    """What the rank said with `report(kind, data)`."""

    kind: str
    data: dict[str, Any]


@dataclass(frozen=True)
class Result:
    """The function returned; `value` is the pickled result. The process is gone."""

    value: bytes


@dataclass(frozen=True)
class Failed:
    """The rank ended badly. The process is gone. `exception` is the pickled exception, or empty."""

    failure: RankFailure
    exception: bytes = b""


Event = Output | Report | Result | Failed
