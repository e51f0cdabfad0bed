"""Every collective formula of docs/collectives.md in plain Python, from explicit coordinates.

A group is written out member by member. It is regular where its coordinates are a full product of
arithmetic progressions, one per level; everything else follows from those progressions.
"""

import functools
import math
from dataclasses import dataclass
from itertools import pairwise, product

from reference import links

UNBOUNDED = 10**18


@dataclass
class Level:
    members: int
    stride: int
    size: int
    rate: float
    latency: float
    wrapped: bool


def levels_of(sizes, rates, latencies, wraps, ranks):
    """The active levels of a group whose ranks fill a brick of evenly spaced places, or None."""
    members = {links.coordinates(rank, sizes) for rank in ranks}
    axes = [sorted({m[level] for m in members}) for level in range(len(sizes))]
    if math.prod(len(axis) for axis in axes) != len(ranks) or set(product(*axes)) != members:
        return None
    found = []
    for axis, size, rate, latency, wrapped in zip(
        axes, sizes, rates, latencies, wraps, strict=True
    ):
        steps = {b - a for a, b in pairwise(axis)}
        if len(steps) > 1:
            return None
        if len(axis) > 1:
            found.append(Level(len(axis), steps.pop(), size, rate, latency, wrapped))
    return found


def log2(n):
    return math.ceil(math.log2(n) - 1e-12)


# ---- switched fabrics ----


def switched(op, v, p, levels):
    slow = min(level.rate for level in levels)
    late = max(level.latency for level in levels)
    by_tier = sum(log2(level.members) * level.latency for level in levels)
    depth = min(by_tier, log2(p) * late)
    inside = [math.prod(level.members for level in levels[:i]) for i in range(len(levels))]

    def once(level, amount):
        k = level.members
        return (k - 1) / k * amount / level.rate + (k - 1) * level.latency

    parts = [once(level, v / held) for level, held in zip(levels, inside, strict=True)]
    top, left = levels[-1], v / inside[-1]
    tree_on_top = 2 * left / top.rate + 2 * log2(top.members) * top.latency
    nested = 2 * sum(parts[:-1]) + min(2 * parts[-1], tree_on_top)
    ring = (p - 1) / p * v / slow + (p - 1) * late
    rails = (p - 1) / p * v / min(
        level.rate * held for level, held in zip(levels, inside, strict=True)
    ) + (p - 1) * late
    tree = 2 * v / slow + 2 * depth
    several = len(levels) > 1
    if op == "all-reduce":
        found = {"ring": 2 * ring, "tree": tree}
        return {**found, "hierarchical": nested, "rail-ring": 2 * rails} if several else found
    if op in ("reduce-scatter", "all-gather"):
        found = {"ring": ring, "tree": tree}
        both = {"hierarchical": min(sum(parts), nested), "rail-ring": rails}
        return {**found, **both} if several else found
    if op == "broadcast":
        spread = 2 * sum(parts[:-1]) + left / top.rate + log2(top.members) * top.latency
        found = {"tree": v / slow + depth}
        return {**found, "hierarchical": spread} if several else found
    met = [held * (level.members - 1) for level, held in zip(levels, inside, strict=True)]
    pairwise = sum(
        n / p * v / level.rate + n * level.latency for n, level in zip(met, levels, strict=True)
    )
    found = {"pairwise": pairwise}
    return {**found, "hierarchical": sum(once(level, v) for level in levels)} if several else found


def switched_irregular(op, v, p, rates, latencies):
    slow, late = min(rates), max(latencies)
    ring = (p - 1) / p * v / slow + (p - 1) * late
    tree = 2 * v / slow + 2 * log2(p) * late
    return {
        "all-reduce": {"ring": 2 * ring, "tree": tree},
        "reduce-scatter": {"ring": ring, "tree": tree},
        "all-gather": {"ring": ring, "tree": tree},
        "all-to-all": {"pairwise": ring},
        "broadcast": {"tree": v / slow + log2(p) * late},
    }[op]


# ---- grids ----


