"""Break the core on purpose, one place at a time, and see a test fail:
`python tests/tools/mutants.py [WORD]`.

A mutant is found by the name of its function, wherever that is defined, and by the form of the code
in it: a name of one underscore and one letter (`_a`) stands for any expression, the same one
wherever it occurs. So a mutant outlives a move of the function, and other names inside it.

Each mutant whose line of the table contains WORD (default: all) is applied in a copy of the tree.
The program prints "killed" if its test fails, and "SURVIVED" if it passes; the exit status is 1 if
one survived. A test that fails without a mutant would prove nothing, so it ends the program.
`tests/test_mutants.py` checks that each mutant can be applied.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("align", "data", "grpo", "tasks")
ANY = re.compile("_[a-z]")

LEARN = "tests/grpo/learn"
CORE = "tests/grpo/core"


class Mutant(NamedTuple):
    """A mistake, the function or Class.method that it is made in, the change, and the test."""

    mistake: str
    function: str
    before: str  # an expression; the first of this form is changed
    after: str
    test: str


TABLE = """
# advantages
advantages without the mean | advantages | _a - _b | _a | LEARN/test_advantages.py
divided by the range of rewards | divisors | stdev(_a) + _b | max(_a) - min(_a) + _b | \
LEARN/test_advantages.py
tokens without a baseline | token_advantages | means[_a] | 0.0 | LEARN/test_credit.py
the state of a token knows the token | token_states | (0, *ends[:-1]) | ends | LEARN/test_credit.py

# loss
clip bounds exchanged | policy_loss | _a.clamp(1 - _b, 1 + _c) | _a.clamp(1 - _c, 1 + _b) | \
LEARN/test_loss.py
the optimistic bound | policy_loss | torch.minimum(_a, _b) | torch.maximum(_a, _b) | \
LEARN/test_loss.py
a gradient through cispo's ratio | policy_loss | _a.detach() | _a | LEARN/test_loss.py
the other KL | kl_k3 | _a - _b | _b - _a | LEARN/test_loss.py
the sign of the KL term | step_loss | _a + _b | _a - _b | LEARN/test_loss.py
masked tokens counted | zero_padding | torch.where(_a, _b, 0.0) | _b | LEARN/test_loss.py
long completions count for more | token_weights | len(_a) * _b | len(_a) | LEARN/test_loss.py
a ratio without a bound | _log_ratio | _a.clamp(max=_b) | _a | LEARN/test_loss.py

# update
the policy as its own reference | _backward | reference.run(_a, reference, _b, packing=_c) | \
policy.run(_a, policy, _b, packing=_c) | LEARN/update/test_update.py
the temperature left out of the update | completion_logprobs | batch.temperature | 1.0 | \
LEARN/update/test_exact.py
the reference cut as the policy | Policy.reference | self.frozen or self.is_lora | False | \
LEARN/update/test_update.py
predicted by the next token | PaddedBatch.__init__ | len(prompt) - 1 | len(prompt) | \
tests/grpo/rollout/test_generate.py
ranks keep their own gradients | Optimizer.collect | self.ranks.all_reduce(_a) | None | \
LEARN/test_shard.py
gradients are not clipped | Optimizer.collect | \
torch.nn.utils.clip_grads_with_norm_(_a, _b, _c) | None | LEARN/update/test_update.py
the last micro-batch alone | _add_up | _a.add_(_b) | None | LEARN/test_optimizer.py
no warm-up | lr_factor | step / _a | 1.0 | LEARN/test_optimizer.py
one epoch whatever was asked | Trainer.update_policy | range(_a) | range(1) | CORE/test_trainer.py

