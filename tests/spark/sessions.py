"""Spark sessions for drivers that are not to be seen: loopback only, no page, no bar, no log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_QUIET = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.shuffle.partitions": "2",
}


def session(master: str = "local[2]", **settings: str) -> Any:
    """A new session, or the one that this process has."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(master)
    for key, value in {**_QUIET, **settings}.items():
        builder = builder.config(key, value)
    made = builder.getOrCreate()
    made.sparkContext.setLogLevel("OFF")
    return made


def home_of_links(directory: Path | str) -> str:
    """A SPARK_HOME: `local-cluster` writes its `work` folder there, not into the package."""
    import pyspark

    source = Path(pyspark.__file__).parent
    for name in ("bin", "sbin", "jars", "python", "data"):
        if (source / name).exists():
            (Path(directory) / name).symlink_to(source / name)
    return str(directory)
