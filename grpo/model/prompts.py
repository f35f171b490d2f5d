"""How a problem is put to the model: the turns before the question, what the chat template is
told, and how all of it is shown.

    system turn ─► K times (an example's prompt as the user, its answer as the assistant) ─► the
    problem's prompt as the user

A chat template is a program of the model's maker, and some leave out a system turn, or all turns
but the last, without a word. So a format is tried on the template before it is used, and what the
template does not pass on is refused.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from data.files import json_kind, read_text
from grpo.model.encoding import TemplateArguments, Turn, controls_of, render
from grpo.text import escape_control, shortened
from tasks.base import Problem, Task, UserError
from tasks.supply import Examples

OURS = ("messages", "conversation", "chat_template", "tokenize", "add_generation_prompt")
MOST_LINES, MOST_CHARACTERS = 24, 300  # of a prompt on the console, and of each of its lines
PROBE = "probe of the {} turn"


@dataclass(frozen=True)
class PromptFormat:
    """What stands around a problem's prompt, e.g. ``PromptFormat("Be brief.", Examples(task,
    seed=0, count=2), {"enable_thinking": False})``.

    `system` is the text of a system turn ("": none), `examples` the solved problems that are shown
    before the question, and `arguments` are variables of the chat template.
    """

    system: str = ""
    examples: Examples | None = None
    arguments: TemplateArguments = field(default_factory=dict)

    def turns(self, problem: Problem | str) -> tuple[Turn, ...]:
        """Return all that the model is sent of `problem`, or of a prompt that stands alone."""
        prompt = problem if isinstance(problem, str) else problem.prompt
        system = [("system", self.system)] if self.system else []
        shown = [
            turn
            for example in self.shots(problem)
            for turn in (("user", example.prompt), ("assistant", example.target))
        ]
        return (*system, *shown, ("user", prompt))

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
    """Return the variables that --chat-template-kwargs gives as JSON. Raises UserError for
    anything but an object.
    """
    where = f"--chat-template-kwargs {shortened(text)}"
    fix = """give a JSON object, e.g. '{"enable_thinking": false}'"""
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: is not JSON ({error}); {fix}") from error
    if not isinstance(arguments, dict):
        raise UserError(f"{where}: is {json_kind(arguments)}; {fix}")

    for name in arguments:
        if name in OURS:
            raise UserError(f"{where}: {name} is not the user's to set; leave it out")
    return arguments


def system_text(given: str) -> str:
    """Return what --system says: the text itself, or that of the file behind an "@"."""
    text = _file_text(given[1:]) if given.startswith("@") else given
    return _encodable(text, "--system")


def wording_text(given: str) -> str:
    """Return the text of the file that --wording names; "" (the task's own wording) where it names
    none.
    """
    return _file_text(given) if given else ""


def _file_text(path: str) -> str:
    """Return the text of a file without the line end that closes it, which is the editor's."""
    return read_text(Path(path)).removesuffix("\n").removesuffix("\r")


def _encodable(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where} {shortened(text)}: is not UTF-8 text") from error
    return text


def check_format(tokenizer, format: PromptFormat):
    """Raise UserError unless the model's chat template, where it has one, passes on all that the
    `format` adds to a prompt.
    """
    template = tokenizer.chat_template
    for name in format.arguments:
        flag = f"--chat-template-kwargs: {escape_control(name)}"
        if template is None:
            raise UserError(f"{flag}: the model has no chat template; leave it out")
        # A variable, so no attribute (after a dot) and no text (after a quote).
        if not re.search(rf"(?<![\w.'\"]){re.escape(name)}(?!\w)", template):
            raise UserError(f"{flag}: the model's chat template has no such variable; leave it out")
    if template is None:
        return

    question: list[Turn] = [("user", PROBE.format("last"))]
    system: list[Turn] = [("system", PROBE.format("system"))]
    examples: list[Turn] = [
        ("user", PROBE.format("user")),
        ("assistant", PROBE.format("assistant")),
    ]
    if format.arguments:
        _try(tokenizer, question, format.arguments, "--chat-template-kwargs")
    if format.system:
        _try(tokenizer, system + question, format.arguments, "--system")
    if format.examples:
        before = system if format.system else []
        _try(tokenizer, before + examples + question, format.arguments, "--shots")


def _try(tokenizer, turns: list[Turn], arguments: TemplateArguments, flag: str):
    """Raise UserError, which names the `flag` that added something, unless the chat template
    passes on each of the `turns`.
    """
    try:
        text = render(tokenizer, turns, tokenizer.chat_template, arguments)
    except Exception as error:  # the template is a program of a stranger's
        said = shortened(f"{type(error).__name__}: {error}", 200)
        raise UserError(
            f"{flag}: the model's chat template refuses it ({said}); leave it out"
        ) from error

    for role, said in turns:
        if said not in text:
            raise UserError(
                f"{flag}: the model's chat template leaves out the {role} turn without a word; "
                "leave the flag out, or say it by --wording"
            )


def sent_lines(policy, problem: Problem) -> list[str]:
    """Return what the model is sent of `problem`, decoded from its token ids, line by line and
    with nothing unprintable.

    Control tokens are shown by their names. Where a name stands that is text, it gets a backslash:
    ``\\<|end|>``.
    """
    tokenizer, ids = policy.tokenizer, policy.encode(problem)
    controls = controls_of(tokenizer)
    text = tokenizer.decode(ids, skip_special_tokens=False)
    names = controls.pattern.findall(text) if controls.pattern else []
    if len(names) > sum(token in controls.ids for token in ids):
        runs = [
            (is_control, tokenizer.decode(list(run), skip_special_tokens=False))
            for is_control, run in groupby(ids, controls.ids.__contains__)
        ]
        text = "".join(
            said if is_control else controls.pattern.sub(r"\\\g<0>", said)
            for is_control, said in runs
        )
    return [escape_control(line) for line in text.split("\n")]


def middle_left_out(lines: Sequence[str]) -> list[str]:
    """Return `lines` as they fit a screen: of a long text its first and its last part."""
    half = MOST_LINES // 2
    kept = list(lines)
    if len(kept) > MOST_LINES:
        kept = [*kept[:half], f"… {len(kept) - 2 * half:,} lines …", *kept[-half:]]
    return [shortened(line, MOST_CHARACTERS) for line in kept]
