"""How a problem is put to the model: the turns before the question, and the template's variables.

    system turn ─► for each example: its prompt as the user, its answer as the assistant
                ─► the problem's prompt as the user

A chat template is a program by the model's maker. Some leave out a system turn, or all turns but
the last, without an error. What a template does not pass on is refused (`render`).

Control tokens (those that a tokenizer calls special: end of turn, padding ...) come from the chat
template alone. What stands in a turn is text, even "<|end|>". It is encoded as the characters that
it consists of, as the policy would have to write it.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache, partial
from itertools import islice, zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import Any

from grpo.data.errors import UserError, escape_control, shortened
from grpo.data.files import read_text
from grpo.tasks.base import Problem, Task
from grpo.tasks.supply import examples_of

# A tokenizer of `transformers`, which types all results as unions.
Tokenizer = Any

Turn = tuple[str, str]  # role ("system", "user" or "assistant") and text
TemplateArguments = Mapping[str, Any]  # variables of the chat template: {"enable_thinking": False}

# Today's date for chat templates that ask for one (`strftime_now`): the one that Llama 3.1 falls
# back on, and never another, so that a run is resumed and evaluated with its first prompts.
TODAY = datetime(2024, 7, 26)

MARK = "\ue000"  # a character for private use, which ordinary texts do not contain


def text_of(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """Return the text of `tokens` as it was written; control tokens are shown by their names."""
    # Some tokenizers would "clean up" the spaces before marks, and a right answer would be wrong.
    return tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)


@lru_cache(maxsize=8)
def controls_of(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Return a pattern of the texts of all control tokens, None if there are none."""
    added = tokenizer.added_tokens_decoder.values()
    texts = {token.content for token in added if token.special}
    return one_of(texts) if texts else None


def one_of(texts: Collection[str]) -> re.Pattern[str]:
    """Return a pattern that matches any of the `texts`, the longest first."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))))


def plain_tokens(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of each of the `texts`, none of them a control token."""
    return tokenizer(list(texts), add_special_tokens=False, split_special_tokens=True).input_ids


class Encodings:
    """The token ids of texts, or of prompts: new ones are encoded together by `encode`, on all
    cores of the CPU, and the latest `most` are kept.
    """

    def __init__(self, encode: Callable[[list[Any]], Iterable[Sequence[int]]], most: int):
        self.encode, self.most = encode, most
        self.known: dict[Any, tuple[int, ...]] = {}

    def __call__(self, texts: Iterable[Any]) -> list[tuple[int, ...]]:
        """Return the token ids of each of the `texts`."""
        texts = list(texts)
        if new := [text for text in dict.fromkeys(texts) if text not in self.known]:
            self.known.update(zip(new, map(tuple, self.encode(new)), strict=True))
        found = [self.known[text] for text in texts]
        for oldest in [*islice(self.known, max(0, len(self.known) - self.most))]:
            del self.known[oldest]
        return found


def prompt_tokens(
    tokenizer: Tokenizer,
    prompts: Sequence[tuple[Sequence[Turn], str | None]],
    arguments: TemplateArguments = MappingProxyType({}),
) -> list[tuple[int, ...]]:
    """Return the token ids of prompts. Each is its turns and their chat template, or None if they
    are lines of text.
    """
    pattern = controls_of(tokenizer)
    found: list[tuple[int, ...]] = [()] * len(prompts)
    rendered: dict[int, str] = {}  # by place: prompts that are encoded together
    for n, (turns, template) in enumerate(prompts):
        if template is None:
            text = "".join(f"{said}\n" for _, said in turns)
            ids = tuple(tokenizer(text, split_special_tokens=True).input_ids)
            # The text is not at its end: some tokenizers say so after every text.
            found[n] = ids[:-1] if ids[-1:] == (tokenizer.eos_token_id,) else ids
        elif pattern is None or not any(pattern.search(said) for _, said in turns):
            rendered[n] = render(tokenizer, turns, template, arguments)
        else:
            found[n] = _with_controls(tokenizer, turns, template, arguments)
    if rendered:
        together = tokenizer([*rendered.values()], add_special_tokens=False).input_ids
        for n, each in zip(rendered, together, strict=True):
            found[n] = tuple(each)
    return found


def _with_controls(
    tokenizer: Tokenizer, turns: Sequence[Turn], template: str, arguments: TemplateArguments
) -> tuple[int, ...]:
    """Return the token ids of a prompt whose turns have the texts of control tokens.

    The template sees a mark in place of each turn, and what it writes around them is encoded apart
    from the turns' own texts.
    """
    marked = [(role, f"{MARK}{i}{MARK}") for i, (role, _) in enumerate(turns)]
    pieces = re.split(f"{MARK}([0-9]+){MARK}", render(tokenizer, marked, template, arguments))
    tokens: list[int] = []
    for around, turn in zip_longest(pieces[::2], pieces[1::2]):
        tokens += tokenizer(around, add_special_tokens=False).input_ids
        if turn is not None:
            said = turns[int(turn)][1]
            alone, line_end, after = plain_tokens(tokenizer, [said, "\n", "\n" + said])
            # Many tokenizers add a space at the beginning of a text.
            n = len(line_end)
            tokens += after[n:] if after[:n] == line_end else alone
    return tuple(tokens)


