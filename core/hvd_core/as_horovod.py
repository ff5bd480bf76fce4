"""`import horovod` without Horovod: its public names are ours, so that old scripts run as they are.

    hvdrun -np 4 -- python -m hvd_core.as_horovod train.py --lr 0.1      # or -m module, as python takes it

or `hvd_core.install_as_horovod()` before the first `import horovod`. A name that is not there says what to
use instead. `_MODULES` has what is there; `hvd_core.torch.as_horovod` what behaves otherwise than in
`hvd_core.torch`.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from typing import Any

from .errors import HvdError, InvalidArgument, no_such
from .horovod_calls import REPLACING, tell_place

#: The Horovod whose names these are.
HOROVOD_VERSION = "0.28.1"

_HERE = "hvd_core.as_horovod"  # not __name__, when Python runs this file
_CALLS = "hvd_core.horovod_calls"
_BASICS = (
    f"{_CALLS}: init",
    "hvd_core.basics: shutdown is_initialized start_timeline stop_timeline rank size local_rank local_size "
    "cross_rank cross_size is_homogeneous",
    "hvd_core.built: mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built nccl_built "
    "ddl_built ccl_built cuda_built rocm_built",
)
_SETS = (
    "hvd_core.process_sets: ProcessSet",
    "hvd_core.basics: global_process_set add_process_set remove_process_set",
)
_TORCH = (f"{_CALLS}: init", "hvd_core.torch.as_horovod", "hvd_core.torch")
_TORCH_ELASTIC = (f"{_CALLS}: init", "hvd_core.basics: shutdown", "hvd_core.torch.elastic")
_ESTIMATORS = ("hvd_spark: TorchEstimator TorchModel",)

#: By module of Horovod, where its names come from: "module" for all that it exports, "module: name name" for
#: some. What comes first wins.
_MODULES: dict[str, Sequence[str]] = {
    "horovod": (f"{_CALLS}: run",),
    "horovod.common": (),
    "horovod.common.basics": (*_BASICS, *_SETS),
    "horovod.common.elastic": ("hvd_core.elastic: State ObjectState",),
    "horovod.common.exceptions": ("hvd_core.errors: HorovodInternalError",),
    "horovod.common.process_sets": _SETS,
    "horovod.common.util": (
        "hvd_core.built: mpi_built gloo_built nccl_built ddl_built ccl_built cuda_built",
    ),
    "horovod.ray": ("hvd_ray: RayExecutor",),
    "horovod.ray.runner": ("hvd_ray: RayExecutor",),
    "horovod.runner": (f"{_CALLS}: run",),
    "horovod.runner.util": (),
    "horovod.runner.util.threads": (f"{_CALLS}: in_thread",),
    "horovod.spark": (f"{_CALLS}: run_on_spark=run",),
    "horovod.spark.common": (),
    "horovod.spark.common.store": (
        "hvd_spark.store: Store LocalStore FilesystemStore HDFSStore DBFSLocalStore",
    ),
    "horovod.spark.torch": _ESTIMATORS,
    "horovod.spark.torch.estimator": _ESTIMATORS,
    "horovod.torch": _TORCH,
    "horovod.torch.compression": (
        "hvd_core.torch.compression: Compressor NoneCompressor FP16Compressor Compression",
    ),
    "horovod.torch.elastic": _TORCH_ELASTIC,
    "horovod.torch.elastic.sampler": _TORCH_ELASTIC,
    "horovod.torch.elastic.state": _TORCH_ELASTIC,
    "horovod.torch.functions": _TORCH,
    "horovod.torch.mpi_ops": _TORCH,
    "horovod.torch.optimizer": _TORCH,
    "horovod.torch.sync_batch_norm": _TORCH,
}

_NO_TENSORFLOW = "TensorFlow and Keras are not supported yet, only torch"
#: Modules and names of Horovod that there are not, and what to do.
_INSTEAD: dict[str, str] = {
    "horovod.common.exceptions.HostsUpdatedInterrupt": REPLACING,
    "horovod.data": "torch's own DataLoader loads in the background (num_workers)",
    "horovod.keras": _NO_TENSORFLOW,
    "horovod.mxnet": "MXNet has been retired, and hvd does not support it",
    "horovod.ray.BaseHorovodWorker": "use the methods of RayExecutor",
    "horovod.ray.ElasticRayExecutor": REPLACING,
    "horovod.ray.elastic": REPLACING,
    "horovod.runner.run_elastic": REPLACING,
    "horovod.spark.common.backend": "the estimator takes num_proc and env",
    "horovod.spark.common.util": "an estimator keeps nothing that could be prepared or cleared",
    "horovod.spark.keras": _NO_TENSORFLOW,
    "horovod.spark.lightning": "Lightning is not supported yet; TorchEstimator trains torch modules",
    "horovod.spark.run_elastic": REPLACING,
    "horovod.spark.tensorflow": _NO_TENSORFLOW,
    "horovod.tensorflow": _NO_TENSORFLOW,
}


def install_as_horovod() -> None:
    """From now on `import horovod` in this process, and in ranks that it starts, gives hvd. May be called
    again. Raises `InvalidArgument` if Horovod itself has been imported."""
    found = sys.modules.get("horovod")
    if found is not None and not isinstance(found, _Module):
        raise InvalidArgument(
            "horovod has been imported already, from "
            f"{getattr(found, '__file__', 'somewhere')}: call install_as_horovod() before"
        )
    if FINDER not in sys.meta_path:
        sys.meta_path.insert(0, FINDER)
        from .launch import pickling

        pickling.BEFORE_JOBS[_HERE] = _Installed()
    tell_place()


class _Installed:
    """Whoever unpickles it has `import horovod` too."""

    def __reduce__(self) -> tuple[Any, ...]:
        return install_as_horovod, ()


def _imported(name: str) -> types.ModuleType:
    install_as_horovod()
    return importlib.import_module(name)


class _Module(types.ModuleType):
    """A module of Horovod. Pickles for ranks that have not imported it."""

    def __getattr__(self, name: str) -> Any:
        full = f"{self.__name__}.{name}"
        if full in _MODULES:
            return importlib.import_module(full)
        if full in _INSTEAD:
            raise ImportError(f"hvd has no {full}: {_INSTEAD[full]}", name=full)
        known = [known for known in vars(self) if not known.startswith("_")]
        raise AttributeError(no_such(f"hvd as {self.__name__}", "attribute", name, known or ["nothing"]))

    def __reduce__(self) -> tuple[Any, ...]:
        return _imported, (self.__name__,)


class _Finder:
    """Finds and loads the modules of `_MODULES`."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] != "horovod":
            return None
        if name not in _MODULES:
            raise ModuleNotFoundError(_why_not(name), name=name)
        spec = ModuleSpec(name, FINDER, origin=__file__, is_package=True)  # type: ignore[arg-type]
        spec.has_location = True
        return spec

    @staticmethod
    def create_module(spec: ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    @staticmethod
    def exec_module(module: types.ModuleType) -> None:
        if module.__name__ == "horovod":
            vars(module)["__version__"] = HOROVOD_VERSION
        for source in reversed(_MODULES[module.__name__]):
            for name, value in _names(source).items():
                if f"{module.__name__}.{name}" not in _MODULES:
                    vars(module)[name] = value


FINDER = _Finder()


def _names(source: str) -> dict[str, Any]:
    place, _, listed = source.partition(": ")
    module = importlib.import_module(place)
    pairs = [word.partition("=") for word in listed.split() or module.__all__]
    return {there or here: getattr(module, here) for here, _, there in pairs}


def _why_not(name: str) -> str:
    parents = [name.rsplit(".", depth)[0] for depth in range(name.count("."))]
    for parent in parents:
        if parent in _INSTEAD:
            return f"hvd has no {parent}: {_INSTEAD[parent]}"
    return no_such("hvd as Horovod", "module", name, _MODULES)


def main(words: Sequence[str] | None = None) -> int:
    """Runs a script, `-m module` or `-c code` as Python would. Returns 2 for a bad command line."""
    from .launch.hvdrun import Command

    try:
        command = Command.parse(sys.argv[1:] if words is None else words)
        install_as_horovod()
    except HvdError as error:
        print(f"hvd_core.as_horovod: {error}", file=sys.stderr)
        return 2
    command.run()
    return 0


if __name__ == "__main__":
    # The module by its name, which this one is not.
    sys.exit(importlib.import_module(_HERE).main())
