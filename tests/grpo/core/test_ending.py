"""How a run ends: early, and with which verdict."""

import json
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_groups import group_of

from grpo.config import Config
from grpo.ending import (
    EXHAUSTED,
    MIN_STEPS,
    EndWatch,
    HeldOut,
    Verdict,
    conclude,
    mistake_of,
    most_common_mistake,
    reach_verdict,
    solves_level,
)
from grpo.records import Completion
from grpo.tasks.base import ABSTAINED, EXPECTED, Score

UNJUDGED = Score(0.5, {"reason": ABSTAINED})


def group(class_name="varied", action="keep", value=0.5):
    scores = [Score(0.0 if class_name == "failed" else value)] * 2
    return group_of("xx", scores, class_name=class_name, action=action)


SOLVED, FAILED = [group("solved", "skip", value=1.0)], [group("failed", "skip")]


def watch(patience, *steps, **settings):
    return observe(EndWatch(Config(patience=patience, **settings)), *steps)


def observe(end, *steps, level=1, is_last=True):
    for groups in steps:
        for each in groups:
            each.problem = replace(each.problem, level=level)
        end.observe(groups, level, is_last=is_last)
    return end


def restored(end, patience):
    other = watch(patience)
    other.load_state_dict(json.loads(json.dumps(end.state_dict())))
    return other


def test_a_run_is_stopped_when_nothing_was_trained_on():
    stuck = FAILED * 3 + [group("identical", "skip")]
    end = watch(3, stuck, stuck)
    assert end.stopped(1) == ""
    stopped = observe(end, stuck).stopped(1)
    assert stopped.startswith(
        "no group could be trained on for 3 steps, up to level 1 (75% failed, 25%"
    )
    assert end.ended(1) == stopped

    assert observe(end, [*stuck, group()]).stopped(1) == ""  # one trained group


def test_what_trains_nothing():
    for groups, found in (
        ([group("tied", "keep")], "(100% tied)"),  # kept, but without variance
        # Replayed solved groups do not excuse the current level.
        (SOLVED * 9 + FAILED, "(90% solved, 10% failed)"),
    ):
        assert watch(2, groups, groups).stopped(1).endswith(found)


def test_solved_groups_are_no_failure():
    end = watch(2, SOLVED * 16, SOLVED * 14 + FAILED)
    assert end.stopped(1) == ""
    assert end.ended(1) == "every training group was solved for 2 steps"


def test_a_check_is_due_once_19_of_20_groups_of_ten_steps_are_solved():
    nearly = SOLVED * 19 + [group()]
    assert not watch(50, *[nearly] * 9, SOLVED * 18 + [group()] * 2).wants_check(1)  # 18.9
    end = watch(50, *[nearly] * 9)
    assert not end.wants_check(1)  # of nine steps
    observe(end, nearly)
    for each in (end, restored(end, 50)):
        assert each.wants_check(1)
        observe(each, *[nearly] * 9)
        assert not each.wants_check(1)  # again every ten steps
        assert observe(each, nearly).wants_check(1)
        assert not observe(each, [group()] * 10).wants_check(1)


def test_windows_are_solved_where_whole_answers_are_expected_to_be():
    def wants_check(expected):
        data = {EXPECTED: expected}
        parts = [replace(each, problem=replace(each.problem, data=data)) for each in SOLVED]
        return watch(50, *[parts] * 10).wants_check(1)

    assert wants_check(EXHAUSTED) and not wants_check(EXHAUSTED - 0.001)


def test_solved_steps_of_one_level_say_nothing_about_the_next():
    end = observe(EndWatch(Config(patience=50)), *[SOLVED] * 12, is_last=False)
    observe(end, *[SOLVED] * 9, level=2)
    assert not end.wants_check(2)
    assert observe(end, SOLVED, level=2).wants_check(2)


def test_only_the_groups_of_the_hardest_level_show_that_it_is_solved():
    easy, hard = [group("solved", "skip", value=1.0)] * 20, [group()]
    hard[0].problem = replace(hard[0].problem, level=2)
    end = EndWatch(Config(patience=50))
    for _ in range(10):
        end.observe(easy + hard, 2)
    assert not end.wants_check(2)
    for _ in range(10):
        end.observe(easy + hard, None)  # all levels of a dataset
    assert end.wants_check(2)


