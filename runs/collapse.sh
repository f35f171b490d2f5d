#!/usr/bin/env bash
# The collapse: 500 words straight from the base, paid by similarity, as the original experiment
# was. Once with the monitor off, once with it on. Needs a GPU; seconds a step. `runs/collapse.sh
# off` or `on` makes one of the two alone. Runs that are there already are not made again.
# The plot of docs/failing-run.md is older: its second run sampled groups without variance again.
set -euo pipefail
cd "$(dirname "$0")/.."
declare -A flags=(
    [off]='--config {"on_degenerate":"keep"}'
    [on]='--config {"on_degenerate":"skip"}'
)
for arm in ${1:-off on}; do
    [ -d "runs/collapse-$arm" ] || python train.py --task interleave --curriculum 500 --preflight off \
        --reward similarity --prompts 8 --steps 40 --eval-every 0 --name "collapse-$arm" \
        --config '{eval_problems: 32, dynamic_sampling: 0}' ${flags[$arm]} || [ $? = 3 ]
done
