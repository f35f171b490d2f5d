"""The library: `grpo.train`, `grpo.load_model`, and the same by the command line."""

import inspect
import json
from pathlib import Path

import peft
import pytest
from refusals import refused
from small_library import FLAGS, QUICK, ROWS, alike, example, reward
from transformers import AutoModelForCausalLM

from grpo import GRPOConfig, GRPOTrainer, load_model, load_run, train
from grpo.data.errors import UserError
from grpo.tools.train import main


def test_ten_lines_train_and_return_the_run(home):
    run = train(ROWS, reward, reward_range=(0, 1.2), name="a", **QUICK)
    assert len(run.metrics) == 2
    for line in run.metrics:
        assert line["reward"] == pytest.approx(line["reward/length"] + line["reward/all"])
        assert 0 < line["reward/length"] <= 1
    assert run.verdict["verdict"] and run.status in (0, 3)
    assert [line["step"] for line in run.reports] == [0, 2]
    facts = run.config["facts"]
    assert facts["functions"] == {"reward": inspect.getsource(reward)}
    assert facts["data"].startswith(f"data (list): {len(ROWS)} rows (")
    assert run.rollouts(1)[0]["row/answer"] in run.rollouts(1)[0]["prompt"]
    assert run.report() == Path("runs/a/report.html") and Path("runs/a/report.html").stat().st_size
    assert load_run("runs/a").rollouts(1)[0]["parts"].keys() <= {"reward/length", "reward/all"}

    texts = run.policy.generate(["Copy text A.\nA: owl tide"] * 3, max_new_tokens=8, seed=1)
    again = load_model("runs/a").generate(
        ["Copy text A.\nA: owl tide"] * 3, max_new_tokens=8, seed=1
    )
    assert texts == again and len(set(texts)) >= 1
    greedy = run.policy.generate(["Copy text A.\nA: owl tide"] * 2, temperature=0)
    assert greedy[0] == greedy[1]


NO_NAME = [json.dumps(ROWS), "a\nb", "a\0b", "x/" * 3000, "x" * 300]


@pytest.mark.parametrize("text", NO_NAME, ids=["JSON", "lines", "NUL", "deep", "long"])
def test_any_text_that_names_nothing_is_refused_in_one_line(home, text):
    for arguments in (
        {"data": text},
        {"reward": f"{text}.py:f"},
        {"model": text},
        {"model": f"{text}.gguf"},
        {"loss": f"{text}.py:f"},
        {"resume": text},
        {"name": text},
    ):
        usual = {"data": ROWS, "reward": reward, "reward_range": (0, 1.2), **QUICK}
        assert len(refused(train, **usual | arguments)) < 1_010, arguments
    for load in (load_model, load_run, lambda task: train(task=task, **QUICK)):
        refused(load, text)
    assert not Path("runs").exists()


@pytest.mark.slow
def test_epochs_go_through_the_training_split(home):
    run = train(
        ROWS, reward, reward_range=(0, 1.2), name="a", **QUICK | {"steps": 30, "prompts": 3}
    )
    keys = [row["key"] for row in run.rollouts() if row["sample"] == 0]
    size = len(set(keys))
    first = keys[:size]
    assert len(set(first)) == size > 40  # each once before any comes again
    assert run.metrics[-1]["problems/family_share"] == 1  # of those to train on
    held_out = {row["key"] for row in run.rollouts(kind="eval")}
    assert held_out and not held_out & set(keys)


def test_the_command_line_and_the_library_make_the_same_run(home):
    command = ["--data", "rows.jsonl", "--reward-file", "own.py:reward", "--reward-range", "0,1.2"]
    assert main([*command, *FLAGS, "--steps", "2", "--name", "cli"]) in (0, 3)
    from_file = train("rows.jsonl", "own.py:reward", reward_range=(0, 1.2), name="file", **QUICK)
    alike(load_run("runs/cli"), from_file)
    in_memory = train(ROWS, reward, reward_range=(0, 1.2), name="memory", **QUICK)
    for one, other in zip(in_memory.rollouts(), from_file.rollouts(), strict=True):
        assert one["text"] == other["text"] and one["reward"] == other["reward"]


def test_a_run_is_resumed_to_the_same_weights_with_the_same_rows(home):
    rows = [{"question": row["prompt"], "answer": row["answer"]} for row in ROWS]
    columns = {"prompt": "question"}
    options = dict(columns=columns, reward_range=(0, 1.2), **QUICK)
    options["schedule"] = "constant"  # a cosine depends on the number of steps
    whole = train(rows, reward, name="whole", **options | {"steps": 3})
    train(rows, reward, name="cut", **options)
    again = dict(columns=columns, reward_range=(0, 1.2), resume="runs/cut")
    alike(whole, train(rows, reward, steps=3, **again))
    with pytest.raises(UserError, match="'0,1.4'.*: the run in runs/cut has .*'0,1.2'"):
        train(rows, reward, **again | {"reward_range": (0, 1.4)})
    for data, function in ((rows[1:], reward), (rows, lambda completion, **row: 0.5)):
        with pytest.raises(UserError, match="changed since it was saved: (corpus|functions: <lam)"):
            train(data, function, **again)


