#!/usr/bin/env bash
# A real model the whole way: what it can do before training, 10 words by the defaults, a second run
# that climbs to 50 words, an evaluation of it on the test split, and a report of both runs.
#
#     runs/real.sh MODEL [NAME]
#
# MODEL is what --model takes; `python -m grpo.smollm2 FOLDER` makes one to try. A script that was
# interrupted continues where it stopped.
set -euo pipefail
cd "$(dirname "$0")/.."
model=$1 name=${2:-real}
short=runs/$name-10 long=runs/$name-50

[ -d "$short" ] || python train.py --model "$model" --task interleave --words 10 --preflight only
if [ -d "$short/checkpoints" ]; then
    python train.py --resume "$short"
else
    python train.py --model "$model" --task interleave --words 10 --name "$name-10"
fi
if [ -d "$long/checkpoints" ]; then
    python train.py --resume "$long"
else
    python train.py --model "$model" --task interleave --name "$name-50" --steps 1600 \
        --curriculum 10,15,25,35,50 --credit alignment
fi
python eval.py --model "$long" --words 10,25,50 --problems 200 --split test \
    --json "runs/$name-test.json"
python -m grpo.report "$short" "$long" -o "runs/$name.html"
python -m grpo.tasks.audit "$short" "$long"
