"""Mutants of runs and tools."""

# See `mutants`.
TABLE = {
    ("grpo/run/facts.py", "grpo/test_facts.py"): [
        (
            "the commit of any repository around the code",
            "commit",
            "git('ls-files', '--error-unmatch', file.name)",
            "None",
        ),
        (
            "no run without git",
            "commit",
            "(OSError, subprocess.CalledProcessError)",
            "subprocess.CalledProcessError",
        ),
    ],
    ("grpo/tools/report/page.py", "test_locale.py"): [
        (
            "the page is read as the system's text is",
            "assembled",
            "(FOLDER / 'report.html').read_text('utf-8')",
            "(FOLDER / 'report.html').read_text()",
        ),
    ],
    ("grpo/run/difficulty.py", "grpo/test_difficulty.py"): [
        (
            "a resumed run measures again",
            "filter_by_difficulty",
            "_measure(run, limits) if is_new else run.ranks.on_rank0(lambda: _stored(run, folder))",
            "_measure(run, limits)",
        ),
        (
            "nothing is left out",
            "filter_by_difficulty",
            "{each.key for each in found if each.outcome == 'kept'}",
            "{each.key for each in found}",
        ),
    ],
    ("grpo/run/session.py", "grpo/test_difficulty.py"): [
        (
            "the first prompt is drawn before problems are left out",
            "Run.begin",
            "filter_by_difficulty(self.context, self.folder, is_new=self.is_new)",
            "None",
        ),
    ],
    (
        "grpo/run/session.py",
        "test_kill.py::test_a_new_run_does_not_enter_a_folder_that_was_made_meanwhile",
    ): [
        (
            "a new run enters another's folder",
            "Run._make_files",
            "self.folder.mkdir(parents=True)",
            "self.folder.mkdir(parents=True, exist_ok=True)",
        ),
    ],
    (
        "grpo/run/opening.py",
        "test_kill.py::test_a_run_that_was_continued_meanwhile_keeps_its_steps",
    ): [
        (
            "another's steps are removed",
            "require_unchanged",
            "_checkpoint_names(opened.folder) != opened.checkpoints",
            "False",
        ),
    ],
    ("grpo/run/lock.py", "test_kill.py::test_a_process_that_a_reward_has_forked_is_no_run"): [
        ("a forked process keeps the lock", "_let_go", "file.close()", "pass"),
    ],
    ("grpo/run/interrupt.py", "test_kill.py::test_a_process_that_a_reward_has_forked_is_no_run"): [
        (
            "a forked process outlives SIGTERM",
            "Interrupt.note",
            "os.getpid() != self.process",
            "False",
        ),
    ],
    ("grpo/run/interrupt.py", "test_kill.py::test_a_hangup_stays_ignored"): [
        (
            "a hangup is no longer ignored",
            "Interrupt.renew",
            "(*STOPPING, HANGUP, TIME_OVER)",
            "STOPPING",
        ),
    ],
    (
        "grpo/tools/train_run.py",
        "test_kill.py::test_a_library_that_takes_the_signals_over_does_not_keep_them",
    ): [
        ("signals are left to a library", "take_steps", "interrupt.renew()", "pass"),
    ],
    ("grpo/tools/replay.py", "grpo/test_inspect.py"): [
        (
            "texts are not looked at",
            "replay",
            "[trainer.policy.decode(completion.tokens) for completion in completions]",
            "stored_figures['texts']",
        ),
        (
            "a step is repeated at the rate that its number has",
            "trainer_before",
            "learning_rate(run, between)",
            "trainer.learning_rate(between)",
        ),
        (
            "means of rewards are not looked at",
            "replay",
            "reward_metrics(first_tries(everything))",
            "{}",
        ),
    ],
    ("grpo/training/callbacks.py", "library/test_loop.py"): [
        (
            "a callback changes metrics",
            "run_callback",
            "report.metrics[name] is not value",
            "False",
        ),
        (
            "a callback changes scores",
            "run_callback",
            "[_parts(group) for group in groups] != parts",
            "False",
        ),
        (
            "a callback changes groups",
            "run_callback",
            "list(map(id, report.groups)) != list(map(id, groups))",
            "False",
        ),
    ],
    ("grpo/config_file.py", "grpo/test_config.py"): [
        ("1e-4 is a text", "_as_meant", "float(value)", "value"),
        ("off is False", "_word", "isinstance(value, bool)", "False"),
    ],
    ("grpo/config_file.py", "test_security.py"): [
        (
            "an unnamed loss file is executed",
            "require_trusted",
            "is_allowed(loss, allowed)",
            "True",
        ),
    ],
    ("grpo/run/sources.py", "test_resume.py"): [
        ("changed sources accepted unasked", "check", "set(found) <= set(accept)", "True"),
    ],
    ("grpo/run/sources.py", "grpo/test_sources.py"): [
        ("one page of each tensor", "_places", "(last - start) * i // (PAGES - 1)", "0"),
    ],
    ("grpo/run/sources.py", "library/test_rewards.py"): [
        ("a reward given in Python may change", "_programs", "functions.items()", "{}.items()"),
    ],
    ("grpo/run/dependencies.py", "test_resume.py"): [
        (
            "settings taken from config.yaml as they are",
            "Dependencies.read",
            "self.sources | {'config': settings_now}",
            "self.sources",
        ),
    ],
    ("grpo/run/interrupt.py", "test_lost_console.py::test_under_nohup_a_hangup_is_nothing"): [
        (
            "a hangup counts under nohup",
            "Interrupt.__enter__",
            "HANGUP and signal.getsignal(HANGUP) != signal.SIG_IGN",
            "HANGUP",
        ),
    ],
    ("grpo/run/interrupt.py", "test_kill.py::test_a_signal_that_is_sent_twice_is_one"): [
        (
            "a signal that is sent twice loses the step",
            "Interrupt.note",
            "time.monotonic() - self.time > SAME",
            "True",
        ),
    ],
    ("grpo/run/interrupt.py", "test_kill.py::test_a_second_signal_ends_the_run_at_once"): [
        (
            "no signal stops at once",
            "Interrupt.note",
            "time.monotonic() - self.time > SAME",
            "False",
        ),
    ],
    ("grpo/run/saver.py", "grpo/test_background.py"): [
        (
            "what is being written goes on learning",
            "Saver._copied",
            "self.memory.copy(live)",
            "live",
        ),
    ],
    ("grpo/run/background.py", "grpo/test_background.py"): [
        (
            "training waits for the disk",
            "Writer.collect",
            "wait or self._saved.done()",
            "True",
        ),
    ],
    ("grpo/run/checkpoint.py", "grpo/test_background.py"): [
        ("what was read back is not compared", "_on_disk", "_sha256(path) != checksum", "False"),
    ],
    ("grpo/run/preparation.py", "grpo/test_ways.py"): [
        (
            "imitation is measured at one level",
            "imitate_answers",
            "run.reported_levels",
            "{run.level}",
        ),
    ],
    ("grpo/run/checkpoint_rules.py", "grpo/test_checkpoint.py"): [
        (
            "an easier level beats the best",
            "CheckpointRules.decide",
            "level == self.level",
            "True",
        ),
        (
            "a harder level is compared with an easier one",
            "CheckpointRules.decide",
            "(level, None)",
            "(level, self.best)",
        ),
        (
            "the first save does not count for the spacing",
            "CheckpointRules.decide",
            "self.last is None or not is_regular",
            "not is_regular",
        ),
    ],
    ("grpo/run/checkpoint.py", "grpo/test_checkpoint.py"): [
        ("renamed before it is on the disk", "save_checkpoint", "sync(path)", "pass"),
        ("checksums not compared", "_damage", "_sha256(file) != fact['sha256']", "False"),
        (
            "first checkpoint deleted",
            "prune",
            "{valid[0], *valid[-2:], keep_best}",
            "{*valid[-2:], keep_best}",
        ),
        (
            "step gone back to deleted",
            "remove_after",
            "step_of(path) > step",
            "step_of(path) >= step",
        ),
    ],
    ("grpo/run/rollouts.py", "grpo/test_store_logs.py"): [
        ("reward stored as the advantage", "_to_json", "advantage", "score.reward"),
    ],
    ("grpo/run/reader.py", "test_resume.py"): [
        ("any evaluation is one before", "RunData.first_reports", "line['step'] == 0", "True"),
    ],
    ("grpo/run/files.py", "test_resume.py"): [
        (
            "a log that is gone is not named",
            "RunFiles.warn_of_damage",
            "range(1, done + 1)",
            "range(0)",
        ),
    ],
    ("data/files.py", "data/test_files.py"): [
        (
            "aliases expand without end",
            "load_yaml",
            "_expanded_size(node, {}) > MAX_NODES",
            "False",
        ),
        ("names stand twice", "_expanded_size", "count > 1", "False"),
        ("a log ends with half a line", "read_jsonl", "lines[:-1] if is_log else lines", "lines"),
        ("infinities become null", "raw_json", "b'null' not in content", "True"),
        ("writers share a name", "replacing", "threading.get_native_id()", "0"),
    ],
    ("grpo/run/trackers.py", "grpo/test_trackers.py"): [
        ("samples as they were drawn", "samples", "rewards.__getitem__", "lambda number: number"),
        ("the text of a model is Markdown", "_cell", "char.isalnum() or char == ' '", "True"),
        ("advantages of tokens are left out", "histograms", "[advantage]", "[]"),
        (
            "a tracker that failed is used again",
            "Trackers._try",
            "self.live.pop(name, None)",
            "pass",
        ),
    ],
    ("grpo/tools/hub.py", "grpo/test_export.py"): [
        ("a new repository is public", "push", "not is_public", "is_public"),
        ("the token is shown", "_first_line", "line.replace(token, '***')", "line"),
        ("a push without a token", "check_push", "get_token() is None", "False"),
    ],
    ("grpo/tools/model_card.py", "grpo/test_export.py"): [
        (
            "figures of later evaluations",
            "card",
            "[line for line in run.reports if line['step'] <= step]",
            "run.reports",
        ),
        ("the verdict on a later policy", "_verdict", "line['step'] > step", "False"),
        ("a published path", "_without_folders", "Path(part).name", "part"),
    ],
    (
        "grpo/tools/evaluation/texts.py",
        "evaluation/test_sampling.py evaluation/test_problems.py evaluation/test_own_texts.py",
    ): [
        (
            "texts that were trained on are evaluated on",
            "known_texts",
            "known |= set(saved['corpus'].values())",
            "pass",
        ),
        (
            "the run that an adapter started from is forgotten",
            "known_texts",
            "config.start or config.model",
            "config.model",
        ),
    ],
    ("grpo/run/opening.py", "library/test_rewards.py library/test_train.py"): [
        (
            "a resumed run may have another range of rewards",
            "_require_same_options",
            "name not in FREE_OPTIONS and value != saved.get(name)",
            "False",
        ),
    ],
    ("grpo/tools/evaluation/endpoint.py", "test_endpoint.py"): [
        (
            "a seed has the answers of another",
            "Endpoint._answer",
            "question.seed",
            "0",
        ),
    ],
    ("grpo/run/conclusion.py", "grpo/test_next_commands.py"): [
        (
            "solved once is solved for good",
            "solved_step",
            "line['step'] > last_unsolved",
            "is_solved(line)",
        ),
    ],
    ("grpo/flags.py", "grpo/test_config.py"): [
        ("all levels become the hardest", "read_settings", "values.get('mixed')", "False"),
    ],
    ("grpo/flags.py", "test_security.py"): [
        (
            "a file allows its own programs",
            "parse",
            "settings if is_inline(source) else {}",
            "settings",
        ),
    ],
    ("grpo/run/next_commands.py", "grpo/test_next_commands.py"): [
        (
            "what was learned at an easier level counts as learned",
            "next_command",
            "verdict.level != config.level",
            "False",
        ),
        (
            "a run that has ended is to go on",
            "next_command",
            "run.ended or verdict.stopped",
            "verdict.stopped",
        ),
        (
            "a ladder that is stuck is climbed again",
            "_easier",
            "run.config.curriculum",
            "''",
        ),
        (
            "a program of the user's is executed unasked",
            "EndedRun.trusted",
            "not is_of_project(config.task)",
            "False",
        ),
    ],
    ("grpo/mistakes.py", "grpo/test_mistakes.py"): [
        (
            "right answers count as mistakes",
            "most_common_mistake",
            "not score.exact",
            "True",
        ),
    ],
    ("grpo/tools/inspect_why.py", "grpo/test_inspect_why.py"): [
        (
            "truncated completions count as trained on",
            "training_in_words",
            "masks and completion.is_truncated",
            "False",
        ),
    ],
    ("grpo/tools/reward_words.py", "grpo/test_inspect_why.py"): [
        ("evaluations have shuffled rewards", "reward_in_words", "is_of_step", "True"),
    ],
    ("grpo/tools/report/live.py", "grpo/test_report_live.py"): [
        ("any host is served", "Handler._is_allowed", "name in HOSTS", "True"),
        (
            "any token is served",
            "Handler._is_allowed",
            "is_known and name in HOSTS",
            "name in HOSTS",
        ),
    ],
    ("grpo/tools/report/samples.py", "grpo/test_report_samples.py"): [
        ("a reward is rounded twice", "rounded", "round(value, 3)", "float(f'{value:.4g}')"),
        ("no target is a target", "view_of", "split_words(group.problem.target)", "True"),
    ],
    ("grpo/tools/report/search.py", "grpo/test_report_search.py"): [
        ("the case of a completion matters", "finds_in", "words.lower()", "words"),
        ("a text is found once for each completion", "finds_in", "dict.fromkeys", "list"),
        ("an answer never ends", "search", "time.monotonic() > end", "False"),
        ("a step is searched twice", "search", "after < step <= until", "after <= step <= until"),
    ],
    ("grpo/tools/report/outcome.py", "grpo/test_report.py"): [
        ("learning begins although it is lost again", "learning_began", "low[-1]", "low[0]"),
    ],
}