@pytest.mark.parametrize(
    "class_name, trap, varied, found",
    [
        ("tied", "copies A", 0, "for 15 steps most completions were in the trap 'copies A'"),
        ("identical", None, 1, "for 15 steps most groups wrote one wrong text each at level 1"),
        ("identical", None, 2, ""),  # a fifth of the groups still varies
        ("tied", None, 0, ""),
    ],
)
def test_a_run_that_sits_in_a_trap_is_stopped(class_name, trap, varied, found):
    stuck = [group(class_name, "skip") for _ in range(8)]
    for each in stuck:
        each.scores = [Score(0.5, {"trap": trap})] * 2
    steps = [stuck + [group() for _ in range(max(1, varied))]] * 15  # it is trained on
    end = watch(3, *steps[:14])
    assert end.stopped(1) == ""
    assert observe(restored(end, 3), steps[14]).stopped(1)[: len(found)] == found
    assert observe(end, [group()] * 9).stopped(1) == ""  # it came out


@pytest.mark.parametrize(
    "settings", [{"patience": 0}, {"patience": 50, "control": "constant-reward"}]
)
def test_a_run_that_never_stops_and_a_control_run_never_count_as_solved(settings):
    assert not watch(**settings).wants_check(1)
    assert not observe(watch(**settings), *[SOLVED] * 10).wants_check(1)


def test_a_held_out_evaluation_confirms_that_a_run_is_solved():
    end = watch(50, *[SOLVED] * 10)
    line = {"level": 1, "mean": 0.99, "ci_low": 0.97, "ci_high": 1.0, "n": 128}
    assert end.take_check(10, line) == [] and end.ended(1) == ""
    (decision,) = end.take_check(10, line | {"mean": 0.996})
    assert decision.kind == "solved" and decision.why.startswith("at least 95% of the groups of")
    assert "held-out mean is 0.996" in decision.why
    assert end.ended(1) == restored(end, 50).ended(1) == decision.why
    assert not end.wants_check(1)


def test_steps_without_a_trained_group_count_whatever_their_level():
    end = watch(4, FAILED, FAILED)
    observe(end, SOLVED, level=2)
    assert end.stopped(2) == ""
    stopped = observe(end, FAILED).stopped(1)
    assert stopped.startswith("no group could be trained on for 4 steps, up to level 1 (75% failed")


@given(
    st.lists(st.sampled_from(["varied", "failed", "solved", "tied"]), max_size=12),
    st.integers(0, 12),
)
def test_a_restored_state_goes_on_identically(classes, cut):
    steps = [[group(name, "keep" if name == "varied" else "skip")] for name in classes]
    whole = watch(3, *steps)
    second = observe(restored(watch(3, *steps[:cut]), 3), *steps[cut:])
    assert whole.state_dict() == second.state_dict()
    assert whole.ended(1) == second.ended(1)


def answered(text, score, level=10, **more):
    """A group of one completion."""
    return group_of([text], [score], level=level, **more)


def answers(values, level=10, text="", finish="stop", **score):
    """A group for each problem, whose key leads to its mean score. Their texts differ, unless one
    is given.
    """
    return [
        answered(text or f"answer {key}", Score(value, **score), level, key=key, finish=finish)
        for key, value in values.items()
    ]


def held_out(before, after, imitated=None, level=10):
    then = () if imitated is None else answers(imitated, level)
    return HeldOut(answers(before, level), answers(after, level), then)


def metrics(steps, updated=None, wasted=0, clipped=0.0):
    """The lines of metrics.jsonl for so many steps, the first `updated` of which had an update."""
    return [
        {
            "num_tokens": 100 * number,
            "wasted_tokens_total": wasted,
            "completions/clipped_ratio": clipped,
            **({"loss": 0.1} if updated is None or number <= updated else {}),
        }
        for number in range(1, steps + 1)
    ]


def verdict_on(before, after, steps=MIN_STEPS, was_solved=False, stopped=""):
    problems = [str(number) for number in range(len(before))]
    made = held_out(dict(zip(problems, before)), dict(zip(problems, after)), level=25)
    return reach_verdict(25, made, metrics(steps), was_solved, stopped=stopped)


