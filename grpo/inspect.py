"""Why did a completion get its reward? Show what a run has stored, from all steps down to a token.

    python -m grpo.inspect runs/NAME steps                 every step
    python -m grpo.inspect runs/NAME step 12               its groups: class, reward, advantages
    python -m grpo.inspect runs/NAME group 12 3            a group's completions by reward
    python -m grpo.inspect runs/NAME why 12 3 0            its reward and advantage in words
    python -m grpo.inspect runs/NAME tokens 12 3 0         a completion's tokens
    python -m grpo.inspect runs/NAME degenerate            the groups without gradient, and why
    python -m grpo.inspect runs/NAME replay 12             repeat the step's update and compare

Steps are counted from 1, groups and completions from 0, as in the run's files. The exit status is 1
if a replayed step differs, and 2 if there is no such run, step or group, or if a file is damaged.
`grpo.load_run` gives every record to Python and pandas.

Nothing depends on colour alone: a text has the marks of wdiff, `[-missing-]`, `{+added+}`, and both
for a word that replaces another.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.text import Text

from grpo.config import SCALES
from grpo.data.errors import Parser, UserError, command_of, escape_control, exit_status
from grpo.records import CLASSES, WHY, Group, summaries
from grpo.run.logs import KINDS, MOST_TOKENS, load_run, tokenizer_of
from grpo.show.console import show_table
from grpo.show.group import Column, aligned, first_divergence, question_of, reward_in_words

Record = Mapping[str, Any]

# Columns of the output if it is not a terminal.
PIPE_WIDTH = 160

# The columns of `steps`, of which a narrow screen cuts the last ones off, and of groups.
STEP_FIGURES = (
    "step level reward group_std value exact groups/count groups/kept completions/mean_length "
    "distinct_completions entropy grad_norm kl step_time"
).split()
GROUP_FIGURES = "group level reward reward_std value exact distinct".split()

# What was done with a group, by its action.
DONE_TO = {
    "keep": "kept",
    "skip": "skipped",
    "demonstrate": "shown the right answer",
    "imitate": "imitated",
}

# What a replay repeats without running the model.
FROM = {
    "texts": "texts, from the stored tokens",
    "advantages": "advantages, from the stored rewards",
}

# The colours of words that are not right.
STYLES = {"substitute": "bold magenta", "delete": "bold red", "insert": "bold blue"}

# In a long run of right words, this many are shown at each end.
CONTEXT = 6


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program with these arguments; return the exit status."""
    return exit_status("grpo.inspect", lambda: show(argv))


