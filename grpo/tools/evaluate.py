"""What `eval.py` does with its flags: evaluate each model, compare them, and show the results.

A model is loaded here, or is asked by way of an OpenAI-compatible server (--endpoint).
"""

import argparse
import json
import math
import multiprocessing
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from math import comb
from multiprocessing.pool import ThreadPool
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
from rich.console import Console as RichConsole
from rich.table import Table

from grpo.config import Config, with_texts
from grpo.data.errors import UserError, escape_control
from grpo.data.files import check_output, write_whole
from grpo.evaluate import (
    ShowProgress,
    budgets,
    evaluate,
    held_out_stream,
    mean_of,
    score_groups,
    select,
    summarise,
    truncation_warning,
)
from grpo.model.load import load_policy
from grpo.model.prompts import format_of, middle_left_out, sent_lines
from grpo.records import Completion, Group, row_of
from grpo.rollout.server import Server, reason_of
from grpo.run.resume import checkpoint_of, config_of, load_run_policy
from grpo.show.console import Console, control_mark, counted, interval
from grpo.show.group import question_and_answer
from grpo.tasks.base import (
    Problem,
    Task,
    after_reasoning,
    compares,
    declared_budget,
    foreign_of,
    key_of,
    problems_of,
    worded,
)
from grpo.tasks.registry import REWARD_FILE, implied_task, load_task, require_trusted, split_options
from grpo.tasks.supply import DistinctProblems, first_distinct, parse_levels, read_problems

Result = dict[str, Any]

# The settings of a run that hold in its evaluation, unless a flag overrides them.
SAMPLING = ("temperature", "top_p", "max_new_tokens")
PROMPT = ("system", "shots", "chat_template_kwargs", "wording")

# What a search for problems counts.
COUNTS = ("asked", "dropped", "too_long")

# The headings of the table, how wide it is if standard output is not a terminal, and the groups of
# each result whose worst completion is shown.
HEADINGS = "level,figure,n,mean [95 % interval],exact,truncated,sampling,budget,seen".split(",")
WIDTH = 100
WORST = 2
MOST_SHOWN = 1500  # characters of an answer

# Of requests to a server: the key's variable, how many at a time, and seconds between two looks at
# what has arrived.
KEY = "OPENAI_API_KEY"
AT_A_TIME = 8
LOOK = 1.0

# Some servers accept no value but their own of these, or another name, and say so.
RENAMED = {"max_tokens": "max_completion_tokens"}
OPTIONAL = re.compile(r"\b(temperature|top_p|seed|max_tokens)\b")
REFUSAL = re.compile(r"support|permitted|forbidden|unknown|unrecogni|deprecated|cannot", re.I)

# Without the model's tokenizer, the budget is a token for each character of the target, and this
# many more.
MARGIN = 32


def report(flags: argparse.Namespace, others: list[str]) -> int:
    """Evaluate each model, write the figures and the answers, and show them; return 0."""
    if flags.json:
        check_output(flags.json, "--json")
    kind = RemoteEvaluation if flags.endpoint else Evaluation
    evaluations = [kind(flags, model, others) for model in flags.models]
    results = [result for each in evaluations for result in each.results()]
    add_differences(results)

    # The file is written first, because the table may go to a pipe that is closed early.
    if flags.json:
        write_whole(flags.json, as_json(results))
    metrics = {getattr(each.task, "metric", "score") for each in evaluations}
    show(results, metrics.pop() if len(metrics) == 1 else "score")
    return 0


