"""The interface of tasks: what `grpo`, and a task of the user's own, import.

`grpo` knows this file and no task by name.
"""

from data.errors import Parser, UserError, blaming, exit_status, needs
from tasks.optional import (
    credits_of,
    declared_budget,
    draft_of,
    foreign_of,
    levels_of,
    plain_texts_of,
    sources_of,
    summary_of,
    unseen_texts,
)
from tasks.protocol import SPLITS, Problem, Score, Task, is_right, key_of, split_of_key
from tasks.registry import (
    REGISTRY,
    check_wording,
    flags_of_tasks,
    load_task,
    options_of,
    split_options,
    task_file,
    trust,
)
from tasks.scoring import range_of, rescaled, scores_of
from tasks.streams import problem_at, problem_stream
from tasks.wording import worded

__all__ = [
    "Parser",
    "Problem",
    "REGISTRY",
    "SPLITS",
    "Score",
    "Task",
    "UserError",
    "check_wording",
    "credits_of",
    "declared_budget",
    "draft_of",
    "exit_status",
    "flags_of_tasks",
    "foreign_of",
    "is_right",
    "key_of",
    "levels_of",
    "load_task",
    "blaming",
    "needs",
    "options_of",
    "plain_texts_of",
    "problem_at",
    "problem_stream",
    "range_of",
    "rescaled",
    "scores_of",
    "sources_of",
    "split_of_key",
    "split_options",
    "summary_of",
    "task_file",
    "trust",
    "unseen_texts",
    "worded",
]
