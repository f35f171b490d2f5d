"""The comparison with TRL's trainer is fair: both sides do the same work, no score is luck.

The tests of TRL's side are slow and need the extra `bench`; without it they are skipped.
"""

import gc
import io
import json
from dataclasses import asdict, replace

import bench_learning
import learning_records
import pytest
import torch
from bench_learning import OUT_OF_MEMORY, parse
from learning_job import Job
from learning_records import Arm, Record
from learning_sides import Course, Stream, train_ours, train_trl, trl_trainer

from data.errors import UserError
from grpo.evaluate import EvaluationSettings, Sampling, evaluate
from grpo.model.load import BUILTIN, load_policy
from grpo.trainer import Trainer
from grpo.training.build import Parts
from tasks.scoring import scores_of

JOB = Job(
    trainer="ours",
    rate=1e-2,
    seed=3,
    model=str(BUILTIN),
    task="interleave",
    level=2,
    reward=None,
    prompts=2,
    group_size=4,
    lora_rank=4,
    lora_alpha=32.0,
    warmup=2,
    minutes=60.0,
    steps=4,
    eval_every=100,
    eval_problems=4,
    enough=1.0,
    budget=12,
)


def run(*scores, seconds=60):
    """Return points with these scores, `seconds` and 1,000 tokens apart, the first at the start."""
    return [(number * seconds, number * 1000, score) for number, score in enumerate(scores)]


def record_of(job, *scores, prompts="same", trained=8):
    steps = [
        {
            "step": step,
            "seconds": 60.0 * step,
            "tokens": 1000 * step,
            "prompts": prompts,
            "score": s,
        }
        for step, s in enumerate(scores, start=1)
    ]
    head = {"job": asdict(job), "trained": trained, "startup": 1.0, "device": "cpu", "versions": {}}
    return Record(head, steps, {"end": "steps", "first": 60.0, "memory": {"peak GB": 1.0}})


def write(path, record):
    lines = [record.head, *record.steps, record.end]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_one_lucky_evaluation_reaches_nothing():
    points = run(0.4, 0.95, 0.6, 0.8, 0.9, 0.99)
    assert learning_records.highest(points) == 0.9  # 0.95 and 0.99 are not confirmed
    assert learning_records.reached(points, 0.8) == (180, 3000)
    assert learning_records.reached(points, 0.95) is None


def test_every_seed_must_reach_a_score_and_costs_are_means():
    arm = Arm("trl", 1e-3, [run(0.4, 0.9, 0.9), run(0.4, 0.5, 0.6, 0.7, 0.8)])
    assert arm.highest == 0.7
    assert arm.cost(0.7) == ((60 + 180) / 2, (1000 + 3000) / 2)
    assert arm.cost(0.9) is None


def test_the_best_rate_is_the_first_at_the_highest_common_score():
    arms = [
        Arm("ours", 1e-3, [run(0.4, 0.9, 0.9, 0.9)]),
        Arm("ours", 3e-3, [run(0.4, 0.5, 0.99, 0.99)]),
        Arm("trl", 1e-3, [run(0.4, 0.4, 0.9, 0.9, seconds=300)]),
        Arm("trl", 3e-3, [run(0.4, 0.6, 0.6, 0.6, seconds=300)]),
    ]
    score = learning_records.common_score(arms)
    best = learning_records.best_arms(arms, score)
    assert score == 0.9
    assert {name: arm.rate for name, arm in best.items()} == {"ours": 1e-3, "trl": 1e-3}

    reached, beyond = learning_records.compare(best, [0.9, 0.99])
    assert reached["ratio seconds"] == 600 / 60 and reached["ratio tokens"] == 2
    assert beyond["ours seconds"] is beyond["ratio seconds"] is None


def test_what_saw_other_prompts_or_trained_otherwise_is_no_result():
    ours, trl = (record_of(replace(JOB, trainer=name), 0.5, 0.6) for name in ("ours", "trl"))
    learning_records.check_comparable([ours, trl])
    other_seed = record_of(replace(JOB, seed=4), 0.5, prompts="others")
    learning_records.check_comparable([ours, other_seed])

    with pytest.raises(UserError, match="prompts differ at step 1"):
        learning_records.check_comparable([ours, record_of(JOB, 0.5, prompts="others")])
    with pytest.raises(UserError, match="parameters trained"):
        learning_records.check_comparable([ours, record_of(JOB, 0.5, trained=9)])


