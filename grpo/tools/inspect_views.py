"""The views of `python -m grpo.inspect`: each takes the run, the flags and the console.

A view returns an exit status, or None for 0.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from grpo.records import Group
from grpo.run.reader import RunData, load_run, rollout_record
from grpo.run.rollouts import summaries
from grpo.show.alignment import aligned, counts, first_divergence, rendered
from grpo.show.console import interval
from grpo.show.tables import (
    WHY,
    advantage_of,
    advantage_range,
    class_of,
    classes_of,
    done_to,
    said_of,
    show_table,
    tint,
    trap_of,
)
from grpo.text import escape_control
from grpo.tools.tabular import export
from tasks.base import UserError

Record = Mapping[str, Any]
STEP_FIGURES = {  # of a line of metrics.jsonl: head of the column -> key, format
    "step": ("step", "d"),
    "level": ("level", "d"),
    "reward": ("reward", ".3f"),
    "std": ("reward_std", ".3f"),
    "score": ("value", ".3f"),
    "exact": ("exact", ".2f"),
    "groups": ("groups/count", "d"),
    "kept": ("groups/kept", "d"),
    "T": ("temperature", ".2f"),
    "distinct": ("distinct_completions", ".1f"),
    "entropy": ("entropy", ".3f"),
    "KL": ("kl", ".4f"),
    "gradient": ("grad_norm", ".3f"),
    "tokens": ("completions/mean_length", ".0f"),
    "s": ("step_time", ".1f"),
}
GROUP_FIGURES = {
    "group": ("group", "d"),
    "level": ("level", "d"),
    "T": ("temperature", ".2f"),
    "reward": ("reward", ".3f"),
    "std": ("reward_std", ".3f"),
    "score": ("value", ".3f"),
    "exact": ("exact", ".2f"),
    "distinct": ("distinct", "d"),
}
COMPARED = {
    "reward": "reward",
    "score": "value",
    "std": "group_std",
    "entropy": "entropy",
    "gradient": "grad_norm",
}


def show_steps(run: RunData, arguments: argparse.Namespace, console: Console) -> None:
    """Show a line for each step."""
    lines = chosen(run.metrics, arguments)
    if not lines:
        raise UserError(f"{run.path}: no such steps; it has {len(run.metrics)}")
    if not as_json(lines, arguments, console):
        figures = {
            head: figure
            for head, figure in STEP_FIGURES.items()
            if any(line.get(figure[0]) is not None for line in lines)
        }
        show_table(console, lines, figures, {"classes": classes_of})
        console.print(
            f"next: python -m grpo.inspect {run.path} step {lines[-1]['step']}", style="dim"
        )


def show_step(run: RunData, arguments: argparse.Namespace, console: Console) -> None:
    """Show a line for each group of a step."""
    groups = run.groups(arguments.step, arguments.kind)
    lines = [
        {
            "step": arguments.step,
            **line,
            "advantages": advantage_range(group),
            "prompt": group.problem.prompt,
        }
        for line, group in zip(summaries(groups), groups)
    ]
    if not as_json(lines, arguments, console):
        show_table(
            console,
            lines,
            GROUP_FIGURES,
            {
                "class": class_of,
                "done": done_to,
                "advantages": lambda line: line["advantages"],
                "trap": trap_of,
            },
        )
        most = max(lines, key=lambda line: line["reward_std"])
        kind = "" if arguments.kind == "step" else f" --kind {arguments.kind}"
        console.print(
            f"next: python -m grpo.inspect {run.path} group {arguments.step} {most['group']}{kind}",
            style="dim",
        )


def show_group(run: RunData, arguments: argparse.Namespace, console: Console) -> None:
    """Show the completions of a group beside the target, highest reward first."""
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
    console.print(Text.assemble(("wanted  ", "bold"), escape_control(target)))
    console.print(
        Text.assemble(
            ("group   ", "bold"),
            class_of(line),
            f", {done_to(line)}; reward {line['reward']:.3f} ± {line['reward_std']:.3f}, "
            f"{line['distinct']} different of {len(order)}, temperature {group.temperature:g}",
        )
    )

    same_text = defaultdict(list)  # text -> the completions that wrote it, in order of reward
    for sample in order:
        same_text[group.texts[sample]].append(sample)
    for samples in same_text.values():
        _show_completions(run, group, samples, console, whole=arguments.whole)

    console.print(
        f"\nnext: python -m grpo.inspect {run.path} tokens {arguments.step} {arguments.group} "
        f"{order[-1]}",
        style="dim",
    )


def _show_completions(
    run: RunData, group: Group, samples: Sequence[int], console: Console, *, whole: bool
) -> None:
    """Show the completions `samples` of a group, which have the same text."""
    target, text = group.problem.target, group.texts[samples[0]]
    completion, score = group.completions[samples[0]], group.scores[samples[0]]
    columns = aligned(target, text)
    reward = f" ({run.config['reward']})" if run.config.get("reward") else ""
    plural = "s" if len(samples) > 1 else ""

    console.print()
    console.print(
        Text.assemble(
            (f"completion{plural} {', '.join(map(str, samples))}", "bold"),
            f"  reward {score.reward:.3f}{reward}, score {score.value:.3f}, advantage "
            f"{advantage_of(group, samples[0])}, {len(completion.tokens)} tokens, "
            f"{'ended' if completion.finish == 'stop' else 'truncated'}",
        )
    )
    difference = first_divergence(target, text) or "right to the end"
    console.print(Text(f"{counts(columns)}; {difference}{said_of(score.parts)}", "dim"))
    console.print(rendered(columns, whole=whole))


def show_tokens(run: RunData, arguments: argparse.Namespace, console: Console) -> None:
    """Show a line for each token of a completion."""
    group = run.group(arguments.step, arguments.group, arguments.kind)
    if not 0 <= arguments.sample < len(group.completions):
        raise UserError(
            f"{run.path}: the group has no completion {arguments.sample}; it has 0 to "
            f"{len(group.completions) - 1}"
        )
    completion = group.completions[arguments.sample]
    advantage = group.advantages[arguments.sample] if group.advantages else None
    texts = texts_of_tokens(run, completion.tokens)
    lines = [
        {
            "position": i,
            "token": token,
            "text": text,
            "logprob": logprob,
            "advantage": advantage[i] if isinstance(advantage, list) else advantage,
        }
        for i, (token, text, logprob) in enumerate(
            zip(completion.tokens, texts, completion.logprobs)
        )
    ]
    figures = {
        "position": ("position", "d"),
        "token": ("token", "d"),
        "log-prob": ("logprob", ".4f"),
        "advantage": ("advantage", "+.3f"),
    }
    if arguments.policy and arguments.kind != "step":
        raise UserError(
            "--policy: only the policy of a training step can be computed again, not that of "
            f"--kind {arguments.kind}"
        )
    if arguments.policy:
        from grpo.tools.replay import token_figures  # the trainer: it takes seconds to import

        for line, entropy, logprob in zip(
            lines,
            *token_figures(run, arguments.step, arguments.group, arguments.sample, arguments.task),
        ):
            line |= {"entropy": entropy, "parity": line["logprob"] - logprob}
        figures |= {"entropy": ("entropy", ".4f"), "parity": ("parity", "+.1e")}
    if not as_json(lines, arguments, console):
        show_table(
            console,
            lines,
            figures,
            {"text": lambda line: Text(escape_control(line["text"] or ""), tint(line["logprob"]))},
        )


def show_replay(run: RunData, arguments: argparse.Namespace, console: Console) -> int:
    """Repeat a step's update and compare; return 1 if it differs."""
    from grpo.tools.replay import replay  # the trainer: it takes seconds to import

    found = replay(run, arguments.step, arguments.task)
    same, lines = (
        found["same"],
        [
            {"figure": name, "stored": old, "again": new, "same": old == new}
            for name, (old, new) in found["figures"].items()
        ],
    )
    if not as_json([{**found, "figures": lines}], arguments, console):
        show_table(
            console,
            [line for line in lines if line["figure"] != "advantages"],
            {"stored": ("stored", ".17g"), "repeated": ("again", ".17g")},
            {
                "": lambda line: line["figure"],
                "same": lambda line: (
                    Text("yes", "green") if line["same"] else Text("no", "bold red")
                ),
            },
        )
        console.print(
            "advantages from the stored rewards: "
            f"{'the same' if lines[-1]['same'] else 'they differ'}"
        )
        start = (
            f"the checkpoint of step {found['start']}"
            if found["start"]
            else "the model that the run began with"
        )
        console.print(
            f"step {arguments.step} repeated from {start}: "
            + ("the same, to the last bit" if same else "it differs")
        )
    return 0 if same else 1


