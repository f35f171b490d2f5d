"""From text to tokens: prompts by the chat template, targets and drafts.

Control tokens (those that a tokenizer calls special: end of turn, padding ...) come from the chat
template alone. What stands in a turn is text, even "<|end|>". It is encoded as the characters that
it consists of, as the policy would have to write it.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from itertools import groupby
from types import MappingProxyType
from typing import Any, NamedTuple

from data.errors import UserError
from data.text import shortened

# A tokenizer of `transformers`, which types all results as unions.
Tokenizer = Any

Turn = tuple[str, str]  # role ("system", "user" or "assistant") and text
TemplateArguments = Mapping[str, Any]  # variables of the chat template: {"enable_thinking": False}

# Today's date for chat templates that ask for one (`strftime_now`), as those of Llama 3.1 and later
# do. It is the date that they fall back on, and never another: a run must go on, and be evaluated,
# with the prompts that it began with.
TODAY = datetime(2024, 7, 26)

# What to do about turns that the chat template does not pass on.
TURNS_FIX = (
    "give a conversation whose turns the template passes on, or write all of it into one user turn"
)
TEMPLATE_FIX = (
    "it must show the whole content, a text (some templates of models for images take only a list "
    "of parts): correct the template in the model's folder, or give another --model"
)

# What may come before a run of plain text, see `_plain_run`.
ANCHORS = ("", "\n", "a", ".")

# Characters for private use, which ordinary texts do not contain.
MARKS = tuple(map(chr, range(0xE000, 0xE010)))


def text_of(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """Return the text of `tokens` as it was written; control tokens are shown by their names.

    Some tokenizers would "clean up" the spaces before marks ("said ," to "said,"), and a right
    answer would be read as a wrong one.
    """
    return tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)


class Controls(NamedTuple):
    """The control tokens of a tokenizer: a pattern of their texts, and their ids.

    The pattern is None if there are no control tokens.
    """

    pattern: re.Pattern[str] | None
    ids: frozenset[int]


@lru_cache(maxsize=8)
def controls_of(tokenizer: Tokenizer) -> Controls:
    """Return the control tokens of `tokenizer`."""
    special = {i: token for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    texts = {token.content for token in special.values()}
    return Controls(one_of(texts) if texts else None, frozenset(special))


def one_of(texts: Collection[str]) -> re.Pattern[str]:
    """Return a pattern that matches any of the `texts`, the longest first."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))))


def encode(tokenizer: Tokenizer, text: str | list[str], **options: Any) -> Any:
    """Return the tokenizer's encoding of `text`. Raises UserError if its own rules fail on it."""
    try:
        return tokenizer(text, **options)
    except BaseException as error:
        # The Rust code of `tokenizers` raises plain exceptions, and panics with a BaseException.
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise UserError(
            f"the model's tokenizer fails on it ({shortened(str(error), 200)}); correct "
            "tokenizer.json in the model's folder, or give another --model"
        ) from error


