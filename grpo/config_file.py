"""Settings as a file gives them: read, with their names and types checked.

Nothing here imports torch, so that `--help` is quick.
"""

import difflib
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from data.errors import UserError
from data.files import read_yaml
from grpo.choices import program_of
from grpo.config import Config
from tasks.registry import REWARD_FILE, is_allowed, require_trusted_task

# The mean scores of the problems that `keep_difficulty: true` keeps.
MIDDLING = [0.2, 0.8]

# Settings whose values may be the words on and off or a number, which YAML does not read as text.
WORDS = ("draft", "preflight", "warm_start")

# What TRL, or the command line, calls a setting that has another name here.
ELSEWHERE = {
    "num_generations": "group_size",
    "max_completion_length": "max_new_tokens",
    "max_steps": "steps",
    "num_iterations": "epochs",
    "loss_type": "loss",
    "scale_rewards": "scale",
    "epsilon": "clip_low",
    "epsilon_high": "clip_high",
    "mask_truncated_completions": "truncated",
    "words": "level",
}


def checked(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the settings `values`, which come from `where`.

    Raises UserError for unknown names and for values of the wrong type.
    """
    values = dict(values)
    if isinstance(values.get("keep_difficulty"), bool):
        values["keep_difficulty"] = list(MIDDLING) if values["keep_difficulty"] else None
    kinds = get_type_hints(Config)
    for name, value in values.items():
        if name not in kinds:
            elsewhere = ELSEWHERE.get(str(name))
            near = [elsewhere] if elsewhere else difflib.get_close_matches(str(name), kinds, 1)
            hint = f"did you mean {near[0]}?" if near else "this version has no such setting"
            raise UserError(f"{where}: unknown key {name}; {hint}")

        kind = kinds[name]
        members = get_args(kind) if isinstance(kind, UnionType) else (kind,)
        allowed = [get_origin(member) or member for member in members]
        values[name] = value = _as_meant(value, name, allowed)
        if not any(_is(value, each) for each in allowed):
            names = " or ".join(each.__name__ for each in allowed if each is not NoneType)
            raise UserError(f"{where}: {name} is {value!r}, and should be {names}")
        if name == "task_options":
            values[name] = _options(value, where)
    return values


def _as_meant(value: Any, name: str, allowed: Collection[type]) -> Any:
    """Return what a user means by `value` where YAML reads something else.

    YAML 1.1 has no "1e-4" among its numbers, and reads "off" as False.
    """
    if name in WORDS:
        return _word(value)
    if float in allowed and str not in allowed and isinstance(value, str):
        with suppress(ValueError):
            return float(value)
    return value


def _options(options: Mapping[Any, Any], where: str) -> dict[str, str]:
    """Return the options of a task as texts. Raises UserError for values that are no text."""
    found = {}
    for name, value in options.items():
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise UserError(
                f"{where}: task_options has {name}: {value!r}; give it as on the command line, as "
                "a text"
            )
        found[str(name)] = str(value)
    return found


def _word(value: Any) -> Any:
    """Return a word or number that YAML has read as something else, as it was written.

    >>> _word(False), _word(True), _word(8), _word("auto")
    ('off', 'on', '8', 'auto')
    """
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value) if isinstance(value, int) else value


def load_config(path: Path) -> Config:
    """Read the configuration of a run.

    Raises UserError if the file is not one, for unknown keys, and for values of the wrong type.
    """
    values = read_yaml(path)
    values.pop("facts", None)
    return Config(**checked(values, str(path)))


def programs_in(values: Mapping[str, Any]) -> list[str | None]:
    """Return the programs that settings name: the task, the reward and the loss."""
    reward = values.get("task_options", {}).get(REWARD_FILE)
    return [values.get("task"), reward, values.get("loss")]


def require_trusted(
    values: Mapping[str, Any], allowed: Collection[str | None], where: str | Path
) -> None:
    """Check that the user has allowed the programs that the settings `values` of a file name.

    The file may come from a stranger, and a task, reward or loss in a file of its own is executed.
    Raises UserError, which names `where` the settings come from, for one that is not `allowed`.
    """
    task, _, loss = programs_in(values)
    require_trusted_task(task or Config.task, values.get("task_options", {}), allowed, where)
    if loss and program_of(loss) and not is_allowed(loss, allowed):
        raise UserError(
            f"{where}: its loss is a program that would be executed, {loss}; if you trust it, give "
            f"--loss {loss} as well"
        )


def _is(value: Any, kind: type) -> bool:
    """Return whether `value` has the type `kind`. An int also passes as a float; a bool never."""
    if isinstance(value, bool) != (kind is bool):
        return False
    return isinstance(value, (int, float) if kind is float else kind)
