#!/usr/bin/env bash
# Groups without variance kept, skipped or drawn again: three seeds each, the same steps. 2 CPU cores, about a minute a run.
# Runs that are there already are not made again.
set -euo pipefail
cd "$(dirname "$0")/.."
for seed in 0 1 2; do
    for what in keep skip resample; do
        run="runs/degenerate-$what-seed$seed"
        [ -d "$run" ] || python train.py --task interleave --words 10 --steps 60 --on-degenerate "$what" --eval-every 0 --seed "$seed" --name "${run#runs/}"
    done
done
python runs/tables.py runs/degenerate-*
