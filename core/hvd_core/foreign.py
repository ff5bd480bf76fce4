"""What launchers that are not ours say about a rank: torchrun, mpirun, srun and what sets the same variables.

An environment in, a `Place` out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .errors import InvalidArgument


@dataclass(frozen=True)
class Place:
    """A rank's place in the job of a foreign launcher. `job` tells it from other jobs on the host, and is the
    same on all of its ranks."""

    launcher: str
    rank: int
    size: int
    #: Ranks on this host, None if the launcher does not tell.
    local_size: int | None
    job: str
    #: host:port where a rank 0 may listen; "" if the launcher names none or listens there itself.
    address: str = ""

    @property
    def is_on_one_host(self) -> bool:
        return self.local_size == self.size


def place_in(env: Mapping[str, str] | None = None) -> Place | None:
    """From this process's environment by default. None without a launcher, and for a job of one rank. Raises
    `InvalidArgument`, naming the variable, for what makes no sense."""
    env = os.environ if env is None else env
    for find in (_torchrun, _open_mpi, _hydra, _slurm):
        place = find(env)
        if place is not None:
            if not 0 <= place.rank < place.size:
                raise InvalidArgument(f"{place.launcher} says rank {place.rank} of {place.size}")
            return place if place.size > 1 else None
    return None


def _torchrun(env: Mapping[str, str]) -> Place | None:
    """Also what Kubeflow, SageMaker and Azure ML set."""
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= env.keys():
        return None
    number = _numbers(env)
    address = f"{env['MASTER_ADDR']}:{number('MASTER_PORT')}"
    attempt = env.get("TORCHELASTIC_RESTART_COUNT", "")
    return Place(
        "RANK and WORLD_SIZE (torchrun)",
        number("RANK"),
        number("WORLD_SIZE"),
        number("LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in env else None,
        f"torchrun {address} {env.get('TORCHELASTIC_RUN_ID', '')} {attempt}",
        "" if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else address,
    )


def _open_mpi(env: Mapping[str, str]) -> Place | None:
    if "OMPI_COMM_WORLD_RANK" not in env:
        return None
    number = _numbers(env)
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or os.getppid()
    return Place(
        "OMPI_COMM_WORLD_RANK (Open MPI)",
        number("OMPI_COMM_WORLD_RANK"),
        number("OMPI_COMM_WORLD_SIZE"),
        number("OMPI_COMM_WORLD_LOCAL_SIZE"),
        f"Open MPI {job}",
        _master(env),
    )


def _hydra(env: Mapping[str, str]) -> Place | None:
    """MPICH, Intel MPI and others with Hydra."""
    if not {"PMI_RANK", "PMI_SIZE"} <= env.keys():
        return None
    if "MPI_LOCALNRANKS" not in env and env.get("SLURM_STEP_NUM_TASKS") == env["PMI_SIZE"]:
        return None  # srun --mpi=pmi2, whose own variables say more
    number = _numbers(env)
    return Place(
        "PMI_RANK (Hydra)",
        number("PMI_RANK"),
        number("PMI_SIZE"),
        number("MPI_LOCALNRANKS") if "MPI_LOCALNRANKS" in env else None,
        f"Hydra {env.get('PMI_PORT') or env.get('PMI_JOBID') or os.getppid()}",  # its proxy on this host
        _master(env),
    )


def _slurm(env: Mapping[str, str]) -> Place | None:
    """Within srun only: a batch script has a SLURM_PROCID too, and is one process."""
    if not {"SLURM_PROCID", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"} <= env.keys():
        return None
    number = _numbers(env)
    size = number("SLURM_STEP_NUM_TASKS")
    return Place(
        "SLURM_PROCID (srun)",
        number("SLURM_PROCID"),
        size,
        size if number("SLURM_STEP_NUM_NODES") == 1 else None,
        f"SLURM {env.get('SLURM_JOB_ID', '')}.{env['SLURM_STEP_ID']}",
        _master(env),
    )


def _master(env: Mapping[str, str]) -> str:
    host, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT")
    return f"{host}:{port}" if host and port else ""


def _numbers(env: Mapping[str, str]) -> Callable[[str], int]:
    def number(name: str) -> int:
        text = env.get(name, "")
        if not text.isdigit():
            raise InvalidArgument(f"the launcher has set {name}={text!r}, which is not a whole number")
        return int(text)

    return number
