"""Ranks as supervised child processes; `run` starts them on this machine.

Read order: `local.run` (N ranks, first cause) -> `template_process`, `rank_process` (the two
kinds of processes, seen from their supervisor) -> `template` (the process that forks ranks) -> `child` (what
a rank does).
"""

from __future__ import annotations

from . import events
from .child import log_to_driver, report
from .cpus import thread_env, usable_cpus
from .events import Assignment
from .local import Env, envs_of, run
from .pickling import dumps
from .rank_process import RankProcess, end_ranks
from .template_process import Template

__all__ = [
    "Assignment",
    "Env",
    "RankProcess",
    "Template",
    "dumps",
    "end_ranks",
    "envs_of",
    "events",
    "log_to_driver",
    "report",
    "run",
    "thread_env",
    "usable_cpus",
]