@pytest.mark.parametrize(
    "before, after, options, kind, exit_status",
    [
        ([0.2] * 64, [0.9] * 64, {}, "learned", 0),
        ([0.2] * 64, [0.9] * 64, {"stopped": "no group"}, "learned", 3),
        ([1.0] * 64, [1.0] * 64, {"was_solved": True}, "already solved", 0),
        ([1.0] * 64, [0.1] * 64, {"was_solved": True}, "got worse", 3),
        # Too few problems for the interval: solved before, and not any more.
        ([1.0] * 5, [0.0] * 5, {"was_solved": True}, "got worse", 3),
        ([1.0] * 44, [1.0] * 39 + [0.0] * 5, {"was_solved": True}, "got worse", 3),
        ([1.0] * 5, [1.0, 1.0, 1.0, 1.0, 0.6], {"was_solved": True}, "already solved", 0),
        ([1.0] * 10, [1.0] * 9 + [0.0], {"was_solved": True}, "already solved", 0),  # by chance
        ([], [], {"was_solved": True}, "not measured", 0),
        ([0.2] * 64, [0.2] * 64, {}, "not learned", 3),
        ([0.9] * 64, [0.2] * 64, {}, "got worse", 3),
        ([0.2] * 64, [0.2] * 64, {"steps": MIN_STEPS - 1}, "too short to tell", 0),
        ([0.2] * 64, [0.2] * 64, {"steps": 20, "stopped": "no group"}, "not learned", 3),
        ([0.0] * 3, [1.0] * 3, {}, "not learned", 3),  # three problems prove nothing
        ([], [], {}, "not measured", 0),
    ],
)
def test_verdicts_by_hand(before, after, options, kind, exit_status):
    verdict = verdict_on(before, after, **options)
    assert (verdict.kind, verdict.exit_status) == (kind, exit_status)


def judged(**counts):
    """A group for each of so many problems: "right", "wrong", or not judged ("none")."""
    scores = {"right": Score(1.0, exact=True), "wrong": Score(0.0), "none": UNJUDGED}
    names = [name for name, count in counts.items() for _ in range(count)]
    return [answered(f"{name} {key}", scores[name], key=str(key)) for key, name in enumerate(names)]


@pytest.mark.parametrize(
    "after, n, kind, share",
    [
        (dict(none=40), 0, "not learned", "100%"),
        (dict(right=8, none=32), 8, "not learned", "80%"),
        (dict(right=30, none=10), 30, "not learned", "25%"),
        (dict(right=38, none=2), 38, "learned", ""),
    ],
)
def test_what_the_reward_no_longer_judges_is_not_learned(after, n, kind, share):
    made = HeldOut(judged(wrong=40), judged(**after))
    verdict = reach_verdict(10, made, metrics(60))
    assert (verdict.n, verdict.kind) == (n, kind)
    said = f"the reward no longer judges {share} of the held-out problems" if share else ""
    assert verdict.cause == said and verdict.exit_status == (3 if share else 0)
    short = reach_verdict(10, made, metrics(MIN_STEPS - 1))
    assert short.kind == ("too short to tell" if share else kind) and short.cause == said


def test_problems_that_were_never_judged_are_not_compared():
    before, after = judged(none=20, wrong=40), judged(right=60)
    verdict = reach_verdict(10, HeldOut(before, after), metrics(60))
    assert (verdict.kind, verdict.n, verdict.before) == ("learned", 40, 0)
    assert reach_verdict(10, HeldOut(judged(none=9), after), metrics(60)).kind == "not measured"


def test_of_several_samples_as_many_must_be_judged_as_before():
    def groups(value, judged):
        scores = [Score(value, exact=value == 1)] * judged + [UNJUDGED] * (8 - judged)
        texts = [Completion((1,), (0.0,), str(n), "stop") for n in range(8)]
        one = answered("", UNJUDGED)
        return [
            replace(
                one, problem=replace(one.problem, key=str(key)), completions=texts, scores=scores
            )
            for key in range(40)
        ]

    for counts, kind in [((8, 1), "not learned"), ((4, 4), "learned"), ((4, 8), "learned")]:
        then, now = counts
        made = HeldOut(groups(0.0, then), groups(1.0, now))
        assert reach_verdict(10, made, metrics(60)).kind == kind


