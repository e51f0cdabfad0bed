"""Layouts of a tensor on a mesh of dies, die by die: what a change of layout takes.

The lower layer of `reference.mapping_oracle`, where the words are explained.
"""

import itertools
import math
from functools import cache

SPLITS = "BMNE"
ORDERED, RING, SPLIT = 1, 2, 3


def _index(sizes):
    """All positions of a tensor: per slot a digit of batch, rows, features and experts."""
    return list(itertools.product(*(itertools.product(range(p), repeat=4) for p in sizes)))


def meets(position, die, layout, slots=None):
    """Whether a die's part has this position, as far as the given slots say."""
    chosen = range(len(layout)) if slots is None else slots
    return all(
        layout[k] not in SPLITS or position[k][SPLITS.index(layout[k])] == die[k] for k in chosen
    )


def holdings(layout, sizes):
    """What each die has of a tensor: position -> terms of its sum."""
    found = {}
    for die in itertools.product(*(range(p) for p in sizes)):
        term = tuple(digit for digit, at in zip(die, layout, strict=True) if at == "+")
        found[die] = {p: {term} for p in _index(sizes) if meets(p, die, layout)}
    return found


@cache
def needed(before, after, size):
    """Collective that a line of dies needs between two layouts of one slot; None = nothing."""
    have, want = holdings(before, (size,)), holdings(after, (size,))
    terms = {term for parts in have.values() for held in parts.values() for term in held}
    if all(have[d].get(position) == terms for d in want for position in want[d]):
        return None
    alike = all(want[d].keys() == want[(0,)].keys() for d in want)
    if len(terms) > 1:
        return "all-reduce" if alike else "reduce-scatter"
    return "all-gather" if alike else "all-to-all"


ORDER = ("reduce-scatter", "all-to-all", "all-reduce", "all-gather")


def steps(before, after, sizes, limit=(64, 64, 64, 64)):
    """Collectives of a conversion: (kind, slots, bytes of each die's vector / bytes of the tensor).

    What makes the tensor smaller comes first, what makes it larger last. A whole tensor is cut
    before it travels only where its dimension has digits for the slots of both ends.
    """
    room = {
        name: math.prod(p for b, a, p in zip(before, after, sizes, strict=True) if name in (b, a))
        <= most
        for name, most in zip("BMN", limit, strict=False)
    }
    kinds = [needed(b, a, p) for b, a, p in zip(before, after, sizes, strict=True)]
    share = 1.0
    for b, a, p in zip(before, after, sizes, strict=True):
        share /= p if b in SPLITS or (b == "-" and room.get(a, False)) else 1
    found = []
    for kind in ORDER:
        slots = tuple(k for k, found_kind in enumerate(kinds) if found_kind == kind)
        size = math.prod(sizes[k] for k in slots)
        if kind == "all-gather":
            share *= size
        if slots:
            found.append((kind, slots, share))
        if kind == "reduce-scatter":
            share /= size
    return found


# ---- seconds of a collective ----


def primes(number):
    """Prime factors of a side, smallest first: the sizes of its slots."""
    return next(([p, *primes(number // p)] for p in range(2, number + 1) if number % p == 0), [])


def merged(slots):
    """Neighbouring slots of one axis as one run: axis, size and stride of each."""
    runs = []
    for axis, size, stride in slots:
        if runs and runs[-1][0] == axis and runs[-1][1] * runs[-1][2] == stride:
            runs[-1] = (axis, runs[-1][1] * size, runs[-1][2])
        else:
            runs.append((axis, size, stride))
    return runs


def _half(runs, rates, hop_s, volume, algorithm):
    """Seconds of an all-gather or a reduce-scatter."""
    weights = [stride / rates[axis] for axis, _, stride in runs]
    reach = [(size - 1) * stride for _, size, stride in runs]
    order = sorted(range(len(runs)), key=lambda i: -weights[i])
    ordered, inside = hop_s * sum(reach), volume
    for i in reversed(order):
        ordered += weights[i] * (runs[i][1] - 1) / runs[i][1] * inside
        inside /= runs[i][1]
    ways = {ORDERED: ordered}
    if len(runs) == 2 and runs[0][0] != runs[1][0]:
        (_, f, s), (_, g, t) = runs
        wf, wg = (w * (r[1] - 1) / r[1] for w, r in zip(weights, runs, strict=True))
        ways[SPLIT] = volume / 2 * (max(wf / g, wg / f) + max(wf, wg)) + 2 * hop_s * max(reach)
        if f % 2 == 0 or g % 2 == 0:
            (along, a), (across, c) = ((f, s), (g, t)) if g % 2 == 0 else ((g, t), (f, s))
            turns = 2 * (across - 1)
            length = turns * c + (along * across - turns) * a - min(a, c)
            part = (f * g - 1) / (f * g) * volume / 2
            ways[RING] = max(weights) * part + hop_s * length
    return ways.get(algorithm, ordered) if algorithm else min(ways.values())


def seconds(case, kind, slots, volume, algorithm=0):
    """Seconds of a collective over a set of slots; bytes that a die sends where that is asked."""
    if not slots:
        return 0.0
    size = math.prod(case.sizes[k] for k in slots)
    times = 2 if kind == "all-reduce" else 1
    if case.rules["volume"]:
        return times * volume * (size - 1) / size
    if case.rules.get("fabric", 0):  # one link of each die to the switches
        each = 1.0 if kind == "all-reduce" and case.rules["fabric"] == 2 else (size - 1) / size
        rounds = 2 if kind == "all-reduce" and case.rules["fabric"] == 1 else 1
        once = each * volume / case.rules["x_bytes_per_s"] + 2 * case.rules["hop_s"]
        return rounds * once
    rates = (case.rules["x_bytes_per_s"], case.rules["y_bytes_per_s"])
    hop_s, runs = case.rules["hop_s"], merged([case.slots[k] for k in slots])
    if kind == "all-to-all":
        return sum(
            hop_s * (f - 1) * stride + stride / rates[axis] * (f // 2) * (f - f // 2) / f * volume
            for axis, f, stride in runs
        )
    return times * _half(runs, rates, hop_s, volume, algorithm)


def convert(case, op, before, after, volume, algorithm):
    """Seconds of a conversion, and of what is paid again when the tensor is kept as it was made."""
    total = again = 0.0
    for kind, slots, share in steps(before, after, case.sizes, case.ops[op].limit):
        spent = seconds(case, kind, slots, share * volume, algorithm)
        total += spent
        again += spent if kind in ("all-to-all", "all-gather") else 0.0
    return total, again


def overlapped(pieces, whole_s, piece_s, work_s):
    """Seconds that work waits for a conversion, and that pieces of it take beside work.

    The clock of a line of pieces: one is communicated while another is worked on.
    """
    clock = link = 0.0
    for _ in range(pieces):
        link += piece_s  # the link never rests
        clock = max(clock, link) + work_s / pieces
    waits = clock - work_s
    if waits >= whole_s:
        return whole_s, 0.0
    return waits, pieces * piece_s - waits
