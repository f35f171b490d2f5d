"""A loop of one's own, and callbacks."""

import re
from pathlib import Path
from statistics import fmean

import numpy
import pytest
import torch
from compare_runs import without_times
from forced import trainer_for
from small_library import QUICK, ROWS, alike, reward
from transformers import AutoModelForImageTextToText, AutoTokenizer, Gemma3Config, TrainerCallback

from grpo import Model, load_model, make_trainer, train
from grpo.data.errors import UserError
from grpo.distributed import Ranks
from grpo.learn.optimizer import default_rate
from grpo.model.load import BUILTIN


def same_steps(reports, metrics):
    """Assert that the steps of a loop are those of a run, times apart."""
    assert without_times(report.metrics for report in reports) == without_times(metrics)


def test_a_repeated_row_is_a_warning(home):
    with pytest.warns(UserWarning, match="^--data: 1 of .* rows repeat the prompt") as warned:
        make_trainer([*ROWS, ROWS[0]], lambda completion, answer: 0.0, **QUICK)
    assert warned[0].filename == __file__


def test_a_loop_by_hand_makes_the_steps_of_a_run_and_writes_nothing(home):
    trainer = make_trainer(ROWS, reward, reward_range=(0, 1.2), **QUICK)
    reports = [trainer.step() for _ in range(2)]
    assert sorted(path.name for path in home.iterdir()) == ["own.py", "rows.jsonl", "tiny"]
    run = train(ROWS, reward, reward_range=(0, 1.2), name="a", **QUICK)
    same_steps(reports, run.metrics)

    prompts = ["Copy text A.\nA: owl tide"] * 2
    wrote = Model(trainer.policy).generate(prompts, max_new_tokens=8)
    assert wrote == run.policy.generate(prompts, max_new_tokens=8)
    trainer.policy.save(home / "saved")
    assert load_model("saved").generate(prompts, max_new_tokens=8) == wrote


def test_an_adapter_saved_by_hand_is_loaded_on_its_base(home):
    trainer = make_trainer(ROWS, reward, reward_range=(0, 1.2), **QUICK, lora_rank=4)
    trainer.step()
    trainer.policy.save(home / "adapter")
    ours = dict(trainer.policy.model.merge_and_unload().named_parameters())
    theirs = weights(load_model("adapter")._policy)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def weights(policy):
    return dict(policy.model.named_parameters())


