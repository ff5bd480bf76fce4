"""S7: Spark through SPARK_HOME only."""

from __future__ import annotations

import os
import site
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from . import home_job
from .drivers import facts

pyspark = pytest.importorskip("pyspark")

pytestmark = pytest.mark.slow


def python_without_pyspark(directory: Path) -> Path:
    """A virtual environment of links to everything that this one has, pyspark and py4j left out."""
    venv.create(directory, symlinks=True)
    scheme = {"base": str(directory), "platbase": str(directory)}
    target = Path(sysconfig.get_path("purelib", "venv", scheme))
    places = [*site.getsitepackages(), *(p for p in sys.path if p.endswith("site-packages"))]
    for place in filter(os.path.isdir, dict.fromkeys(places)):  # Debian's Python names others, too
        for entry in Path(place).iterdir():
            is_spark = entry.name.startswith(("pyspark", "py4j"))
            leads_elsewhere = entry.suffix == ".pth" and "editable" not in entry.name
            if not (is_spark or leads_elsewhere or (target / entry.name).exists()):
                (target / entry.name).symlink_to(entry)
    return directory / "bin" / "python"


def unpacked_spark(directory: Path) -> Path:
    """As the archives from spark.apache.org are laid out, as far as Python needs them."""
    directory.mkdir()
    source = Path(pyspark.__file__).parent
    for name in ("bin", "jars", "python"):
        (directory / name).symlink_to(source / name)
    return directory


@pytest.mark.timeout(180)
def test_s7_unpacked_spark_without_pip_pyspark(tmp_path: Path) -> None:
    python = python_without_pyspark(tmp_path / "venv")
    home = unpacked_spark(tmp_path / "spark")
    tried = subprocess.run([python, "-c", "import pyspark"], capture_output=True, text=True, check=False)
    assert "No module named 'pyspark'" in tried.stderr
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    env |= {"SPARK_HOME": str(home), "PYSPARK_PYTHON": str(python), "PYSPARK_DRIVER_PYTHON": str(python)}
    process = subprocess.Popen(
        [home / "bin" / "spark-submit", "--master", "local[2]", home_job.__file__],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        start_new_session=True,
    )
    found = facts(process, 170)["home"]
    assert f"{home}/python/lib/pyspark.zip" in found["where"] and not found["pip"]
    assert found["python"] == str(python)
    assert found["got"] == [3.0, 3.0] and found["rows"] == 400