def test_texts_that_the_reward_did_not_judge_are_neither_wrong_nor_a_collapse():
    after = [
        replace(one, completions=answered("same", UNJUDGED).completions) for one in judged(none=40)
    ]
    assert most_common_mistake(after) == ""
    assert reach_verdict(10, HeldOut(judged(wrong=40), after), metrics(60)).kind == "not learned"


def test_the_same_problems_are_compared_after_a_warm_start():
    before, imitated, after = {"a": 0.2, "b": 0.4}, {"b": 0.5}, {"a": 0.9, "b": 0.75}
    verdict = reach_verdict(10, held_out(before, after, imitated), metrics(2))
    assert verdict.n == 1
    assert (verdict.before, verdict.imitated, verdict.after) == (0.4, 0.5, 0.75)
    assert verdict.difference == 0.25


def test_figures_weigh_steps_by_their_groups():
    lines = metrics(2)
    lines[0] |= {"groups/count": 8, "completions/clipped_ratio": 1.0}
    lines[0] |= {"groups/kept": 4, "groups/demonstrated": 3}
    lines[1] |= {"groups/count": 24, "groups/kept": 8}
    verdict = reach_verdict(25, HeldOut(), lines)
    assert verdict.truncated == verdict.demonstrated == 0.25 and verdict.untaught == 0


def test_the_figures_of_a_verdict_and_how_they_read():
    lines = metrics(60, updated=41, wasted=4800, clipped=0.25)
    values = {str(n): 0.0 for n in range(100)}, {str(n): 0.9 for n in range(100)}
    verdict = reach_verdict(25, held_out(*values, level=25), lines)
    assert (verdict.steps, verdict.updated, verdict.untaught) == (60, 41, 0.8)
    said = verdict.lines("similarity", "words")
    assert said[0].startswith("LEARNED: held-out similarity at 25 words 0.000 → 0.900, difference")
    assert "(n = 100, paired)" in said[0]
    assert said[1:] == [
        "steps that updated the weights: 41 of 60",
        "sampled tokens that taught nothing: 80%",
        "completions truncated: 25%",
    ]
    begun = replace(verdict, demonstrated=0.0, windows=0.5)
    assert begun.tier == "right answers shown"
    said = begun.lines("similarity", "words")
    assert said[4:] == ["groups that began within the right answer: 50%"]
    shown = replace(verdict, demonstrated=0.25).lines("similarity", "words")
    assert shown[4:] == ["groups trained on that showed the right answer: 25%"]

    more = replace(verdict, solved_step=40, mistake="a wrong word (2 of 3 wrong answers)")
    assert more.lines("similarity", "words")[4:] == [
        "solved for good: step 40",
        "most common mistake: a wrong word (2 of 3 wrong answers)",
    ]
    line = json.loads(json.dumps(more.to_json()))
    assert (line["verdict"], line["purpose"], line["step"]) == ("learned", "verdict", 60)
    assert Verdict.from_json(line) == more


def test_what_imitation_came_to_is_no_learning_by_reinforcement():
    """The run is compared with the policy after imitation; the untrained score is stated beside
    it.
    """
    untrained, imitated = {str(n): 0.0 for n in range(64)}, {str(n): 0.4 for n in range(64)}
    learned = {str(n): 0.9 for n in range(64)}
    scores = held_out(untrained, imitated, imitated)
    same = reach_verdict(10, scores, metrics(60))
    assert same.kind == "not learned" and same.exit_status == 3 and same.difference == 0
    assert same.before == 0 and same.imitated == pytest.approx(0.4)

    scores = held_out(untrained, learned, imitated)
    more = reach_verdict(10, scores, metrics(60))
    assert more.kind == "learned" and more.difference == pytest.approx(0.5)
    assert (
        "10 words 0.000 → 0.400 by imitation → 0.900, reinforcement added +0.500"
        in (more.lines("similarity", "words")[0])
    )


