"""Mutants of alignment, data, tasks and benchmarks."""

# See `mutants`.
TABLE = {
    ("align/diagonals.py", "align/test_needleman.py"): [
        ("ties broken the other way", "Batch.fill", "delete < top", "delete <= top"),
        (
            "cells that overflow",
            "Batch.__init__",
            "np.min_scalar_type(-bound - 1)",
            "np.dtype(np.int8)",
        ),
        ("numbers that are not finite", "_finite", "math.isfinite(number)", "True"),
    ],
    ("align/bitparallel.py", "align/test_needleman.py"): [
        ("carries run into the neighbour", "BitColumns.__init__", "len(first) + 1", "len(first)"),
    ],
    ("align/prefixes.py", "align/test_prefixes.py"): [
        ("end of the target not open", "prefix_scores", "row_BM.max(axis=1)", "row_BM[:, -1]"),
    ],
    ("align/words.py", "align/test_words.py"): [
        (
            "ends counted in the normalised text",
            "word_ends",
            "_WORD.finditer(text)",
            "_WORD.finditer(normalise(text))",
        ),
    ],
    ("data/streams.py", "test_lost_console.py::test_a_lost_console_does_not_lose_the_run"): [
        (
            "what is buffered is written when the interpreter ends",
            "Lasting._attempt",
            "self._point_to_nothing()",
            "pass",
        ),
    ],
    ("data/streams.py", "test_lost_console.py::test_what_cannot_be_encoded_is_a_question_mark"): [
        ("a program ends at a character", "Lasting.write", "'replace'", "'strict'"),
    ],
    ("data/strange.py", "data/test_strange.py"): [
        ("all compounds are numbers", "compound", "rng.random() < 0.4", "True"),
        ("no word in capitals", "wrapped", "change(rng.choice(parts))", "rng.choice(parts)"),
        ("patterns without digits", "pattern", "string.digits", "'7'"),
        ("marks of any number", "mark", "rng.choice(stock)", "rng.choice(string.punctuation)"),
        (
            "every kind, whatever was asked for",
            "documents",
            "family(prose, rng, kinds=kinds)",
            "family(prose, rng)",
        ),
        (
            "every word as frequent as the next",
            "documents",
            "rng.uniform(*ZIPF)",
            "0.0",
        ),
        (
            "always the usual share",
            "documents",
            "mingled(plain, families, rng, share)",
            "mingled(plain, families, rng)",
        ),
    ],
    ("data/corpus.py", "data/test_corpus.py"): [
        (
            "a chapter of a book is no repeat",
            "_Shingles.nearest",
            "count / len(shingles)",
            "count / (len(shingles) + len(self._numbers))",
        ),
        (
            "the chapter is kept instead of the book",
            "without_repeats",
            "-len(documents[i].words)",
            "len(documents[i].words)",
        ),
        (
            "one sequence too few is looked up",
            "_Shingles.nearest",
            "len(shingles) - math.ceil(NEAR * len(shingles) - ROUNDING) + 1",
            "len(shingles) - math.ceil(NEAR * len(shingles) - ROUNDING)",
        ),
        ("the user's texts repeat", "without_repeats", "shingles.add(documents[number])", "pass"),
    ],
    ("data/foreign.py", "data/test_foreign.py"): [
        (
            "every file of a folder is read",
            "_licences",
            "found[::-(-len(found) // MAX_FILES) or 1]",
            "found",
        ),
    ],
    ("tasks/reward_calls.py", "tasks/test_rewards.py"): [
        (
            "the watcher is not told of the end",
            "Progress.__exit__",
            "self._tell(len(self.calls))",
            "None",
        ),
    ],
    ("tasks/rewards.py", "tasks/test_rewards.py"): [
        ("calls share the row", "_Function.calls", "copy.deepcopy(row)", "row"),
        (
            "workers that hang are kept",
            "RewardFunctions.scores",
            "self._calls = self._new_calls()",
            "pass",
        ),
        (
            "a single component is no metric",
            "RewardFunctions._score",
            "len(results) > 1 or results[0].is_named",
            "len(parts) > 1",
        ),
        (
            "rewards outside their range",
            "RewardFunctions._score",
            "not is_within(reward, (low, high))",
            "False",
        ),
    ],
    ("tasks/rows.py", "tasks/test_rows.py"): [
        ("numbers are rounded", "_written", "repr(number)", "f'{number:g}'"),
        ("no reward compares", "Rows.__init__", "bool(self.functions.of_groups)", "False"),
        ("a level of 0 passes", "_level", "given < 1", "False"),
        ("a level of a data frame is refused", "_level", "given.is_integer()", "False"),
        ("a conversation as text is shown", "_prompt_of", "TURNS.fullmatch(given)", "False"),
        ("a replaced column is not named", "_replaced", "name not in names.values()", "False"),
    ],
    ("tasks/checks.py", "tasks/test_scores.py"): [
        ("a score moves the process", "process_unchanged", "after != folder", "False"),
        ("a score changes torch", "_torch_settings", "torch is None", "True"),
        ("a score changes data", "data_unchanged", "_differs(problem.data, data)", "False"),
        ("an inner list is shared", "_copied", "(dict, list, tuple)", "dict"),
    ],
    ("tasks/scoring.py", "tasks/test_scores.py"): [
        ("a score empties the list", "scores_of", "list(completions)", "completions"),
        (
            "a value of 1 is not exact",
            "_checked",
            "bool(score.exact) or value >= 1.0",
            "bool(score.exact)",
        ),
        (
            "scores outside the range",
            "is_within",
            "low - margin <= number <= high + margin",
            "True",
        ),
    ],
    ("tasks/supply.py", "tasks/test_supply.py"): [
        ("what was trained on is held out", "first_distinct", "problem.key in seen", "False"),
        ("few draws end the search", "patience", "10 * max(10, most)", "2 * max(10, most)"),
        ("a problem is its own example", "Examples._draw", "{key}", "set()"),
        ("examples of the test split", "Examples._draw", "'train'", "'test'"),
    ],
    ("tasks/streams.py", "tasks/test_base.py"): [
        (
            "seed and index added",
            "problem_at",
            "f'{task.name}/{seed}/{split}/{level}/{index}'",
            "f'{task.name}/{seed + index}/{split}/{level}'",
        ),
        (
            "split not in the hash",
            "problem_at",
            "f'{task.name}/{seed}/{split}/{level}/{index}'",
            "f'{task.name}/{seed}/{level}/{index}'",
        ),
    ],
    ("tasks/arithmetic.py", "tasks/test_arithmetic.py"): [
        ("problems of any split", "Arithmetic.make", "split_of_key(problem.key) == split", "True"),
        ("no chain divides", "chain", "[n for n in FACTORS if value % n == 0]", "[]"),
        (
            "other digits than the level names",
            "Arithmetic._draw",
            "divmod(level, 10)",
            "divmod(level, 9)",
        ),
    ],
    ("tasks/gsm8k.py", "tasks/test_reasoning.py"): [
        ("one of several numbers counts", "number_of", "len(values) == 1", "values"),
        ("what is calculated counts", "number_of", "_UNIT_POWER.sub('', result)", "plain"),
        (
            "equal numbers of a formula are one",
            "number_of",
            "_OPERATOR.search(result[one.end() : start])",
            "None",
        ),
        ("minus sign of a result dropped", "_value", "(None, '+')", "(None, '+', '−')"),
    ],
    ("tasks/dataset.py", "tasks/test_dataset.py"): [
        ("problems of any task", "_require_task", "problem.task != task.name", "False"),
    ],
    ("data/rows.py", "tasks/test_rows.py"): [
        ("a missing date is a text", "_plain", "value == value", "True"),
        ("rows without end are read", "_numbered", "number > most", "False"),
    ],
    ("tasks/reasoning.py", "tasks/test_reasoning.py"): [
        ("an answer has one line", "_after_answer", "has_lines", "False"),
        ("marks of a right answer removed", "bare", "mark not in ends", "True"),
        ("its full stop removed", "bare", "right.endswith('.')", "False"),
    ],
    ("tasks/reasoning_gym.py", "tasks/test_reasoning.py"): [
        ("right answers of one line alone", "_has_lines", "'\\n' in str(answer).strip()", "False"),
        ("no example of many right answers", "_right_answer", "name in metadata", "False"),
    ],
    ("tasks/answers.py", "tasks/test_answers.py tasks/test_answer_forms.py"): [
        ("first marker counts", "_last", "pass", "break"),
        ("minus sign of typesetters dropped", "_number", "('-', '−')", "('-',)"),
        ("what was thought is read", "_after_thinking", "text[start:]", "text"),
        ("one number is an expression", "_place", "numbers >= 2", "numbers >= 1"),
    ],
    ("tasks/interleave.py", "tasks/test_interleave.py"): [
        (
            "the embedded corpus counts as the user's own",
            "Interleave.unseen",
            "{*known, *map(fingerprint, load_corpus())}",
            "known",
        ),
        (
            "credits of a text that runs on",
            "Interleave.credits",
            "max(i, len(target), 1)",
            "max(len(target), 1)",
        ),
    ],
    ("tasks/trap_names.py", "tasks/test_trap_names.py"): [
        ("B leads the other way", "TrapNames.kinds", "lead == 1", "lead == -1"),
        ("a slip changes the strategy", "", "MIN_EXTRA_STEPS = 3", "MIN_EXTRA_STEPS = 0"),
    ],
    ("tests/benchmarks/learning_records.py", "test_bench_learning.py"): [
        (
            "one lucky evaluation counts",
            "kept",
            "min(here[2], after[2])",
            "here[2]",
        ),
        (
            "one seed of several is enough",
            "Arm.highest",
            "min(map(highest, self.runs))",
            "max(map(highest, self.runs))",
        ),
        (
            "a killed run counts as whole",
            "read_record",
            'not lines or "end" not in lines[-1]',
            "not lines",
        ),
    ],
    ("tasks/interleave.py", "tasks/test_explanations.py"): [
        ("the shorter text divides", "explain", "written > wanted", "written < wanted"),
    ],
    ("tasks/audit.py", "test_audit.py::test_rewards_of_right_answers"): [
        (
            "rewards that pay anything pass",
            "_wrong_rewards",
            "2 * len(others) > len(problems)",
            "False",
        ),
        ("shifted rewards pass", "_wrong_rewards", "not any(map(any, right))", "not right[0][0]"),
    ],
    ("tasks/function_digest.py", "tasks/test_function_digest.py"): [
        ("defaults and body do not count", "_source", "ast.unparse(node)", "''"),
    ],
    ("tasks/optional.py", "tasks/test_optional.py"): [
        ("credits in any order", "_plain_pairs", "any(map(operator.gt, ends, ends[1:]))", "False"),
        ("credits behind the text", "_plain_pairs", "ends[-1] <= length", "True"),
        ("no steps at all", "default_steps_of", "steps < 1", "False"),
        ("a task that never ends", "_listed", "islice(found, MOST + 1)", "islice(found, MOST)"),
    ],
}
