"""Right answers shown in groups in which no completion is right (`demonstrate`)."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from forced import trainer_for, weights
from updates import SETTINGS, sgd, update

from grpo import inspect, load_run
from grpo.config import Config
from grpo.curriculum import demonstrate, demonstration
from grpo.data.errors import UserError
from grpo.learn.advantages import advantages, token_advantages
from grpo.learn.batch import completion_logprobs, micro_batches
from grpo.learn.optimizer import Optimizer
from grpo.model.load import load_policy
from grpo.records import Completion, Group
from grpo.report import outcome
from grpo.run.logs import groups_of, write_rollouts
from grpo.tasks import audit
from grpo.tasks.base import ABSTAINED, Score, scores_of
from grpo.tasks.interleave import Interleave
from grpo.tools import train
from grpo.trainer import Trainer
from grpo.variance import common_trap

TASK = Interleave("similarity")
PROBLEM = TASK.problem(["one", "two"], ["owl", "rain"])  # one owl two rain


def group(policy, texts, problem=PROBLEM, action="skip", task=TASK):
    """A group whose completions write `texts`, each of log-probability -0.5 a token."""
    completions = []
    for text in texts:
        tokens = (*policy.target_tokens(text), policy.end)
        completions.append(Completion(tokens, (-0.5,) * len(tokens), policy.decode(tokens), "stop"))
    scores = scores_of(task, problem, [completion.text for completion in completions])
    prompt = policy.encode(problem)
    return Group(3, problem, prompt, 1.0, completions, scores=scores, action=action)


def right_logprob(policy, shown):
    """The log-probabilities of a completion's tokens under the policy, (T,)."""
    one = Group(0, PROBLEM, policy.encode(PROBLEM), 1.0, [shown], advantages=[1.0])
    (batch,) = micro_batches([one], "dapo", max_length=24, device=policy.device)
    with torch.no_grad():
        return completion_logprobs(policy, batch)[0][0]


# Which groups.


def test_a_group_without_a_right_completion_gets_a_copy_with_the_right_answer(tiny_policy):
    wrong = group(tiny_policy, ["one owl two two", "one owl", "rain"])
    (copy,) = demonstrate(tiny_policy, TASK, [wrong])
    assert copy.completions[:2] == wrong.completions[:2] and copy.scores[:2] == wrong.scores[:2]
    shown, score = copy.completions[2], copy.scores[2]
    right = tiny_policy.answer_tokens(PROBLEM)
    assert shown == demonstration(tiny_policy, right) and shown.is_demonstration
    assert shown.text.split() == ["one", "owl", "two", "rain"] and score.reward == 1.0
    assert shown.tokens[-1] == tiny_policy.end
    assert (copy.action, copy.class_name, copy.index) == ("keep", "varied", 3)
    # Nothing but the action of the sampled group has changed, and its tokens are counted once.
    assert wrong.action == "demonstrate"
    assert [each.text.split()[-1] for each in wrong.completions] == ["two", "owl", "rain"]
    assert copy.tokens == 0 < wrong.tokens


@pytest.mark.parametrize(
    "texts, action",
    [
        (["one owl two rain", "one"], "keep"),  # one is right
        (["one owl two rain", "one owl two rain"], "skip"),
    ],
)
def test_other_groups_are_left_alone(tiny_policy, texts, action):
    other = group(tiny_policy, texts, action=action)
    assert demonstrate(tiny_policy, TASK, [other]) == [] and other.action == action


@pytest.mark.parametrize(
    "target",
    [
        Score(0.5, value=0.5, exact=False),  # as good as the completions, and not right
        Score(0.5, value=0.5, exact=True),  # right, and earns no more
        Score(0.9, value=0.9, exact=False),  # better, and not right
    ],
)
def test_a_target_that_is_not_right_or_no_better_is_not_shown(tiny_policy, target):
    class Other(Interleave):
        def score(self, problem, completions):
            return [target if "rain" in text else Score(0.5, value=0.5) for text in completions]

    wrong = group(tiny_policy, ["one", "two"], task=Other())
    assert demonstrate(tiny_policy, Other(), [wrong]) == [] and wrong.action == "skip"


