#!/usr/bin/env bash
# The positive control: does the pipeline learn what everybody knows, and nothing where the reward
# says nothing? Three seeds each of: real reward, shuffled rewards, constant reward. 2 CPU cores.
# Needs the environment's python in PATH; runs that are there already are not made again.
set -euo pipefail
cd "$(dirname "$0")/.."
declare -A flags=(
    [real]=""
    [shuffled]='--control shuffled-rewards --config {"patience":0}'
    [constant]='--control constant-reward --config {"patience":0}'
)
measure() {  # model, folder for the figures
    for sampling in "" --greedy; do
        file="$2/test${sampling#--}.json"
        [ -f "$file" ] || python eval.py --model "$1" --task arithmetic --problems 1000 \
            $sampling --json "$file"
    done
}
mkdir -p runs/control-base
measure builtin runs/control-base
for seed in 0 1 2; do
    for arm in real shuffled constant; do
        run="runs/control-$arm-seed$seed"
        [ -f "$run/eval.jsonl" ] || python train.py --task arithmetic --seed $seed \
            --name "control-$arm-seed$seed" ${flags[$arm]} || [ $? = 3 ]
        measure "$run" "$run"
        python -m grpo.tasks.audit "$run"
    done
done
python -m grpo.report runs/control-*-seed? --output runs/control.html
