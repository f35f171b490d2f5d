"""How long may two texts be for a model behind a server to keep its place in both?

python examples/endpoint.py URL MODEL [--words 3,5,10,25] [--problems N]

URL is an OpenAI-compatible server, such as http://localhost:8000: vLLM, llama.cpp, `transformers
serve`, or a service whose key is in OPENAI_API_KEY. What was asked once is not asked again.
"""

import argparse
import json
import sys
from pathlib import Path

from grpo.tools.evaluation.program import main as evaluate

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("url")
parser.add_argument("model")
parser.add_argument("--words", default="3,5,10,25")
parser.add_argument("--problems", default="40")


def main(flags):
    """Evaluate, and print the scores as a table in Markdown; return the exit status."""
    figures = Path("endpoint.json")
    asked = ["--endpoint", flags.url, "--model", flags.model, "--words", flags.words]
    status = evaluate([*asked, "--problems", flags.problems, "--json", str(figures)])
    if status:
        return status

    print("\n| words of each text | similarity | 95 % interval | exact |\n|---|---|---|---|")
    for line in json.loads(figures.read_text("utf-8")):
        interval = f"{line['ci_low']:.3f} to {line['ci_high']:.3f}"
        print(f"| {line['level']} | {line['mean']:.3f} | {interval} | {line['exact']:.3f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main(parser.parse_args()))
