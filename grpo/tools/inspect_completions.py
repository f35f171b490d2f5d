"""The views of `python -m grpo.inspect` on completions: group, tokens, replay, export.

Each takes the run, the flags and the console. A view returns an exit status, or None for 0.
"""

import argparse
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from data.errors import UserError
from data.text import escape_control
from grpo.records import Group
from grpo.run.folders import check_output
from grpo.run.reader import RunData, rollout_record
from grpo.run.rollouts import summaries
from grpo.run.tokenizer import MOST_TOKENS, tokenizer_of
from grpo.show.alignment import aligned, counts, first_divergence, rendered
from grpo.show.tables import advantage_of, class_of, done_to, said_of, show_table, tint
from grpo.tools.inspect_common import Figures, as_json, check_sample, show_next
from grpo.tools.tabular import export

# The columns of `tokens`.
TOKEN_FIGURES = {
    "position": ("position", "d"),
    "token": ("token", "d"),
    "log-prob": ("logprob", ".4f"),
    "advantage": ("advantage", "+.3f"),
}

# Those that --policy adds.
POLICY_FIGURES = {"entropy": ("entropy", ".4f"), "parity": ("parity", "+.1e")}


def show_group(run: RunData, arguments: argparse.Namespace, console: Console) -> None:
    """Show the completions of a group next to the target, highest reward first."""
    group = run.group(arguments.step, arguments.group, arguments.kind)
    order = sorted(range(len(group.completions)), key=lambda sample: -group.scores[sample].reward)
    target = group.problem.target
    records = [
        {
            "step": arguments.step,
            "group": arguments.group,
            "sample": sample,
            **rollout_record(group, sample),
            "first_divergence": first_divergence(target, group.texts[sample]),
        }
        for sample in order
    ]
    if as_json(records, arguments, console):
        return

    line = summaries([group])[0]
    console.print(Text.assemble(("prompt  ", "bold"), escape_control(group.problem.prompt)))
    if target.strip():
        console.print(Text.assemble(("target  ", "bold"), escape_control(target)))
    console.print(
        Text.assemble(
            ("group   ", "bold"),
            class_of(line),
            f", {done_to(line)}; reward {line['reward']:.3f} ± {line['reward_std']:.3f}, "
            f"{line['distinct']} distinct texts in {len(order)} completions, temperature "
            f"{group.temperature:g}",
        )
    )

    same_text = defaultdict(list)  # text -> the completions that wrote it, in order of reward
    for sample in order:
        same_text[group.texts[sample]].append(sample)
    for samples in same_text.values():
        _show_completions(run, group, samples, console, whole=arguments.whole)

    console.print()
    kind = "" if arguments.kind == "step" else f" --kind {arguments.kind}"
    show_next(run, f"why {arguments.step} {arguments.group} {order[-1]}{kind}", console)


def _show_completions(
    run: RunData, group: Group, samples: Sequence[int], console: Console, *, whole: bool
) -> None:
    """Show the completions `samples` of a group, which have the same text."""
    first = samples[0]
    target, text = group.problem.target, group.texts[first]
    completion, score = group.completions[first], group.scores[first]

    plural = "s" if len(samples) > 1 else ""
    title = f"completion{plural} {', '.join(map(str, samples))}"
    reward = f" ({run.config['reward']})" if run.config.get("reward") else ""
    end = "complete" if completion.finish == "stop" else "truncated"
    if completion.is_demonstration:
        end = "the right answer, which was shown"
    figures = (
        f"  reward {score.reward:.3f}{reward}, score {score.value:.3f}, advantage "
        f"{advantage_of(group, first)}, {len(completion.tokens)} tokens, {end}"
    )
    console.print()
    console.print(Text.assemble((title, "bold"), figures))

    columns = aligned(target, text)
    difference = ""
    if target.strip():
        difference = f"; {first_divergence(target, text) or 'right to the end'}"
    console.print(Text(f"{counts(columns)}{difference}{said_of(score.parts)}", "dim"))
    console.print(rendered(columns, whole=whole))