class Evaluation:
    """The evaluation of one model, which is prepared first, because it takes long to load.

    `config` is that of a run, or the default; `settings` are the `config` overridden by the flags,
    and by those `others` that are flags of the task.
    """

    def __init__(self, flags: argparse.Namespace, model: str, others: list[str]):
        self.flags, self.model = flags, model
        self.checkpoint, warnings = (None, []) if flags.endpoint else checkpoint_of(model)
        for warning in warnings:
            _say(warning)
        self.config = config = config_of(self.checkpoint) if self.checkpoint else Config()
        self.settings = settings = self._settings(others)
        self.task = load_task(
            settings.task, options=settings.task_options, wording=settings.wording
        )
        self.levels = self._levels()
        if flags.samples == 1 and compares(self.task):
            raise UserError(
                "--samples 1: the reward may compare the completions of a group; leave it out"
            )
        self.samples = flags.samples or (config.group_size if compares(self.task) else 1)
        self.format = format_of(self.task, settings, flags.seed)

    def _settings(self, others: list[str]) -> argparse.Namespace:
        flags, config, where = self.flags, self.config, Path(self.model)
        spec = flags.task
        if spec is None:  # an empty one is a mistake
            spec = implied_task(others) or config.task
        is_runs_task = spec == config.task
        require_trusted({"task": spec}, (flags.task,), where)  # its options are in the program
        given, unknown = split_options(spec, others)
        if unknown:
            fix = "python eval.py --help lists the flags"
            if not unknown[0].startswith("-"):
                fix = f"did you mean --model {unknown[0]}?"
            raise UserError(f"{unknown[0]}: no such flag; {fix}")
        options = {**(config.task_options if is_runs_task else {}), **given}
        require_trusted({"task_options": options}, (given.get(REWARD_FILE),), where)

        settings = vars(config) | {"task": spec, "task_options": options}
        if not is_runs_task:
            settings["wording"] = ""  # that of the run is for another task
        own = {name: getattr(flags, name) for name in (*SAMPLING, *PROMPT)}
        own = with_texts({name: value for name, value in own.items() if value is not None})
        return argparse.Namespace(**settings | own)

    def _levels(self) -> list[int]:
        """Return the levels asked for, else the run's, else the task's own."""
        config, settings = self.config, self.settings
        if self.flags.words:
            return parse_levels(self.flags.words, "--words")

        # The run's level means the same for its own task on other texts.
        own, asked = ({**each.task_options, "texts": ""} for each in (config, settings))
        if settings.task == config.task and own == asked and config.level:
            return [config.level]
        of_rows = {problem.level for problem in problems_of(self.task, "train")}
        return [max(of_rows, default=getattr(self.task, "default_level", 1))]

    def results(self) -> list[Result]:
        """Return the result of each level and, with --foreign, of each kind of text there."""
        flags, task = self.flags, self.task
        dataset = read_problems(Path(flags.dataset), task) if flags.dataset else []
        kinds = {level: foreign_of(task, level) for level in self.levels if flags.foreign}
        self._load()
        results = [self._at_level(level, dataset) for level in self.levels]
        for level, tasks in kinds.items():
            results += self._foreign(level, tasks)
        return results

    def _at_level(self, level: int, dataset: Sequence[Problem]) -> Result:
        flags, task = self.flags, self.task
        if flags.dataset:
            problems = [worded(task, one) for one in dataset if one.level == level]
            found = self._select(problems, flags.problems)
            where = f"{flags.dataset}, level {level}"
        else:
            found = self._find(task, level, flags.problems, flags.split)
            where = f"the {flags.split} split, level {level}, --seed {flags.seed}"
        if not found.problems:
            raise UserError(found.error or f"{where}: {found.why_none}")
        source = {"split": flags.split, "dataset": flags.dataset}
        return self._result(task, level, found, source)

    def _foreign(self, level: int, tasks: Mapping[str, Task]) -> list[Result]:
        """Return the result of each foreign kind of text, and last that of all kinds.

        The kinds share the problems evenly. One has no result if none of its problems fits.
        """
        size = math.ceil(self.flags.problems / len(tasks))
        results = []
        for kind, task in tasks.items():
            found = self._find(task, level, size, "test")
            if found.problems:
                source = {"split": "test", "dataset": "", "foreign": kind}
                results.append(self._result(task, level, found, source))
            else:
                _say(f"warning: level {level}, {kind}: {found.why_none}")
        if not results:
            raise UserError(
                f"--foreign: no problem of level {level} fits the model; give a lower level"
            )

        every = [group for result in results for group in result["groups"]]
        overall = {**results[0], **figures_of(every), "foreign": "all", "groups": []}
        for name in COUNTS:
            overall[name] = sum(result[name] for result in results)
        overall["budget"] = max(result["budget"] for result in results)
        return [*results, overall]

    def _find(self, task: Task, level: int, size: int, split: str) -> DistinctProblems:
        """Return `size` distinct problems that the model may be evaluated on, or all there are."""
        stream, fruitless = held_out_stream(task, level, split, seed=self.flags.seed, size=size)
        return self._select(stream, size, fruitless)

    def _result(
        self, task: Task, level: int, found: DistinctProblems, source: Mapping[str, str]
    ) -> Result:
        """Return the result: figures, "sent" (the lines of the first prompt), and all "groups"."""
        settings = self.settings
        kind = f", foreign {source['foreign']}" if "foreign" in source else ""
        what = f"{self.model}, level {level}{kind}"
        with Console(0, file=sys.stderr).working(what) as progress:
            groups = self._answer(task, found.problems, progress)
        if not any(group.judged for group in groups):
            raise UserError(f"{what}: the reward judged no answer to its {len(groups)} problems")
        return {
            "model": self.model,
            **self.config.mark,
            "task": settings.task,
            **settings.task_options,
            "level": level,
            **source,
            **{name: getattr(settings, name) for name in (*PROMPT, *SAMPLING)},
            "seed": self.flags.seed,
            "samples": self.samples,
            **{name: getattr(found, name) for name in COUNTS},
            **figures_of(groups),
            **self._about(task, found.problems),
            "groups": groups,
        }

    # --- what depends on the model ------------------------------------------------------------

    def _load(self) -> None:
        """Load the model, and the keys of the problems that it was trained on."""
        self.seen: set[str] = set()
        if self.checkpoint is None:
            self.policy = load_policy(self.model, device=self.flags.device)
        else:
            run = self.checkpoint, self.config
            self.policy, self.seen = load_run_policy(*run, self.flags.device)
        for note in self.policy.notes:
            _say(f"warning: {note}")
        self.policy.use(self.format)

    def _select(
        self, problems: Iterable[Problem], size: int, fruitless: int | None = None
    ) -> DistinctProblems:
        """Return distinct problems that training has not seen, and that fit the model's context."""
        budget = self.settings.max_new_tokens
        return select(self.policy, problems, size, self.seen, budget, fruitless)

    def _answer(
        self, task: Task, problems: Sequence[Problem], progress: ShowProgress
    ) -> list[Group]:
        sampling = self.settings, self.flags.seed, self.samples
        return evaluate(self.policy, task, problems, *sampling, progress)

    def _about(self, task: Task, problems: Sequence[Problem]) -> Result:
        """Return the largest budget, and the first prompt, decoded from its token ids."""
        budget = max(budgets(self.policy, task, problems, self.settings.max_new_tokens))
        return {"budget": budget, "sent": sent_lines(self.policy, problems[0])}


