"""The mutants of `run_mutants.py`: one deliberate fault each, beside the tests that should notice.

There is a table for each part of the project.
"""

from typing import NamedTuple

from mutants import learn, model, rollout, run, tasks, training


class Mutant(NamedTuple):
    """One change to one file. `tests` (paths separated by spaces) should fail once it is made.

    `where` is the qualified name of the function or class that holds the code ("" for the whole
    module). `old` and `new` are source code: two expressions or two statements. Code is compared
    by syntax tree, so neither its layout nor its comments matter.
    """

    name: str
    file: str
    tests: str
    where: str
    old: str
    new: str


# (file, its tests): (name, where, old, new) of each mutant. Test paths are relative to tests/.
TABLES = (learn.TABLE, model.TABLE, rollout.TABLE, training.TABLE, run.TABLE, tasks.TABLE)

MUTANTS = [
    Mutant(name, file, " ".join(f"tests/{path}" for path in tests.split()), where, old, new)
    for table in TABLES
    for (file, tests), rows in table.items()
    for name, where, old, new in rows
]