def test_mistakes_are_one_line(home):
    for message, arguments in (
        ("data without a reward", dict(data=ROWS)),
        ("data without a reward; give reward=FUNCTION", dict(data=ROWS, reward=[])),
        ("unknown key stepz \\(did you mean steps", dict(data=ROWS, reward=reward, stepz=3)),
        (
            "--credit alignment: the advantages are those of a function; leave it out",
            dict(data=ROWS, reward=reward, advantages=print, credit="alignment"),
        ),
        (
            "advantages must be a function, and takes the place of scale",
            dict(data=ROWS, reward=reward, advantages=print, scale="batch"),
        ),
        ("steps is 'x'", dict(data=ROWS, reward=reward, steps="x")),
        ("a reward function without data; give the data", dict(reward=reward)),
        ("no such task", dict(task="none")),
        (
            "a reward of 1.2; it must lie in \\[0, 1\\]",
            dict(data=ROWS, reward=lambda completion: 1.2, **QUICK),
        ),
    ):
        with pytest.raises(UserError, match=message) as caught:
            train(**arguments)
        assert "\n" not in str(caught.value)


CHAT = """
from trl import GRPOConfig, GRPOTrainer

def length(completions, **kwargs):
    return [len(completion[0]["content"]) % 7 for completion in completions]

def begins(prompts, completions, **kwargs):
    return ["owl" in x[0]["content"] for x in completions if prompts[0][0]["role"] == "user"]

words = "owl tide salt moss bell rope loom".split()
rows = [{"prompt": [{"role": "user", "content": f"Copy: {a} {b}"}]} for a in words for b in words]
args = GRPOConfig(output_dir="out/ours", max_steps=2, num_generations=4, max_completion_length=8,
                  per_device_train_batch_size=8, logging_steps=1, eval_strategy="no", epsilon=0.1)
trainer = GRPOTrainer(model="tiny", reward_funcs=[length, begins], args=args, train_dataset=rows)
trainer.train()
trainer.save_model("saved")
"""
STOPS = """
from transformers import TrainerCallback

class Enough(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        logs["left"] = args.max_steps - len(state.log_history)
        control.should_training_stop = state.global_step == 2
"""
STOPS += CHAT.replace("steps=2", "steps=9").replace("args=args", "args=args, callbacks=[Enough()]")
ADAPTER = CHAT.replace('"tiny"', '"adapter"')


@pytest.mark.parametrize("script", [CHAT, STOPS, ADAPTER], ids=["chat", "stops", "adapter"])
def test_scripts_that_were_written_for_trl_run_but_for_the_import(home, script):
    base = AutoModelForCausalLM.from_pretrained("tiny")
    peft.get_peft_model(base, peft.LoraConfig(r=4)).save_pretrained("adapter")
    exec(script.replace("trl", "grpo"), names := {})
    run, prompts = load_run("runs/ours"), ["Copy: owl tide"]
    assert len(run.metrics) == 2 and run.metrics[0]["reward/length"] > 0
    assert [line["step"] for line in run.reports] == [0, 2]
    assert run.metrics[1].get("left") == (7 if script == STOPS else None)
    trained = names["trainer"].run.policy.generate(prompts, max_new_tokens=4)
    assert load_model("saved").generate(prompts, max_new_tokens=4) == trained


TRL = {"num_generations": 4, "gradient_accumulation_steps": 2, "epsilon_high": 5.0, "bf16": True}
TRL |= {"loss_type": "cispo", "scale_rewards": False, "use_vllm": True, "eval_strategy": "no"}
OURS = {
    "reward_range": None,
    "group_size": 4,
    "prompts": 4,
    "clip": [1, 4],
    "dtype": "bfloat16",
    "loss": "cispo",
}
OURS |= {"scale": "none", "eval_every": 0, "lora_rank": 8, "data": [{"split": "train"}]}


def test_what_trl_says_is_translated_or_refused_at_once():
    args = GRPOConfig(**TRL, max_steps=-1, min_p=None, top_k=0, report_to=[])
    with pytest.warns(UserWarning, match="of peft_config, r is taken; the alpha is 32"):
        adapter = {"peft_config": peft.LoraConfig(r=8), "train_dataset": [{}], "eval_dataset": []}
        assert GRPOTrainer(args=args, **adapter).options == OURS
    gspo = {"importance_sampling_level": "sequence"}
    assert GRPOTrainer(args=GRPOConfig(**gspo)).options == {"reward_range": None, "loss": "gspo"}
    with pytest.raises(UserError, match="eval_dataset and train_dataset must be lists or datasets"):
        GRPOTrainer(train_dataset=[{}], eval_dataset={"easy": [{}]})
    args = GRPOConfig(**gspo, top_k=3, num_train_epochs=2, loss_type="dapo")
    line = r"unknown key importance_sampling_level .*; unknown key top_k .*_epochs \(give steps\)$"
    with pytest.raises(UserError, match=line):
        GRPOTrainer("tiny", reward, args, ROWS).train()


@pytest.mark.slow
def test_the_example_learns(home):
    """The lines of examples/every_second.py, on a task that the model was never taught."""
    said = example("every_second.py")
    assert "LEARNED" in said and "warning" not in said
    (run,) = Path("runs").iterdir()
    first, last = load_run(run).reports[0], load_run(run).reports[-1]
    assert first["mean"] < 0.5 and last["mean"] > 0.95