def test_several_levels_need_a_clearer_difference_each():
    """The one-sided error of 2.5 % is shared among them."""
    rng = random.Random(0)
    gains = [rng.choice([-1.0, 0.0, 0.0, 1.0, 1.0]) / 4 for _ in range(80)]
    values = {str(n): 0.5 for n in range(80)}, {str(n): 0.5 + g for n, g in enumerate(gains)}
    one, four = (
        reach_verdict(10, held_out(*values), metrics(60), chances=chances) for chances in (1, 4)
    )
    assert one.kind == "learned" and one.low > 0 > four.low and four.kind == "not learned"
    assert four.high > one.high and four.difference == one.difference


def test_no_difference_is_rarely_called_learning():
    """Two draws of one policy: "learned" in at most 2.5 % of the cases (one-sided), here of 200.

    At the true rate of 2.5 % more than 12 of 200 come up with a probability below 0.2 %.
    """
    rng = random.Random(8)
    kinds = []
    for _ in range(200):
        rates = [rng.random() for _ in range(8)]
        before, after = (
            [1.0 if rng.random() < rate else rng.choice([0.0, 0.5]) for rate in rates]
            for _ in range(2)
        )
        kinds.append(verdict_on(before, after).kind)
    assert kinds.count("learned") <= 12


PROBLEMS = {str(number): 0.5 for number in range(40)}
KIND = "ignores a text"
TRAPPED = {"parts": {"trap": "copies A", "trap_kind": KIND}}


def copier(share=40, level=10, **score):
    """Answers of a policy of which this many of 40 completions copy text A."""
    copies = {key: 0.5 for key in list(PROBLEMS)[:share]}
    others = {key: 0.4 for key in PROBLEMS if key not in copies}
    return answers(copies, level, **TRAPPED) + answers(others, level)


def trained_by(shares, **values):
    """The lines of metrics.jsonl of a run whose steps had these shares of copies of text A."""
    return [
        line | {"step": n, "traps/copies A": share} | values
        for n, (line, share) in enumerate(zip(metrics(len(shares)), shares), start=1)
    ]


def of_classes(steps, updated, **counts):
    """The lines of metrics.jsonl of a run whose steps had groups of these classes."""
    classes = {f"groups/class/{name}": count for name, count in counts.items()}
    levels = {"10": {"class": counts, "groups": 4}}
    values = {"groups/count": 4, "levels": levels, **classes}
    return [line | {"step": n} | values for n, line in enumerate(metrics(steps, updated), start=1)]


RISEN, BEFORE = (dict.fromkeys(PROBLEMS, value) for value in (0.9, 0.277))
COPIED = "the score rose by answers that ignore a part of the task"


def test_few_completions_in_a_trap_prove_nothing_unless_those_of_training_agree():
    few = dict.fromkeys("abcde", 0.2)
    trapped = HeldOut(answers(few), answers(few, **TRAPPED))
    for shares, kind in (([0.0, 0.0], "too short to tell"), ([0.0, 1.0], "collapsed")):
        assert reach_verdict(10, trapped, trained_by(shares)).kind == kind


@pytest.mark.parametrize(
    "before, shares, kind",
    [
        (answers(BEFORE), [0.0] * 60, "collapsed"),
        # At a level that was not trained it is no collapse.
        (answers(BEFORE, **TRAPPED), [0.0] * 60, "not learned"),
        (answers(BEFORE, **TRAPPED), [0.2] * 59 + [0.5], "collapsed"),
    ],
)
def test_traps_that_ignore_a_text_count_together(before, shares, kind):
    traps = ["copies A", "copies B", "doubles A", "ignores B", *[None] * 4]
    after = [
        each
        for number, key in enumerate(PROBLEMS)
        for trap in (traps[number % 8],)
        for each in answers({key: 0.5}, parts={"trap": trap, "trap_kind": trap and KIND})
    ]
    lines = [
        line | {"traps/copies B": share / 2, "traps/ignores B": share / 2}
        for line, share in zip(trained_by([0.0] * 60), shares)
    ]
    verdict = reach_verdict(10, HeldOut(before, after), lines)
    assert (verdict.kind, verdict.trap) == (kind, "ignores a text")
    assert kind != "collapsed" or verdict.cause.startswith(
        "50% of the held-out completions are in the trap 'ignores a text'"
    )


