"""Collectives as explicit messages over explicit links of a grid.

Every group of the same shape runs at once. Messages are routed hop by hop along one dimension after
another, the shorter way round where a dimension wraps and half each way where both are equally
long. The answer is the load of the busiest directed link, in bytes; no formula of the kernel is
used.
"""

from collections import defaultdict
from fractions import Fraction
from itertools import product


def coordinates(rank, dims):
    place = []
    for size in dims:
        place.append(rank % size)
        rank //= size
    return tuple(place)


def groups(dims, ranks, stride):
    """All groups of this shape that tile the grid, each a list of coordinates."""
    total = 1
    for size in dims:
        total *= size
    block = ranks * stride
    found = []
    for base in range(0, total - block + 1, block):
        for offset in range(stride):
            members = [base + offset + i * stride for i in range(ranks)]
            found.append([coordinates(m, dims) for m in members])
    return found


def _ways(a, b, size, wrap):
    """(steps, direction, share) of the shortest ways from a to b along one dimension."""
    forward = (b - a) % size
    backward = (a - b) % size
    if not wrap or size <= 2:
        return [(abs(b - a), 1 if b > a else -1, Fraction(1))]
    if forward == backward:
        return [(forward, 1, Fraction(1, 2)), (backward, -1, Fraction(1, 2))]
    return [(forward, 1, Fraction(1))] if forward < backward else [(backward, -1, Fraction(1))]


def send(loads, source, target, amount, dims, wrap):
    """Add a message's bytes to every link it crosses, dimension by dimension."""
    at = list(source)
    for d, size in enumerate(dims):
        if at[d] == target[d]:
            continue
        for steps, direction, share in _ways(at[d], target[d], size, wrap):
            place = list(at)
            for _ in range(steps):
                nxt = list(place)
                nxt[d] = (place[d] + direction) % size
                loads[(tuple(place), tuple(nxt))] += amount * share
                place = nxt
        at[d] = target[d]


def busiest_link(messages, dims, wrap):
    loads = defaultdict(Fraction)
    for source, target, amount in messages:
        send(loads, source, target, Fraction(amount), dims, wrap)
    return max(loads.values(), default=Fraction(0))


def all_to_all_load(dims, wrap, ranks, stride, payload):
    """Each rank sends payload / ranks to every other rank of its group."""
    messages = [
        (a, b, Fraction(payload, ranks))
        for group in groups(dims, ranks, stride)
        for a, b in product(group, group)
        if a != b
    ]
    return busiest_link(messages, dims, wrap)


def shift_load(dims, wrap, distance, payload):
    """Every rank sends to the rank `distance` further on along one dimension, cyclically there."""
    total = 1
    for size in dims:
        total *= size
    step = coordinates(distance, dims)
    messages = []
    for rank in range(total):
        a = coordinates(rank, dims)
        b = tuple(
            (x + s) % size if wrap else x + s for x, s, size in zip(a, step, dims, strict=True)
        )
        if all(x < size for x, size in zip(b, dims, strict=True)):
            messages.append((a, b, payload))
    return busiest_link(messages, dims, wrap)


def ring_pass_load(order, dims, wrap, payload, both_ways):
    """One all-gather round a ring of members in `order`: each edge carries (p-1)/p of the payload.

    `both_ways` sends half the payload round each way. Edges between neighbours on the grid take
    one hop; others are routed.
    """
    p = len(order)
    amount = Fraction(payload) * (p - 1) / p
    messages = []
    for i, a in enumerate(order):
        b = order[(i + 1) % p]
        if both_ways:
            messages += [(a, b, amount / 2), (b, a, amount / 2)]
        else:
            messages.append((a, b, amount))
    return busiest_link(messages, dims, wrap)
