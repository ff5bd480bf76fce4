"""Horovod's `Store`, as far as there is something to store: where the checkpoints of runs lie."""

from __future__ import annotations

import os
import secrets
import time
from typing import Any

from hvd_core.train.storage import child


class Store:
    """`store=Store.create("s3://bucket/jobs"), run_id="a"` means `resume=True` and
    `checkpoint_dir="s3://bucket/jobs/runs/a"`. Rows are never staged there: they go from Spark straight into
    the ranks.

    runs_path: another place for the runs. save_runs=False: no checkpoints. Further arguments of Horovod's
    stores (train_path, val_path, test_path, ...) concern staged rows and are ignored.
    """

    def __init__(
        self,
        prefix_path: str | os.PathLike[str],
        *_: Any,
        runs_path: str | None = None,
        save_runs: bool = True,
        **__: Any,
    ):
        self.prefix_path = os.fspath(prefix_path)
        self.saving_runs = save_runs
        self._runs_path = runs_path or child(self.prefix_path, "runs")

    @staticmethod
    def create(prefix_path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Store:
        """For any URL that `checkpoint_dir` takes."""
        return Store(prefix_path, *args, **kwargs)

    def get_runs_path(self) -> str:
        return self._runs_path

    def get_run_path(self, run_id: str) -> str:
        return child(self._runs_path, run_id)

    def get_checkpoint_path(self, run_id: str) -> str:
        """What `hvd_core.train.load_checkpoint` takes."""
        return self.get_run_path(run_id)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Store) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash(self._runs_path)

    def __repr__(self) -> str:
        return f"Store({self.prefix_path!r})"


#: Horovod's classes by filesystem; here one serves all.
LocalStore = FilesystemStore = HDFSStore = DBFSLocalStore = Store


def new_run_id() -> str:
    """Readable, and unique also for fits that begin in the same second."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"
