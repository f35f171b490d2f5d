"""Show runs on one page: charts, and the groups and completions of single steps.

    python -m grpo.report runs/NAME                           writes runs/NAME/report.html
    python -m grpo.report runs/NAME runs/OTHER -o both.html   several runs in the same charts
    python -m grpo.report --live runs/NAME                    writes it again while the run goes on

The page is a single HTML file that needs no network. The charts show all steps. The completions
would be too large, so the page has those of as many steps as fit into --megabytes: the first, the
last, steps with a decision or a warning, and evenly spaced steps between them. With --live an open
page loads itself again, except while its reader looks at the samples. The exit status is 2 if there
is no such run, or if a file is damaged.
"""

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from data.errors import Parser, UserError, exit_status, printable
from data.files import check_output
from grpo.run.logs import load_run
from grpo.tools.report.page import MEGABYTES, RELOAD_SECONDS, write_report


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program with these arguments; return the exit status."""
    return exit_status("grpo.report", lambda: report(argv))


def report(argv: Sequence[str] | None) -> int:
    """Write the page, and print its path; with --live, again until the runs have ended."""
    arguments = parse(argv)
    if arguments.output:
        check_output(str(arguments.output), "--output")

    steps: list[int] = []
    while True:
        runs = [load_run(path) for path in arguments.runs]
        before, steps = steps, [len(run.metrics) for run in runs]
        has_ended = all(run.verdict and run.verdict["step"] >= n for run, n in zip(runs, steps))
        is_live = arguments.live and not has_ended
        if steps != before or not is_live:
            output = write_report(runs, arguments.output, arguments.megabytes, is_live=is_live)
        if not before:
            size = f"{output.stat().st_size / 1e6:.1f} MB"
            count = f"{len(runs)} runs" if len(runs) > 1 else "1 run"
            print(printable(f"{output}: {size}, {count}; open it in a browser"), flush=True)
        if not is_live:
            return 0
        time.sleep(RELOAD_SECONDS)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the flags."""
    parser = Parser(prog="python -m grpo.report", description=__doc__)
    add = parser.add_argument
    add("runs", type=Path, nargs="+", metavar="RUN", help="the directory of a run")
    page = "the page to write (default: report.html in the first run)"
    add("-o", "--output", type=Path, metavar="FILE", help=page)
    size = "size of the completions of all runs (default: %(default)g); the charts take 5 more"
    add("--megabytes", type=float, default=MEGABYTES, metavar="N", help=size)
    add("--live", action="store_true", help="write the page again until the runs have ended")
    arguments = parser.parse_args(argv)
    if not 0 < arguments.megabytes < math.inf:
        raise UserError("--megabytes: give a number above 0, such as 4")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
