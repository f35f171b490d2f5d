"""Evaluate a model on held-out problems: `python eval.py --model runs/NAME --words 10,25
--problems 200`.

Problems come from the test split, whose documents are used neither to train nor to choose
anything. They are distinct: if fewer exist than were asked for, all of them are evaluated and the
output says so. Problems that the run was trained on are dropped and counted.

A run is evaluated as it was trained: task, level, wording, system turn, examples, variables of the
chat template, temperature, top-k, top-p and completion budget are the run's own unless a flag
overrides them.

--texts evaluates on every text of the folder except those that the run was trained on. --foreign
adds kinds of text that no run is trained on (`data/foreign.py`), and reports each kind.
"""

import json
import sys
from pathlib import Path

from data.streams import interrupts_end

with interrupts_end():  # these load torch, which takes seconds
    from data.files import check_output, write_whole
    from data.text import escape_control
    from grpo.config import Config
    from grpo.model.load import load_policy
    from grpo.model.policy import Policy
    from grpo.model.prompts import format_of
    from grpo.tools.evaluation.figures import SHOWN, Evaluator, load_run_policy
    from grpo.tools.evaluation.flags import parse
    from grpo.tools.evaluation.request import Request, make_request, trained_run
    from grpo.tools.evaluation.table import show
    from grpo.tools.evaluation.texts import held_out_texts, task_of_examples
    from tasks.base import exit_status, foreign_of
    from tasks.dataset import read_problems


def main(argv: list[str]) -> int:
    """Evaluate with these flags; return the exit status."""
    return exit_status("eval.py", lambda: report(argv))


def report(argv: list[str]) -> int:
    """Evaluate, write the figures to --json, and show them; return the exit status."""
    assert __doc__ is not None
    flags, others = parse(argv, description=__doc__.splitlines()[0])
    if flags.json:
        check_output(flags.json, "--json")
    checkpoint, config = trained_run(flags.model)
    request, task = make_request(flags, others, config)
    dataset = read_problems(Path(request.dataset), task) if request.dataset else []

    examples_from = task
    if request.texts is not None and request.split == "test":
        examples_from = task_of_examples(task, request, config)
        task = held_out_texts(task, checkpoint, config)
    kinds = {level: foreign_of(task, level) for level in request.levels if request.foreign}

    policy, seen = _load(request, checkpoint, config)
    prompt = request.prompt
    policy.use(
        format_of(
            examples_from,
            system=prompt.system,
            shots=prompt.shots,
            chat_template_kwargs=prompt.chat_template_kwargs,
            seed=request.seed,
        )
    )

    evaluator = Evaluator(request, policy, seen, dataset)
    results = [evaluator.level(task, level) for level in request.levels]
    for level, tasks in kinds.items():
        results += evaluator.foreign(tasks, level)

    # The file is written first, because the table may go to a pipe that is closed early.
    if flags.json:
        lines = [
            {key: value for key, value in result.items() if key not in SHOWN} for result in results
        ]
        write_whole(flags.json, (json.dumps(lines, indent=1) + "\n").encode())
    show(results, getattr(task, "metric", "score"))
    return 0


def _load(request: Request, checkpoint: Path | None, config: Config) -> tuple[Policy, set[str]]:
    """Return the policy, and the keys of the problems that it was trained on."""
    if checkpoint is None:
        policy, seen = load_policy(request.model, device=request.device), set[str]()
    else:
        policy, seen = load_run_policy(checkpoint, config, request.device, request.accept)
    for note in policy.notes:
        print(f"eval.py: warning: {escape_control(note)}", file=sys.stderr)
    return policy, seen


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
