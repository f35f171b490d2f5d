#!/usr/bin/env bash
# Credit for single words against one advantage for the whole completion: the same ladder, seeds
# and steps, looked at every ten steps on the same 100 validation problems of 50 words. One core a
# run is enough: eight minutes each. `runs/credit.sh 0 alignment` makes one run alone. Runs that
# are there already are not made again.
set -euo pipefail
cd "$(dirname "$0")/.."
for seed in ${1:-0 1 2}; do
    for credit in ${2:-outcome alignment}; do
        run="runs/credit-$credit-seed$seed"
        [ -d "$run" ] || python train.py --task interleave --curriculum 10,25,50 \
            --config "{patience: 0, eval_problems: 100}" --words 50 --steps 60 --eval-every 10 \
            --seed "$seed" --credit "$credit" --name "${run#runs/}"
    done
done
