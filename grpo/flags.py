"""The command line of `train.py`, made from `grpo.config.Config`.

Settings come from three places, each overriding the one before: defaults, `--config`, flags.
Nothing here imports torch, so that `--help` is quick.
"""

import argparse
import dataclasses
import sys
from argparse import SUPPRESS
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml

from data.errors import Parser, UserError
from data.files import load_yaml, read_yaml
from grpo.config import Config
from grpo.config_file import ELSEWHERE, checked, programs_in, require_trusted
from grpo.config_table import RUN
from grpo.model.prompts import system_text, wording_text
from tasks.registry import check_wording, flags_of_tasks, implied_task, split_options

EXAMPLES = """examples:
  {0} --task interleave --words 25
  {0} --model MODEL --task interleave --words 10
  {0} --curriculum 10,25,50 --name ladder
  {0} --resume runs/ladder --steps 400
"""

# Settings that the run fills in itself.
FILLED_IN = ("start", "mixed")

# Keys of a run's config.yaml that another run does not take over.
OF_ONE_RUN = ("facts", "name", "resume", "accept_changes", "mixed")


def program(name: str = "train") -> str:
    """Return how the user starts the program "train" or "eval": by its file in a checkout, unless
    the installed command was started or there is no checkout.
    """
    is_checkout = (Path(__file__).parents[1] / "train.py").is_file()
    is_command = Path(sys.argv[0]).name.startswith("grpo-")
    return f"python {name}.py" if is_checkout and not is_command else f"grpo-{name}"


def parse(argv: Sequence[str]) -> tuple[Config, dict[str, Any]]:
    """Return the configuration of a command line, and the settings that it gave, by name.

    Raises UserError for an unknown flag, with the nearest known one, and for a bad value. Exits
    with status 0 after `--help`.
    """
    show_help(argv)
    parser = make_parser()
    values, unknown = parser.parse_known_args(argv)
    flags = vars(values)

    # Flags override --config, and a later --config overrides an earlier one.
    sources = flags.pop("config", [])
    wording_file = flags.get("wording", "--config")
    given: dict[str, Any] = {}
    written: dict[str, Any] = {}  # on the command line itself, and not in a file
    for source in sources:
        settings = read_settings(source)
        given |= settings
        written |= settings if is_inline(source) else {}
    flags = with_texts(flags)
    given |= flags
    written |= flags

    # Before the task is loaded, which tells its flags.
    files = f"--config {', '.join(source for source in sources if not is_inline(source))}"
    require_trusted({"task": given.get("task")}, programs_in(written), files)

    # What the parser does not know may be flags of the task.
    if "task" not in given and (implied := implied_task(unknown)):
        given["task"] = implied
    if unknown:
        options, unknown = split_options(given.get("task", Config.task), unknown)
        if unknown:
            raise UserError(_no_such_flag(unknown[0], parser))
        if options:
            for settings in (given, written):
                settings["task_options"] = settings.get("task_options", {}) | options
    require_trusted(given, programs_in(written), files)

    # With --resume the task is the run's own, which has not been read yet.
    if given.get("wording") and "resume" not in given:
        check_wording(given.get("task", Config.task), given["wording"], wording_file)
    return Config(**given), given


def show_help(argv: Sequence[str]) -> None:
    """Print the help that `argv` asks for and exit, or return if it asks for none."""
    asked = {"-h", "--help", "--help-all"} & set(argv)
    if asked:
        make_parser(lists_all="--help-all" in asked).print_help()
        sys.exit(0)


