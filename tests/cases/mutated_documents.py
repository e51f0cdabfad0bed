"""Documents with one field changed at random, as a careless editor or a broken disk leaves them."""

import copy

NASTY = [
    *(None, True, False, -1, 0, 1, 2, 7, 2**31, 2**63, 10**30, 1e308, float("inf"), 0.5),
    *("", "x", "two", "1f1bb", "none", "mixed", "full:0", "full:2/x", "a\nb", "=1+1", "\x1b[2J"),
    *([], [None], ["x"], [1, 2], {}, {"a": 1}, [[1]], [{}]),
]


def paths(value, path=()):
    """Every place in plain data."""
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from paths(value[key], (*path, key))


def mutated(rng, document, accept=lambda _: True):
    """A copy with one place deleted or replaced, and what was done."""
    changed = copy.deepcopy(document)
    place = rng.choice([path for path in paths(document) if path and accept(path)])
    parent = changed
    for key in place[:-1]:
        parent = parent[key]
    if rng.random() < 0.2:
        del parent[place[-1]]
        return changed, (place, "deleted")
    parent[place[-1]] = rng.choice(NASTY)
    return changed, (place, parent[place[-1]])