def show(argv: Sequence[str] | None) -> int:
    """Show the view that the arguments name; return the exit status."""
    arguments = parse(argv)
    numbers = [getattr(arguments, name) for name in NUMBERS if name in arguments]
    return arguments.show(View(arguments), *numbers) or 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the flags; `show` is the method of View."""
    parser = Parser(prog=command_of("inspect"), description=__doc__)
    parser.add_argument("run", type=Path, help="the directory of a run")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    parts = {}
    for name, count in VIEWS.items():
        method = getattr(View, name)
        part = parts[name] = commands.add_parser(name, help=method.__doc__)
        part.set_defaults(show=method)
        for number in NUMBERS[:count]:
            part.add_argument(number, type=int)

    for name in ("step", "group", "why", "tokens"):
        parts[name].add_argument(
            "--kind",
            default="step",
            choices=KINDS,
            help="what they were sampled for: training (the default), an evaluation, a validation "
            "check, the pre-flight, the evaluation after imitation (imitated), or a step that "
            "failed; imitation: the right answers that were imitated",
        )
    for flag, name in (("--task", "CLASS"), ("--reward-file", "FUNCTION"), ("--loss", "FUNCTION")):
        help = "the same as for train.py: allows this program of yours to be executed"
        parts["replay"].add_argument(flag, metavar=f"FILE:{name}", help=help)
    return parser.parse_args(argv)


class View:
    """What the commands show of a run: a method for each, which takes its numbers."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments = arguments
        self.run = load_run(arguments.run)
        self.kind = getattr(arguments, "kind", "step")
        width = None if sys.stdout.isatty() else PIPE_WIDTH
        self.console = Console(width=width, highlight=False, markup=False, emoji=False)

    def _group_of(self, step: int, number: int, sample: int) -> Group:
        group = self.run.group(step, number, self.kind)
        most = len(group.completions) - 1
        if not 0 <= sample <= most:
            raise UserError(
                f"{self.run.path}: the group has no completion {sample}; it has 0 to {most}"
            )
        return group

    def steps(self) -> None:
        """Show a line for each step."""
        lines = []
        for line in self.run.metrics:
            numbers = {name: line.get(f"groups/class/{name}") for name in CLASSES}
            classes = ", ".join(f"{number:g} {name}" for name, number in numbers.items() if number)
            lines.append({**line, "classes": classes})
        if not lines:
            raise UserError(f"{self.run.path}: the run has made no step yet")
        show_table(self.console, lines, [*STEP_FIGURES, "classes"])

    def step(self, step: int) -> None:
        """Show a line for each group of a step."""
        groups = self.run.groups(step, self.kind)
        lines = []
        for line, group in zip(summaries(groups), groups):
            rows = [row if isinstance(row, list) else [row] for row in group.advantages]
            extent = f"{min(map(min, rows)):+.2f} to {max(map(max, rows)):+.2f}" if rows else ""
            lines.append({**line, "done": DONE_TO[group.action], "advantages": extent})

        # Only groups that were sampled for training have a class, and something done with them.
        is_training = self.kind in ("step", "failed")
        words = ["class", "done", "advantages", "trap"] if is_training else ["trap"]
        show_table(self.console, lines, [*GROUP_FIGURES, *words])

    def degenerate(self) -> None:
        """Show the groups without gradient."""
        lines = [
            {**line, "why": WHY[line["class"]], "done": DONE_TO[line["action"]]}
            for line in self.run.group_index
            if line["class"] in WHY
        ]
        show_table(self.console, lines, ["step", *GROUP_FIGURES, "why", "done", "trap"])

    def group(self, step: int, number: int) -> None:
        """Show the texts of a group next to the target, highest reward first."""
        group = self.run.group(step, number, self.kind)
        (line,) = summaries([group])
        figures = (
            f"{group.class_name}, {DONE_TO[group.action]}; reward {line['reward']:.3f} ± "
            f"{line['reward_std']:.3f}, {line['distinct']} distinct texts in {len(group.texts)} "
            f"completions, temperature {group.temperature:g}"
        )
        target = group.problem.target.strip() and group.problem.target
        about = question_of(group.problem) | {"prompt": group.problem.prompt}
        about |= {"target": target, "group": figures}
        for name, text in about.items():
            if text:
                self.console.print(Text.assemble((f"{name:<8}", "bold"), escape_control(text)))

        same_text = defaultdict(list)
        for sample in sorted(range(len(group.rewards)), key=lambda each: -group.rewards[each]):
            same_text[group.texts[sample]].append(sample)
        for samples in same_text.values():
            self.console.print()
            lines = completion_lines(group, samples, self.run.config.get("reward") or "")
            self.console.print(*lines, sep="\n")

    def why(self, step: int, number: int, sample: int) -> None:
        """Say in words why a completion earned its reward and advantage, and what it taught."""
        config, kind = self.run.config, self.kind
        group = self._group_of(step, number, sample)
        advantage = training = "none: the completion was not sampled for training"
        if kind == "step":
            groups = self.run.groups(step)
            advantage = advantage_in_words(config, groups, group, sample)
            training = training_in_words(group, sample)
        reward = reward_in_words(config, group, sample, is_of_step=kind in ("step", "failed"))
        said = {"reward": reward, "advantage": advantage, "training": training}
        for name, sentence in said.items():
            line = Text.assemble((f"{name:<9}  ", "bold"), escape_control(sentence))
            self.console.print(line, soft_wrap=not self.console.is_terminal)

    def tokens(self, step: int, number: int, sample: int) -> None:
        """Show a line for each token of a completion, with its text if the run has a tokenizer."""
        group = self._group_of(step, number, sample)
        completion = group.completions[sample]
        advantage = group.advantages[sample] if group.advantages else None
        tokenizer = tokenizer_of(self.run.path)
        lines = []
        for position, token in enumerate(completion.tokens):
            line: dict[str, Any] = {"position": position, "token": token}
            if tokenizer is not None and token < MOST_TOKENS:
                line["text"] = tokenizer.decode([token], skip_special_tokens=False)
            if not completion.is_demonstration:
                line["logprob"] = completion.logprobs[position]
            line["advantage"] = advantage[position] if isinstance(advantage, list) else advantage
            lines.append(line)
        show_table(self.console, lines, "position token logprob advantage text".split())

    def replay(self, step: int) -> int:
        """Repeat a step's update and compare; the status is 1 if it differs."""
        from grpo.tools.replay import replay  # imports the trainer, which takes seconds

        programs = [getattr(self.arguments, name) for name in ("task", "reward_file", "loss")]
        result = replay(self.run, step, programs)
        lines = []
        for name, (old, new) in result["figures"].items():
            numbers = {} if name in FROM else {"stored": old, "repeated": new}
            name = FROM.get(name, name)
            lines.append({"figure": name, "same": "yes" if old == new else "no", **numbers})
        show_table(self.console, lines, "stored repeated figure same".split())

        start = "the run's first model"
        if result["start"]:
            start = f"step {result['start']}'s checkpoint"
        outcome = "identical to the last bit" if result["same"] else "it differs"
        self.console.print(f"step {step}, repeated from {start}: {outcome}")
        return 0 if result["same"] else 1


