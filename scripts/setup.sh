#!/usr/bin/env bash
# Makes .venv ready for development: system packages, Python packages. Run by `make venv`, once per change of
# pyproject.toml or constraints.txt.
#
#   PYTHON=...   interpreter for .venv (default: the first of python3, python3.11, ... that is 3.10 to 3.13)
#   NO_APT=1     install nothing on the system; print the command and stop
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }

supported() { "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.11 python3.12 python3.13 python3.10 /usr/bin/python3}; do
        if supported "$candidate"; then
            echo "$candidate"
            return
        fi
    done
}

java_major() {
    local java=java
    if [ -n "${JAVA_HOME:-}" ]; then java="$JAVA_HOME/bin/java"; fi
    "$java" -version 2>&1 | sed -n 's/.*version "\([0-9]*\).*/\1/p' | head -n 1 || true
}

# Names of the Debian packages that are missing, given the interpreter (or nothing).
missing_packages() {
    local python="$1" java
    command -v g++ >/dev/null || echo g++
    if [ -z "$python" ]; then
        echo python3-venv python3-dev
    else
        "$python" -c 'import ensurepip, venv' >/dev/null 2>&1 || echo python3-venv
        "$python" -c 'import os, sysconfig as s; os.stat(os.path.join(s.get_path("include"), "Python.h"))' \
            >/dev/null 2>&1 || echo python3-dev
    fi
    java="$(java_major)"
    [ "${java:-0}" -ge 17 ] || echo openjdk-17-jre-headless
}

install_system_packages() {
    local command="apt-get install --yes --no-install-recommends $*"
    if [ -z "${NO_APT:-}" ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "Missing on this system: $*"
        say "Installing with: $command"
        apt-get update --quiet --quiet || say "apt-get update failed; trying with the lists that are here"
        # shellcheck disable=SC2086
        DEBIAN_FRONTEND=noninteractive $command
        return
    fi
    say "Missing on this system: $*"
    if command -v apt-get >/dev/null; then
        say "Run this, then try again:"
        say "    $([ "$(id -u)" = 0 ] || echo 'sudo ')$command"
    else
        say "Install the equivalents of these Debian packages, then try again (Java must be 17 or newer):"
        say "    $*"
    fi
    exit 1
}

pip_install() {
    local attempt
    for attempt in 1 2 3; do
        .venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt "$@" && return
        say "pip failed (attempt $attempt of 3)"
    done
    die "pip could not install: $*"
}

python="$(find_python)"
if [ -n "${PYTHON:-}" ] && [ -z "$python" ]; then
    die "PYTHON=$PYTHON is not a Python 3.10 to 3.13"
fi
missing="$(missing_packages "$python" | xargs)"
if [ -n "$missing" ]; then
    # shellcheck disable=SC2086
    install_system_packages $missing
    python="$(find_python)"
    still="$(missing_packages "$python" | xargs)"
    [ -z "$still" ] || die "still missing after the installation: $still (PYTHON=$python)"
fi

if ! .venv/bin/python -c 'import pip' >/dev/null 2>&1; then
    say "Creating .venv with $("$python" --version)"
    "$python" -m venv --clear .venv
fi
pip_install --upgrade pip  # Debian 12's own knows no --config-settings
say "Installing Python packages into .venv (torch and pyspark are large; minutes the first time)"
.venv/bin/python scripts/requirements.py torch spark ray dev > .venv/requirements.txt
pip_install --requirement .venv/requirements.txt