@pytest.mark.parametrize(
    "before, others, kind", [(0.01, 0.02, "not learned"), (0.01, 0.6, "learned"), (0.5, 0.6, None)]
)
def test_copies_of_one_text_are_no_gain(before, others, kind):
    """Of 40 answers 19 copy text A, which are too few for a trap."""
    after = copier(19)[:19] + answers({key: others for key in list(PROBLEMS)[19:]})
    first = answers(dict.fromkeys(PROBLEMS, before))
    verdict = reach_verdict(10, HeldOut(first, after), trained_by([0.4] * 60))
    assert verdict.kind == (kind or "not learned")
    assert (verdict.low > 0) == bool(kind), "by the score alone"
    if (before, others) == (0.01, 0.02):
        assert verdict.cause == COPIED


def partly(count, text, **others):
    """Answers of which `count` of 40 are one text, which earns 0.5."""
    same, rest = list(PROBLEMS)[:count], list(PROBLEMS)[count:]
    made = answers(dict.fromkeys(same, 0.5), text=text)
    return made + answers(dict.fromkeys(rest, 0.9), **others)


def identical_from_step_11():
    lines = of_classes(10, 10, identical=1) + of_classes(5, 5, identical=2)
    return [line | {"step": n} for n, line in enumerate(lines, start=1)]


@pytest.mark.parametrize(
    "before, after, lines, kind, cause",
    [
        # In a trap, although the score rose.
        (answers(BEFORE), copier(20), trained_by([0.1, 0.6, 0.4, 0.5, 0.9, 1.0]), "collapsed",
            "50% of the held-out completions are in the trap 'copies A', since step 4"),
        (answers(BEFORE), copier(19), trained_by([0.4] * 60), "not learned", COPIED),
        # At a level that was not trained it is no collapse, and no learning either.
        (answers(BEFORE, **TRAPPED), copier(), trained_by([0.0] * 60), "not learned", COPIED),
        # One wrong text.
        (answers(BEFORE), partly(20, "the owl"), metrics(60), "collapsed",
            "50% of the held-out completions are the same wrong text"),
        (answers(BEFORE), answers(RISEN, text="yes", exact=True), metrics(60), "learned", ""),
        # One that it leaves: not learned yet.
        (partly(38, "the owl"), partly(22, "the owl"), metrics(60), "not learned", ""),
        # One that it keeps, while other answers get better.
        (partly(24, "the owl"), partly(24, "the owl"), metrics(60), "not learned", ""),
        (partly(24, "the owl")[:24] + answers(BEFORE)[24:], partly(24, "the owl"), metrics(60),
            "not learned", ""),
        (partly(24, "the owl"), partly(25, "the owl"), metrics(60), "collapsed",
            "62% of the held-out completions are the same wrong text"),
        # White space makes no other text.
        (answers(BEFORE), partly(10, "the owl")[:10] + partly(20, " the  owl\n")[10:], metrics(60),
            "collapsed", "50% of the held-out completions are the same wrong text"),
        # Groups that are one wrong text each; without a known range right answers are, too.
        (answers(BEFORE), answers(RISEN), identical_from_step_11(), "collapsed",
            "50% of the last training groups wrote one wrong text each, since step 11"),
        (answers(BEFORE), answers(RISEN, exact=True), identical_from_step_11(), "learned", ""),
        # A score that rises while exact answers become fewer.
        (answers(PROBLEMS, exact=True), answers(RISEN), metrics(60), "got worse",
            "exact answers fell from 1.000 to 0.000, which the score does not show"),
        # A policy that never stops is told so whatever the verdict.
        (answers(BEFORE), answers(RISEN, finish="length"), metrics(60), "learned",
            "100% of the held-out completions did not end within their token budget"),
        # No signal, by the luck of the draws.
        (answers(BEFORE), answers(RISEN), of_classes(60, 0, identical=4), "no signal",
            "100% of the groups were identical (all completions identical)"),
        # `on_degenerate: keep` has a loss in each step.
        (answers(PROBLEMS), answers(PROBLEMS),
            [line | {"grad_norm": 0.0} for line in of_classes(60, 60, tied=4)], "no signal",
            "100% of the groups were tied (different texts, equal rewards)"),
    ],
)  # fmt: skip
def test_what_a_score_does_not_show(before, after, lines, kind, cause):
    verdict = reach_verdict(10, HeldOut(before, after), lines)
    assert (verdict.kind, verdict.cause) == (kind, cause)
    assert verdict.exit_status == (0 if kind == "learned" else 3)
    assert verdict.trap == ("copies A" if "trap" in cause else verdict.trap)


