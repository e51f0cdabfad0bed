"""Numbers of random cases: few by default, many with the slow tests."""

import pytest


def some_or_many(some, many, most=None, thorough=False):
    """Parametrise `cases`: `some` by default, `many` where slow tests run, `most` where all do."""
    few, slow = pytest.param(some, id="some"), [pytest.mark.slow]
    rare = [*slow, pytest.mark.thorough]
    cases = [few, pytest.param(many, id="many", marks=rare if thorough else slow)]
    cases += [] if most is None else [pytest.param(most, id="most", marks=rare)]
    return pytest.mark.parametrize("cases", cases)


def slow_ones(values, *slow):
    """The values as parameters, of which some take seconds and run with the slow tests."""
    assert set(slow) <= set(values)
    return [pytest.param(v, marks=pytest.mark.slow) if v in slow else v for v in values]


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
