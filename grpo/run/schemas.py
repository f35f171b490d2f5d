"""The types of the files of a run, key by key.

Every reader checks a file against its type, so that the user gets a one-line message for a damaged
or foreign file. A file may also have keys that are not named here. They are not checked, except in
metrics.jsonl, where every key that is not in `METRICS` must be a number.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

import msgspec

from data.errors import UserError
from data.files import read_json
from grpo.records import GroupClass

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Number = int | float
Index = Annotated[int, msgspec.Meta(ge=-(1 << 53), le=1 << 53)]


def check(where: str, value: Any, kind: Any) -> None:
    """Raise UserError, which begins with `where`, unless the JSON `value` has the type `kind`."""
    try:
        msgspec.convert(value, kind)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:  # the latter: a lone surrogate
        reason = str(error).replace("`", "").replace(" - at $", " at ")
        raise UserError(
            f"{where}: is not what a run writes ({reason[0].lower()}{reason[1:]})"
        ) from error


def read_checked(path: Path, kind: Any) -> Any:
    """Return the value of a JSON file. Raises UserError unless it has the type `kind`."""
    value = read_json(path)
    check(str(path), value, kind)
    return value


# --- config.yaml ------------------------------------------------------------------------------


class Facts(TypedDict, total=False):
    """The "facts" in config.yaml."""

    started: str
    commit: str | None
    device: str
    ranks: Count
    threads: Count
    is_local_model: bool
    fingerprints: dict[str, str]
    training_levels: list[Index]
    accepted_changes: list[dict[str, Any]]
    resumed: list[dict[str, Any]]


class ConfigFile(TypedDict, total=False):
    """The keys of config.yaml that are read without `grpo.config.load_config`."""

    task: str
    model: str
    level: Index | None
    seed: int
    reward: str | None
    temperature: Number
    start: str | None
    control: str
    facts: Facts


# --- logs -------------------------------------------------------------------------------------


class LevelMetrics(TypedDict):
    """A value of "levels" in metrics.jsonl."""

    groups: Count
    value: Number
    group_std: NotRequired[Number]
    trap: NotRequired[dict[str, Count]]


class WorstToken(TypedDict):
    """An item of "parity/worst" in metrics.jsonl."""

    group: Index
    sample: Count
    position: Count
    token: Count
    sampler: Number
    trainer: Number


# The metrics in metrics.jsonl that are not numbers, and two numbers that are never null.
METRICS: dict[str, Any] = {
    "time": str,
    "level": Index,
    "num_tokens": Number,
    "levels": dict[str, LevelMetrics],
    "group_std/hist": dict[str, Count],
    "parity/worst": list[WorstToken],
    "events": list[str],
    "stopped": str,
    "control": str,
}


class Evaluation(TypedDict):
    """A line of eval.jsonl: an evaluation or a verdict."""

    step: Count
    purpose: str
    level: NotRequired[Index]
    n: NotRequired[Count]
    task: NotRequired[str]
    unit: NotRequired[str]
    split: NotRequired[str]
    metric: NotRequired[str]
    temperature: NotRequired[Number]
    mean: NotRequired[Number]
    ci_low: NotRequired[Number]
    ci_high: NotRequired[Number]
    exact: NotRequired[Number]
    exact_low: NotRequired[Number]
    exact_high: NotRequired[Number]
    truncated: NotRequired[Number]
    demonstrated: NotRequired[Number]
    verdict: NotRequired[str]
    before: NotRequired[Number | None]
    after: NotRequired[Number | None]
    difference: NotRequired[Number | None]
    low: NotRequired[Number | None]
    high: NotRequired[Number | None]
    updated: NotRequired[Count]
    untaught: NotRequired[Number]
    stopped: NotRequired[str]
    imitated: NotRequired[Number | None]
    solved_step: NotRequired[Count | None]
    mistake: NotRequired[str]
    next_command: NotRequired[str]
    cause: NotRequired[str]
    remedy: NotRequired[str]
    trap: NotRequired[str]
    degenerate: NotRequired[str]
    control: NotRequired[str]


class Report(TypedDict):
    """What a line of eval.jsonl has as well if its purpose is a report; the tools read it."""

    level: Index
    mean: Number
    ci_low: Number
    ci_high: Number
    exact: Number


# A line of curriculum.jsonl. It is not written as a class because "from" is a keyword.
DecisionLine = TypedDict(
    "DecisionLine",
    {
        "step": Count,
        "from": Index,
        "to": Index,
        "kind": str,
        "why": str,
        "figures": NotRequired[dict[str, Any]],
    },
)


class SeenLine(TypedDict):
    """A line of seen.jsonl."""

    step: Count
    keys: list[str]
    imitated: NotRequired[bool]


# A group in a line of groups.jsonl. It is not written as a class because "class" is a keyword.
GroupSummary = TypedDict(
    "GroupSummary",
    {
        "group": Count,
        "index": Index,
        "attempt": Count,
        "level": Index,
        "temperature": Number,
        "class": GroupClass,
        "action": str,
        "trap": str | None,
        "reward": Number,
        "reward_std": Number,
        "value": Number,
        "exact": Number,
        "distinct": Count,
        "tokens": Count,
    },
)


class GroupsLine(TypedDict):
    """A line of groups.jsonl."""

    step: Count
    groups: list[GroupSummary]


LOGS: dict[str, Any] = {
    "eval.jsonl": Evaluation,
    "curriculum.jsonl": DecisionLine,
    "seen.jsonl": SeenLine,
    "groups.jsonl": GroupsLine,
}


def check_line(where: str, name: str, line: Mapping[str, Any]) -> None:
    """Raise UserError unless `line` is a line of the log `name` ("metrics.jsonl", ...)."""
    if name in LOGS:
        check(where, line, LOGS[name])
    if name != "metrics.jsonl":
        return

    for metric, value in line.items():
        is_number = type(value) is float or value is None
        if metric in METRICS or not is_number:
            check(f"{where}, {metric}", value, METRICS.get(metric, Number | bool))


# --- rollouts ---------------------------------------------------------------------------------


class CompletionLine(TypedDict):
    """A completion in a line of a file in rollouts/."""

    tokens: list[Count]
    logprobs: list[Number]
    text: str
    finish: str
    is_demonstration: NotRequired[bool]
    reward: Number
    value: Number
    exact: bool
    advantage: Number | list[Number] | None
    parts: dict[str, Any]
    credits: NotRequired[list[tuple[Count, Number]]]


class ProblemLine(TypedDict):
    """The "problem" in a line of a file in rollouts/."""

    task: str
    level: Index
    prompt: str
    target: str
    key: str
    data: dict[str, Any]


# A group: a line of a file in rollouts/. It is not written as a class because "class" is a keyword.
GroupLine = TypedDict(
    "GroupLine",
    {
        "index": Index,
        "attempt": Count,
        "temperature": Number,
        "class": str,
        "action": str,
        "trap": str | None,
        "problem": ProblemLine,
        "prompt_tokens": list[Count],
        "shots": NotRequired[list[str]],
        "completions": Annotated[list[CompletionLine], msgspec.Meta(min_length=1)],
    },
)


# --- checkpoints ------------------------------------------------------------------------------


class CurriculumState(TypedDict):
    """The "curriculum" in a trainer's state."""

    levels: Annotated[list[Index], msgspec.Meta(min_length=1)]
    position: Count
    recent: list[list[Number]]
    scores: list[tuple[Index, Any]]
    collapsed: Count
    stayed: Count
    steps_back: list[Count]
    steps_before_last: Count | None
    by_training: list[Index]