def test_a_reward_that_fell_is_nothing_learned_though_the_score_rose():
    """Of an unknown range, the score of a reward says little about the size of a loss."""

    def verdict(last, steps):
        before, after = answers(PROBLEMS), answers(PROBLEMS)
        for number, (then, now) in enumerate(zip(before, after)):
            reward = last if number % 10 == 9 else 20.0
            then.scores = [Score(0.0, value=0.5)]
            now.scores = [Score(reward, value=(1 + reward / (1 + abs(reward))) / 2)]
        return reach_verdict(10, HeldOut(before, after), metrics(steps))

    lost, short = verdict(-1000.0, 60), verdict(-1000.0, 10)
    assert (lost.kind, short.kind) == ("not learned", "too short to tell") and lost.low > 0
    cause = "the mean reward fell from 0 to -82, although the score rose"
    assert lost.cause == short.cause == cause
    assert verdict(20.0, 60).kind == "learned"


def test_rewards_that_compare_have_no_mean_that_could_fall():
    before, after = answers(BEFORE), answers(RISEN)
    for each in (*before, *after):
        each.scores = [replace(each.scores[0], reward=random.Random(str(each)).gauss(0, 1e-17))]
    assert reach_verdict(10, HeldOut(before, after), metrics(60)).kind == "learned"


def test_a_reward_that_abstains_at_random_may_be_learned():
    rng = random.Random(0)
    before, after = answers(BEFORE), answers(RISEN)
    for each in (*before, *after):
        if rng.random() < 0.2:
            each.scores = [Score(0.5, {"reason": ABSTAINED})]
    assert HeldOut(before, after).unjudged == 0
    assert reach_verdict(10, HeldOut(before, after), metrics(60)).kind == "learned"


def test_groups_of_one_wrong_text_at_another_level_are_no_collapse():
    made = HeldOut(answers(BEFORE, 25), answers(RISEN, 25))
    assert reach_verdict(25, made, identical_from_step_11()).kind == "learned"


def test_a_solved_level_without_a_gradient_is_no_failure():
    right = held_out(dict.fromkeys(PROBLEMS, 1.0), dict.fromkeys(PROBLEMS, 0.92))
    kind = reach_verdict(10, right, of_classes(60, 0, solved=4), was_solved=True).kind
    assert kind == "already solved"


@pytest.mark.parametrize("steps, updated, kind", [
    (1, 0, "no signal"),
    (19, 1, "too short to tell"),
    (40, 1, "no signal"),
    (40, 2, "too short to tell"),
    (100, 5, "not learned"),
])  # fmt: skip
def test_a_run_that_hardly_a_step_taught_had_no_signal(steps, updated, kind):
    lines = of_classes(steps, updated, varied=0, failed=3, solved=1)
    verdict = reach_verdict(10, held_out(PROBLEMS, PROBLEMS), lines)
    assert (verdict.kind, verdict.degenerate) == (kind, "failed")
    assert verdict.exit_status == (0 if kind == "too short to tell" else 3)
    said = "75% of the groups were failed (all with the lowest reward)"
    assert verdict.cause == (said if kind == "no signal" else "")


def report(step, level, mean, **more):
    line = {"step": step, "level": level, "purpose": "report", "n": 64}
    return line | {"mean": mean, "ci_low": mean} | more