def show_degenerate(run: RunData, arguments: argparse.Namespace, console: Console) -> None:
    """Show the groups whose rewards did not differ."""
    lines = chosen(
        run.group_index,
        arguments,
        lambda line: line["class"] != "varied" and arguments.class_name in (None, line["class"]),
    )
    if as_json(lines, arguments, console):
        return
    if not lines:
        console.print("no such group: the rewards of every group differ")
        return
    show_table(
        console,
        lines,
        {"step": ("step", "d"), **GROUP_FIGURES},
        {"why": lambda line: WHY[line["class"]], "done": done_to, "trap": trap_of},
    )
    console.print(
        f"{len(lines)} of {len(run.group_index)} groups; next: python -m grpo.inspect {run.path} "
        f"group {lines[-1]['step']} {lines[-1]['group']}",
        style="dim",
    )


def show_compare(run: RunData, arguments: argparse.Namespace, console: Console) -> None:
    """Show several runs side by side."""
    rows = [compared(data, arguments) for data in (run, *map(load_run, arguments.others))]
    if as_json(rows, arguments, console):
        return
    table = Table("", box=None)
    for row in rows:
        table.add_column(Text(row["run"]))
    for name in rows[0]:
        cells = [row[name] for row in rows]
        if name != "run" and any(cell is not None for cell in cells):
            table.add_row(
                name,
                *(
                    Text(
                        "-"
                        if cell is None
                        else f"{cell:.4g}"
                        if isinstance(cell, float)
                        else str(cell)
                    )
                    for cell in cells
                ),
            )
    console.print(table)


