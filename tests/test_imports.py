"""Data flows one way: the imports that the source code makes are those that are allowed."""

import ast
import re
from functools import cache
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent
PACKAGES = ("align", "data", "tasks", "grpo")
MAY = {  # package: what it may import of the project
    "align": {"align"},
    "data": {"data", "align.needleman"},
    "tasks": {"tasks", "data", "align"},
    "grpo": {"grpo", "tasks.base", "tasks.registry", "tasks.supply", "data.errors", "data.files"},
}
EXCEPTIONS = {
    "grpo/show/group.py": {"align.needleman"},
    "grpo/tools/report/samples.py": {"align.needleman"},
    "grpo/api.py": {"tasks.rows"},
    **dict.fromkeys(("align/__init__.py", "data/__init__.py", "tasks/__init__.py"), {"grpo"}),
}


# The one module outside `grpo.fast` that imports it, and runs if that folder has been deleted.
CHOICE = "grpo/model/load.py"

LAYERS = (  # of `grpo`, lowest first: a module imports its own package and lower layers alone
    ("__version__", "statistics", "records", "distributed"),
    ("model",),
    ("config",),
    ("rollout", "learn"),
    ("fast",),
    ("evaluate", "variance"),
    ("ending",),
    ("next_command",),
    ("curriculum",),
    ("trainer",),
    ("show",),
    ("run",),
    ("tools",),
    ("inspect", "export", "report"),  # what `python -m` runs
    ("smollm2",),
    ("api",),
    ("library",),  # what a user imports
    ("grpo",),
)


@cache
def imports_of(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    first = {name.split(".")[0] for name in names}
    assert not first & {*PACKAGES} - {"grpo"}, f"{path}: import it as grpo.NAME"
    names = {name for name in names if name.split(".")[0] in ("grpo", "train", "eval")}
    return {re.sub(r"^grpo\.(?=(align|data|tasks)\b)", "", name) for name in names}


def files() -> list[str]:
    return sorted(
        str(path.relative_to(TOP)) for package in PACKAGES for path in (TOP / package).rglob("*.py")
    )


def test_imports_follow_the_data():
    for file in files():
        allowed = MAY[file.split("/")[0]] | EXCEPTIONS.get(file, set())
        parents = {good.rpartition(".")[0] for good in allowed}
        for name in imports_of(TOP / file):
            prefixes = {".".join(name.split(".")[:n]) for n in range(1, name.count(".") + 2)}
            assert prefixes & allowed or name in parents, f"{file} imports {name}"


def module_of(file: str) -> str:
    return file[:-3].replace("/", ".").removesuffix(".__init__")


def package_of(module: str) -> str:
    """Return the package of a module of `grpo`: "model" of "grpo.model.policy"."""
    return (module.split(".") + ["grpo"])[1]


def test_packages_of_grpo_import_downwards():
    height = {package: number for number, layer in enumerate(LAYERS) for package in layer}
    for file in [file for file in files() if file.startswith("grpo/")]:
        here = package_of(module_of(file))
        for name in imports_of(TOP / file):
            there = package_of(name)
            if (file, name.split(".")[:2]) == (CHOICE, ["grpo", "fast"]):
                continue
            if there == "fast":
                assert here == "fast", f"{file} imports {name}, which may have been deleted"
            if name.startswith("grpo.") and there != here:
                assert height[there] < height[here], f"{file} imports {name}"


def test_no_import_cycles():
    modules = {module_of(file): imports_of(TOP / file) for file in files()}
    graph = {
        module: {name for name in names if name in modules and name != module}
        for module, names in modules.items()
    }
    done, path = set(), []

    def visit(module):
        assert module not in path, " → ".join([*path[path.index(module) :], module])
        if module in done:
            return
        path.append(module)
        for other in sorted(graph[module]):
            visit(other)
        done.add(path.pop())

    for module in sorted(graph):
        visit(module)
