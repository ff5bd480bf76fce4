#!/usr/bin/env bash
# Runs a small job on the oldest Spark that is supported, with everything else as in .venv. Makes build/oldest for
# it, once.
set -euo pipefail
cd "$(dirname "$0")/.."

SPARK=3.5.9
venv=build/oldest

if [ ! -e "$venv/.ready-$SPARK" ]; then
    .venv/bin/python -m venv --clear --without-pip "$venv"
    site="$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    # Its own packages come first on sys.path, then what .venv has, our editable install included.
    ours="$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    echo "import site; site.addsitedir('$ours')" > "$site/borrowed.pth"
    echo "Installing pyspark $SPARK into $venv (a large source package: minutes)" >&2
    .venv/bin/python -m pip --python "$venv/bin/python" install --quiet --disable-pip-version-check \
        --ignore-installed "pyspark==$SPARK" "py4j==0.10.9.7" setuptools
    touch "$venv/.ready-$SPARK"
fi
"$venv/bin/python" tests/spark/oldest_job.py
