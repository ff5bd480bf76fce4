"""Imports and includes point one way (architecture.md §3). Reads the sources; imports nothing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# A layer may import itself and what stands here. Longest matching prefix decides the layer of a module.
PYTHON_ARROWS: dict[str, set[str]] = {
    "hvd_core.errors": set(),
    "hvd_core.config": {"hvd_core.errors"},
    "hvd_core.limits": set(),
    "hvd_core.built": set(),
    "hvd_core._native": set(),
    "hvd_core.group": {"hvd_core._native", "hvd_core.config", "hvd_core.errors", "hvd_core.limits"},
    "hvd_core.world": {"hvd_core.group", "hvd_core.config", "hvd_core.errors"},
    "hvd_core.foreign": {"hvd_core.errors"},
    "hvd_core.rendezvous": {
        "hvd_core.foreign",
        "hvd_core.world",
        "hvd_core.group",
        "hvd_core.config",
        "hvd_core.errors",
    },
    "hvd_core.process_sets": {"hvd_core.group", "hvd_core.errors"},
    "hvd_core.basics": {
        "hvd_core.process_sets",
        "hvd_core.rendezvous",
        "hvd_core.world",
        "hvd_core.group",
        "hvd_core.config",
        "hvd_core.errors",
    },
    "hvd_core.objects": {"hvd_core.basics", "hvd_core.group", "hvd_core.errors"},
    "hvd_core.elastic": {"hvd_core.objects", "hvd_core.basics", "hvd_core.errors"},
    "hvd_core.launch": {
        "hvd_core.basics",
        "hvd_core.world",
        "hvd_core.group",
        "hvd_core.limits",
        "hvd_core.config",
        "hvd_core.errors",
    },
    "hvd_core.torch": {
        "hvd_core.built",
        "hvd_core.elastic",
        "hvd_core.objects",
        "hvd_core.basics",
        "hvd_core.process_sets",
        "hvd_core.world",
        "hvd_core.group",
        "hvd_core.config",
        "hvd_core.errors",
    },
    "hvd_core.train": {
        "hvd_core.torch",
        "hvd_core.objects",
        "hvd_core.basics",
        "hvd_core.world",
        "hvd_core.group",
        "hvd_core._native",
        "hvd_core.limits",
        "hvd_core.config",
        "hvd_core.errors",
    },
    "hvd_core.horovod_calls": {
        "hvd_core.launch",
        "hvd_core.basics",
        "hvd_core.world",
        "hvd_core.config",
        "hvd_core.errors",
    },
    "hvd_core.as_horovod": {"hvd_core.horovod_calls", "hvd_core.launch", "hvd_core.errors"},
    # The package itself only gathers the framework-free names.
    "hvd_core": {
        "hvd_core.as_horovod",
        "hvd_core.launch",
        "hvd_core.objects",
        "hvd_core.basics",
        "hvd_core.world",
        "hvd_core.group",
        "hvd_core._native",
        "hvd_core.config",
        "hvd_core.errors",
    },
    "hvd_spark": {
        "hvd_core",
        *(f"hvd_core.{name}" for name in ("train", "launch", "world", "group", "basics")),
    }
    | {"hvd_core.config", "hvd_core.errors", "hvd_core.torch"},
}
PYTHON_ARROWS["hvd_ray"] = PYTHON_ARROWS["hvd_spark"]

# Where a framework may be imported, as regular expressions on module names.
FRAMEWORKS: dict[str, str] = {
    "torch": r"hvd_core\.torch(\..+)?|hvd_core\.train\.torch_\w+|hvd_ray\.loader",
    "tensorflow": r"hvd_core\.(tensorflow|keras)(\..+)?|hvd_core\.train\.keras_\w+",
    "keras": r"hvd_core\.(tensorflow|keras)(\..+)?|hvd_core\.train\.keras_\w+",
    "pyspark": r"hvd_spark(\..+)?|hvd_ray\.spark",
    "py4j": r"hvd_spark(\..+)?",
    "ray": r"hvd_ray(\..+)?",
    "pandas": r"(?!)",
}

# Modules that may touch the environment, and why. HVD_* belongs to config.py alone.
ENVIRONMENT: dict[str, str] = {
    "hvd_core.config": "reads HVD_*",
    "hvd_core.foreign": "reads what other launchers set",
    "hvd_core.horovod_calls": "reads HOROVOD_*, as settings of ours",
    "hvd_core.launch": "hands an environment to its children",
    "hvd_spark": "hands an environment to its ranks and finds the interpreter",
    "hvd_ray": "hands an environment to its ranks",
}

CPP_ARROWS: dict[str, set[str]] = {
    "base": set(),
    "data": {"base"},
    "transport": {"base"},
    "collectives": {"transport", "base"},
    "scheduler": {"collectives", "transport", "base"},
    "group": {"scheduler", "collectives", "transport", "base"},
    "group_plan": {"group", "scheduler", "collectives", "transport", "base"},  # the second source of group.h
    "bindings": {"group", "data", "scheduler", "collectives", "transport", "base"},
}


def layer_of(module: str, layers: dict[str, set[str]] = PYTHON_ARROWS) -> str:
    """The longest layer that is `module` or a package above it."""
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        if name in layers:
            return name
    return module


def imported(source: str, module: str, is_package: bool) -> Iterator[tuple[int, str, bool]]:
    """(line, absolute module name, for type checking only) of every import, also inside functions."""
    tree = ast.parse(source)
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for branch in node.body
        for inner in ast.walk(branch)
    }
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, id(node) in typing_only
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - (node.level - 1)] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{prefix}.{alias.name}", id(node) in typing_only


def python_faults(module: str, source: str, is_package: bool = False) -> list[str]:
    """What is wrong with the imports and the environment use of one module."""
    faults = []
    layer = layer_of(module)
    for line, target, typing_only in imported(source, module, is_package):
        top = target.split(".")[0]
        if top in ("hvd_core", "hvd_spark", "hvd_ray"):
            goal = layer_of(target)
            # `from . import Group` in the package, or a name that the package re-exports.
            if goal not in (layer, *PYTHON_ARROWS.get(layer, ())):
                faults.append(f"{module}:{line} imports {target}, but {layer} may not import {goal}")
        elif top in FRAMEWORKS and not typing_only and not re.fullmatch(FRAMEWORKS[top], module):
            faults.append(f"{module}:{line} imports {top}, which only its adapter may")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "putenv"):
            if not any(f"{module}.".startswith(f"{name}.") for name in ENVIRONMENT):
                faults.append(f"{module}:{node.lineno} touches os.{node.attr}")
        elif isinstance(node, ast.Constant) and module != "hvd_core.config":
            if re.fullmatch(r"HVD_\w*", str(node.value)):
                faults.append(f"{module}:{node.lineno} names {node.value}; settings are read in config.py")
    return faults


def cpp_faults(path: str, source: str) -> list[str]:
    """What is wrong with the includes of one file; `path` is relative to core/src."""
    faults = []
    layer = Path(path).parts[0] if "/" in path else Path(path).stem
    for number, line in enumerate(source.splitlines(), 1):
        where = f"{path}:{number}"
        if re.search(r"\bgetenv\s*\(", line):
            faults.append(f"{where} reads the environment")
        match = re.match(r'\s*#\s*include\s*(["<])([^">]+)[">]', line)
        if match is None:
            continue
        ours, target = match[1] == '"', match[2]
        if ours:
            goal = Path(target).parts[0] if "/" in target else Path(target).stem if "/" not in path else layer
            if target in ("group.h",):
                goal = "group"
            if goal not in CPP_ARROWS:
                faults.append(f"{where} includes {target}, which is in no known layer")
            elif goal not in (layer, *CPP_ARROWS.get(layer, ())):
                faults.append(f"{where} includes {target}, but {layer} may not include {goal}")
        elif re.match(r"(Python\.h|nanobind/)", target) and layer != "bindings":
            faults.append(f"{where} includes {target}, which only bindings may")
        elif re.match(r"(torch|c10|ATen|tensorflow|cuda|nccl|mpi)\b", target):
            faults.append(f"{where} includes {target}; frameworks are opened at run time")
    return faults


def python_modules() -> list[tuple[str, Path]]:
    found = []
    for base, package in ((ROOT / "core", "hvd_core"), (ROOT, "hvd_spark"), (ROOT, "hvd_ray")):
        for path in sorted((base / package).rglob("*.py")):
            parts = path.relative_to(base).with_suffix("").parts
            found.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return found


def test_python_imports_point_one_way():
    modules = python_modules()
    assert any(name == "hvd_core.errors" for name, _ in modules)
    faults = [
        fault
        for name, path in modules
        for fault in python_faults(name, path.read_text(), path.name == "__init__.py")
    ]
    assert not faults, "\n".join(faults)


def test_cpp_includes_point_one_way():
    src = ROOT / "core" / "src"
    files = sorted([*src.rglob("*.h"), *src.rglob("*.cc")])
    assert files
    faults = [
        fault for path in files for fault in cpp_faults(path.relative_to(src).as_posix(), path.read_text())
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("module", "source", "wrong"),
    [
        ("hvd_core.group", "from ._native import X", False),
        ("hvd_core.group", "from .world import current", True),
        ("hvd_core.group", "def f():\n    from . import basics", True),
        ("hvd_core.errors", "from .config import Config", True),
        ("hvd_core.launch.run", "from ..world import current", False),
        ("hvd_core.launch.run", "from ..train import spec", True),
        ("hvd_core.launch.run", "from .. import torch", True),
        ("hvd_core.torch.ops", "import torch", False),
        ("hvd_core.train.torch_loop", "import torch", False),
        ("hvd_core.train.spec", "import torch", True),
        (
            "hvd_core.train.spec",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch",
            False,
        ),
        ("hvd_core.train.shard", "import hvd_spark", True),
        ("hvd_core.basics", "import pyspark.sql", True),
        ("hvd_spark.task", "from hvd_core.train import Shard", False),
        ("hvd_core.train.shard", "import os\nos.environ['X']", True),
        ("hvd_spark.task", "key = 'HVD_CHUNK_BYTES'", True),
    ],
)
def test_a_wrong_import_is_found(module: str, source: str, wrong: bool):
    assert bool(python_faults(module, source)) is wrong


@pytest.mark.parametrize(
    ("path", "source", "wrong"),
    [
        ("transport/arena.h", '#include "base/status.h"', False),
        ("base/status.h", '#include "transport/arena.h"', True),
        ("collectives/plan.cc", '#include "plan.h"', False),
        ("collectives/plan.cc", '#include "scheduler/queue.h"', True),
        ("data/gather.cc", '#include "transport/arena.h"', True),
        ("group.cc", '#include "scheduler/queue.h"', False),
        ("scheduler/queue.cc", '#include "group.h"', True),
        ("bindings/module.cc", "#include <nanobind/nanobind.h>", False),
        ("group.cc", "#include <nanobind/nanobind.h>", True),
        ("group.cc", "#include <cuda.h>", True),
        ("base/log.cc", 'auto* x = getenv("A");', True),
    ],
)
def test_a_wrong_include_is_found(path: str, source: str, wrong: bool):
    assert bool(cpp_faults(path, source)) is wrong
