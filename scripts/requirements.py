"""Prints what pyproject.toml asks for, one a line: build, run time, and the extras given as arguments.

pip cannot install a project's dependencies without building the project; `make venv` must not compile.
"""

from __future__ import annotations

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib

project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
requirements = set(project["build-system"]["requires"]) | set(project["project"]["dependencies"])
for extra in sys.argv[1:]:
    requirements |= set(project["project"]["optional-dependencies"][extra])
print("\n".join(sorted(requirements)))