# The commands, which are methods of View, and how many of the numbers each takes.
NUMBERS = ("step", "group", "sample")
VIEWS = {"steps": 0, "step": 1, "group": 2, "why": 3, "tokens": 3, "degenerate": 0, "replay": 1}


# --- a group and its completions as text --------------------------------------------------------


def completion_lines(group: Group, samples: Sequence[int], reward_name: str) -> Iterator[Text]:
    """Yield the lines of the completions `samples`, which have the same text."""
    first = samples[0]
    completion, score = group.completions[first], group.scores[first]
    target = group.problem.target

    title = f"completion{'s' * (len(samples) > 1)} {', '.join(map(str, samples))}"
    reward = f" ({reward_name})" if reward_name else ""
    yield Text.assemble(
        (title, "bold"),
        f"  reward {score.reward:.3f}{reward}, score {score.value:.3f}, advantage "
        f"{advantage_of(group, first)}, {len(completion.tokens)} tokens, {completion.ending}",
    )

    said = []
    if target.strip():
        said.append(first_divergence(target, completion.text) or "right to the end")
    for name, value in score.parts.items():
        if value is not None:
            text = f"{value:.3g}" if isinstance(value, float) else escape_control(str(value))
            said.append(f"{name} {text}")
    if said:
        yield Text(", ".join(said), "dim")
    yield rendered(aligned(target, completion.text))


def rendered(columns: Sequence[Column]) -> Text:
    """Return the alignment as text; the number of its words is the middle of a long right run."""
    pieces: list[Text] = []
    for right, same in groupby(columns, lambda column: column.kind in ("match", "plain")):
        run = list(same)  # neighbouring words that are all right, or all wrong
        words = [_word(column) for column in run]
        hidden = len(run) - 2 * CONTEXT
        if right and hidden > CONTEXT:
            what = "right" if run[0].kind == "match" else "more"
            words[CONTEXT:-CONTEXT] = [Text(f"… {hidden} {what} …", "dim")]
        pieces += words
    return Text(" ").join(pieces)


