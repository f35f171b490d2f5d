#!/usr/bin/env bash
# From 10 words to 500: one command, gone on with where it was interrupted, then every length,
# sampled and greedy. Needs a GPU. `runs/ladder.sh test` looks at the test split at the end: once,
# when nothing is to be chosen any more.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -d runs/ladder/checkpoints ]; then
    python train.py --resume runs/ladder
else
    python train.py --task interleave --curriculum --name ladder --config '{window: 50}'
fi
for sampling in "" --greedy; do
    for asked in "10,25,50,100 200" "200,500 64"; do
        read -r words problems <<< "$asked"
        python eval.py --model runs/ladder --words "$words" --problems "$problems" \
            --split "${1:-validation}" $sampling
    done
done
