"""Recorded searches: answers, and the work that each wave did.

An error in a bound or in the order of candidates often leaves the answer as it is and does more work,
or proves less. `PYTHONPATH=tests/cases python tests/explore/test_recorded_searches.py` writes the
record anew; a commit that changes it says why.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from case_counts import slow_ones
from recorded import assert_as_recorded, plain, recorded_rows, write_record
from search_cases import FRONTS, random_case, some_with_every_hbm

import phaze_fast as pf
from phaze_fast.explore import Budget
from phaze_fast.explore.find import find_chips

FILE = Path(__file__).parents[1] / "golden" / "recorded_searches.json"
NUMBERS = (
    *(0, 2, 3, 4, 5, 6, 7, 9, 10, 12, 13, 14, 15, 17, 18, 19, 20, 22, 25, 26, 27, 28, 30, 33, 35),
    *(36, 37, 39, 40, 47, 51, 53, 55, 59, 62, 63, 65, 67, 68),
)
OBJECTIVES = ("time", "energy", "cost", "time", "area", "tokens")


def asked(number: int) -> dict[str, Any]:
    """A small random search, whose options change with its number."""
    case = random_case(7000 + number, devices=16, layers=8)
    models: list[Any] = [case.model]
    options: dict[str, Any] = {"top": (1, 2, 3, 10)[number % 4]}
    if number % 5 == 1:
        models.append(pf.models.load("bert-large").replace(layers=3))
        options["weights"] = (0.5, 2.0) if number % 2 else None
    if number % 3 == 2:
        options["pareto"] = FRONTS[number % len(FRONTS)] if len(models) == 1 else FRONTS[0]
    else:
        options["objective"] = OBJECTIVES[number % len(OBJECTIVES)]
    if number % 8 == 7:
        options["budget"] = Budget(max_points=5.0 * number)
    space = some_with_every_hbm(900 + number, 12 + 5 * (number % 9))
    return {"models": models, "space": space, "case": case, "options": options}


def found(number: int) -> Any:
    question = asked(number)
    case = question["case"]
    answer = find_chips(
        question["models"], question["space"], case.cluster, case.training, **question["options"]
    )
    data = answer.to_dict()
    data.pop("seconds")
    for wave in data["history"]:
        wave.pop("seconds")
    for winner in (*data["winners"], *data["front"]):
        winner["plans"] = [
            [plan[name] for name in ("tp", "pp", "dp", "zero", "micro_batch", "schedule", "time_s")]
            for plan in winner["plans"]
        ]
    return plain({**data, "gap": answer.gap, "status": answer.status})


@pytest.mark.parametrize("number", slow_ones(NUMBERS, 18, 33, 36, 55))
def test_search_does_what_was_recorded(number: int) -> None:
    assert_as_recorded(found(number), recorded_rows(FILE)[NUMBERS.index(number)])


if __name__ == "__main__":
    write_record(FILE, [found(number) for number in NUMBERS])