def test_a_killed_run_is_made_again_a_whole_one_is_not_and_other_settings_are_refused(tmp_path):
    path = tmp_path / "run.jsonl"
    assert learning_records.read_record(path, JOB) is None

    write(path, record_of(JOB, 0.5, 0.6))
    whole = path.read_text()
    assert learning_records.read_record(path, JOB).points(0.4) == [
        (0.0, 0.0, 0.4),
        (60.0, 1000, 0.5),
        (120.0, 2000, 0.6),
    ]
    again = record_of(JOB, 0.5)
    again.steps[-1]["again"] = 0.45
    assert learning_records.highest(again.points(0.4)) == 0.45

    for length in (len(whole) // 2, len(whole) - 20):
        path.write_text(whole[:length])
        assert learning_records.read_record(path, JOB) is None

    path.write_text(whole)
    with pytest.raises(UserError, match="made with level 2, not 10"):
        learning_records.read_record(path, replace(JOB, level=10))


def test_trl_gets_smaller_micro_batches_where_memory_runs_out(tmp_path, monkeypatch):
    tried = []

    def spawn(job, path):
        tried.append(job.micro)
        if job.micro != 2:
            return OUT_OF_MEMORY
        write(path, record_of(job, 0.5))
        return 0

    monkeypatch.setattr(bench_learning, "spawn", spawn)
    job = replace(JOB, trainer="trl")
    assert bench_learning.make(job, tmp_path).head["job"]["micro"] == 2
    assert tried == [0, 4, 2]
    assert bench_learning.make(job, tmp_path) and tried == [0, 4, 2]  # found whole


def test_a_failed_run_loses_only_itself(tmp_path, monkeypatch, capsys):
    def spawn(job, path):
        path.with_suffix(".log").write_text("what went wrong\n")
        if job.trainer == "start":
            head = {"job": asdict(job), "budget": 12, "score": 0.4, "n": 4, "versions": {}}
            write(path, Record(head, [], {"end": "measured"}))
        elif (job.trainer, job.rate) == ("ours", 1e-3):
            return 1
        else:
            write(path, record_of(job, 0.5, 0.9, 0.9))
        return 0

    monkeypatch.setattr(bench_learning, "spawn", spawn)
    output = tmp_path / "learning.json"
    flags = ["--model", str(BUILTIN), "--rates", "1e-3,3e-3", "--output", str(output)]
    monkeypatch.setattr(bench_learning, "find_spec", lambda name: name == "trl")  # and no plot
    assert bench_learning.main(flags) == 1

    said = capsys.readouterr().out
    assert "ours-0.001-seed0: exit status 1" in said and "what went wrong" in said
    assert "| 0.900 | 2 | 2 | 1 | 0.002 | 0.002 | 1 |" in said
    assert json.loads(output.read_text())["common"] == 0.9


def test_the_sides_take_turns_with_rates_of_their_own():
    flags = ["--model", "x", "--trainers", "ours", "--rates", "1,2", "--seeds", "0,5"]
    jobs = bench_learning.jobs_of(parse(flags))
    assert [(job.rate, job.seed) for job in jobs] == [(1, 0), (2, 0), (1, 5), (2, 5)]


class Recorded(Course):
    """A course that keeps what each step reported."""

    def step(self, prompts, lengths, reward, rate):
        self.__dict__.setdefault("kept", []).append((prompts, lengths, reward, rate))
        return super().step(prompts, lengths, reward, rate)


def course_of(job):
    policy = load_policy(job.model, options=job.config.loading)
    return Recorded(job, job.make_task(), policy, io.StringIO(), 0.0)


@pytest.fixture(scope="module")
def trl_course():
    """TRL's side after its last step, and its trainer."""
    pytest.importorskip("trl", reason="needs the extra bench")
    course = course_of(replace(JOB, trainer="trl"))
    trainers = []

    def keep(*arguments):
        trainers.append(trl_trainer(*arguments))
        return trainers[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("learning_sides.trl_trainer", keep)
        train_trl(course)
    gc.unfreeze()
    return course, trainers[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # TRL's and datasets' own
def test_both_sides_see_the_same_prompts_and_learn_at_the_same_rates(trl_course):
    trl, _ = trl_course
    ours = course_of(JOB)
    train_ours(ours)
    gc.unfreeze()

    for mine, theirs in zip(ours.kept, trl.kept, strict=True):
        assert [list(prompt) for prompt in mine[0]] == theirs[0]
        assert len(mine[1]) == len(theirs[1]) == JOB.batch
        assert mine[3] == pytest.approx(theirs[3], rel=1e-9)
    records = [
        [json.loads(line) for line in course.file.getvalue().splitlines()] for course in (ours, trl)
    ]
    assert [line.get("prompts") for line in records[0]] == [
        line.get("prompts") for line in records[1]
    ]
    assert records[0][0]["trained"] == records[1][0]["trained"]
    assert len(records[0]) == JOB.steps + 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_both_sides_step_with_the_same_optimizer(trl_course):
    trl, trainer = trl_course
    config = JOB.config
    mine = Trainer(
        config, Parts(trl.task), load_policy(JOB.model, options=config.loading)
    ).optimizer.inner
    for name in ("betas", "eps", "weight_decay"):
        for group in trainer.optimizer.optimizer.param_groups:
            assert group[name] == mine.param_groups[0][name]
    assert type(trainer.optimizer.optimizer) is type(mine)
    assert (trainer.epsilon_low, trainer.epsilon_high) == config.clips
    assert trainer.args.max_grad_norm == config.max_grad_norm


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_both_sides_pay_the_same_for_the_same_texts(trl_course):
    trl, trainer = trl_course
    policy, stream = trl.policy, Stream(trl)
    tokens, problems, expected = [], [], []
    for index in (0, 1):
        target = stream[index].target
        texts = [target, target.split()[0], "", target + " " + target, policy.tokenizer.pad_token]
        tokens += [[*policy.tokenizer(text).input_ids, policy.end] for text in texts]
        problems += [index] * len(texts)
        expected += [score.reward for score in scores_of(trl.task, stream[index], texts)]
    assert len(set(expected)) > 2
    pay = trainer.reward_funcs[0]
    assert pay(completions=None, completion_ids=tokens, problem=problems) == expected


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_what_trl_has_learned_is_what_is_evaluated(trl_course):
    trl, trainer = trl_course
    trl.evaluate()  # takes the weights over
    greedy = Sampling(temperature=0.0, max_new_tokens=JOB.budget)
    groups = evaluate(trl.policy, trl.task, trl.heldout, EvaluationSettings(sampling=greedy))
    start = load_policy(JOB.model, options=JOB.config.loading)
    untrained = evaluate(start, trl.task, trl.heldout, EvaluationSettings(sampling=greedy))
    assert [group.texts for group in groups] != [group.texts for group in untrained]

    model = trainer.model.eval()
    for group in groups:
        prompt = torch.tensor([group.prompt])
        written = model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=JOB.budget,
            eos_token_id=list(trl.policy.stops),
        )
        assert written[0, prompt.shape[1] :].tolist() == list(group.completions[0].tokens)
