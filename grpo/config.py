"""The configuration of a run: the settings, checked, and what follows from them.

The settings themselves are in `grpo.config_table`. Nothing here imports torch, so that `--help` is
quick.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from data.errors import UserError
from data.files import write_whole
from grpo.choices import (
    LOSSES,
    MAX_DRAFTED,
    MAX_SHOTS,
    PROMOTE_AT,
    SOURCES,
    TRACKERS,
    is_draft_mode,
    is_loss,
)
from grpo.config_table import Settings
from grpo.model.options import AdapterSettings, LoadOptions
from grpo.model.prompts import PromptFormat, format_of, template_arguments
from grpo.statistics import problems_needed
from tasks.base import Task
from tasks.supply import fixed_size, parse_levels, ramp_to

# How far below and above 1 the ratio is clipped, according to each loss's paper. Other losses have
# 0.2 and 0.2.
CLIP = {
    "dapo": (0.2, 0.28),
    "gspo": (3e-4, 4e-4),
    "cispo": (1.0, 0.28),
}

# Settings that a resumed run can change.
ON_RESUME = (
    "steps",
    "log_every",
    "eval_every",
    "eval_problems",
    "samples_every",
    "save_every",
    "keep_best",
    "device",
    "on_alarm",
    "patience",
    "track",
)

# The upper limit of all counts and weights.
MAX_NUMBER = 10**9

# The longest name of a folder that file systems take (bytes).
MAX_NAME = 255


def names_in(text: str | None) -> list[str]:
    """Return the names of a list such as "wandb,trackio".

    >>> names_in("wandb, trackio"), names_in(None)
    (['wandb', 'trackio'], [])
    """
    return [part.strip() for part in text.split(",")] if text else []


@dataclass(frozen=True)
class Config(Settings):
    """The settings of a run, which are checked when an object is made.

    Raises UserError for an invalid value or combination.
    """

    def __post_init__(self) -> None:
        for name, is_good, fix in self._checks():
            if not is_good:
                raise UserError(f"{spelled(name)} {getattr(self, name)}: {fix}")

    def _checks(self) -> Iterator[tuple[str, bool, str]]:
        """Yield the name of each checked setting, whether it is valid, and what to do if not."""
        yield from self._choice_checks()
        yield from self._range_checks()
        yield from self._combination_checks()

        if self.curriculum:
            parse_levels(self.curriculum, "--curriculum", must_rise=True)
        template_arguments(self.chat_template_kwargs)
        fixed_size(self.problems)

    def _choice_checks(self) -> Iterator[tuple[str, bool, str]]:
        for spec in dataclasses.fields(self):
            choices = spec.metadata.get("choices")
            value = getattr(self, spec.name)
            if choices and value is not None:
                yield spec.name, value in choices, f"give one of {', '.join(choices)}"

        for name, choices in (("accept_changes", SOURCES), ("track", TRACKERS)):
            is_good = set(names_in(getattr(self, name))) <= set(choices)
            yield name, is_good, f"give one of {', '.join(choices)}"

        fix = f"give one of {', '.join(LOSSES)}, or path/to/file.py:function for your own"
        yield "loss", is_loss(self.loss), fix

        is_device = self.device.split(":")[0] in ("auto", "cpu", "cuda")
        yield "device", is_device, "give one of auto, cpu, cuda"

    def _range_checks(self) -> Iterator[tuple[str, bool, str]]:
        for spec in dataclasses.fields(self):
            least = spec.metadata.get("least")
            value = getattr(self, spec.name)
            if least is not None and value is not None:
                yield spec.name, value >= least, f"give {least} or more"
                yield spec.name, value <= MAX_NUMBER, f"give {MAX_NUMBER:,} or less"

            is_finite = not isinstance(value, float) or math.isfinite(value)
            yield spec.name, is_finite, "give a finite number"

        for name in ("clip_low", "clip_high"):
            value = getattr(self, name)
            yield (
                name,
                value is None or 0 < value <= MAX_NUMBER,
                f"give a number above 0, up to {MAX_NUMBER:,}",
            )

        fix = "a group of one has no variance and nothing to learn from; give 2 or more"
        yield "group_size", self.group_size >= 2, fix
        yield "shots", self.shots <= MAX_SHOTS, f"give {MAX_SHOTS} or less"
        yield "temperature", self.temperature > 0, "give a number above 0"
        yield "top_p", 0 < self.top_p <= 1, "give a number above 0 and up to 1"
        yield "replay", 0 <= self.replay < 1, "give a share from 0 up to, not including, 1"

        rate = self.learning_rate
        yield (
            "learning_rate",
            rate is None or 0 <= rate < 1,
            "give a number from 0 up to, not including, 1",
        )
        limits = self.keep_difficulty
        fix = "give the lowest and the highest mean score, e.g. [0.2, 0.8]"
        yield "keep_difficulty", limits is None or is_score_range(limits), fix
        mark = self.promote_at
        yield "promote_at", mark is None or 0 <= mark <= 1, "give a score from 0 to 1"

        fix = f"give auto, off, or a number of tokens up to {MAX_DRAFTED}"
        yield "draft", is_draft_mode(self.draft), fix

    def _combination_checks(self) -> Iterator[tuple[str, bool, str]]:
        # A name that is not UTF-8 holds halves of surrogate pairs. `open_run` refuses it, and says
        # why.
        is_plain = self.name is None or (
            re.fullmatch(r"[^/\\\0]+", self.name) is not None
            and all(c.isprintable() or "\ud800" <= c <= "\udfff" for c in self.name)
            and self.name.strip(".") != ""
            and len(self.name.encode(errors="replace")) <= MAX_NAME
        )
        fix = f"give the plain name of a folder in runs, of up to {MAX_NAME} bytes"
        yield "name", is_plain, fix

        is_only_source = self.problems == "fresh" or not self.dataset
        yield "problems", is_only_source, "leave it out: --dataset says which problems there are"

        weighs_tokens = self.credit == "outcome" or self.loss != "gspo"
        fix = "gspo weighs whole sequences, not tokens; give another --loss"
        yield "credit", weighs_tokens, fix

        is_trainable = self.quantise == "none" or self.lora_rank != 0
        fix = "give --lora-rank 16 too: what is quantised cannot be trained"
        yield "quantise", is_trainable, fix

        is_full = not (self.shard and self.lora_rank)
        fix = "give --lora-rank 0 too; an adapter is small, and each rank holds it whole"
        yield "shard", is_full, fix

        is_cut = self.demonstrate and (self.top_k > 0 or self.top_p < 1)
        fix = "top_k and top_p leave out what a right answer may need; leave out one or the other"
        yield "demonstrate", not is_cut, fix
        is_control = self.demonstrate and self.control != "none"
        fix = "a control experiment must not be shown right answers; leave out one or the other"
        yield "demonstrate", not is_control, fix

        if self.promote_by == "heldout" and self.promote_at is not None:
            needed = problems_needed(min(self.promote_at, 1))
            fix = (
                f"give {needed} or more: fewer cannot show --promote-at {self.promote_at:g}, even "
                "if all are right"
            )
            yield "promote_problems", self.promote_problems >= needed, fix

    @property
    def clips(self) -> tuple[float, float]:
        """How far below and above 1 the ratio is clipped: as set, or as in the loss's paper."""
        low, high = CLIP.get(self.loss, (0.2, 0.2))
        return self.clip_low or low, self.clip_high or high

    @property
    def promotion(self) -> tuple[str, float]:
        """What promotes to the next level, and the mean score that it takes."""
        promote_by = self.promote_by or ("heldout" if self.curriculum else "running")
        promote_at = PROMOTE_AT[promote_by] if self.promote_at is None else self.promote_at
        return promote_by, promote_at

    @property
    def adapter(self) -> AdapterSettings | None:
        """The adapter of a new run; None for full fine-tuning."""
        if not self.lora_rank:
            return None
        return AdapterSettings(self.lora_rank, self.lora_alpha, self.seed)

    @property
    def loading(self) -> LoadOptions:
        """How the policy is loaded, besides its device."""
        return LoadOptions(
            dtype=self.dtype,
            adapter=self.adapter,
            quantise=self.quantise,
            start=self.start,
            keep_reference=self.beta > 0,
        )

    def prompt_format(self, task: Task) -> PromptFormat:
        """Return how the prompts of the `task` are presented."""
        return format_of(
            task,
            system=self.system,
            shots=self.shots,
            chat_template_kwargs=self.chat_template_kwargs,
            seed=self.seed,
        )

    @property
    def mark(self) -> dict[str, str]:
        """The mark of each line that a control experiment writes; {} for an ordinary run."""
        return {} if self.control == "none" else {"control": self.control}

    def levels_for(self, task: Task) -> list[int]:
        """Return the levels of training, rising. Without --curriculum the last one is --words."""
        if self.curriculum:
            return parse_levels(self.curriculum, "--curriculum", must_rise=True)

        assert self.level is not None, "the configuration is resolved"
        climbs = self.ramp and getattr(task, "climbs", False) and not self.dataset
        return ramp_to(self.level) if climbs else [self.level]

    def save(self, path: Path, **facts: Any) -> None:
        """Write the configuration and `facts` (versions, device, commit) as YAML."""
        values = {**dataclasses.asdict(self), "facts": facts}
        write_whole(path, yaml.safe_dump(values, sort_keys=False).encode())


def is_score_range(limits: Sequence[Any]) -> bool:
    """Return whether `limits` are two scores, from 0 to 1, that do not fall.

    >>> is_score_range([0.2, 0.8]), is_score_range([0.8, 0.2]), is_score_range([0.2])
    (True, False, False)
    """
    are_numbers = all(type(end) in (int, float) for end in limits)
    return are_numbers and len(limits) == 2 and 0 <= limits[0] <= limits[1] <= 1


def spelled(name: str) -> str:
    """Return how a user writes the setting `name`.

    >>> spelled("group_size"), spelled("level"), spelled("top_p")
    ('--group-size', '--words', '--config: top_p')
    """
    spec = Config.__dataclass_fields__[name]
    if not spec.metadata.get("is_flag"):
        return f"--config: {name}"
    return spec.metadata["flags"][0] if spec.metadata["flags"] else f"--{name.replace('_', '-')}"