class MonitorState(TypedDict):
    """The "monitor" in a trainer's state."""

    temperature: Positive
    wasted: Count
    classes: list[dict[str, Number]]
    traps: list[dict[str, list[Number]]]
    truncated: list[Number]
    hot: list[tuple[Number, Number]]  # share of groups that lost their diversity, reward
    cold: list[tuple[Number, Number]]
    gave_up_heat: bool
    level: Index | None
    alarms: dict[str, Any]
    collapse: list[Any]


class EarlyStopState(TypedDict):
    """The "progress" in a trainer's state."""

    untrained: Count
    solved: Count
    classes: dict[str, Count]
    reward: Number | None
    recent: list[tuple[Count, Count]]  # solved groups, groups
    level: Count | None


class DraftingState(TypedDict):
    """The "drafting" in a trainer's state."""

    matched: Number
    rejected: Number


class TrainerState(TypedDict):
    """The "trainer" in trainer.json."""

    done: Count
    drawn: Count
    tokens: Count
    kept_share: Share
    seen: list[str]
    inherited: Count
    trained: list[tuple[Index, Count]]  # level, problems
    curriculum: CurriculumState
    monitor: MonitorState
    progress: EarlyStopState
    solved: str
    drafting: DraftingState
    imitation: dict[str, Any] | None


class SeenState(TypedDict):
    """The keys of a trainer's state that evaluations and later runs read."""

    seen: list[str]
    drawn: Count
    inherited: Count


class RulesState(TypedDict):
    """The "rules" in trainer.json."""

    best: Number | None
    level: Index | None
    passed: bool
    last: Count | None


class StateFile(TypedDict):
    """trainer.json."""

    trainer: dict[str, Any]
    rules: RulesState
    best: str | None


class StartFile(TypedDict):
    """trainer.json of a checkpoint that a later run or an evaluation starts from."""

    trainer: SeenState


class ParamGroup(TypedDict):
    """A group of parameters in optimizer.json, with the keys of `torch.optim`."""

    params: list[Count]
    lr: Number
    betas: NotRequired[tuple[Number, Number]]
    eps: NotRequired[Number]
    weight_decay: NotRequired[Number]
    amsgrad: NotRequired[bool]
    maximize: NotRequired[bool]
    foreach: NotRequired[bool | None]
    capturable: NotRequired[bool]
    differentiable: NotRequired[bool]
    fused: NotRequired[bool | None]


class LossScaleState(TypedDict):
    """Entry "loss_scale" of optimizer.json."""

    factor: Annotated[float, msgspec.Meta(ge=1, le=1 << 16)]
    steps: Count


class OptimizerFile(TypedDict):
    """optimizer.json."""

    rest: dict[str, Number]
    param_groups: list[ParamGroup]
    loss_scale: LossScaleState


class RngFile(TypedDict):
    """rng.json."""

    python: tuple[int, list[int], Number | None]
    numpy: tuple[str, list[int], int, int, Number]
    torch: list[Annotated[int, msgspec.Meta(ge=0, le=255)]]
    cuda: list[list[Annotated[int, msgspec.Meta(ge=0, le=255)]]]
