"""Parameters that travel together are records: no function takes more than five.

This holds for the packages, and for what tests import and run.
"""

import ast
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parent.parent
PACKAGES = ("align", "data", "grpo", "tasks", "tests/support", "tests/tools")
MAX_PARAMETERS = 5

# A signature that `transformers` lays down.
GIVEN = {
    ("grpo/model/prefix_cache.py", "attention"),
}

# What makes a kernel of a function; the second is `triton.jit` with options.
KERNELS = {"triton.jit", "for_any_batch"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def parameters(function: Function) -> list[str]:
    """Return the names of the parameters of a function, without `self`, `*args` and `**kwargs`."""
    given = function.args
    names = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return [name for name in names if name not in ("self", "cls")]


def is_exempt(function: Function) -> bool:
    """Return whether it is a kernel, whose arguments are pointers, or the forward pass of an
    autograd function.
    """
    decorators = {ast.unparse(each) for each in function.decorator_list}
    is_kernel = bool(decorators & KERNELS)
    is_forward = function.name == "forward" and parameters(function)[:1] == ["ctx"]
    return is_kernel or is_forward


def too_long(code: str) -> list[str]:
    """Return the names of the functions in `code` with more than MAX_PARAMETERS parameters."""
    return [
        node.name
        for node in ast.walk(ast.parse(code))
        if isinstance(node, Function)
        if len(parameters(node)) > MAX_PARAMETERS and not is_exempt(node)
    ]


@pytest.mark.parametrize("package", PACKAGES)
def test_parameters_that_travel_together_are_a_record(package):
    found = {
        (str(path.relative_to(TOP)), name)
        for path in sorted((TOP / package).rglob("*.py"))
        for name in too_long(path.read_text())
    }
    assert found == {each for each in GIVEN if each[0].startswith(f"{package}/")}


def test_a_long_signature_is_seen():
    assert too_long("def f(a, b, c, d, e): pass\ndef g(a, b, c, *, d, e, f): pass") == ["g"]
    assert too_long("class C:\n    def f(self, a, b, c, d, e, **others): pass") == []
    assert too_long("@triton.jit\ndef f(a, b, c, d, e, f): pass") == []
    assert too_long("def forward(ctx, a, b, c, d, e, f): pass") == []
    assert too_long("def forward(a, b, c, d, e, f): pass") == ["forward"]