def test_a_problem_without_a_target_has_nothing_to_show(tiny_policy):
    """Rows of the user's own have none, and a reward may be paid for saying nothing."""

    class Silence(Interleave):
        def score(self, problem, completions):
            return [Score(float(not text), exact=not text) for text in completions]

    task, problem = Silence(), replace(PROBLEM, target="")
    wrong = group(tiny_policy, ["one", "two"], problem=problem, task=task)
    assert demonstrate(tiny_policy, task, [wrong]) == [] and wrong.action == "skip"
    stream = SimpleNamespace(task=task, take=lambda index, levels: [(index, problem)])
    trainer = SimpleNamespace(stream=stream, curriculum=SimpleNamespace(levels=[2]))
    assert not Trainer.knows_answers.fget(trainer)


def test_what_the_reward_did_not_judge_learns_nothing_from_an_answer_that_is_shown(tiny_policy):
    unjudged = Score(0.5, {"reason": ABSTAINED})
    wrong = group(tiny_policy, ["one", "two", "owl"])
    wrong.scores = [replace(wrong.scores[0], reward=0.0), replace(unjudged, reward=0.0), unjudged]
    (copy,) = demonstrate(tiny_policy, TASK, [wrong])
    assert copy.rewards == [0.0, 0.5, 1.0]
    assert advantages([copy.rewards])[0][1] == 0

    wrong.scores, wrong.action = [unjudged] * 3, "skip"
    assert demonstrate(tiny_policy, TASK, [wrong]) == [] and wrong.action == "skip"


def test_the_copy_has_a_trap_of_its_own(tiny_policy):
    """Half of the completions make a trap, and one of them is replaced."""
    wrong = group(tiny_policy, ["rain", "one two"])
    wrong.trap = common_trap(wrong.scores)
    (copy,) = demonstrate(tiny_policy, TASK, [wrong])
    assert wrong.trap == "copies A" and copy.trap is None


# What is learned.


def with_advantages(policy):
    (copy,) = demonstrate(policy, TASK, [group(policy, ["one owl", "one owl two"])])
    # The completion that was sampled has the log-probabilities of the policy, as in a real step.
    sampled = copy.completions[0]
    logp = right_logprob(policy, sampled).tolist()
    return replace(
        copy,
        completions=[replace(sampled, logprobs=tuple(logp)), copy.completions[1]],
        advantages=[-0.7, 0.7],
    )


