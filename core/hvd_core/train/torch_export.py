"""Writes a fitted torch model for torch_pyfunc.py, which reads it without hvd."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import cloudpickle
import numpy
import torch

from .columns import Layout
from .result import OutputSpec

#: The package as which the code travels.
PACKAGE = "hvd_pyfunc"
LOADER = f"{PACKAGE}.torch_pyfunc"


def write_model(
    folder: Path,
    model: Any,
    layout: Layout,
    specs: Sequence[OutputSpec],
    outputs: Sequence[Mapping[str, Any]],
    *,
    batch_size: int,
) -> None:
    """The model's data directory. outputs: for each column to add {"name", "output", "what", "head", "form",
    "threshold"}. Classes and functions of importable modules are stored by name, others by value."""
    folder.mkdir(parents=True)
    torch.save(model.cpu().eval(), folder / "model.pt", pickle_module=cloudpickle)
    if layout.transform_fn is not None:
        (folder / "transform.pkl").write_bytes(cloudpickle.dumps(layout.transform_fn))
    fields = ("columns", "joined", "dtype", "shape", "float_dtype")
    feed = {
        "columns": layout.input_columns,
        "inputs": [{name: getattr(block, name) for name in fields} for block in layout.inputs],
        "shapes": dict(layout.shapes),
        "null_value": layout.null_value,
        "model_outputs": [asdict(spec) for spec in specs],
        "outputs": list(outputs),
        "batch_size": batch_size,
    }
    (folder / "feed.json").write_text(json.dumps(feed, indent=1))


def write_code(folder: Path) -> Path:
    """The package of the loader, below `folder`; returns where it is."""
    package = folder / PACKAGE
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('"""Loads a model that was trained with hvd, without it."""\n')
    for name in ("heads.py", "torch_pyfunc.py"):
        shutil.copy(Path(__file__).with_name(name), package / name)
    return package


def requirements() -> list[str]:
    """What has to be installed where the model is loaded, in the versions of here."""
    exact = (torch, numpy, cloudpickle)
    return [*(f"{m.__name__}=={m.__version__.partition('+')[0]}" for m in exact), "pandas"]
