"""Prices of explicit lists of ranks, and of messages between two of them.

Nothing here knows of strides: where a group lies is read off the coordinates of its ranks, one by
one, and what a message shares a link with is found by sending all the others as well.
"""

import math
from itertools import pairwise

from reference import links
from reference.collectives import (
    UNBOUNDED,
    Level,
    grid,
    grid_irregular,
    levels_of,
    switched,
    switched_irregular,
)


def split(ranks):
    """Sorted ranks as runs of neighbours at one distance: a list of lists."""
    gaps = [b - a for a, b in pairwise(ranks)]
    run = next((i for i, gap in enumerate(gaps) if gap != gaps[0]), len(gaps)) + 1
    runs = [ranks[i : i + run] for i in range(0, len(ranks), run)]
    offsets = {tuple(rank - members[0] for rank in members) for members in runs}
    starts = {b[0] - a[0] for a, b in pairwise(runs)}
    assert len(offsets) == 1, f"{ranks} are not equal runs"
    assert len(starts) <= 1, f"{ranks} are not runs at equal distances"
    return runs


def by_unit(ranks, unit):
    held = {}
    for rank in ranks:
        held.setdefault(rank // unit, []).append(rank)
    return held


def evenly_held(runs, unit):
    """Members in every unit of that many ranks that holds any, or None where units differ.

    A unit must not cut a run unevenly, and the outer run must be able to go on: of groups that are
    even by luck some other of the same shape is not.
    """
    ranks = [rank for members in runs for rank in members]
    held = by_unit(ranks, unit)
    if len(held) == 1:
        return len(ranks)
    if min(b - a for a, b in pairwise(ranks)) >= unit:
        return 1
    apart = runs[1][0] - runs[0][0]
    count = len(runs) + unit  # by then runs have begun at every place in a unit that they ever will
    longer = [[rank + j * apart for rank in runs[0]] for j in range(count)]
    run_of = {rank: j for j, members in enumerate(longer) for rank in members}
    end = (runs[0][0] + count * apart) // unit  # units before it are complete
    on = {where: members for where, members in by_unit(run_of, unit).items() if where < end}
    step = runs[0][1] - runs[0][0]
    for members in on.values():
        mine = {run_of[rank] for rank in members}
        whole = len(mine) * len(runs[0]) == len(members)
        filled = len(mine) == 1 and len(members) * step == unit
        if not (whole or filled):
            return None
    numbers = {len(members) for members in (*held.values(), *on.values())}
    return numbers.pop() if len(numbers) == 1 else None


def tiers_of(sizes, rates, latencies, runs):
    """Active levels of two runs on switched tiers, or None where they lie unevenly."""
    found, unit, below = [], 1, 1
    for size, rate, latency in zip(sizes, rates, latencies, strict=True):
        unit *= size
        held = evenly_held(runs, unit)
        if held is None:
            return None
        if held > below:
            found.append(Level(held // below, 1, size, rate, latency, False))
        below = held
    return found


def price_ranks(fabric, op, v, ranks):
    """Seconds of every algorithm over these ranks: one run, or equal runs at equal distances.

    `fabric` is its kind, ``switched`` or ``grid``, then sizes (0: no limit), bytes/s, latencies and
    wraps of its levels.
    """
    kind, sizes, rates, latencies, wraps = fabric
    ranks, p = sorted(ranks), len(ranks)
    assert len(set(ranks)) == p
    if p == 1 or v == 0:
        return {}
    sizes = [UNBOUNDED if size == 0 else size for size in sizes]
    runs = split(ranks)
    if kind == "grid" or len(runs) == 1:
        levels = levels_of(sizes, rates, latencies, wraps, ranks)
    else:
        levels = tiers_of(sizes, rates, latencies, runs)
    if levels is not None:
        return (grid if kind == "grid" else switched)(op, v, p, levels)
    units = [math.prod(sizes[: level + 1]) for level in range(len(sizes))]
    crossed = [
        level
        for level in range(len(sizes))
        if level == 0 or len(by_unit(ranks, units[level - 1])) > 1
    ]
    if kind == "grid":
        starts = [members[0] for members in runs] if len(runs) > 1 else ranks
        pick = [[column[i] for i in crossed] for column in (sizes, rates, latencies)]
        return grid_irregular(op, v, p, starts[1] - starts[0], *pick)
    nearest = min(b - a for a, b in pairwise(ranks))
    used = [level for level in crossed if units[level] > nearest]
    return switched_irregular(op, v, p, [rates[i] for i in used], [latencies[i] for i in used])


def price_message(fabric, v, a, b):
    """Seconds of one message from rank a to rank b while all pairs at that distance send."""
    kind, sizes, rates, latencies, wraps = fabric
    if a == b or v == 0:
        return 0.0
    sizes = [UNBOUNDED if size == 0 else size for size in sizes]
    if kind == "switched":
        unit = 1
        for size, rate, latency in zip(sizes, rates, latencies, strict=True):
            unit *= size
            if a // unit == b // unit:
                return v / rate + latency
        raise AssertionError("no tier holds both ranks")
    slowest, latency = 0.0, 0.0
    places = zip(links.coordinates(a, sizes), links.coordinates(b, sizes), strict=True)
    for (x, y), size, rate, hop, wrap in zip(places, sizes, rates, latencies, wraps, strict=True):
        if x == y:
            continue
        closed = bool(wrap) and size > 2
        row = [((i,), ((i + y - x) % size,), 1) for i in range(size)]
        if not closed:  # those whose target is on the line
            row = [(s, t, n) for s, t, n in row if t[0] - s[0] == y - x]
        busiest = float(links.busiest_link(row, (size,), closed))
        slowest = max(slowest, busiest / rate)
        latency += hop * (min((x - y) % size, (y - x) % size) if closed else abs(x - y))
    return v * slowest + latency
