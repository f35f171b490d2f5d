#!/usr/bin/env bash
# Everything of docs/guarantees.md that takes minutes, one after the other: slow tests (200 kills
# among them), a long run, the fuzzer. Needs the environment's python in PATH and the
# extras `test` and `fuzz`.
set -euo pipefail
cd "$(dirname "$0")/../.."
python -m pytest -m slow
OMP_NUM_THREADS=1 python tests/tools/soak.py
python tests/tools/fuzz.py --seconds 180