@pytest.mark.parametrize("given, name", [({}, "_proj"), ({"lora_rank": 4}, "lora_B")])
@pytest.mark.filterwarnings("ignore:--model images")
def test_a_model_of_images_and_texts_is_trained_at_its_default_rate(home, given, name):
    """The width is that of its language model; layers that no text goes through stay."""
    text = {"vocab_size": 4096, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
    text |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    images = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    images |= {"num_attention_heads": 4, "image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=text, vision_config=images, mm_tokens_per_image=4)
    AutoModelForImageTextToText.from_config(config).save_pretrained("images")
    AutoTokenizer.from_pretrained(BUILTIN).save_pretrained("images")

    trainer = make_trainer(ROWS, by_length, **QUICK | {"model": "images"}, **given)
    assert trainer.config.learning_rate == default_rate(32, is_lora=bool(given))
    before = {key: value.clone() for key, value in weights(trainer.policy).items()}
    trainer.step()
    changed = [key for key in before if (weights(trainer.policy)[key] != before[key]).any()]
    assert not any("vision" in key for key in changed)
    assert not any("lora" in key and "vision" in key for key in before)
    assert sum(name in key for key in changed) == 2 * 7


@pytest.mark.parametrize(
    "largest, given, rank", [(64, {}, 0), (63, {}, 64), (64, {"lora_rank": 2}, 2)]
)
def test_the_size_of_the_model_decides_what_is_trained(home, monkeypatch, largest, given, rank):
    monkeypatch.setattr("grpo.model.load.MEASURED_SIZE", largest)
    trainer = make_trainer(ROWS, reward, **QUICK, **given)
    assert trainer.config.lora_rank == trainer.policy.lora_rank == rank
    assert trainer.config.learning_rate == (1e-3 if rank else 2e-4)


def by_length(completion, **row):
    """Differs within nearly every group."""
    return len(completion) % 7 / 7


def test_the_stations_called_one_by_one_make_the_steps_of_a_run(home):
    """By the code of docs/library.md."""
    page = (Path(__file__).parents[3] / "docs" / "library.md").read_text()
    (program,) = re.findall(r"```python\n(step = trainer.done .*?)```", page, re.S)
    trainer, other = (make_trainer(ROWS, by_length, temperature=2.0, **QUICK) for _ in range(2))
    reports = []
    for _ in range(2):
        names = {"trainer": trainer}
        exec(program, names)
        reports.append(names["report"])
    same_steps(reports, [other.step().metrics for _ in range(2)])


@pytest.mark.parametrize("rank", [0, pytest.param(4, marks=pytest.mark.slow)])
def test_a_loop_continues_from_the_policy_of_a_run(home, rank):
    run = train(ROWS, reward, reward_range=(0, 1.2), name="a", lora_rank=rank, **QUICK)
    assert any(line.get("grad_norm") for line in run.metrics)

    more = QUICK | {"model": "runs/a"}
    trainer = make_trainer(ROWS, reward, reward_range=(0, 1.2), **more)
    assert trainer.done == 0 and trainer.config.lora_rank == rank
    trained, own = (policy.saved_tensors() for policy in (run.policy._policy, trainer.policy))
    assert trained.keys() == own.keys() and all(own[name].equal(trained[name]) for name in own)
    assert trainer.step().step == 1


def test_generating_between_steps_leaves_the_examples_of_the_prompt(home):
    options = dict(task="interleave", level=2, shots=1, **QUICK | {"max_new_tokens": 24})
    plain, looked_at = (make_trainer(**options) for _ in range(2))
    Model(looked_at.policy).generate(["Copy text A.\nA: owl tide"], max_new_tokens=2)
    assert plain.step().groups[0].prompt == looked_at.step().groups[0].prompt


class SecondRank(Ranks):
    """A rank that writes nothing, and does all of the work by itself."""

    is_rank0 = False

    def on_rank0(self, make):
        return make()


def test_of_several_ranks_the_first_one_calls_callbacks(tiny_policy):
    trainer, called = trainer_for(tiny_policy), []
    trainer.callbacks.append(called.append)
    report = trainer.step()
    trainer.ranks = SecondRank()
    trainer.step()
    assert called == [report]


def test_callbacks_are_called_after_each_step_add_metrics_and_end_the_run(home, capsys):
    seen = []

    def first(report):
        seen.append(("first", report.step, len(report.groups)))
        lengths = [len(text) for group in report.groups for text in group.texts]
        report.metrics["mine/mean"] = numpy.mean(lengths)
        report.metrics["mine/groups"] = torch.tensor(len(report.groups))

    class Second:
        def __call__(self, report):
            seen.append(("second", report.step, report.metrics["mine/mean"] > 0))
            report.end = "two steps are enough" if report.step == 2 else ""

    options = dict(reward_range=(0, 1.2), **QUICK | {"steps": 9})
    run = train(ROWS, reward, name="a", callbacks=[first, Second()], **options)
    assert seen == [("first", 1, 2), ("second", 1, True), ("first", 2, 2), ("second", 2, True)]
    for line in run.metrics:
        texts = [row["text"] for row in run.rollouts(line["step"])]
        assert (line["mine/mean"], line["mine/groups"]) == (fmean(map(len, texts)), 2)

    assert [line["step"] for line in run.reports] == [0, 2]
    assert "ended after step 2: two steps are enough" in capsys.readouterr().out
    again = dict(reward_range=(0, 1.2), resume="runs/a", steps=20)
    assert len(train(ROWS, reward, **again).metrics) == 2


def test_a_callback_that_fails_is_one_line_and_loses_nothing(home):
    def fails(report):
        if report.step == 2:
            raise KeyError("gone")

    options = dict(reward_range=(0, 1.2), **QUICK | {"save_every": 1})
    whole = train(ROWS, reward, name="whole", **options)
    with pytest.raises(UserError, match="^callback fails, step 2 raised KeyError: 'gone'"):
        train(ROWS, reward, name="a", callbacks=[fails], **options)
    alike(whole, train(ROWS, reward, reward_range=(0, 1.2), resume="runs/a"))
    with pytest.raises(UserError, match="resume applies only to runs"):
        make_trainer(ROWS, reward, resume="runs/a")


@pytest.mark.parametrize(
    "wrong, line",
    [
        (lambda report: report.metrics.update(mine="no"), "its metric 'mine' is .*; give a number"),
        (lambda report: report.metrics.update(mine=[2]), "its metric 'mine' is .*; give a number"),
        (lambda report: report.metrics.update({("a", 1): 2.0}), "its metric is called .*'a', 1"),
        (lambda report: report.metrics.update(reward=1.0), "it changed the metric 'reward'; give"),
        (lambda report: report.metrics.pop("level"), "it changed the metric 'level'; give"),
        (lambda report: setattr(report, "end", True), "report.end is True; give the reason as a t"),
    ],
)
def test_a_callback_adds_nothing_but_numbers_and_a_reason_to_end(tiny_policy, wrong, line):
    trainer = trainer_for(tiny_policy)
    trainer.callbacks.append(wrong)
    with pytest.raises(UserError, match=f"^callback <lambda>: {line}"):
        trainer.step()


class Saves(TrainerCallback):
    def on_save(self, args, state, control, **kwargs):
        pass


@pytest.mark.parametrize(
    "options, line",
    [
        ({"callbacks": print}, r"^make_trainer\(\): callbacks must be a list of functions"),
        ({"callbacks": [3]}, r"^make_trainer\(\): callbacks must be a list of functions"),
        (
            {"callbacks": [Saves()]},
            "callback Saves: on_save is never called; use on_step_end or on",
        ),
        ({"task": "interleave"}, r"^make_trainer\(\): task and data; give one of them"),
        ({"task_options": {"texts": "x"}}, "task_options and data; give one of them"),
        ({"columns": 3}, "--columns 3: give name=value"),
        ({"reward_range": 3}, "--reward-range 3: give the lowest and the highest reward"),
        ({"reward_timeout": "x"}, "--reward-timeout x: give a number of seconds"),
    ],
)
def test_arguments_of_the_wrong_type_are_one_line(home, options, line):
    with pytest.raises(UserError, match=line):
        make_trainer(ROWS, reward, **options)


def test_a_task_by_name_with_its_reward_and_a_wording_from_a_file(home):
    Path("wording.txt").write_text("Weave these.\nOne: {a}\nTwo: {b}\n")
    options = dict(reward="similarity", wording="wording.txt", model="tiny")
    trainer = make_trainer(task="interleave", level=2, **options)
    assert trainer.task.reward == trainer.config.reward == "similarity"
    assert trainer.problems(1)[0][1].prompt.startswith("Weave these.\nOne: ")


def test_arguments_of_rows_are_refused_without_rows(home):
    with pytest.raises(UserError, match="reward_range applies only to rows; give data and a rew"):
        make_trainer(task="interleave", reward_range=(0, 9))


def test_a_model_is_asked_for_what_it_can_give(home):
    model = load_model("tiny")
    assert model.generate([]) == []
    for prompts in ("text", [3]):
        with pytest.raises(UserError, match="^generate: give a list of prompts, which are texts"):
            model.generate(prompts)
    refused = {"max_new_tokens": 0}, {"temperature": -1}, {"top_p": float("nan")}
    for options in (*refused, {"max_new_tokens": 2.5}, {"temperature": None}):
        with pytest.raises(
            UserError, match=f"^generate: .*{'.*'.join(map(str, *options.items()))}"
        ):
            model.generate(["text"], **options)


def test_a_prompt_without_room_in_the_context_is_refused(home):
    model = load_model("builtin")
    model._policy.context = len(model._policy.encode("Copy text A.\nA: owl"))
    with pytest.raises(UserError, match="^generate: a prompt is longer than the model's context"):
        model.generate(["Copy text A.\nA: owl"])
