"""How a problem is put to the model: the turns before the question, and the template's variables.

    system turn ─► for each example: its prompt as the user, its answer as the assistant
                ─► the problem's prompt as the user

A chat template is a program by the model's maker. Some leave out a system turn, or all turns but
the last, without an error. What a template does not pass on is refused (`encoding.render`).
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.errors import UserError
from data.files import read_text
from data.text import escape_control, shortened
from grpo.model.encoding import TemplateArguments, Turn, text_of
from tasks.base import Problem, Task
from tasks.supply import Examples

# Arguments of a chat template that the trainer sets itself.
RESERVED_ARGUMENTS = (
    "messages",
    "conversation",
    "chat_template",
    "tokenize",
    "add_generation_prompt",
)
MAX_LINES = 24  # of a prompt on the console
MAX_CHARACTERS = 300  # of each of its lines


@dataclass(frozen=True)
class PromptFormat:
    """What is added to a problem's prompt.

    For example ``PromptFormat("Be brief.", Examples(task, seed=0, count=2), {"enable_thinking":
    False})``. `system` is the text of a system turn ("": none), `examples` are the solved problems
    shown before the question, and `arguments` are variables of the chat template.
    """

    system: str = ""
    examples: Examples | None = None
    arguments: TemplateArguments = field(default_factory=dict)

    def turns(self, problem: Problem | str) -> tuple[Turn, ...]:
        """Return all turns of `problem`, or of a prompt without a problem."""
        given = (("user", problem),) if isinstance(problem, str) else problem.turns
        own = [turn for turn in given if turn[0] == "system"]
        system = [("system", self.system)] if self.system else own
        question = [turn for turn in given if turn[0] != "system"]

        shown: list[Turn] = []
        for example in self.shots(problem):
            shown += [("user", example.prompt), ("assistant", example.target)]
        return (*system, *shown, *question)

    def shots(self, problem: Problem | str) -> tuple[Problem, ...]:
        """Return the examples that `problem` is shown with."""
        if self.examples is None:
            return ()
        assert isinstance(problem, Problem), "examples depend on the problem: encode(problem)"
        return self.examples.of(problem)


def format_of(
    task: Task, *, system: str, shots: int, chat_template_kwargs: str, seed: int
) -> PromptFormat:
    """Return the format that the flags of these names ask for; `seed` chooses the examples."""
    return PromptFormat(
        system,
        Examples(task, seed=seed, count=shots) if shots else None,
        template_arguments(chat_template_kwargs),
    )


def template_arguments(text: str) -> dict[str, Any]:
    """Return the variables that --chat-template-kwargs gives as JSON.

    Raises UserError unless it is an object without reserved names.
    """
    where = f"--chat-template-kwargs {shortened(text)}"
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise UserError(f"""{where}: give a JSON object, e.g. '{{"enable_thinking": false}}'""")

    for name in arguments:
        if name in RESERVED_ARGUMENTS:
            raise UserError(f"{where}: {name} is set by the trainer; leave it out")
    return arguments


def system_text(given: str) -> str:
    """Return the text of --system: the text itself, or that of a file if it begins with "@"."""
    return wording_text(given[1:]) if given.startswith("@") else given


def wording_text(path: str) -> str:
    """Return the text of the file that --wording names; "", the task's own wording, if none.

    The line end that editors add is left out.
    """
    return read_text(Path(path)).removesuffix("\n").removesuffix("\r") if path else ""


def check_arguments(template: str | None, names: Iterable[str]) -> None:
    """Raise UserError unless the chat template has all variables of these names."""
    for name in names:
        # A variable, so no attribute (after a dot) and no text (after a quote).
        if not re.search(rf"(?<![\w.'\"]){re.escape(name)}(?!\w)", template or ""):
            raise UserError(
                f"--chat-template-kwargs: {escape_control(name)}: the model's chat template has no "
                "such variable; leave it out"
            )


def check_conversations(policy: Any, problems: Iterable[Problem]) -> None:
    """Raise UserError unless the chat template passes on the turns of all `problems`.

    The longest problem is tried for each sequence of roles, because templates refuse or drop turns
    by their roles, and may cut long ones.
    """
    by_length = sorted(problems, key=lambda problem: sum(len(said) for _, said in problem.turns))
    by_roles = {tuple(role for role, _ in problem.turns): problem for problem in by_length}
    for problem in by_roles.values():
        policy.encode(problem)


def opened_reasoning(prompt: str) -> str:
    r"""Return the reasoning tag that a prompt ends with, "" if it ends with none.

    >>> opened_reasoning("<|assistant|><think>\n")
    '<think>\n'
    """
    found = re.search(r"<think(?:ing)?>\s*\Z", prompt, re.IGNORECASE)
    return found[0] if found else ""


def sent_lines(policy: Any, problem: Problem) -> list[str]:
    """Return the whole prompt of `problem`, decoded from its token ids, line by line.

    Control tokens are shown by their names. Nothing in the lines is unprintable.
    """
    text = text_of(policy.tokenizer, policy.encode(problem))
    return [escape_control(line) for line in text.split("\n")]


def middle_left_out(lines: Sequence[str]) -> list[str]:
    """Return `lines` shortened to fit a screen: the beginning and the end of a long text."""
    half = MAX_LINES // 2
    kept = list(lines)
    if len(kept) > MAX_LINES:
        kept = [*kept[:half], f"… {len(kept) - 2 * half:,} lines …", *kept[-half:]]
    return [shortened(line, MAX_CHARACTERS) for line in kept]