class RemoteEvaluation(Evaluation):
    """The evaluation of a model behind a server. Its tokenizer and its context are not known.

    The server is asked by POST .../chat/completions, several requests at a time in threads. One
    whose OPTIONAL values are refused is sent without them. Any other refusal is the user's mistake.
    """

    def _load(self) -> None:
        limits: dict[str, Any] = {"timeout": self.flags.timeout, "limit": "--timeout "}
        self.server = Server("--endpoint ", self.flags.endpoint, key=KEY, **limits)
        self.refused: set[str] = set()

    def _select(
        self, problems: Iterable[Problem], size: int, fruitless: int | None = None
    ) -> DistinctProblems:
        return first_distinct(problems, size, (), fruitless)

    def _answer(
        self, task: Task, problems: Sequence[Problem], progress: ShowProgress
    ) -> list[Group]:
        """Ask for the completions of each problem, and score them."""
        size = self.samples
        bodies = [self._body(task, problem, i) for problem in problems for i in range(size)]
        completions: list[Completion] = []
        with ThreadPool(AT_A_TIME) as pool:
            # The first is alone: it shows whether the server can be reached, and what it refuses.
            for part in (bodies[:1], bodies[1:]):
                answers, last = pool.imap(self._ask, part), len(completions) + len(part)
                while len(completions) < last:
                    progress(self.server.doing, len(completions), len(bodies))
                    with suppress(multiprocessing.TimeoutError):
                        completions.append(answers.next(LOOK))

        groups = []
        for number, problem in enumerate(problems):
            own = completions[number * size : (number + 1) * size]
            groups.append(Group(number, problem, (), self.settings.temperature, own))
        progress("scoring", 0, len(groups))
        score_groups(task, groups)
        return groups

    def _about(self, task: Task, problems: Sequence[Problem]) -> Result:
        """Return the largest budget, and the first prompt by its turns: the server writes them."""
        turns = [f"{role}: {text}" for role, text in self.format.turns(problems[0])]
        return {
            "endpoint": self.server.url,
            "refused": sorted(self.refused),
            "budget": max(self._budget(task, problem) for problem in problems),
            "sent": [escape_control(line) for text in turns for line in text.split("\n")],
        }

    def _budget(self, task: Task, problem: Problem) -> int:
        declared = declared_budget(task, problem.level)
        return self.settings.max_new_tokens or max(declared, len(problem.target) + MARGIN)

    def _body(self, task: Task, problem: Problem, sample: int) -> Result:
        turns = self.format.turns(problem)
        variables = dict(self.format.arguments)  # servers that lack the name refuse it
        return {
            **({"chat_template_kwargs": variables} if variables else {}),
            "model": self.model,
            "messages": [{"role": role, "content": text} for role, text in turns],
            "temperature": self.settings.temperature,
            "top_p": self.settings.top_p,
            "max_tokens": self._budget(task, problem),
            "seed": int(key_of(self.flags.seed, problem.key, sample), 16) % 2**31,
        }

    def _ask(self, body: Result) -> Completion:
        """Return the answer to a request without the values that the server refuses."""
        while True:
            names = {name: RENAMED.get(name) if name in self.refused else name for name in body}
            sent = {new: body[name] for name, new in names.items() if new}
            response = self.server.ask("/chat/completions", sent)
            if response.is_success:
                return self._read(response)
            is_refusal = response.status_code in (400, 422) and REFUSAL.search(response.text)
            found = sent.keys() & OPTIONAL.findall(response.text) if is_refusal else ()
            if not found:
                where = f"{self.server.where}, model {self.model}"
                raise UserError(f"{where}: {reason_of(response)}")
            name = max(found)  # of temperature and top_p, which some refuse together, top_p
            if name not in self.refused:
                instead = RENAMED.get(name, "its own value")
                _say(f"warning: {self.model}: the server refuses {name}; asking with {instead}")
            self.refused.add(name)

    def _read(self, response: httpx.Response) -> Completion:
        with self.server.reading(response, "an OpenAI-compatible server"):
            choice = response.json()["choices"][0]
            # JSON can write half of a surrogate pair, which no file can hold.
            answer = (choice["message"]["content"] or "").encode("utf-8", "replace").decode()
            if self.flags.strip_reasoning:
                answer = (after_reasoning(answer) or "").lstrip()
            finish = "length" if choice.get("finish_reason") == "length" else "stop"
        return Completion((), (), answer, finish)


