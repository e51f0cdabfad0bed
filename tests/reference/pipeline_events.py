"""A pipeline's step as a discrete-event simulation, written from docs/pipelines.md alone.

An order is a list of passes; a pass is a tuple of parts that run together, each (kind, chunk,
micro-batch) with kind F, B, I or W. Any kind of number will do for seconds; with integers or
fractions the result is exact.
"""

import heapq
from collections import Counter

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe", "dualpipe-v")


# ---- orders ----


class Order:
    """Writes an order down; the micro-batch of a part is the next one of its kind and chunk."""

    def __init__(self, micro_batches):
        self.passes = []
        self.micro_batches = micro_batches
        self.seen = Counter()
        self.waiting = []  # chunks of input gradients without their weight gradients

    def add(self, *parts):
        numbered = []
        for kind, chunk in parts:
            # B is I and W at once: they count together.
            counted = "I" if kind == "B" else kind
            numbered.append((kind, chunk, self.seen[counted, chunk]))
            self.seen[counted, chunk] += 1
            if kind == "B":
                self.seen["W", chunk] += 1
            if kind == "I":
                self.waiting.append(chunk)
            if kind == "W":
                self.waiting.remove(chunk)
        if all(k < self.micro_batches for _, _, k in numbered):
            self.passes.append(tuple(numbered))

    def add_oldest_weight(self):
        self.add(("W", self.waiting[0]))


def gpipe(p, v, m, d):
    order = Order(m)
    for kind in "FB":
        for _ in range(m):
            order.add((kind, 0))
    return order.passes


def one_f_one_b(p, v, m, d):
    order = Order(m)
    w = min(m, p - d)
    for _ in range(w):
        order.add(("F", 0))
    for _ in range(m - w):
        order.add(("B", 0))
        order.add(("F", 0))
    for _ in range(w):
        order.add(("B", 0))
    return order.passes


