#!/usr/bin/env bash
# Breaks the core on purpose, one mutant after the other, in copies of the tree, and asks whether
# the tests notice: signs, masks, off-by-ones, axes, temperatures, gradients, seeds. Seven minutes
# on 2 CPU cores; exit status 1 if a mutant survives or cannot run. tests/tools/mutation.sh [--jobs N]
# [WORD ...]: only mutants with one of the words in their file or name, e.g. loss.py
set -euo pipefail
cd "$(dirname "$0")/../.."
exec python tests/tools/mutation.py "$@"