def make_parser(lists_all: bool = False) -> Parser:
    """Return the parser. Its help lists the basic flags, or all flags and settings."""
    examples = EXAMPLES.format(program())
    parser = Parser(
        prog=program(),
        usage=f"{program()} [flags]",
        description="Train a language model by GRPO.",
        epilog=examples,
        allow_abbrev=False,
        add_help=False,
        argument_default=SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    groups: dict[str, Any] = {}

    def group_of(name: str) -> Any:
        title = name if lists_all else "basic flags"
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        return groups[title]

    group_of(RUN).add_argument(
        "--config",
        metavar="FILE",
        action="append",
        help="a YAML file of settings, a run's own config.yaml, or '{name: value, ...}'; may be "
        "repeated: a later one overrides an earlier one, and flags override both",
    )
    for spec in dataclasses.fields(Config):
        if not spec.metadata.get("is_flag"):
            continue
        is_listed = lists_all or spec.metadata["is_basic"]
        _add(group_of(spec.metadata["group"]), spec, is_listed)

    group_of(RUN).add_argument("--help", "-h", action="store_true", help="the basic flags")
    group_of(RUN).add_argument("--help-all", action="store_true", help="all flags and settings")
    if lists_all:
        parser.epilog = f"{_settings_text()}\n{flags_of_tasks()}\n\n{examples}"
    return parser


def _add(group: Any, spec: dataclasses.Field, is_listed: bool) -> None:
    """Add the flag of one field to the argument group."""
    info = spec.metadata
    options = info["flags"] or (f"--{spec.name.replace('_', '-')}",)
    text = _help_of(spec) if is_listed else SUPPRESS

    # The type of a flag that may be None is the other member of the union.
    kind = get_type_hints(Config)[spec.name]
    kind = get_args(kind)[0] if get_args(kind) else kind

    if kind is bool:
        action = "store_false" if spec.default else "store_true"
        options = [f"--no-{option[2:]}" if spec.default else option for option in options]
        group.add_argument(*options, dest=spec.name, action=action, help=text)
        return

    extra = {name: info[name] for name in ("nargs", "const") if name in info}
    metavar = info["metavar"] or "{" + ",".join(info["choices"]) + "}"
    group.add_argument(*options, dest=spec.name, type=kind, metavar=metavar, help=text, **extra)


def _help_of(spec: dataclasses.Field) -> str:
    """Return the help of a field, with its default unless the text mentions one."""
    text = spec.metadata["help"]
    has_default = not isinstance(spec.default, bool) and spec.default not in (None, "", "{}")
    if has_default and spec.default is not dataclasses.MISSING and "default" not in text:
        text += f" (default: {spec.default})"
    return text.replace("%", "%%")


def _settings_text() -> str:
    """Return the list of settings that have no flag, for the end of --help-all."""
    lines = ["settings without a flag, given by --config FILE or --config '{top_p: 0.9}':"]
    for spec in dataclasses.fields(Config):
        if not spec.metadata.get("is_flag") and spec.name not in FILLED_IN:
            lines.append(f"  {spec.name:<22}{_help_of(spec)}")
    return "\n".join(lines).replace("%%", "%")


def is_inline(source: str) -> bool:
    """Return whether `source`, of --config, is YAML in the argument, and not a file."""
    return source.lstrip().startswith("{")


def read_settings(source: str) -> dict[str, Any]:
    """Return the settings of `--config`: a YAML file, a run's config.yaml, or YAML in the argument.

    A run's config.yaml gives everything except what belongs to that run only, such as its name, so
    the same training starts again. Raises UserError if the file cannot be read, a name is unknown,
    or a value has the wrong type.
    """
    where = f"--config {source}"
    if not is_inline(source):
        values = read_yaml(Path(source))
    else:
        try:
            values = load_yaml(source)
        except yaml.MarkedYAMLError as error:
            raise UserError(f"{where}: not YAML; give '{{name: value, ...}}'") from error
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise UserError(f"--config: {str(error).splitlines()[0]}") from error
        where = "--config"

    if "facts" not in values:  # not the config.yaml of a run
        for name in FILLED_IN:
            if name in values:
                raise UserError(f"{where}: {name} is filled in by the run; leave it out")
        return with_texts(checked(values, where))

    left_out = (*OF_ONE_RUN, "level") if values.get("mixed") else OF_ONE_RUN  # all levels again
    values = {name: value for name, value in values.items() if name not in left_out}
    values = checked(values, where)
    if start := values.pop("start", None):
        values["model"] = start
    return values


def with_texts(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `given` with the contents of the text files that it names instead of their paths.

    So a run keeps the texts even if the files change later.
    """
    given = dict(given)
    if "system" in given:
        given["system"] = system_text(given["system"])
    if file := given.get("wording"):
        given["wording"] = wording_text(file)
    return given


def _no_such_flag(given: str, parser: Parser) -> str:
    """Return the message for an unknown flag: the nearest known one, or how to give the setting."""
    word = given.split("=")[0]
    name = word.lstrip("-").replace("-", "_")
    spec = Config.__dataclass_fields__.get(name)
    if spec is not None and not spec.metadata.get("is_flag") and name not in FILLED_IN:
        return f"{given}: this setting has no flag; give --config '{{{name}: ...}}'"

    known = [option for action in parser._actions for option in action.option_strings]
    if name in ELSEWHERE:
        flag = "--" + ELSEWHERE[name].replace("_", "-")
        near = flag if flag in known else f"--config '{{{ELSEWHERE[name]}: ...}}'"
    else:
        near = parser.nearest(word)
    hint = f"did you mean {near}?" if near else f"{program()} --help-all lists all"
    return f"{given}: no such flag; {hint}"
