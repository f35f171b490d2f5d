#!/usr/bin/env bash
# The user's own command on a directory like Llama-3.2-3B-Instruct (exact configuration, random
# weights, common words likely; 6.4 GB): train three steps, killed in the second; go on, evaluate,
# report, export, load by transformers and by peft. Minutes on a GPU; a quarter of an hour on two
# cores with `--dtype bfloat16 --prompts 1 --group-size 4 --config '{eval_problems: 2}'` and 20 GB
# of memory. `bash runs/rehearsal.sh FOLDER [FLAG ...]`; LAYERS=2 makes a small one. Such a model
# earns next to nothing: so every group is kept and similarity is paid, or there would be nothing
# to learn from; and its steps are large, or three of them would not show beside bfloat16's
# rounding.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$1; shift
model=$folder/llama run=runs/rehearsal
[ -d "$model" ] || python tests/tools/make_llama.py "$model" --layers "${LAYERS:-28}"
rm -rf $run "$folder/merged" "$folder/adapter"
python train.py --task interleave --curriculum 25 --preflight off --model "$model" --steps 3 \
    --save-every 1 --reward similarity --learning-rate 3e-3 \
    --config "{eval_problems: 8, on_degenerate: keep, schedule: constant}" --name rehearsal "$@" &
until [ -d $run/checkpoints/step-000001 ]; do kill -0 $!; sleep 0.1; done
kill -9 $!; wait $! || echo "killed, exit status $?, after step $(wc -l < $run/metrics.jsonl)"
python train.py --resume $run || [ $? = 3 ]
python eval.py --model $run --words 25 --problems 8
python -m grpo.inspect $run steps
python -m grpo.report $run
python -m grpo.export $run "$folder/merged"
[ -f $run/checkpoints/step-000003/adapter_config.json ] &&
    python -m grpo.export --adapter $run "$folder/adapter"
python - "$model" "$folder" <<'P'
import sys
from pathlib import Path
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
base, folder = sys.argv[1], Path(sys.argv[2])
place = dict(dtype=torch.bfloat16, device_map={"": "cuda" if torch.cuda.is_available() else "cpu"})
tokenizer = AutoTokenizer.from_pretrained(folder / "merged")
turn = {"role": "user", "content": "Interleave: the owl / a lamp"}
ask = tokenizer.apply_chat_template(
    [turn], add_generation_prompt=True, return_tensors="pt", return_dict=True
)
merged = AutoModelForCausalLM.from_pretrained(folder / "merged", **place)
ask = ask.to(merged.device)
found = merged(**ask).logits.float()
written = merged.generate(**ask, max_new_tokens=8)[0, ask.input_ids.shape[1]:]
print("merged, by transformers:", tokenizer.decode(written))
untrained = AutoModelForCausalLM.from_pretrained(base, **place)
before = untrained(**ask).logits.float()
moved = (found - before).square().mean().sqrt()
print(f"trained against untrained: logits differ by {moved:.3f} (root mean square)")
if (folder / "adapter").exists():
    adapted = PeftModel.from_pretrained(untrained, folder / "adapter")(**ask).logits.float()
    print(f"adapter, by peft, against merged: {(adapted - found).square().mean().sqrt():.3f}")
P