def _say(text: str) -> None:
    print(f"eval.py: {escape_control(text)}", file=sys.stderr)


# --- figures and the file of answers ----------------------------------------------------------


def figures_of(groups: Sequence[Group]) -> Result:
    """Return the figures of a result, among them how many answers are empty, and with several
    samples pass@k for k = 1, 2, 4, ... and their number, over the problems of which all samples
    were judged.

    The estimator of Chen et al. 2021 (arXiv:2107.03374) has no bias: of n samples of a problem, k
    are all wrong in comb(wrong, k) of comb(n, k) choices. Intervals are over problems, because the
    samples of one problem are not independent.
    """
    empty = sum(not text.strip() for group in groups for text in group.texts)
    figures = {**summarise(groups), "empty": empty}
    n = min(len(group.scores) for group in groups)
    whole = [group.judged for group in groups if len(group.judged) >= n]
    if n == 1 or not whole:
        return figures

    wrongs = [sum(not score.exact for score in scores[:n]) for scores in whole]
    powers = [2**i for i in range(n.bit_length()) if 2**i < n]
    rates = {k: [1 - comb(wrong, k) / comb(n, k) for wrong in wrongs] for k in (*powers, n)}
    figures["pass_at"] = [{"k": k, **mean_of(values)} for k, values in rates.items()]
    return figures


def add_differences(results: Sequence[Result]) -> None:
    """Add to each result how its model differs from the first one, on problems that both got."""
    first = results[0]["model"]
    of_first: dict[tuple, dict[str, float]] = {}
    for result in results:
        place = result["level"], result.get("foreign")
        scores = {group.problem.key: group.judged for group in result["groups"]}
        values = {key: fmean(score.value for score in each) for key, each in scores.items() if each}
        if result["model"] == first:
            of_first[place] = values
        elif shared := sorted(values.keys() & of_first.get(place, {}).keys()):
            figures = mean_of([values[key] - of_first[place][key] for key in shared], -1.0)
            result["difference"] = {"to": first, "n": len(shared), **figures}


def as_json(results: Sequence[Result]) -> bytes:
    """Return the content of --json: the figures of each result, and all answers by problem."""
    lines = []
    for result in results:
        answers = [
            {
                "key": group.problem.key,
                "prompt": group.problem.prompt,
                "target": group.problem.target,
                "row": row_of(group.problem),
                "completions": group.texts,
                "scores": [None if each.abstained else each.value for each in group.scores],
                "exact": [bool(score.exact) for score in group.scores],
            }
            for group in result["groups"]
        ]
        figures = {key: x for key, x in result.items() if key not in ("sent", "groups")}
        lines.append({**figures, "prompt": "\n".join(result["sent"]), "answers": answers})
    return (json.dumps(lines, indent=1) + "\n").encode()


