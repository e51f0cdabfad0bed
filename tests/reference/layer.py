"""Layers by exhaustive enumeration, and a checker of schedules, in plain Python."""

from itertools import product


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
    """Least makespan over all modes and all orders, each operator as early as it can be."""
    count = len(layer)
    before = [{a for a, b in layer.edges if b == i} for i in range(count)]
    best = float("inf")
    for choice in product(*(range(len(m)) for m in layer.modes)):
        length = [layer.modes[i][choice[i]][1] for i in range(count)]
        held = [
            uses(layer.types[i], layer.cores, layer.modes[i][choice[i]], overlap)
            for i in range(count)
        ]
        if sum(length) == 0:
            return 0.0
        best = min(best, _orders(before, length, held, layer.cores, {}, best))
    return best


def best_makespan_by_moments(layer, overlap=False):
    """Least makespan over everything that can be done from one finish to the next.

    Goes through all states (what is done, what runs and for how long yet), each once: no bounds, no
    rule that leaves anything out. Latencies must be whole numbers.
    """
    count = len(layer)
    before = [sum(1 << a for a, b in layer.edges if b == i) for i in range(count)]
    ways = [
        [(int(mode[1]), uses(layer.types[i], layer.cores, mode, overlap)) for mode in modes]
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


def _orders(before, length, held, cores, placed, limit):
    """Every order in which starts may be fixed (serial schedule generation)."""
    if len(placed) == len(length):
        return max(s + length[i] for i, s in placed.items())
    best = limit
    for i in range(len(length)):
        if i in placed or not before[i] <= set(placed):
            continue
        ready = max((placed[b] + length[b] for b in before[i]), default=0.0)
        start = _earliest(i, ready, length, held, cores, placed)
        if start + length[i] >= best:
            continue
        best = min(best, _orders(before, length, held, cores, {**placed, i: start}, best))
    return best


def _earliest(i, ready, length, held, cores, placed):
    moments = sorted({ready} | {s + length[j] for j, s in placed.items() if s + length[j] > ready})
    for moment in moments:
        end = moment + length[i]
        beside = [j for j, s in placed.items() if s < end and moment < s + length[j]]
        checks = [moment, *(placed[j] for j in beside if placed[j] > moment)]
        if all(
            sum(held[j][r] for j in beside if placed[j] <= at < placed[j] + length[j]) + held[i][r]
            <= cores[r]
            for at in checks
            for r in range(3)
        ):
            return moment
    raise AssertionError("the last moment always fits")