def interleaved(p, v, m, d):
    if v == 1:
        return one_f_one_b(p, v, m, d)
    full = -(-m // p) * p
    forward, backward = [], []
    for first in range(0, full, p):
        group = range(first, first + p)
        forward += [("F", c, k) for c in range(v) for k in group]
        backward += [("B", c, k) for c in reversed(range(v)) for k in group]
    n = len(forward)
    w = min(n, 2 * (p - d - 1) + (v - 1) * p)
    order = forward[:w]
    rest = forward[w:]
    for k in range(n):
        order += rest[k : k + 1]
        order.append(backward[k])
    return [(part,) for part in order if part[2] < m]


def zero_bubble(w, late, m):
    order = Order(m)
    for _ in range(w):
        order.add(("F", 0))
    for k in range(m):
        order.add(("I", 0))
        if k >= late:
            order.add(("W", 0))
        if w + k < m:
            order.add(("F", 0))
    while order.waiting:
        order.add_oldest_weight()
    return order.passes


def zb_v(p, v, m, d):
    order = Order(m)
    n = max(m, 2 * p - 1)

    def times(count, *passes):
        for _ in range(count):
            for name in passes:
                order.add((name[0], int(name[1])))

    times(2 * (p - d) - 1, "F0")
    times(d, "F1", "F0")
    times(p - d, "F1", "I1", "W1")
    times(n - (2 * p - d - 1), "F0", "I0", "W0", "F1", "I1", "W1")
    times(p - d - 1, "I0", "W0", "F1", "I1", "W1")
    times(d, "I0", "I1")
    times(p - d, "I0", "W0")
    times(d, "W1")
    times(d, "W0")
    return order.passes


def dual(h, r, n, exchanged):
    order = Order(n)
    zero, one = (1, 0) if exchanged else (0, 1)
    for _ in range(2 * (h - r - 1)):
        order.add(("F", zero))
    for _ in range(r + 1):
        order.add(("F", zero))
        order.add(("F", one))
    for _ in range(h - r - 1):
        order.add(("I", one))
        order.add(("W", one))
        order.add(("F", one))
    for k in range(n - 2 * h + r + 1):
        if k == 0 and r == h - 1:
            order.add(("F", zero))
            order.add(("B", one))
        else:
            order.add(("F", zero), ("B", one))
        order.add(("F", one), ("B", zero))
    for _ in range(h - r - 1):
        order.add(("B", one))
        order.add(("F", one), ("B", zero))
    for k in range(2 * r + 2):
        order.add(("I" if k >= r + 1 else "B", one if k % 2 == 0 else zero))
    for _ in range(h - r - 1):
        order.add_oldest_weight()
        order.add(("I", zero))
    for _ in range(r + 1):
        order.add_oldest_weight()
    assert not order.waiting
    return order.passes


def orders(schedule, p, v, m):
    """The order of each device."""
    make = {
        "gpipe": gpipe,
        "1f1b": one_f_one_b,
        "interleaved": interleaved,
        "zb-h1": lambda p, v, m, d: zero_bubble(min(m, p - d), d, m),
        "zb-h2": lambda p, v, m, d: zero_bubble(min(m, 2 * (p - d) - 1), 2 * d, m),
        "zb-v": zb_v,
        "dualpipe": lambda p, v, m, d: dual(p // 2, min(d, p - 1 - d), m // 2, d >= p // 2),
        "dualpipe-v": lambda p, v, m, d: dual(p, d, m, False),
    }[schedule]
    return [make(p, v, m, d) for d in range(p)]


# ---- stages ----


def stage_of(schedule, p, d, c):
    """(way, position in the chain) of a device's chunk."""
    if schedule in ("zb-v", "dualpipe-v"):
        return 0, d if c == 0 else 2 * p - 1 - d
    if schedule == "dualpipe":
        return c, d if c == 0 else p - 1 - d
    return 0, c * p + d


# ---- events ----


class DeadlockError(Exception):
    """Passes wait for one another."""


def simulate(schedule, forward, backward, weight_grad, micro_batches, overlap=1):
    """Play a step; seconds are lists by device, then chunk.

    Returns a list of (device, pass, start, end).
    """
    p, v = len(forward), len(forward[0])
    waiting_orders = orders(schedule, p, v, micro_batches)
    stages = {(d, c): stage_of(schedule, p, d, c) for d in range(p) for c in range(v)}
    last = max(position for _, position in stages.values())
    arrived = set()  # (F or B, way, position, micro-batch) that have ended

    def seconds(d, parts):
        def of(kind, c):
            return {
                "F": forward[d][c],
                "B": backward[d][c],
                "W": weight_grad[d][c],
                "I": backward[d][c] - weight_grad[d][c],
            }[kind]

        if len(parts) == 1:
            return of(*parts[0][:2])
        return overlap * (of(*parts[0][:2]) + of(*parts[1][:2]))

    def ready(d, parts):
        for kind, c, k in parts:
            way, position = stages[d, c]
            if kind == "F" and position > 0 and ("F", way, position - 1, k) not in arrived:
                return False
            if kind in "BI":
                if ("F", way, position, k) not in arrived:
                    return False
                if position < last and ("B", way, position + 1, k) not in arrived:
                    return False
            if kind == "W" and ("B", way, position, k) not in arrived:
                return False
        return True

    at, idle, timeline, events = [0] * p, [True] * p, [], []
    now = 0
    while True:
        for d in range(p):
            if idle[d] and at[d] < len(waiting_orders[d]) and ready(d, waiting_orders[d][at[d]]):
                parts = waiting_orders[d][at[d]]
                end = now + seconds(d, parts)
                heapq.heappush(events, (end, d))
                timeline.append((d, parts, now, end))
                idle[d] = False
        if not events:
            break
        now, d = heapq.heappop(events)
        idle[d] = True
        for kind, c, k in waiting_orders[d][at[d]]:
            if kind != "W":
                arrived.add(("F" if kind == "F" else "B", *stages[d, c], k))
        at[d] += 1
    if any(at[d] < len(waiting_orders[d]) for d in range(p)):
        raise DeadlockError(schedule, p, v, micro_batches)
    return timeline


def makespan(timeline):
    """End of the last pass."""
    return max(end for _, _, _, end in timeline)


def longest_device(timeline):
    """Most time between a device's first pass and its last."""
    return max(
        max(end for d, _, _, end in timeline if d == device)
        - min(start for d, _, start, _ in timeline if d == device)
        for device in {d for d, _, _, _ in timeline}
    )


def peaks(timeline, chunk_bytes, kept=1):
    """Most bytes that each device holds, read off the timeline."""
    most = []
    for device, sizes in enumerate(chunk_bytes):
        changes = []
        # Devices run one pass at a time: passes in the order in which they stand, and what starts
        # counts before what the same pass ends.
        for d, parts, _, _ in timeline:
            if d != device:
                continue
            changes += [sizes[c] for kind, c, _ in parts if kind == "F"]
            freed = {"F": 0, "B": 1, "I": 1 - kept, "W": kept}
            changes += [-freed[kind] * sizes[c] for kind, c, _ in parts]
        held = best = 0
        for change in changes:
            held += change
            best = max(best, held)
        assert abs(held) <= 1e-9 * best
        most.append(best)
    return most
