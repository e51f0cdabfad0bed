"""Numbers of random cases: few by default, many with the slow tests."""

import pytest


def some_or_many(some, many, thorough=False):
    """Parametrise `cases`: `some` by default, `many` where slow tests run."""
    few = pytest.param(some, id="some")
    marks = [pytest.mark.slow, pytest.mark.thorough] if thorough else [pytest.mark.slow]
    return pytest.mark.parametrize("cases", [few, pytest.param(many, id="many", marks=marks)])


def first_slow(name, values, slow=1):
    """Parametrise a slow test: the first values in every slow run, all in thorough ones."""
    rest = [pytest.param(value, marks=pytest.mark.thorough) for value in values[slow:]]
    several = pytest.mark.parametrize(name, [*values[:slow], *rest])
    return lambda test: pytest.mark.slow(several(test))


def slow_or_thorough(few, all_of_them):
    """Parametrise `cases` of a slow test: `few` in every slow run, all in thorough ones."""
    marks = pytest.mark.thorough
    several = pytest.mark.parametrize("cases", [few, pytest.param(all_of_them, marks=marks)])
    return lambda test: pytest.mark.slow(several(test))