def compared(run: RunData, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return a run's line of `compare`: means over the last ten of the steps chosen, held-out
    scores first and last, what differs in its flags.
    """
    lines = chosen(run.metrics, arguments)
    if not lines:
        raise UserError(f"{run.path}: no such steps; it has {len(run.metrics)}")
    means = {
        name: fmean(values)
        if (values := [line[key] for line in lines[-10:] if line.get(key) is not None])
        else None
        for name, key in COMPARED.items()
    }
    heldout = (
        {"held out before": run.reports[0], "held out at the end": run.reports[-1]}
        if run.reports
        else {}
    )
    flags = {
        name: run.config.get(name)
        for name in (
            "task",
            "level",
            "curriculum",
            "reward",
            "model",
            "start",
            "loss",
            "credit",
            "on_degenerate",
            "seed",
        )
    }
    return {
        "run": run.path.name,
        **flags,
        "steps": len(lines),
        "million tokens": lines[-1]["num_tokens"] / 1e6,
        "minutes": sum(line["step_time"] for line in lines) / 60,
        **{f"{name}, last 10 steps": value for name, value in means.items()},
        **{name: f"{interval(line)} at {line['level']}" for name, line in heldout.items()},
    }


def export_rollouts(run: RunData, arguments: argparse.Namespace, console: Console) -> None:
    """Write every completion to a file, one on a line."""
    steps = [step for step in run.steps() if arguments.first <= step <= arguments.last_step][
        -arguments.last :
    ]
    records = (
        record for record in run.each_rollout(steps) if arguments.level in (None, record["level"])
    )
    number = export(arguments.output, records)
    console.print(f"{arguments.output}: {number:,} completions of {len(steps)} steps")


def chosen(
    lines: Sequence[Record],
    arguments: argparse.Namespace,
    good: Callable[[Record], bool] = lambda line: True,
) -> list[Record]:
    """Return the `good` lines that the filters --from, --to, --level and --last leave."""
    kept = [
        line
        for line in lines
        if arguments.first <= line["step"] <= arguments.last_step
        and arguments.level in (None, line["level"])
        and good(line)
    ]
    return kept[-arguments.last :]


def as_json(lines: Sequence[Record], arguments: argparse.Namespace, console: Console) -> bool:
    """Print the lines as one JSON array, if that was asked for; return whether it was."""
    if arguments.json:
        console.file.write(json.dumps(lines, ensure_ascii=False, indent=1) + "\n")
    return arguments.json


def texts_of_tokens(run: RunData, tokens: Sequence[int]) -> list[str | None]:
    """Return the text of each token by the tokenizer of a checkpoint of the run; None where there
    is none.
    """
    files = sorted((run.path / "checkpoints").glob("step-*/tokenizer.json"))
    if not files:
        return [None] * len(tokens)
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(files[-1]))
    return [tokenizer.decode([token], skip_special_tokens=False) for token in tokens]
