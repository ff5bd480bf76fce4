"""Horovod's questions about what it was built with. hvd brings its own transport, shared memory and TCP, and
no other: the answers are the same everywhere."""

from __future__ import annotations


def mpi_built() -> bool:
    """False: hvd neither needs nor uses MPI, also when `mpirun` starts its ranks."""
    return False


def mpi_enabled() -> bool:
    return False


def mpi_threads_supported() -> bool:
    return False


def gloo_built() -> bool:
    """False: what gloo did is done by hvd itself, always and without being asked."""
    return False


def gloo_enabled() -> bool:
    return False


def nccl_built() -> int:
    """0: CUDA tensors are reduced on the host."""
    return 0


def ddl_built() -> bool:
    return False


def ccl_built() -> bool:
    return False


def cuda_built() -> bool:
    """False: the core knows no CUDA; CUDA tensors go through pinned host memory, by torch."""
    return False


def rocm_built() -> bool:
    return False