# sampling
one draw for two problems | Trainer.sample | sample_key(_a, _b, index, _c, _d) | \
sample_key(_a, _b, _c, _d) | CORE/test_trainer.py
two ranks share their prompts | Ranks.share | items[self.rank::self.size] | items[::self.size] | \
CORE/test_distributed.py
another generator | uniform | _shift(_a, 27) | _shift(_a, 26) | tests/grpo/rollout/test_sampling.py
temperature ignored | choose | _a / (temperature or 1.0) | _a | \
tests/grpo/rollout/test_generate.py
another nucleus | truncation | 1 - top_p | top_p | tests/grpo/rollout/test_sampling.py
a drawn token cut off | truncation | _a.scatter(-1, _b, False) | _a | \
tests/grpo/rollout/test_sampling.py
stop token ignored | PlainDecoder._decode | token not in _a | True | \
tests/grpo/rollout/test_generate.py
every completion counts as ended | _completion | 'stop' if _a else 'length' | 'stop' | \
tests/grpo/rollout/test_generate.py
one token beyond the budget | PlainDecoder._decode | place + 1 | place | \
tests/grpo/rollout/test_generate.py
drafts accepted after a wrong one | accepted | _a.cumprod(1) | _a | tests/grpo/fast/test_decoder.py

# scores
no gap cost | BitColumns.score | _a - n - m | _a - n | tests/align/test_needleman.py
a skipped word costs nothing | prefix_scores | row_BM - 1 | row_BM | \
tests/align/test_needleman.py
prefix reward off by one | Interleave._score | prefix / _a | (prefix + 1) / _a | \
tests/tasks/test_interleave.py
prefix credit off by one | Interleave.credits | min(i, _a) | min(i, _a + 1) | \
tests/tasks/test_interleave.py
cut off answers are right | score_groups | _a.is_truncated | False | CORE/test_truncation.py

# problems
every problem of a stream is one | problem_at | text.encode() | task.name.encode() | \
tests/tasks/test_base.py
trained problems are held out | first_distinct | _a in seen | False | tests/tasks/test_supply.py
seen keys not recorded | ProblemStream.mark_seen | self.seen.update(_a) | None | \
tests/grpo/curriculum/test_curriculum.py

# groups and levels
groups always vary | classify | max(_a) - min(_a) > _b and not _c | True | CORE/test_variance.py
every group is kept | VarianceMonitor.classify | _a or _b | True | CORE/test_variance.py
shown answers count | Trainer.metrics | originals(_a) | _a | \
tests/grpo/curriculum/test_demonstrations.py
rewards are not shuffled | VarianceMonitor.apply_control | random.Random(_a).shuffle(_b) | None | \
CORE/test_trainer.py
a level opens by luck | reaches_mark | _a and _b | _a | tests/grpo/curriculum/test_curriculum.py
a level is forgotten | Curriculum.weights | max(FLOOR, _a) | _a | \
tests/grpo/curriculum/test_curriculum.py
a worse answer is shown | demonstrate | earned.reward <= _a | False | \
tests/grpo/curriculum/test_demonstrations.py
solved without an end | solves_level | _a and _b | _a | CORE/test_ending.py
no step is untrained | EndWatch.observe | _a.teaches | True | CORE/test_ending.py

# state
a checkpoint without moments | Optimizer.state_dict | _a['state'].items() | {}.items() | \
LEARN/test_optimizer.py
damage overlooked | verify | _sha256(_a) != _b | False | tests/grpo/run/test_checkpoint.py
the best checkpoint removed | prune | _a.name != keep | True | tests/grpo/run/test_checkpoint.py
random numbers start again | load_rng | random.setstate(_a) | None | \
tests/grpo/run/test_checkpoint.py
the curriculum starts again | Trainer.restore | getattr(self, name).load_state_dict(_a) | None | \
CORE/test_trainer.py
masters are rounded | Optimizer.state_dict | weight.dtype != master.dtype | False | \
LEARN/test_optimizer.py
"""


def mutants() -> list[Mutant]:
    """Return the mutants of the table."""
    lines = [line for line in TABLE.splitlines() if line and line[0] != "#"]
    cells = [[cell.strip() for cell in line.split(" | ")] for line in lines]
    folders = {"LEARN": LEARN, "CORE": CORE}
    return [
        Mutant(*rest, re.sub("LEARN|CORE", lambda found: folders[found[0]], test))
        for *rest, test in cells
    ]


def mutated(mutant: Mutant, root: Path = ROOT) -> tuple[Path, ast.Module]:
    """Return the file that a mutant changes, and its code with the change.

    Raises LookupError unless one function has the name and some code in it has the form.
    """
    *classes, name = mutant.function.split(".")
    found = []
    for path, text in _texts(root).items():
        if f"def {name}(" in text:
            tree = ast.parse(text)
            found += [(path, tree, node) for node in _named(tree, [*classes, name])]
    if len(found) != 1:
        raise LookupError(f"{mutant.mistake}: {len(found)} functions are called {mutant.function}")

    ((path, tree, function),) = found
    change = _Change(mutant)
    change.visit(function)
    if not change.is_done:
        raise LookupError(f"{mutant.mistake}: {mutant.function} has no {mutant.before}")
    return path, ast.fix_missing_locations(tree)


@cache
def _texts(root: Path) -> dict[Path, str]:
    """Return the text of each file of the packages."""
    return {path: path.read_text() for name in PACKAGES for path in (root / name).rglob("*.py")}


def _named(tree: ast.AST, names: list[str]) -> list[ast.AST]:
    """Return the definitions that are called `names`, each inside the one before it."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    here = [
        node
        for node in ast.iter_child_nodes(tree)
        if isinstance(node, kinds) and node.name == names[0]
    ]
    return here if len(names) == 1 else [node for each in here for node in _named(each, names[1:])]