def show_tokens(run: RunData, arguments: argparse.Namespace, console: Console) -> None:
    """Show a line for each token of a completion."""
    group = run.group(arguments.step, arguments.group, arguments.kind)
    check_sample(run, group, arguments.sample)
    if arguments.policy and arguments.kind != "step":
        raise UserError(
            "--policy: only the policy of a training step can be computed again, not that of "
            f"--kind {arguments.kind}"
        )

    lines = _token_lines(run, group, arguments.sample)
    figures: Figures = TOKEN_FIGURES
    if arguments.policy:
        _add_policy(lines, run, arguments)
        figures = TOKEN_FIGURES | POLICY_FIGURES
    if as_json(lines, arguments, console):
        return

    def text_of(line: dict[str, Any]) -> Text:
        return Text(escape_control(line["text"] or ""), tint(line["logprob"]))

    show_table(console, lines, figures, {"text": text_of})


def _token_lines(run: RunData, group: Group, sample: int) -> list[dict[str, Any]]:
    """Return a record for each token of a completion."""
    completion = group.completions[sample]
    advantage = group.advantages[sample] if group.advantages else None
    texts = texts_of_tokens(run, completion.tokens)
    return [
        {
            "position": position,
            "token": token,
            "text": texts[position],
            "logprob": None if completion.is_demonstration else completion.logprobs[position],
            "advantage": advantage[position] if isinstance(advantage, list) else advantage,
        }
        for position, token in enumerate(completion.tokens)
    ]


def _add_policy(lines: list[dict[str, Any]], run: RunData, arguments: argparse.Namespace) -> None:
    """Add to the records of tokens the policy's entropy, and sampler less trainer as parity."""
    from grpo.tools.replay import token_figures  # imports the trainer, which takes seconds

    allowed = (arguments.task, arguments.reward_file, arguments.loss)
    figures = token_figures(run, arguments.step, arguments.group, arguments.sample, allowed)
    for line, entropy, logprob in zip(lines, *figures):
        sampled = line["logprob"]
        line |= {"entropy": entropy, "parity": None if sampled is None else sampled - logprob}


def show_replay(run: RunData, arguments: argparse.Namespace, console: Console) -> int:
    """Repeat a step's update and compare; return 1 if it differs."""
    from grpo.tools.replay import replay  # imports the trainer, which takes seconds

    allowed = (arguments.task, arguments.reward_file, arguments.loss)
    result = replay(run, arguments.step, allowed)
    lines = [
        {"figure": name, "stored": old, "again": new, "same": old == new}
        for name, (old, new) in result["figures"].items()
    ]
    status = 0 if result["same"] else 1
    if as_json([{**result, "figures": lines}], arguments, console):
        return status

    def same(line: dict[str, Any]) -> Text:
        return Text("yes") if line["same"] else Text("no", "bold red")

    show_table(
        console,
        [line for line in lines if line["figure"] not in ("texts", "advantages")],
        {"stored": ("stored", ".17g"), "repeated": ("again", ".17g")},
        {"": lambda line: line["figure"], "same": same},
    )
    for line in lines[-2:]:
        source = {"texts": "tokens", "advantages": "rewards"}[line["figure"]]
        verb = "are the same" if line["same"] else "differ"
        console.print(f"{line['figure']} from the stored {source}: they {verb}")

    start = "the model that the run began with"
    if result["start"]:
        start = f"the checkpoint of step {result['start']}"
    outcome = "identical to the last bit" if result["same"] else "it differs"
    console.print(f"step {arguments.step}, repeated from {start}: {outcome}")
    return status


def export_rollouts(run: RunData, arguments: argparse.Namespace, console: Console) -> None:
    """Write every completion to a file, one record each."""
    steps = [step for step in run.steps() if arguments.first <= step <= arguments.last_step]
    steps = steps[-arguments.last :] if arguments.last else steps
    records = (
        record for record in run.each_rollout(steps) if arguments.level in (None, record["level"])
    )
    check_output(str(arguments.output), "export")
    count = export(arguments.output, records)
    console.print(f"{arguments.output}: {count:,} completions of {len(steps)} steps")


def texts_of_tokens(run: RunData, tokens: Sequence[int]) -> list[str | None]:
    """Return the text of each token, by the tokenizer of a checkpoint of the run.

    Without a checkpoint the texts are None.
    """
    tokenizer = tokenizer_of(run.path)
    if tokenizer is None:
        return [None] * len(tokens)
    return [
        tokenizer.decode([token], skip_special_tokens=False) if token < MOST_TOKENS else None
        for token in tokens
    ]
