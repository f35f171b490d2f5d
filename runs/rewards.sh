#!/usr/bin/env bash
# Which trap catches which reward: 25 words straight from the base, paid by each reward, the traps
# counted over time. 2 CPU cores, some 3 minutes a run. Runs that are there already are not made
# again.
set -euo pipefail
cd "$(dirname "$0")/.."
for reward in similarity prefix pairs; do
    [ -d "runs/reward-$reward" ] || python train.py --task interleave --curriculum 25 --preflight off \
        --steps 60 --reward "$reward" --eval-every 0 --name "reward-$reward" || [ $? = 3 ]
done
python -m grpo.report runs/reward-* --output runs/rewards.html