def plain_tokens(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of each of the `texts`, none of them a control token."""
    return encode(
        tokenizer, list(texts), add_special_tokens=False, split_special_tokens=True
    ).input_ids


def target_length(tokenizer: Tokenizer, target: str) -> int:
    """Return how many tokens the answer `target` takes, its end token included."""
    return len(plain_tokens(tokenizer, [target])[0]) + 1


def prompt_tokens(
    tokenizer: Tokenizer,
    turns: Sequence[Turn],
    template: str | None,
    arguments: TemplateArguments = MappingProxyType({}),
) -> tuple[int, ...]:
    """Return the token ids of `turns` by the chat `template`, up to where the answer begins.

    The template is called with its `arguments`. Without a template each turn is a line of text.
    Raises UserError if a turn contains the text of a control token and the tokenizer cannot tell
    which characters its tokens cover.
    """
    if template is None:
        text = "".join(f"{said}\n" for _, said in turns)
        ids = tuple(encode(tokenizer, text, split_special_tokens=True).input_ids)
        # The text is not at its end: some tokenizers say so after every text.
        return ids[:-1] if ids[-1:] == (tokenizer.eos_token_id,) else ids

    texts = [said for _, said in turns] + _strings_in(arguments)
    pattern = controls_of(tokenizer).pattern
    found = {name for said in texts for name in pattern.findall(said)} if pattern else set()
    if not found:
        text = render(tokenizer, turns, template, arguments)
        return tuple(encode(tokenizer, text, add_special_tokens=False).input_ids)

    if not tokenizer.is_fast:
        raise UserError(
            f"the prompt holds {sorted(found)[0]!r}, a control token of this model, whose "
            "tokenizer cannot encode it as text"
        )
    mark = next(mark for mark in MARKS if not any(mark in said for said in texts))
    stand_ins = {text: f"{mark}{i}{mark}" for i, text in enumerate(sorted(found))}
    return tuple(_escaped_tokens(tokenizer, turns, template, arguments, stand_ins))


def _escaped_tokens(
    tokenizer: Tokenizer,
    turns: Sequence[Turn],
    template: str,
    arguments: TemplateArguments,
    stand_ins: Mapping[str, str],
) -> list[int]:
    """Return the token ids of turns that hold the texts of control tokens.

    The template sees a stand-in for each of these texts: a number between two marks. So the control
    tokens of the rendered text are the template's own, with runs of plain text between them. Runs
    with stand-ins are encoded again, with the texts themselves.
    """
    controls = controls_of(tokenizer)
    assert controls.pattern is not None
    pattern = controls.pattern
    originals = {stand_in: text for text, stand_in in stand_ins.items()}
    mark = next(iter(originals))[0]

    def escaped(said: str) -> str:
        return pattern.sub(lambda match: stand_ins[match[0]], said)

    text = render(
        tokenizer,
        [(role, escaped(said)) for role, said in turns],
        template,
        _with_strings(arguments, escaped),
    )

    tokens: list[int] = []
    for ids, run in _runs(tokenizer, text, controls.ids):
        if mark in run:
            whole = re.sub(f"{mark}[0-9]+{mark}", lambda match: originals[match[0]], run)
            ids = _plain_run(tokenizer, whole, run, ids)
        tokens += ids
    return tokens


def render(
    tokenizer: Tokenizer,
    turns: Sequence[Turn],
    template: str,
    arguments: TemplateArguments,
    fix: str = "",
) -> str:
    """Return the text that the chat `template` makes of `turns`, up to where the answer begins.

    A template that asks for today's date gets TODAY, so that a prompt is the same every day. Raises
    UserError, which ends with the `fix`, if the template, a program of the model's makers, fails or
    does not pass on all of the turns. Only white space may change.
    """
    fix = fix or (TURNS_FIX if len(turns) > 1 else TEMPLATE_FIX)
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


def _strings_in(value: Any) -> list[str]:
    """Return the strings of a JSON value, those inside lists and objects too."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for inner in value.values() for text in _strings_in(inner)]
    if isinstance(value, list):
        return [text for inner in value for text in _strings_in(inner)]
    return []


def _with_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Return a JSON value with each of its strings changed, but not the names in objects."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {name: _with_strings(inner, change) for name, inner in value.items()}
    if isinstance(value, list):
        return [_with_strings(inner, change) for inner in value]
    return value


def _runs(tokenizer: Tokenizer, text: str, controls: frozenset[int]) -> list[tuple[list[int], str]]:
    """Return the token ids of `text` in runs of control tokens and of other tokens.

    Each run comes with its part of the text, "" for control tokens.
    """
    encoding = encode(tokenizer, text, add_special_tokens=False, return_offsets_mapping=True)
    tokens = zip(encoding.input_ids, encoding.offset_mapping, strict=True)
    groups = [
        (is_control, list(group))
        for is_control, group in groupby(tokens, lambda token: token[0] in controls)
    ]

    runs = []
    start = 0
    for number, (is_control, group) in enumerate(groups):
        ids = [token for token, _ in group]
        if is_control:
            _, (_, start) = group[-1]
            runs.append((ids, ""))
            continue

        # A run goes up to the next control token, because some tokenizers leave blanks out of the
        # offsets of their tokens.
        end = len(text)
        if number + 1 < len(groups):
            _, following = groups[number + 1]
            _, (end, _) = following[0]
        runs.append((ids, text[start:end]))
    return runs


def _plain_run(tokenizer: Tokenizer, run: str, like: str, like_ids: list[int]) -> list[int]:
    """Return the tokens of `run`, encoded the way `like` was when it got the tokens `like_ids`.

    Some tokenizers put a space before a text, but not before what follows a control token. So the
    run is encoded behind the first anchor that gives `like` these tokens.
    """
    for anchor in ANCHORS:
        before, same, wanted = plain_tokens(tokenizer, [anchor, anchor + like, anchor + run])
        n = len(before)
        if same == before + like_ids and wanted[:n] == before:
            return wanted[n:]
    return plain_tokens(tokenizer, [run])[0]


# Which token ends an answer. A model's files declare its end tokens, and its chat template shows
# one: the control token that it writes after an assistant's turn. The two may differ. Base models
# with a chat template declare the end of a document, and the GGUF reader of `transformers` takes
# the first token of a turn for the last one. The template is right: the model was trained on it.

QUESTION = "Which?"
ANSWER = "This"  # one plain word, which no template changes


def end_of_turn(tokenizer: Tokenizer) -> int | None:
    """Return the token that the chat template writes after an assistant's answer.

    It is a token that was added to the vocabulary, "special" or not. Returns None if there is no
    template, if it takes no assistant's turn, or if plain text follows the answer.
    """
    added = {token.content for token in tokenizer.added_tokens_decoder.values()}
    if not tokenizer.chat_template or not added:
        return None

    turns = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    except Exception:  # the template may raise anything
        return None

    _, answer, rest = text.rpartition(ANSWER)
    found = one_of(added).match(rest.lstrip()) if answer else None
    return tokenizer.convert_tokens_to_ids(found[0]) if found else None


def name_of(tokenizer: Tokenizer, token: int | None) -> str:
    """Return a token as messages show it, e.g. "<|im_end|>"."""
    return "no token" if token is None else str(tokenizer.convert_ids_to_tokens(token))
