"""Every mutant can still be made, and a test that fails is told from one that cannot run."""

import pytest
from mutants import MUTANTS
from run_mutants import ROOT, mutated, outcome


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_can_be_made(mutant):
    original = (ROOT / mutant.file).read_text()
    text = mutated(mutant, original)  # raises unless the code occurs exactly once
    assert text != original
    compile(text, mutant.file, "exec")
    for path, _, test in (tests.partition("::") for tests in mutant.tests.split()):
        assert f"def {test.partition('[')[0]}" in (ROOT / path).read_text()


def test_mutants_are_many_and_their_names_differ():
    assert len(MUTANTS) >= 45
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize(
    "text, said",
    [
        ("def test(): pass", "survived"),
        ("def test(): assert 1 == 2", "killed"),
        ("import nothing_of_the_kind", "broken"),
        ("def", "broken"),
    ],
)
def test_only_a_failing_test_kills(tmp_path, text, said):
    (tmp_path / "conftest.py").write_text(
        "from hypothesis import settings\nsettings.register_profile('mutation')\n"
    )
    (tmp_path / "test_it.py").write_text(text)
    assert outcome(tmp_path, "test_it.py").partition(":")[0] == said
