"""Layers by exhaustive enumeration, and a checker of schedules, in plain Python."""

from fractions import Fraction


def uses(types, cores, mode, overlap):
    """Cores of each resource that a way to run an operator holds."""
    asked = mode[0]
    if asked == 0:
        return [have if (types >> r & 1 or not overlap) else 0 for r, have in enumerate(cores)]
    return [min(asked, have) if types >> r & 1 else 0 for r, have in enumerate(cores)]


def faults(layer, starts, choice, makespan, overlap=False):
    """What is wrong with a schedule; nothing if it is right."""
    found = []
    length = [modes[c][1] for modes, c in zip(layer.modes, choice, strict=True)]
    ends = [s + d for s, d in zip(starts, length, strict=True)]
    slack = 1e-9 * max(makespan, 1e-300)
    if any(s < -slack for s in starts):
        found.append("starts before zero")
    if abs(max(ends) - makespan) > slack:
        found.append("makespan is not the last end")
    found += [f"{a} -> {b}" for a, b in layer.edges if starts[b] < ends[a] - slack]
    held = [
        uses(t, layer.cores, modes[c], overlap)
        for t, modes, c in zip(layer.types, layer.modes, choice, strict=True)
    ]
    for at in starts:
        now = [i for i in range(len(layer)) if starts[i] <= at + slack and at + slack < ends[i]]
        for r, have in enumerate(layer.cores):
            if sum(held[i][r] for i in now) > have:
                found.append(f"resource {r} at {at}")
    return found


def best_makespan(layer, overlap=False):
    """Least makespan over everything that can be done from one finish to the next.

    Goes through all states (what is done, what runs and for how long yet), each once: no bounds, no
    rule that leaves anything out. Sums are exact.
    """

    def exact(latency):
        return int(latency) if latency == int(latency) else Fraction(latency)

    count = len(layer)
    before = [sum(1 << a for a, b in layer.edges if b == i) for i in range(count)]
    ways = [
        [(exact(mode[1]), uses(layer.types[i], layer.cores, mode, overlap)) for mode in modes]
        for i, modes in enumerate(layer.modes)
    ]
    known = {}

    def starts(done, running, first, free):
        """Every set of operators, with modes, that may start now, besides those that run."""
        yield ()
        begun = done | sum(1 << i for i, _, _ in running)
        for i in range(first, count):
            if begun >> i & 1 or before[i] & ~done:
                continue
            for m, (length, use) in enumerate(ways[i]):
                left = [f - u for f, u in zip(free, use, strict=True)]
                if min(left) < 0:
                    continue
                for more in starts(done, running, i + 1, left):
                    yield ((i, m, length), *more)

    def rest(done, running):
        if done == (1 << count) - 1:
            return 0
        key = (done, running)
        if key not in known:
            free = list(layer.cores)
            for i, m, _ in running:
                free = [f - u for f, u in zip(free, ways[i][m][1], strict=True)]
            best = float("inf")
            for chosen in starts(done, running, 0, free):
                now = (*running, *chosen)
                if not now:
                    continue
                step = min(left for _, _, left in now)
                finished = sum(1 << i for i, _, left in now if left == step)
                on = tuple(sorted((i, m, left - step) for i, m, left in now if left > step))
                best = min(best, step + rest(done | finished, on))
            known[key] = best
        return known[key]

    return float(rest(0, ()))
