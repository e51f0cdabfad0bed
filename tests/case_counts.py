"""How many random cases a test looks at: some by default, many with the slow tests."""

import pytest


def some_or_many(some, many):
    """Give a test its number of `cases`: a few by default, and all of them where slow tests run."""
    few = pytest.param(some, id="some")
    return pytest.mark.parametrize(
        "cases", [few, pytest.param(many, id="many", marks=pytest.mark.slow)]
    )
