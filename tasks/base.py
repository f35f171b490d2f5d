"""The interface of tasks: what `grpo` and a user's task import.

`grpo` imports this file and knows no task by name.
"""

from data.errors import Parser, UserError, blaming, exit_status, needs
from tasks.checks import calling, process_unchanged
from tasks.function_digest import function_digest
from tasks.optional import (
    answers_of,
    credits_of,
    declared_budget,
    default_steps_of,
    draft_of,
    drafts_leave_data,
    foreign_of,
    levels_of,
    mistakes_of,
    notes_of,
    plain_texts_of,
    problems_of,
    python_functions_of,
    sources_of,
    summary_of,
    unseen_texts,
    watch_scoring,
)
from tasks.own_files import load_from_file
from tasks.protocol import COMPONENT, SPLITS, Problem, Score, Task, is_right, key_of, split_of_key
from tasks.registry import (
    REGISTRY,
    REWARD_FILE,
    check_wording,
    explain,
    flags_of_tasks,
    implied_task,
    is_of_project,
    is_same_program,
    load_task,
    options_of,
    programs_of,
    require_trusted_task,
    split_options,
)
from tasks.scoring import range_of, rescaled, scores_of, scores_of_groups
from tasks.streams import problem_at, problem_stream
from tasks.wording import worded

__all__ = [
    "COMPONENT",
    "Parser",
    "Problem",
    "REGISTRY",
    "REWARD_FILE",
    "SPLITS",
    "Score",
    "Task",
    "UserError",
    "answers_of",
    "blaming",
    "calling",
    "check_wording",
    "credits_of",
    "declared_budget",
    "default_steps_of",
    "draft_of",
    "drafts_leave_data",
    "exit_status",
    "explain",
    "flags_of_tasks",
    "foreign_of",
    "function_digest",
    "implied_task",
    "is_of_project",
    "is_same_program",
    "is_right",
    "key_of",
    "levels_of",
    "load_from_file",
    "load_task",
    "mistakes_of",
    "needs",
    "notes_of",
    "options_of",
    "plain_texts_of",
    "problem_at",
    "problem_stream",
    "problems_of",
    "process_unchanged",
    "programs_of",
    "python_functions_of",
    "range_of",
    "require_trusted_task",
    "rescaled",
    "scores_of",
    "scores_of_groups",
    "sources_of",
    "split_of_key",
    "split_options",
    "summary_of",
    "unseen_texts",
    "watch_scoring",
    "worded",
]
