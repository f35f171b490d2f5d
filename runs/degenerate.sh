#!/usr/bin/env bash
# Groups without variance kept, skipped, or replaced by further prompts: three seeds each, some
# 0.6 M sampled tokens, 25 words straight from the base. 2 CPU cores, about a minute and a half a
# run. Runs that are there already are not made again.
set -euo pipefail
cd "$(dirname "$0")/.."
declare -A flags=(
    [keep]='--steps 36 --config {"on_degenerate":"keep"}'
    [skip]="--steps 36"
    [dynamic]='--steps 25 --config {"dynamic_sampling":12}'
)
for seed in 0 1 2; do
    for arm in keep skip dynamic; do
        run="runs/degenerate-$arm-seed$seed"
        [ -d "$run" ] || python train.py --task interleave --curriculum 25 --preflight off \
            --config "{patience: 0, eval_problems: 300, dynamic_sampling: 0}" \
            --prompts 16 --eval-every 0 --seed "$seed" --name "${run#runs/}" ${flags[$arm]} || [ $? = 3 ]
    done
done
python -m grpo.report runs/degenerate-* --output runs/degenerate.html