class _Change(ast.NodeTransformer):
    """Changes the first expression of the mutant's form."""

    def __init__(self, mutant: Mutant):
        self.before = ast.parse(mutant.before, mode="eval").body
        self.after = mutant.after
        self.is_done = False

    def visit(self, node: ast.AST) -> ast.AST:
        bound: dict[str, ast.AST] = {}
        if self.is_done or not _matches(self.before, node, bound):
            return node if self.is_done else self.generic_visit(node)
        self.is_done = True
        changed = _Filled(bound).visit(ast.parse(self.after, mode="eval").body)
        assert ast.dump(changed) != ast.dump(node)
        return changed


class _Filled(ast.NodeTransformer):
    """Puts the expressions that a form has matched in the place of their names."""

    def __init__(self, bound: dict[str, ast.AST]):
        self.bound = bound

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return self.bound.get(node.id, node)


def _matches(form: object, found: object, bound: dict[str, ast.AST]) -> bool:
    """Return whether code has a form; note in `bound` what its names `_a`, `_b` ... stand for."""
    if isinstance(form, ast.Name) and ANY.fullmatch(form.id) and isinstance(found, ast.expr):
        known = bound.setdefault(form.id, found)
        return ast.dump(known) == ast.dump(found)
    if isinstance(form, list) and isinstance(found, list):
        return len(form) == len(found) and all(
            _matches(one, other, bound) for one, other in zip(form, found, strict=True)
        )
    if isinstance(form, ast.AST) and type(form) is type(found):
        return all(
            _matches(getattr(form, name), getattr(found, name), bound) for name in form._fields
        )
    return not isinstance(form, ast.AST) and form == found


@cache
def passes(test: str, copy: Path, mutant: Mutant | None = None) -> bool:
    """Return whether a test passes in a copy of the tree, with a mutant if one is given."""
    if mutant:
        path, tree = mutated(mutant, copy)
        original = path.read_text()
        path.write_text(ast.unparse(tree))

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", test],
        cwd=copy,
        env=os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    if mutant:
        path.write_text(original)
    # 1: a test failed; 2: the test could not be collected; 5: no test was found.
    assert done.returncode in (0, 1), done.stdout[-2000:]
    return done.returncode == 0


def main() -> int:
    word = " ".join(sys.argv[1:])
    chosen = [mutant for mutant in mutants() if word in " | ".join(mutant)]
    if not chosen:
        raise SystemExit(f"no mutant's line of the table contains {word!r}")
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "tree")
        ignored = shutil.ignore_patterns(".git", "__pycache__", "runs")
        shutil.copytree(ROOT, copy, symlinks=True, ignore=ignored)
        for mutant in chosen:
            if not passes(mutant.test, copy):
                raise SystemExit(f"{mutant.test} fails without a mutant")
            is_alive = passes(mutant.test, copy, mutant)
            survivors += is_alive
            outcome = "SURVIVED" if is_alive else "killed"
            print(f"{outcome:9} {mutant.mistake} ({mutant.function}; {mutant.test})", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} killed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
