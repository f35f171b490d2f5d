"""Mutants of the trainer, its monitor, evaluation and curriculum."""

TRAINER = (
    "grpo/test_trainer_groups.py grpo/test_trainer.py grpo/test_trainer_rates.py "
    "grpo/test_trainer_control.py"
)

# See `mutants`.
TABLE = {
    ("grpo/trainer.py", "grpo/test_truncation.py"): [
        (
            "a step of truncated completions is learned from",
            "Trainer.update_policy",
            "all(group.is_truncated for group in kept)",
            "False",
        ),
    ],
    ("grpo/curriculum/demonstrations.py", "grpo/test_demonstrations.py"): [
        (
            "an answer is shown before the last try",
            "demonstrate",
            "group.action != 'resample'",
            "True",
        ),
        (
            "an answer is shown beside a right one",
            "demonstrate",
            "not any((score.exact for score in group.scores))",
            "True",
        ),
        (
            "nothing is shown as the answer of a problem without a target",
            "demonstrate",
            "group.problem.target.strip()",
            "True",
        ),
        (
            "a target that is not right is shown",
            "demonstrate",
            "not earned.exact or earned.reward <= max(group.rewards)",
            "earned.reward <= max(group.rewards)",
        ),
        (
            "an answer that earns no more is shown",
            "demonstrate",
            "not earned.exact or earned.reward <= max(group.rewards)",
            "not earned.exact",
        ),
        (
            "the copy keeps the trap of what was sampled",
            "demonstrate",
            "common_trap(scores)",
            "group.trap",
        ),
        (
            "the sampled group is still skipped or kept",
            "demonstrate",
            "group.action = 'demonstrate'",
            "pass",
        ),
        (
            "the right answer counts as sampled",
            "demonstration",
            "Completion(tokens, zeros, policy.decode(tokens), 'stop', is_demonstration=True)",
            "Completion(tokens, zeros, policy.decode(tokens), 'stop')",
        ),
        (
            "the right answer does not end",
            "demonstration",
            "(*policy.target_tokens(problem.target), policy.end)",
            "policy.target_tokens(problem.target)",
        ),
    ],
    ("grpo/variance.py", "grpo/test_demonstrations.py"): [
        (
            "a group that is shown an answer counts as without gradient",
            "VarianceMonitor.observe",
            "{group.index for group in groups if group.action == 'demonstrate'}",
            "set()",
        ),
    ],
    ("grpo/records.py", "grpo/test_demonstrations.py"): [
        (
            "a shown answer counts as a sampled one",
            "truncated_share",
            "not each.is_demonstration",
            "True",
        ),
    ],
    ("grpo/trainer.py", "grpo/test_demonstrations.py"): [
        (
            "answers are shown unasked",
            "Trainer.rollout",
            "self.config.demonstrate",
            "True",
        ),
        (
            "a task without answers may show them",
            "Trainer.check_fit",
            "self.config.demonstrate and not self.knows_answers",
            "False",
        ),
    ],
    ("grpo/distributed.py", "test_ranks.py"): [
        ("every rank samples everything", "Ranks.share", "items[self.rank::self.size]", "items"),
    ],
    ("grpo/variance.py", "grpo/test_variance.py grpo/test_alarms.py tasks/test_scores.py"): [
        (
            "solved counts as collapsed",
            "",
            "('identical', 'failed', 'tied')",
            "('identical', 'failed', 'tied', 'solved')",
        ),
        (
            "equal rewards vary",
            "classify",
            "max(rewards) - min(rewards) > EQUAL",
            "max(rewards) - min(rewards) >= 0",
        ),
        (
            "solved by another task's range",
            "classify",
            "reward_range or (-math.inf, math.inf)",
            "(0.0, 1.0)",
        ),
        (
            "masked groups vary",
            "group_class",
            "_is_masked(group, rule)",
            "False",
        ),
        (
            "masked without `truncated: mask`",
            "_is_masked",
            "not rule.masks_truncated",
            "False",
        ),
        (
            "a completion that earned the mean teaches",
            "_is_masked",
            "(value or rule.credits_tokens) and (not completion.is_truncated)",
            "not completion.is_truncated",
        ),
        (
            "tokens have no credits",
            "_is_masked",
            "value or rule.credits_tokens",
            "value",
        ),
        (
            "an alarm of masked groups is a collapse",
            "VarianceMonitor._watch_classes",
            "cause in COLLAPSED",
            "cause != 'solved'",
        ),
        (
            "temperature raised only above the trigger",
            "VarianceMonitor._adjust_temperature",
            "lost >= settings.trigger",
            "lost > settings.trigger",
        ),
        (
            "failing groups raise the temperature",
            "lost_diversity",
            "distinct <= max(1, DIVERSITY * len(group.texts))",
            "True",
        ),
        (
            "an alarm is raised once only",
            "VarianceMonitor._count_step",
            "periods.bit_count() == 1",
            "periods == 1",
        ),
        (
            "one alarm hides all others",
            "VarianceMonitor._watch_classes",
            "self._count_step(cause)",
            "self._count_step('any')",
        ),
        (
            "kept tokens are the wasted ones",
            "_wasted",
            "group.action not in ('keep', 'demonstrate')",
            "group.action in ('keep', 'demonstrate')",
        ),
        (
            "half a group is no common trap",
            "common_trap",
            "2 * traps[name] >= len(scores)",
            "2 * traps[name] > len(scores)",
        ),
        (
            "later tries counted",
            "VarianceMonitor.observe",
            "first_tries(groups)",
            "list(groups)",
        ),
    ],
    ("grpo/verdict.py", "grpo/test_verdict.py"): [
        (
            "no update, and learned",
            "reach_verdict",
            "low > 0 and figures['updated'] and (not trap)",
            "low > 0 and (not trap)",
        ),
        (
            "an old trap, and learned",
            "reach_verdict",
            "low > 0 and figures['updated'] and (not trap)",
            "low > 0 and figures['updated']",
        ),
        ("several levels, one chance each", "_interval", "TAIL / levels", "TAIL"),
        ("worse is too short to tell", "_decline", "high < 0", "high < -1"),
        ("a half is no collapse", "_collapse", "most >= COLLAPSED_SHARE * len(scores)", "False"),
        ("almost no update is enough", "_no_signal", "RARE * steps", "0"),
        ("a mean above zero is enough", "reach_verdict", "low > 0", "high > 0"),
        ("a mean of means", "_figures_of", "fmean(truncated, groups)", "fmean(truncated)"),
        (
            "different problems are compared",
            "HeldOut.paired",
            "[(before[key], begun[key], after[key]) "
            "for key in before if key in begun and key in after]",
            "list(zip(before.values(), begun.values(), after.values()))",
        ),
    ],
    ("grpo/early_stop.py", "grpo/test_early_stop.py"): [
        (
            "solved steps of an earlier level count",
            "EarlyStop.observe",
            "self.level != level",
            "False",
        ),
    ],
    (
        "grpo/records.py",
        "grpo/test_early_stop.py grpo/test_trainer_groups.py grpo/test_trainer_control.py",
    ): [
        (
            "kept groups count as trained",
            "Group.teaches",
            "self.action == 'keep' and self.class_name == 'varied'",
            "self.action == 'keep'",
        ),
    ],
    ("grpo/training/metrics.py", "grpo/test_demonstrations.py"): [
        (
            "a group that shows an answer has collapsed",
            "step_summary",
            "group.class_name in COLLAPSED and group.index not in shown",
            "group.class_name in COLLAPSED",
        ),
        (
            "what the last try shows is not seen",
            "step_summary",
            "group.action == 'demonstrate'",
            "group.action == 'demonstrate' and group.attempt == 0",
        ),
    ],
    ("grpo/group_metrics.py", "grpo/test_variance.py grpo/test_alarms.py"): [
        (
            "a bin without its upper bound",
            "",
            "from bisect import bisect_left",
            "from bisect import bisect_right as bisect_left",
        ),
    ],
    ("grpo/trainer.py", TRAINER): [
        (
            "skipped groups learned from",
            "Trainer.step",
            "[group for group in groups if group.action == 'keep']",
            "list(groups)",
        ),
        (
            "prompts drawn in turn",
            "Trainer.batches",
            "max(1, round(missing / varying))",
            "1",
        ),
        (
            "a resumed step draws as the first one does",
            "Trainer.restore",
            "state['kept_share']",
            "1.0",
        ),
        (
            "a promotion solves the next level",
            "Trainer._was_at_last_level",
            "self.early_stop.level == level == self.curriculum.levels[-1]",
            "level == self.curriculum.levels[-1]",
        ),
        (
            "a solved lower level ends the run",
            "Trainer.ended",
            "self.early_stop.exhausted if self._was_at_last_level else ''",
            "self.early_stop.exhausted",
        ),
        (
            "a mixed data set is watched at its highest level",
            "Trainer.observe",
            "None if self.config.mixed else level",
            "level",
        ),
        (
            "a control run ends as solved",
            "Trainer.seems_solved",
            "self.config.control != 'none'",
            "False",
        ),
    ],
    ("grpo/trainer.py", "library/test_loop.py"): [
        ("every rank calls callbacks", "Trainer.step", "self.ranks.is_rank0", "True"),
    ],
    ("grpo/evaluate.py", "grpo/test_config.py"): [
        (
            "rate of wrong answers",
            "summarise",
            "rate_interval(round(sum(exact)), len(exact))",
            "rate_interval(len(exact) - round(sum(exact)), len(exact))",
        ),
    ],
    ("grpo/statistics.py", "grpo/test_statistics.py"): [
        ("interval of 90 %", "", "TAIL = 0.025", "TAIL = 0.05"),
        ("nothing is unseen above", "mean_bounds", "means_SD + weights_DN[:, n]", "means_SD"),
    ],
    (
        "grpo/evaluate.py",
        "evaluation/test_sampling.py evaluation/test_problems.py evaluation/test_own_texts.py",
    ): [
        (
            "evaluations ignore --max-new-tokens",
            "budgets",
            "sampling.max_new_tokens",
            "0",
        ),
        (
            "samples of a problem are copies",
            "_keys",
            "sample_key('eval', seed, problem.key, i)",
            "sample_key('eval', seed, problem.key)",
        ),
    ],
    ("grpo/training/problems.py", "test_start.py"): [
        (
            "what an earlier run trained on may be evaluated",
            "ProblemStream.begin_after",
            'dict.fromkeys(state["seen"])',
            "{}",
        ),
    ],
    ("grpo/training/sampler.py", TRAINER): [
        (
            "tries share their numbers",
            "GroupSampler._keys",
            "sample_key(self.config.seed, step, index, sample, attempt)",
            "sample_key(self.config.seed, step, index, sample, 0)",
        ),
    ],
    ("grpo/training/problems.py", TRAINER): [
        (
            "problems of other levels count in a family",
            "ProblemStream.metrics",
            "self.trained[level]",
            "self.trained.total()",
        ),
        (
            "last problem drawn again",
            "ProblemStream.mark_seen",
            "problems[-1][0] + 1",
            "problems[-1][0]",
        ),
    ],
    ("grpo/curriculum/difficulty.py", "grpo/test_difficulty.py"): [
        ("the limits are left out", "outcome_of", "score <= high", "score < high"),
        ("samples of the pre-flight", "", "SEED = 3_000_029", "SEED = 3_000_003"),
    ],
    ("grpo/curriculum/ladder.py", "grpo/test_trainer_rates.py"): [
        (
            "the last level counts as first reached at every visit",
            "Ladder._move",
            "self.is_last and self.steps_before_last is None",
            "self.is_last",
        ),
    ],
    ("grpo/curriculum/ladder.py", "grpo/test_curriculum.py"): [
        ("scores of the old level kept", "Ladder._move", "self.recent.clear()", "pass"),
        ("collapsed steps of the old level kept", "Ladder._move", "self.collapsed = 0", "pass"),
        (
            "a lucky mean promotes",
            "reaches_mark",
            "mean >= mark and low >= mark - MARGIN",
            "mean >= mark",
        ),
        (
            "steps back ask for nothing more",
            "Ladder._patience",
            "self.settings.collapse_steps * 2 ** self.steps_back[position]",
            "self.settings.collapse_steps",
        ),
        (
            "seed and step added",
            "level_draws",
            "f'levels/{seed}/{step}{later}'",
            "f'levels/{seed + step}{later}'",
        ),
    ],
    ("grpo/curriculum/survey.py", "grpo/test_preflight.py"): [
        (
            "easier levels are surveyed twice",
            "survey",
            "[[level] for level in levels if level > first]",
            "[[level] for level in levels]",
        ),
        (
            "groups that vary are enough",
            "LevelSurvey.is_within_reach",
            "self.varied >= VARIED and self.any_exact >= ANY_EXACT",
            "self.varied >= VARIED",
        ),
    ],
    ("grpo/curriculum/preflight.py", "grpo/test_preflight.py"): [
        (
            "the easiest level within reach",
            "choose_start",
            "max(reachable, key=lambda row: row.level)",
            "min(reachable, key=lambda row: row.level)",
        ),
        (
            "solved levels left out before one out of reach",
            "_past_the_solved",
            "solved if following and following.is_within_reach else solved - 1",
            "min(solved, len(levels) - 1)",
        ),
    ],
    ("grpo/curriculum/warm_start.py", "grpo/test_ways.py"): [
        (
            "imitation goes on when it is enough",
            "warm_start",
            "result.score < ENOUGH and result.updates < limit",
            "result.updates < limit",
        ),
    ],
}
