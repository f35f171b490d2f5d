"""The examples run as they are, in a folder of their own."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
NOTEBOOK = EXAMPLES / "notebook.ipynb"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent))


def python(*arguments):
    """Run Python on an example; return what it printed."""
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def cells():
    return [
        "".join(cell["source"])
        for cell in json.loads(NOTEBOOK.read_text())["cells"]
        if cell["cell_type"] == "code"
    ]


def test_the_notebook_is_stored_without_outputs():
    notebook = json.loads(NOTEBOOK.read_text())
    assert notebook["nbformat"] == 4
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
            ast.parse("".join(cell["source"]))
    assert notebook["metadata"].keys() == {"kernelspec", "language_info"}
    assert "/home/" not in NOTEBOOK.read_text()


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom():
    """As a script, whose last cells are shown; a kernel is not needed."""
    pytest.importorskip("pandas")
    script = "\n\n".join(cells()) + "\n\nprint(run.reports[-1]['mean'], run.report())\n"
    Path("notebook.py").write_text(script)
    mean, report = python("notebook.py").split()[-2:]
    assert float(mean) > 0.6 and Path(report).is_file()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_notebook_runs_in_a_kernel():
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    pytest.importorskip("pandas")
    notebook = nbformat.read(NOTEBOOK, 4)
    nbclient.NotebookClient(notebook, timeout=900, kernel_name="python3").execute()
    assert notebook.cells[-1].outputs[-1]["data"]["text/plain"] == "'report.html'"
    generated = notebook.cells[-3].outputs[-1]["data"]["text/plain"]
    assert "one" in ast.literal_eval(generated)[0]