def render(
    tokenizer: Tokenizer, turns: Sequence[Turn], template: str, arguments: TemplateArguments
) -> str:
    """Return the text that the chat `template` makes of `turns`, up to where the answer begins.

    Raises UserError if it fails, or if a turn changes by more than white space.
    """
    fix = "leave out --system or --shots, give one user turn, or correct the template"
    try:
        text = tokenizer.apply_chat_template(
            [{"role": role, "content": said} for role, said in turns],
            chat_template=template,
            tokenize=False,
            add_generation_prompt=True,
            **{"strftime_now": TODAY.strftime, **arguments},
        )
    except Exception as error:  # the template may raise anything
        reason = shortened(f"{type(error).__name__}: {error}", 200)
        raise UserError(f"the model's chat template refuses it ({reason}); {fix}") from error

    passed_on = "".join(text.split())
    for role, said in turns:
        if "".join(said.split()) not in passed_on:
            raise UserError(
                f"the model's chat template does not pass on all of the {role} turn; {fix}"
            )
    return text


def end_of_turn(tokenizer: Tokenizer) -> int | None:
    """Return the token that the chat template writes after an assistant's answer.

    A model's files also declare end tokens, which may differ: base models with a chat template
    declare the end of a document. The template is right, because the model was trained on it.
    Returns None if there is none, or if no added token, "special" or not, follows the answer.
    """
    added = {token.content for token in tokenizer.added_tokens_decoder.values()}
    if not tokenizer.chat_template or not added:
        return None

    word = "This"  # which no template changes
    turns = [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": word}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    except Exception:  # the template may raise anything
        return None

    _, answer, rest = text.rpartition(word)
    found = one_of(added).match(rest.lstrip()) if answer else None
    return tokenizer.convert_tokens_to_ids(found[0]) if found else None


@dataclass(frozen=True)
class PromptFormat:
    """What is added to a problem's prompt."""

    system: str = ""  # the text of a system turn; "": none
    # From level and key of a problem to the solved ones that are shown before it.
    examples: Callable[[int, str], tuple[Problem, ...]] | None = None
    arguments: TemplateArguments = field(default_factory=dict)  # of the chat template

    def turns(self, problem: Problem | str) -> tuple[Turn, ...]:
        """Return all turns of `problem`, or of a prompt without a problem."""
        given = (("user", problem),) if isinstance(problem, str) else problem.turns
        turns = [turn for turn in given if turn[0] == "system"]
        if self.system:
            turns = [("system", self.system)]
        for example in self.shots(problem):
            turns += [("user", example.prompt), ("assistant", example.target)]
        return (*turns, *(turn for turn in given if turn[0] != "system"))

    def shots(self, problem: Problem | str) -> tuple[Problem, ...]:
        """Return the examples that `problem` is shown with; a prompt without a problem has none."""
        if self.examples is None or isinstance(problem, str):
            return ()
        return self.examples(problem.level, problem.key)


def format_of(task: Task, settings: Any, seed: int) -> PromptFormat:
    """Return the format that the settings of a run ask for; `seed` chooses the examples."""
    count, variables = settings.shots, template_arguments(settings.chat_template_kwargs)
    # A step asks for the examples several times.
    examples = lru_cache(512)(partial(examples_of, task, seed=seed, count=count))
    return PromptFormat(settings.system, examples if count else None, variables)


def template_arguments(text: str) -> dict[str, Any]:
    """Return the variables that --chat-template-kwargs gives as a JSON object."""
    where = f"--chat-template-kwargs {shortened(text)}"
    arguments = None
    with suppress(ValueError, RecursionError):
        arguments = json.loads(text)
    if not isinstance(arguments, dict):
        raise UserError(f"""{where}: give a JSON object, e.g. '{{"enable_thinking": false}}'""")
    return arguments


def system_text(given: str) -> str:
    """Return the text of --system: the text itself, or that of a file if it begins with "@"."""
    return wording_text(given[1:]) if given.startswith("@") else given


def wording_text(path: str) -> str:
    """Return the text of the --wording file, less the line end that editors add; "" if none."""
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

    Templates refuse or drop turns by roles, so the longest of each sequence of roles is tried.
    """
    by_length = sorted(problems, key=lambda problem: sum(len(said) for _, said in problem.turns))
    by_roles = {tuple(role for role, _ in problem.turns): problem for problem in by_length}
    for problem in by_roles.values():
        policy.encode(problem)


def sent_lines(policy: Any, problem: Problem) -> list[str]:
    """Return the printable lines of the whole prompt of `problem`, decoded from its token ids."""
    text = text_of(policy.tokenizer, policy.encode(problem))
    return [escape_control(line) for line in text.split("\n")]


def middle_left_out(lines: Sequence[str]) -> list[str]:
    """Return `lines` shortened to fit a screen: the beginning and the end of a long text."""
    kept = list(lines)
    if len(kept) > 24:
        kept = [*kept[:12], f"… {len(kept) - 24:,} lines …", *kept[-12:]]
    return [shortened(line, 300) for line in kept]
