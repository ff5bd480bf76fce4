"""Every knob, once. The only module that reads HVD_* from the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from .errors import InvalidArgument


@dataclass(frozen=True)
class Config:
    """Settings of one Group and its launcher. `HVD_<FIELD>` in the environment overrides a default.

    All ranks of a job must agree on the values; the launcher passes its own environment on.
    """

    #: Fused batches hold at most this many bytes; 0 turns fusion off. What is ready at one moment completes
    #: together, so larger batches cost no latency; every batch costs waits for the slowest rank.
    fusion_bytes: int = 32 << 20
    #: Tensors outside the arena pass through it in chunks of this many bytes (two are in flight).
    chunk_bytes: int = field(default=256 << 10, metadata={"least": 64})
    #: Every rank must have connected after this many seconds.
    connect_timeout_s: float = 60.0
    #: A peer from which nothing was heard for this long is lost.
    peer_timeout_s: float = field(default=30.0, metadata={"least": 0.01})
    #: A collective that some ranks have not submitted is reported after this long ...
    stall_warn_s: float = 30.0
    #: ... and aborts the Group after this long; 0 waits for ever.
    stall_shutdown_s: float = 600.0
    #: Forces ranks apart: ranks with different values are treated as being on different hosts. Those with
    #: equal ones that share no network namespace (containers) are so too, and rank 0 logs a line.
    host_id: str = ""
    #: Name of the network interface whose address is offered to other hosts; "" asks the routing table.
    interface: str = ""
    #: TCP connections between neighbouring hosts for each slice of the data.
    ring_streams: int = field(default=2, metadata={"least": 1})
    #: What float32 sums, and the sums of 16-bit floats, travel as between hosts: "" for float32, or "bf16" or
    #: "fp16" for half the bytes. Every host then rounds, so the bits depend on which ranks share a host; all
    #: ranks still get the same.
    wire_dtype: str = field(default="", metadata={"one_of": ("", "bf16", "fp16")})
    #: 1: ranks may talk to each other, and tell the driver how far they are, in plain text also where Spark
    #: encrypts its own connections. They authenticate in any case.
    plain_text: int = 0
    #: For ranks that torchrun, mpirun or srun have started on several hosts: a secret that all of them know,
    #: at least 16 characters. On one host none is needed.
    job_token: str = field(default="", repr=False)
    #: ... and host:port where rank 0 then waits for the others; "" is MASTER_ADDR:MASTER_PORT.
    rendezvous: str = ""
    #: Highest kernel set to use: "", "avx512", "avx2" or "baseline". All give the same bits.
    kernels: str = ""
    #: Rank 0 writes a timeline of all ranks to this file, for a trace viewer; "" or "DYNAMIC": not before
    #: `start_timeline`.
    timeline: str = ""
    #: Not 0: the timeline shows when the ranks agreed on something to do.
    timeline_mark_cycles: int = 0
    #: A training shard stays in memory up to this many bytes; 0: half of what the host has free for each
    #: rank.
    shard_memory_bytes: int = 0
    #: Where larger shards are written (unlinked at once); "" is the platform's local directory.
    shard_dir: str = ""

    @property
    def timeline_path(self) -> str:
        """The file that is written from the beginning; "" if none is."""
        return "" if self.timeline == "DYNAMIC" else self.timeline

    def __post_init__(self) -> None:
        for f in fields(self):
            value, least = getattr(self, f.name), f.metadata.get("least", 0)
            if not isinstance(f.default, str) and not value >= least:  # also NaN
                raise InvalidArgument(f"{f.name}={value!r} must be at least {least:g}")
            if value not in f.metadata.get("one_of", (value,)):
                raise InvalidArgument(f"{f.name}={value!r} is none of {f.metadata['one_of']}")

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Config:
        """Reads HVD_* variables. An unknown one, or one that does not parse, is an `InvalidArgument`."""
        env = os.environ if env is None else env
        known = {variable(f.name): f.name for f in fields(cls)}
        defaults = cls()
        values: dict[str, Any] = {}
        for key, text in env.items():
            if not key.startswith("HVD_"):
                continue
            if key not in known:
                raise InvalidArgument(f"unknown setting {key}; known are {', '.join(sorted(known))}")
            kind = type(getattr(defaults, known[key]))
            try:
                values[known[key]] = kind(text)
            except ValueError:
                raise InvalidArgument(f"{key}={text!r} is not {_KINDS[kind]}") from None
        return cls(**values)

    def to_env(self) -> dict[str, str]:
        """The variables from which `from_env` makes this again, for a rank on another machine."""
        defaults = type(self)()
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {
            variable(name): str(value) for name, value in values.items() if value != getattr(defaults, name)
        }


def variable(field_name: str) -> str:
    """The name in the environment of a field of `Config`."""
    return f"HVD_{field_name.upper()}"


_KINDS = {int: "a whole number", float: "a number of seconds", str: "a string"}
