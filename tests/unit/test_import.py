"""`import hvd_core` needs Python and numpy, nothing else."""

from __future__ import annotations

import subprocess
import sys

PROBE = """
import sys

class Refuse:
    allowed = set(sys.stdlib_module_names) | {"hvd_core", "numpy"}
    refused = []

    def find_spec(self, name, path=None, target=None):
        if path is None and name.split(".")[0] not in self.allowed:
            self.refused.append(name)
            raise ModuleNotFoundError(f"blocked: {name}", name=name)
        return None

sys.meta_path.insert(0, Refuse())
import hvd_core
import hvd_core.basics
hvd_core.basics.init()
assert (hvd_core.basics.rank(), hvd_core.basics.size()) == (0, 1)
hvd_core.basics.shutdown()
heavy = {"torch", "pyspark", "pyarrow", "pandas", "cloudpickle", "tqdm"} & set(sys.modules)
assert not heavy, heavy
try:
    import torch
except ModuleNotFoundError:
    print("clean")
"""


def test_import_needs_numpy_only():
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "clean"