def test_the_verdict_is_on_the_hardest_level_that_was_learned():
    """Nothing was learned at 25 words, which the run was asked for."""
    before = answers(PROBLEMS, 5) + answers(PROBLEMS, 10) + answers(PROBLEMS, 25)
    better = dict.fromkeys(PROBLEMS, 0.9)
    after = answers(better, 5) + answers(better, 10) + answers(PROBLEMS, 25)
    lines = [report(0, level, 0.5) for level in (5, 10, 25)]
    lines += [report(40, 10, 1.0), report(60, 10, 1.0), report(60, 25, 0.5)]
    verdict = conclude(25, HeldOut(before, after), metrics(60), lines)
    assert (verdict.kind, verdict.level, verdict.solved_step) == ("learned", 10, 40)
    assert verdict.mistake == "a wrong answer (40 of 40 wrong answers)"

    # One that got worse where it was trained is told so.
    worse = answers(better, 10) + answers(dict.fromkeys(PROBLEMS, 0.1), 25)
    fallen = [metrics(60)[-1] | {"levels": {"25": {"groups": 4, "class": {}}}}]
    verdict = conclude(25, HeldOut(before, worse), fallen, lines)
    assert (verdict.kind, verdict.level) == ("got worse", 25)


def test_a_level_that_was_trained_and_collapsed_is_not_hidden_by_an_easier_one():
    """Of a run that was asked for 50 words and trained on 10 and 25."""
    before = answers(PROBLEMS, 10) + answers(PROBLEMS, 25) + answers(PROBLEMS, 50)
    after = answers(dict.fromkeys(PROBLEMS, 0.9), 10) + copier(level=25) + answers(PROBLEMS, 50)
    lines = [report(0, level, 0.5) for level in (10, 25, 50)]
    levels = {"10": {"groups": 4, "class": {}}, "25": {"groups": 4, "class": {}}}

    made = metrics(60)
    made[30]["levels"] = levels  # not in the last step
    verdict = conclude(50, HeldOut(before, after), made, lines)
    assert (verdict.kind, verdict.level, verdict.exit_status) == ("collapsed", 25, 3)
    assert conclude(50, HeldOut(before, after), metrics(60), lines).level == 10  # not trained

    # The level that it was asked for comes first.
    learned = after[:80] + answers(dict.fromkeys(PROBLEMS, 0.9), 50)
    verdict = conclude(50, HeldOut(before, learned), made, lines)
    assert (verdict.kind, verdict.level) == ("learned", 50)


def test_solved_is_a_high_mean_with_evidence_and_an_end():
    line = report(0, 10, 0.97, ci_low=0.92, truncated=0.05)
    assert solves_level(line)
    for less in ({"mean": 0.969}, {"ci_low": 0.919}, {"truncated": 0.06}, {"unjudged": 11}):
        assert not solves_level(line | {"n": 200} | less)
    assert solves_level(line | {"n": 200, "unjudged": 10})


def test_too_few_held_out_problems_must_all_be_right():
    line = report(0, 3, 1.0, ci_low=0.88, n=44)
    assert solves_level(line) and not solves_level(line | {"mean": 0.98})
    assert not solves_level(line | {"n": 45})  # whose interval might begin high enough


def mistake(text, target="a b c", parts=None, finish="stop"):
    made = answered(text, Score(0.0, parts or {}), target=target, finish=finish)
    return mistake_of(made, 0)


def test_mistakes_by_hand():
    named = {"trap": None, "reason": "several answers"}
    assert mistake("a", parts={"trap": "copies A"}) == "copies A"
    assert mistake("12 13", parts=named) == "several answers"
    assert mistake(" ") == "nothing is written"
    assert mistake("a b", finish="length") == "truncated at the token budget"
    assert mistake("x y " * 4) == "the text repeats itself"
    assert mistake("a b c d") == "words are added"
    assert mistake("a b") == "words are missing"
    assert mistake("a b x") == "a wrong word"
    assert mistake("12", target="13") == "a wrong answer"


def test_the_most_common_mistake_of_wrong_answers_alone():
    right = answered("a b c", Score(1.0, exact=True), target="a b c")
    wrong = [answered(text, Score(0.1), target="a b c") for text in ("a b", "", "x")]
    every = [right, *wrong, right]
    made = replace(
        right,
        completions=[one.completions[0] for one in every],
        scores=[one.scores[0] for one in every],
    )
    assert most_common_mistake([made]) == "words are missing (2 of 3 wrong answers)"
    assert most_common_mistake([right]) == most_common_mistake([]) == ""