def _word(column: Column) -> Text:
    kind, wanted, written = column
    if kind in ("match", "plain"):
        return Text(escape_control(written or ""))
    missing = f"[-{escape_control(wanted)}-]" if wanted is not None else ""
    added = f"{{+{escape_control(written)}+}}" if written is not None else ""
    return Text(missing + added, STYLES[kind])


def advantage_of(group: Group, sample: int) -> str:
    """Return the advantage of a completion, or the range of its tokens' advantages."""
    if not group.advantages:
        return "none"
    advantage = group.advantages[sample]
    if isinstance(advantage, list):
        return f"{min(advantage):+.3f} to {max(advantage):+.3f} by token"
    return f"{advantage:+.3f}"


# --- why, in sentences that have the numbers that they are made of -----------------------------


def advantage_in_words(config: Record, groups: Sequence[Group], group: Group, sample: int) -> str:
    """Return how the reward became the advantage, e.g. "-0.523 = (0.190 - 0.471) / 0.537, ..."."""
    from grpo.learn.advantages import EPS, divisors  # imports torch, which takes seconds

    rewards = group.rewards
    mean = fmean(rewards)
    if not group.advantages:
        return (
            f"none: the group was {DONE_TO[group.action]} ({group.class_name}: "
            f"{WHY.get(group.class_name, 'its rewards vary')}); the mean of its {len(rewards)} "
            f"rewards is {mean:.3f}"
        )

    advantage = advantage_of(group, sample)
    if isinstance(group.advantages[sample], list):
        return f"{advantage}: each token has its own, by what its word added to the reward"

    # "batch" is over all groups that the step trained on.
    scale = config.get("scale", "group")
    if scale not in SCALES:
        return f"{advantage}, by the run's own function ({scale})"
    trained = [each for each in groups if each.advantages] if scale == "batch" else [group]
    (divisor, *_) = divisors([each.rewards for each in trained], scale=scale)

    digits = _enough_digits(advantage, rewards[sample], mean, divisor)
    difference = f"({rewards[sample]:.{digits}f} - {mean:.{digits}f})"
    of_group = f"the reward less the mean of the group's {len(rewards)} rewards"
    if scale == "none":
        return f"{advantage} = {difference}: {of_group}"
    whose = "their" if scale == "group" else "all trained rewards'"
    return (
        f"{advantage} = {difference} / {divisor:.{digits + 1}f}: {of_group}, over {whose} standard "
        f"deviation + {EPS:g}"
    )


def _enough_digits(advantage: str, reward: float, mean: float, divisor: float) -> int:
    """Return the decimals (one more for the divisor) that give the `advantage` again."""
    for digits in range(3, 17):
        difference = round(reward, digits) - round(mean, digits)
        # Half of its last digit, which may have been rounded up or down.
        if abs(difference / round(divisor, digits + 1) - float(advantage)) < 0.0005001:
            return digits
    return 3  # the stored advantage was computed in another way


def training_in_words(group: Group, sample: int) -> str:
    """Return whether the step trained on a completion, and which way."""
    if group.action == "demonstrate":
        return "in the group's copy, where the right answer replaces the last completion"
    if not group.advantages:
        return "no: the group taught nothing"

    advantage, effect = group.advantages[sample], ""
    if advantage == 0:
        effect = "; its advantage is 0, so it taught nothing"
    elif not isinstance(advantage, list):
        sign, verb = ("positive", "raises") if advantage > 0 else ("negative", "lowers")
        effect = f"; its advantage is {sign}, so the update {verb} its probability"
    return f"yes, on its {len(group.completions[sample].tokens)} tokens{effect}"


if __name__ == "__main__":
    sys.exit(main())