# --- what is printed --------------------------------------------------------------------------


def show(results: Sequence[Result], metric: str) -> None:
    """Print a table of the results, remarks, the first prompt and the worst completions."""
    width = None if sys.stdout.isatty() else WIDTH
    console = RichConsole(width=width, highlight=False, markup=False, emoji=False)
    first = results[0]
    has_several = len({result["model"] for result in results}) > 1
    whose = "" if has_several else f"{_marked_name(first)}: "
    texts = f" of {first['texts']}" if "texts" in first else ""
    source = first["dataset"] or f"the {first['split']} split{texts}"

    title = f"{whose}{metric} on {source}"
    if has_several:
        title += f", and its difference to {first['model']}"
    table = Table(title=escape_control(title), title_justify="left", box=None, padding=(0, 1, 0, 0))
    for name in (*["model"] * has_several, *HEADINGS):
        is_wide = name in ("model", "sampling")
        table.add_column(name, justify="right", overflow="fold", no_wrap=not is_wide)
    names = []
    for result in results:
        kind = f", {result['foreign']}" if "foreign" in result else ""
        model = [_marked_name(result)] * has_several
        names.append(escape_control(", ".join([*model, f"level {result['level']}{kind}"])))
        for row in _rows(result):
            table.add_row(*map(escape_control, [*model, f"{result['level']}{kind}", *row]))
    console.print(table)

    for name, result in zip(names, results):
        for line in _remarks(name, result):
            console.print(line, soft_wrap=True)
    console.print("\nthe first prompt as it was sent to the model", style="bold")
    for line in middle_left_out(first["sent"]):
        console.print(f"  {line}", soft_wrap=True)
    for name, result in zip(names, results):
        _show_worst(console, name, result["groups"])


def _marked_name(result: Result) -> str:
    return f"{control_mark(result)}{result['model']}"


def _rows(result: Result) -> Iterator[list[str]]:
    """Yield rows of HEADINGS: the score, then pass@k and the difference to the first model."""
    sampling = f"T {result['temperature']:g}" if result["temperature"] else "greedy"
    refused = result.get("refused", ())
    if result["temperature"] and result["top_p"] < 1 and "top_p" not in refused:
        sampling += f", top-p {result['top_p']:g}"
    if "temperature" in refused:
        sampling = "the server's"
    samples = f" × {result['samples']}" if result["samples"] > 1 else ""
    shares = [f"{result[name]:.3f}" for name in ("exact", "truncated")]
    counts = [str(result["budget"]), str(result["dropped"])]
    yield ["score", f"{result['n']}{samples}", interval(result, ".4f"), *shares, sampling, *counts]
    for name, component in result["components"].items():
        yield [name, "", interval(component, ".4f")]
    for entry in result.get("pass_at", []):
        yield [f"pass@{entry['k']}", "", interval(entry, ".4f")]
    if difference := result.get("difference"):
        yield ["difference", str(difference["n"]), interval(difference, "+.4f")]


def _remarks(name: str, result: Result) -> Iterator[str]:
    if result["n"] < result["asked"]:
        yield f"{name}: {counted(result)}"
    if result["unjudged"]:
        yield (
            f"warning: {name}: the reward did not judge {result['unjudged']} of "
            f"{result['completions']} answers, which the figures leave out"
        )
    if result["too_long"]:
        yield (
            f"{name}: {result['too_long']} problems do not fit the model's context or the budget "
            "and were left out"
        )
    if result["empty"]:
        fix = "; if reasoning takes the whole budget, give a larger --max-new-tokens"
        yield (
            f"warning: {name}: {result['empty']} of {result['completions']} answers are empty"
            f"{fix if result['truncated'] else ''}"
        )
    if warning := truncation_warning(result, name):
        yield f"warning: {warning}"


def _show_worst(console: RichConsole, name: str, groups: Sequence[Group]) -> None:
    judged = [group for group in groups if group.judged]
    by_value = sorted(judged, key=lambda group: min(score.value for score in group.judged))
    for group in by_value[:WORST]:
        pairs = [pair for pair in zip(group.scores, group.completions) if not pair[0].abstained]
        score, completion = min(pairs, key=lambda pair: pair[0].value)
        if score.exact:
            return
        console.print(f"\n{name}, score {score.value:.4f}", style="bold")
        console.print(question_and_answer(group.problem, completion.text, MOST_SHOWN), end="")