def grid(op, v, p, levels):
    def closed(level):
        return level.wrapped and level.size > 2 and level.members * level.stride == level.size

    def once(level, amount):
        k, hop = level.members, level.stride * level.latency
        rate = level.rate / level.stride * (2 if closed(level) else 1)
        step = hop if closed(level) or k == 2 else 2 * hop
        return (k - 1) / k * amount / rate + (k - 1) * step

    slow = min(level.rate / level.stride for level in levels)
    hops = [level.stride * level.latency for level in levels]
    if op == "broadcast":
        far = [x.members // 2 if closed(x) else x.members - 1 for x in levels]
        return {"tree": v / slow + sum(n * hop for n, hop in zip(far, hops, strict=True))}
    if op == "all-to-all":
        return grid_exchange(v, levels, hops, closed)
    middle = sum(level.members // 2 * hop for level, hop in zip(levels, hops, strict=True))
    tree = 2 * v / slow + 2 * middle
    passes = 2 if op == "all-reduce" else 1
    if len(levels) == 1:
        return {"ring": passes * once(levels[0], v), "tree": tree}
    found = {"tree": tree}
    if p % 2 == 0 and all(level.stride == 1 for level in levels):
        found["snake-ring"] = passes * ((p - 1) / p * v / (2 * slow) + (p - 1) * max(hops))
    fastest_first = sorted(levels, key=lambda x: x.stride / x.rate / (2 if closed(x) else 1))
    left, ordered = v, 0.0
    for level in fastest_first:
        ordered += once(level, left)
        left /= level.members
    found["dimension-ordered"] = passes * ordered
    n = len(levels)
    rotating = 0.0
    for phase in range(n):
        times = []
        for part in range(n):
            before = [levels[(part + j) % n].members for j in range(phase)]
            times.append(once(levels[(part + phase) % n], v / n / math.prod(before)))
        rotating += max(times)
    found["multi-ring"] = passes * rotating
    return found


def grid_exchange(v, levels, hops, closed):
    loads = []
    for level in levels:
        k = level.members
        if closed(level):
            share = sum(min(j, k - j) for j in range(1, k)) / (2 * k)
        else:
            share = max(i * (k - i) for i in range(1, k)) / k
        loads.append(v * share * level.stride / level.rate)
    latency = sum((level.members - 1) * hop for level, hop in zip(levels, hops, strict=True))
    if len(levels) == 1:
        return {"pairwise": loads[0] + latency}
    return {"dimension-ordered": sum(loads) + latency, "multi-ring": max(loads) + latency}


def grid_irregular(op, v, p, stride, sizes, rates, latencies):
    slow = min(rates) / (2 * stride)
    late = sum((size - 1) * latency for size, latency in zip(sizes, latencies, strict=True))
    ring = (p - 1) / p * v / slow + (p - 1) * late
    exchange = v * max((p - 1) / p, p / 4) / slow + (p - 1) * late
    return {
        "all-reduce": {"ring": 2 * ring},
        "reduce-scatter": {"ring": ring},
        "all-gather": {"ring": ring},
        "all-to-all": {"pairwise": exchange},
        "broadcast": {"tree": v / slow + log2(p) * late},
    }[op]


# ---- explicit ranks ----

# Nothing below knows of strides: where a group lies is read off the coordinates of its ranks, one by
# one, and what a message shares a link with is found by sending all the others as well.


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


@functools.cache
def _busiest_of_row(size, closed, distance):
    """Bytes over the busiest link of a row whose devices send one byte each so many steps on."""
    row = [((i,), ((i + distance) % size,), 1) for i in range(size)]
    if not closed:  # those whose target is on the line
        row = [(s, t, n) for s, t, n in row if t[0] - s[0] == distance]
    return float(links.busiest_link(row, (size,), closed))


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
        slowest = max(slowest, _busiest_of_row(size, closed, y - x) / rate)
        latency += hop * (min((x - y) % size, (y - x) % size) if closed else abs(x - y))
    return v * slowest + latency
