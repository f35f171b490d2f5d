"""Each mutant of `tests/tools/mutants.py` can still be applied, and its test is still there."""

from mutants import ROOT, mutants, mutated


def test_each_mutant_can_be_applied():
    for mutant in mutants():
        mutated(mutant)
        assert (ROOT / mutant.test).is_file(), mutant
