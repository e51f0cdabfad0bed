"""Sources that contain all mutants of a file: the selected one is the change that it is listed as."""

import builtins

from robustness import mutants

SOURCE = """
def answer(a, b, c):
    if a * b + 1.0 == 7.0 or b % (a * b) > c or not a:
        return max(a, b) / c if a > b else a - b * c
    return [x * a for x in (a, b, c) if x + a < b and x != c]
"""
CASES = [(a, b, c) for a in (0, 1, 2, 3) for b in (1, 2, 3, 5) for c in (-1.5, 1, 2, 4)]


def answers(source):
    names = {}
    exec(source, names)
    found = []
    for case in CASES:
        try:
            found.append(names["answer"](*case))
        except ZeroDivisionError:
            found.append(None)
    return found


def test_a_selected_mutant_is_the_change_that_it_is_listed_as(tmp_path, monkeypatch):
    (tmp_path / "file.py").write_text(SOURCE)
    sites = dict(enumerate(mutants.python_sites(str(tmp_path / "file.py")), 1))
    monkeypatch.setattr(builtins, "phaze_mutant", mutants.Switch(), raising=False)
    every = mutants.instrumented(SOURCE, sites)
    assert answers(every) == answers(SOURCE)
    assert len(sites) > 20
    for number, mutant in sites.items():
        builtins.phaze_mutant.choose(number)
        (start, _, _), (_, end, _) = mutant.edits
        assert answers(every) == answers(f"{SOURCE[:start]}({mutant.after}){SOURCE[end:]}"), mutant
