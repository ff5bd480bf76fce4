# make demo   train on real flights on an embedded Spark     make venv     only set up
# make test   most tests                                     make native   build the extension
# make check  format, lint, types, warnings, fast tests      make bench    benchmarks
# make demo-ray  the same flights on Ray
# make test-oldest   a small job on the oldest Spark that is supported
# make check-sanitizers   C++ tests under ThreadSanitizer, AddressSanitizer and UndefinedBehaviorSanitizer
# Every target sets up .venv by itself, again only when something changed. PYTHON=... picks the interpreter.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
CPP := $(shell find core/src tests/cpp tests/fuzz benchmarks/cpp -name '*.cc' -o -name '*.h' -o -name '*.inc' 2>/dev/null)
CMAKE_INPUTS := $(CPP) $(shell find core tests/cpp -name CMakeLists.txt 2>/dev/null)
PYTHON_DIRS := $(wildcard core/hvd_core hvd_spark hvd_ray tests examples benchmarks scripts)

export PATH := $(CURDIR)/$(BIN):$(PATH)
# Spark's executors must run the interpreter that the driver runs.
export PYSPARK_PYTHON := $(CURDIR)/$(BIN)/python

.PHONY: help venv native demo demo-ray test test-slow test-oldest test-cpp check check-sanitizers format bench clean

help:
	@sed -n 's/^# //p' Makefile | head -n 6

venv: $(VENV)/.ready
native: $(VENV)/.native

$(VENV)/.ready: pyproject.toml constraints.txt scripts/setup.sh scripts/requirements.py
	PYTHON="$(PYTHON)" scripts/setup.sh
	touch $@

# An editable install: Python is used in place; only C++ and the build's description make it run again.
$(VENV)/.native: $(VENV)/.ready $(CMAKE_INPUTS)
	flock $(VENV)/.build-lock $(BIN)/python -m pip install --quiet --disable-pip-version-check \
	    --no-deps --no-build-isolation -C build-dir=build/editable --editable .
	touch $@

# The same sources with warnings as errors, and the C++ tests.
build/check/.built: $(VENV)/.ready $(CMAKE_INPUTS)
	$(BIN)/cmake -S core -B build/check -G Ninja -DCMAKE_BUILD_TYPE=Release -DHVD_WERROR=ON -DHVD_BUILD_TESTS=ON -DHVD_BUILD_PYTHON=ON \
	    -DCMAKE_EXPORT_COMPILE_COMMANDS=ON -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python --log-level=WARNING
	flock build/check/.lock $(BIN)/cmake --build build/check
	touch $@

test-cpp:
	rm -f build/check/.tested
	$(MAKE) --no-print-directory build/check/.tested

# `make check` and `make test` one after the other run the C++ tests once.
build/check/.tested: build/check/.built
	$(BIN)/ctest --test-dir build/check --output-on-failure --no-tests=error
	touch $@

# The C++ tests again under ThreadSanitizer, and under AddressSanitizer with UndefinedBehaviorSanitizer; no suppressions.
# Ranks are threads of one process there, which is what the sanitizers can see.
check-sanitizers: build/thread/.built build/address/.built
	$(BIN)/ctest --test-dir build/thread --output-on-failure --no-tests=error
	$(BIN)/ctest --test-dir build/address --output-on-failure --no-tests=error

build/thread/.built: SANITIZE := thread
build/address/.built: SANITIZE := address,undefined
build/thread/.built build/address/.built: $(VENV)/.ready $(CMAKE_INPUTS)
	$(BIN)/cmake -S core -B $(@D) -G Ninja -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG="-O1 -g1" -DHVD_SANITIZE=$(SANITIZE) \
	    -DHVD_BUILD_TESTS=ON --log-level=WARNING
	flock $(@D)/.lock $(BIN)/cmake --build $(@D)
	touch $@

demo: $(VENV)/.native
	$(BIN)/python examples/flight_delays.py

demo-ray: $(VENV)/.native
	$(BIN)/python examples/ray_flight_delays.py

test: $(VENV)/.native build/check/.tested
	$(BIN)/python -m pytest tests -m "not slow"

# What `make test` leaves out: clusters, kernels of notebooks, benchmarks, a wheel.
test-slow: $(VENV)/.native
	$(BIN)/python -m pytest tests -m slow

test-oldest: $(VENV)/.native
	scripts/oldest.sh

check: $(VENV)/.native
	$(BIN)/ruff format --check $(PYTHON_DIRS)
	$(BIN)/ruff check $(PYTHON_DIRS)
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CPP)
	$(MAKE) --no-print-directory build/check/.tested
	$(BIN)/python -m pytest tests/unit -m "not slow"

format: $(VENV)/.ready
	$(BIN)/ruff format $(PYTHON_DIRS)
	$(BIN)/ruff check --fix $(PYTHON_DIRS)
	$(BIN)/clang-format -i $(CPP)

bench: $(VENV)/.native $(VENV)/.peers
	$(BIN)/python benchmarks/run_all.py

# Open MPI, to compare with; without it the benchmarks leave it out.
$(VENV)/.peers: $(VENV)/.ready
	$(BIN)/python scripts/requirements.py bench > $(VENV)/requirements-bench.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	    --requirement $(VENV)/requirements-bench.txt || echo "no Open MPI here: compared with gloo only"
	touch $@

clean:
	rm -rf build dist $(VENV)/.native .mypy_cache .ruff_cache .pytest_cache
