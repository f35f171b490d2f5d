"""Show runs on one page: charts, and the groups and completions of single steps.

    python -m grpo.report runs/NAME                           writes runs/NAME/report.html
    python -m grpo.report runs/NAME runs/OTHER -o both.html   several runs in the same charts
    python -m grpo.report --live runs/NAME                    the same page of a run in progress

The page is a single HTML file that needs no network. The charts show all steps. The completions
would be too large, so the page has those of as many steps as fit into --megabytes: the first, the
last, steps with a decision or a warning, and evenly spaced steps between them. With --live nothing
is written: a server on 127.0.0.1 shows all steps, and the page follows the run. The exit status is
2 if there is no such run, or if a file is damaged.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from data.errors import Parser, UserError, exit_status
from data.text import printable
from grpo.run.files import check_output
from grpo.run.logs import load_run
from grpo.tools.report.live import serve
from grpo.tools.report.page import MEGABYTES, write_report

# The port of --live, unless another is asked for.
PORT = 8642


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program with these arguments; return the exit status."""
    return exit_status("grpo.report", lambda: report(argv))


def report(argv: Sequence[str] | None) -> int:
    """Write the page, and print its path; return the exit status."""
    arguments = parse(argv)
    if arguments.live:
        serve(arguments.runs, arguments.port)

    if arguments.output:
        check_output(str(arguments.output), "--output")
    runs = [load_run(path) for path in arguments.runs]
    output = write_report(runs, arguments.output, arguments.megabytes)
    size = f"{output.stat().st_size / 1e6:.1f} MB"
    count = f"{len(runs)} runs" if len(runs) > 1 else "1 run"
    line = f"{output}: {size}, {count}; open it in a browser"
    print(printable(line))
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the flags."""
    parser = Parser(
        prog="python -m grpo.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="the folder of a run")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="the page to write (default: report.html in the first run)",
    )
    parser.add_argument(
        "--megabytes",
        type=float,
        default=MEGABYTES,
        metavar="N",
        help="size of the completions of all runs (default: %(default)g); the charts take 5 more",
    )
    parser.add_argument(
        "--live", action="store_true", help="serve the page on 127.0.0.1 and follow the run"
    )
    parser.add_argument(
        "--port",
        type=int,
        default=PORT,
        metavar="N",
        help="of --live (default: %(default)d; 0: any free one)",
    )
    arguments = parser.parse_args(argv)
    if arguments.live and arguments.output:
        raise UserError("--live: writes no file; leave out --output")
    if not 0 <= arguments.port < 1 << 16:
        raise UserError(f"--port {arguments.port}: give a number from 0 to 65535, such as {PORT}")
    if not 0 < arguments.megabytes < math.inf:
        raise UserError("--megabytes: give a number above 0, such as 4")
    return arguments
