"""How many random cases a test looks at: some by default, many with the slow tests."""

import pytest


def some_or_many(some, many, thorough=False):
    """Give a test its number of `cases`: a few by default, and all of them where slow tests run."""
    few = pytest.param(some, id="some")
    marks = [pytest.mark.slow, pytest.mark.thorough] if thorough else [pytest.mark.slow]
    return pytest.mark.parametrize("cases", [few, pytest.param(many, id="many", marks=marks)])


def first_slow(name, values, slow=1):
    """Give a slow test its values: so many of them in every slow run, the others in thorough ones."""
    rest = [pytest.param(value, marks=pytest.mark.thorough) for value in values[slow:]]
    several = pytest.mark.parametrize(name, [*values[:slow], *rest])
    return lambda test: pytest.mark.slow(several(test))


def slow_or_thorough(few, all_of_them):
    """Give a slow test its number of `cases`: some in every slow run, all of them in thorough ones."""
    marks = pytest.mark.thorough
    several = pytest.mark.parametrize("cases", [few, pytest.param(all_of_them, marks=marks)])
    return lambda test: pytest.mark.slow(several(test))