@pytest.mark.parametrize("kind, epochs", [("dapo", 3), ("cispo", 1), ("gspo", 3)])
def test_a_demonstration_is_learned_as_if_the_policy_had_sampled_it(tiny_model, kind, epochs):
    """In every pass: a later one clips the ratio to the policy of the first pass."""
    results = []
    for is_sampled in (False, True):
        policy = load_policy(str(tiny_model), device="cpu")
        one = with_advantages(policy)
        if is_sampled:
            shown = one.completions[1]
            logp = tuple(right_logprob(policy, shown).tolist())
            one.completions[1] = replace(shown, logprobs=logp, is_demonstration=False)
        before = {}
        optimizer = sgd(policy, 0.1)
        passes = [
            update(policy, optimizer, [one], before=before, kind=kind, **SETTINGS)
            for _ in range(epochs)
        ]
        results.append((passes, weights(policy)))
    (shown, shown_weights), (sampled, sampled_weights) = results
    assert shown[0]["grad_norm"] > 1e-3
    for name in ("loss", "grad_norm"):
        of_shown, of_sampled = ([each[name] for each in passes] for passes in (shown, sampled))
        assert of_shown == pytest.approx(of_sampled, rel=1e-3, abs=1e-5), name
    for a, b in zip(shown_weights, sampled_weights, strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_a_demonstration_is_not_compared_with_a_sampler(tiny_policy):
    """Its stored log-probabilities are 0, far from the policy's."""
    one = with_advantages(tiny_policy)
    assert right_logprob(tiny_policy, one.completions[1]).min() < -3
    metrics = update(tiny_policy, sgd(tiny_policy, 0.0), [one], before={}, kind="dapo", **SETTINGS)
    assert metrics["sampling/sampling_logp_difference/max"] < 1e-4
    assert metrics["parity/kl"] < 1e-6 and metrics["clip_ratio/high_mean"] == 0
    assert metrics["grad_norm"] > 1e-3


def test_no_metric_counts_the_tokens_of_a_demonstration(tiny_model):
    """In the second pass the ratio of the demonstration is clipped, and its KL is not 0."""
    policy = load_policy(str(tiny_model), device="cpu", keep_reference=True)
    both = with_advantages(policy)
    sampled = replace(both, completions=both.completions[:1], advantages=[-0.7])
    settings = SETTINGS | {"kind": "dapo", "beta": 0.1}

    def measured(one, before):
        return update(policy, sgd(policy, 0.0), [one], before=before, **settings)

    before, alone = {}, {}
    measured(both, before), measured(sampled, alone)
    update(policy, sgd(policy, 3.0), [both], before=dict(before), **settings)

    figures, expected = measured(both, before), measured(sampled, alone)
    for name in ("entropy", "kl", "parity/kl", "clip_ratio/low_mean", "clip_ratio/high_mean"):
        assert figures[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-9), name
    assert figures["grad_norm"] != pytest.approx(expected["grad_norm"], rel=0.1)
    assert figures["parity/kl"] > 1e-3


def test_a_policy_that_is_sure_of_a_mistake_learns_the_right_answer(tiny_model):
    """All completions are the same, and so there is no gradient; with the right answer there is."""
    policy = load_policy(str(tiny_model), device="cpu")
    shown = demonstration(policy, policy.answer_tokens(PROBLEM))
    before = right_logprob(policy, shown).sum().item()
    optimizer = Optimizer(policy.parameters, 1e-3)
    for _ in range(12):
        (copy,) = demonstrate(policy, TASK, [group(policy, ["one two owl"] * 4)])
        mean = sum(copy.rewards) / 4
        copy.advantages = [reward - mean for reward in copy.rewards]
        update(policy, optimizer, [copy], before={}, kind="dapo", **SETTINGS)
    assert right_logprob(policy, shown).sum().item() > before + 5


def test_each_token_of_a_demonstration_has_the_advantage_of_the_whole(tiny_policy):
    (copy,) = demonstrate(tiny_policy, TASK, [group(tiny_policy, ["one two owl"] * 4)])
    copy.scores = [
        replace(score, credits=credits)
        for score, credits in zip(copy.scores, TASK.credits(PROBLEM, copy.texts), strict=True)
    ]
    ((*sampled, shown),) = token_advantages([copy], tiny_policy.decode, scale="none")
    rewards = copy.rewards
    mean = sum(rewards) / 4
    assert shown == pytest.approx([rewards[3] - mean] * len(copy.completions[3].tokens))
    # The others have what they had beside a sampled right answer: nothing once they are by
    # themselves, because they are all the same.
    for row in sampled:
        assert row[0] == pytest.approx(rewards[0] - mean) and row[-1] == 0


# The step.


class Stuck(Interleave):
    """Nothing that a policy writes is right: `Forced` for the interleave task."""

    def __init__(self, odd):
        super().__init__("similarity")


def stuck_trainer(policy, **options):
    return trainer_for(policy, kind=Stuck, **options)


def test_a_step_counts_what_was_sampled_and_learns_from_what_is_shown(tiny_policy, tmp_path):
    trainer = stuck_trainer(tiny_policy, demonstrate=True, credit="alignment")
    report = trainer.step()
    first = [each for each in report.groups if not each.has_demonstration]
    shown = [each for each in report.groups if each.has_demonstration]
    assert len(first) == len(shown) == 4
    assert {each.action for each in first} == {"demonstrate"}
    assert {each.action for each in shown} == {"keep"}
    metrics = report.metrics
    assert metrics["groups/demonstrated"] == metrics["groups/kept"] == 4
    assert metrics["groups/count"] == 4 and metrics["groups/skipped"] == 0
    assert metrics["wasted_tokens"] == 0 and metrics["num_tokens"] == sum(
        len(completion.tokens) for each in first for completion in each.completions
    )
    mean = sum(sum(each.rewards) for each in first) / 16
    assert metrics["reward"] == pytest.approx(mean) and metrics["exact"] == 0
    assert metrics["grad_norm"] > 0
    assert metrics["sampling/sampling_logp_difference/max"] < 1e-4
    assert trainer.varied_share == 1.0
    assert trainer.curriculum.varied == {1: 1.0}

    file = tmp_path / "step-000001.jsonl.zst"
    write_rollouts(file, report.groups, step=1)
    assert groups_of(file) == report.groups


def test_a_run_says_what_it_was_shown_and_survives_a_kill(
    tmp_path, monkeypatch, tiny_flags, capsys
):
    """The console, the verdict, the report's figures, replay, audit, and a resume to the bit."""
    monkeypatch.chdir(tmp_path)
    flags = ["--words", "3", "--steps", "2", "--prompts", "2", "--group-size", "4"]
    flags += [*tiny_flags, "--preflight", "off", "--save-every", "1", "--device", "cpu"]
    flags += ["--config", "{eval_problems: 4, demonstrate: true}"]
    assert train.main([*flags, "--name", "whole"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "; right answers shown" in out
    assert "groups trained on that showed the right answer: 100%" in out
    run = load_run("runs/whole")
    assert run.verdict["demonstrated"] == 1.0
    figures = outcome(load_run("runs/whole"))["figures"]
    assert ("groups trained on that showed the right answer", "100%", None) in figures

    # The last completion of the first copy.
    assert inspect.main(["runs/whole", "tokens", "1", "2", "3"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[2] == "-"  # no log-probability
    assert inspect.main(["runs/whole", "replay", "2"]) == 0
    assert "identical to the last bit" in capsys.readouterr().out
    assert audit.main(["runs/whole"]) == 0

    shutil.copytree("runs/whole", "runs/again")
    shutil.rmtree("runs/again/checkpoints/step-000002")
    assert train.main(["--resume", "runs/again"]) == 0
    first, again = (
        Path(f"runs/{name}/checkpoints/step-000002/model.safetensors").read_bytes()
        for name in ("whole", "again")
    )
    assert first == again


def test_a_task_without_right_targets_has_nothing_to_show(tiny_policy):
    trainer = stuck_trainer(tiny_policy, demonstrate=True)
    trainer.check_fit()
    trainer.task.compares = True  # what the target earns alone says nothing
    with pytest.raises(UserError, match="demonstrate: task forced does not score the target"):
        trainer.check_fit()
    trainer.task.compares = False
    trainer.task.score = lambda problem, texts: [Score(0.5) for _ in texts]
    with pytest.raises(UserError, match="demonstrate: task forced does not score the target"):
        trainer.check_fit()


@pytest.mark.parametrize(
    "options, expected",
    [
        ({}, True),
        ({"model": "builtin"}, False),
        ({"reward_alone": True}, False),
        ({"control": "shuffled-rewards"}, False),
        ({"top_p": 0.9}, False),
        ({"demonstrate": False}, False),
        ({"model": "builtin", "demonstrate": True}, True),
    ],
)
def test_interleave_is_shown_right_answers_by_default(options, expected):
    config = Config(**{"model": "some/model"} | options)
    trainer = SimpleNamespace(config=config, task=TASK, knows_answers=True)
    assert Trainer.demonstrates.func(trainer) == expected


def test_another_task_is_shown_none_by_default():
    config = Config(model="some/model")
    for task, knows, expected in ((TASK, False, False), (object(), True, False)):
        trainer = SimpleNamespace(config=config, task=task, knows_answers=knows)
        assert Trainer.demonstrates.func(trainer) == expected
