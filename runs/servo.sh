#!/usr/bin/env bash
# The ladder against the servo: 10 to 50 words, the same seeds, looked at every ten steps on the same 100 validation problems of 50 words.
# One core a run is enough. `runs/servo.sh 0 auto` makes one run alone. Runs that are there already are not made again.
set -euo pipefail
cd "$(dirname "$0")/.."
declare -A flags=([ladder]="--curriculum 10,25,50 --promote-by running" [auto]="--curriculum auto:10-50")
for seed in ${1:-0 1 2}; do
    for arm in ${2:-ladder auto}; do
        run="runs/servo-$arm-seed$seed"
        [ -d "$run" ] || python train.py --task interleave ${flags[$arm]} --words 50 --patience 0 --steps 60 \
            --eval-every 10 --eval-problems 100 --seed "$seed" --name "${run#runs/}"
    done
done
