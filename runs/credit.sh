#!/usr/bin/env bash
# Credit for single words against one advantage for the whole completion: the same ladder, seeds and steps. Needs a GPU.
# `runs/credit.sh 0 alignment` makes one run alone. Runs that are there already are not made again.
set -euo pipefail
cd "$(dirname "$0")/.."
for seed in ${1:-0 1 2}; do
    for credit in ${2:-outcome alignment}; do
        run="runs/credit-$credit-seed$seed"
        [ -d "$run" ] || python train.py --task interleave --curriculum 10,25,50,100 --promote-by running --promote-at 0.95 \
            --schedule constant --steps 200 --eval-every 0 --eval-problems 128 --seed "$seed" --credit "$credit" --name "${run#runs/}"
    done
done
