"""Collectives on an open 2-D mesh of dies, played packet by packet: the oracle of the formulas.

A directed link takes one packet at a time. It has two virtual channels, each a FIFO; where packets
wait in both, it takes from both by turns, so that each gets as many bytes, as colors share a link
of the Cerebras fabric, where the traffic of one never blocks that of another and the host's has
some of its own (Cerebras SDK, "A Conceptual View"). Packets of one channel alone find one FIFO. A
packet takes the links of its XY route one after the other, and each hop adds a latency. What a
packet waits for is a graph: an all-gather passes on what it has received, a reduction adds its own
part at no cost before it does. A die hands its links whole messages at once, or, where that is
asked for, one packet of a message at a time, so that no message blocks a link for all others. Only
the algorithms are written down here, no formula.

Dies are counted row by row; a run is (axis, size, stride), a rectangle (x, y, width, height).
"""

import heapq
import itertools
import math
from collections import deque
from dataclasses import dataclass

STEPS = ((1, 0), (-1, 0), (0, 1), (0, -1))
LEFT = -1  # a packet has left its first die
FREE = -2  # a link can take the next packet


class Traffic:
    """Packets on a mesh, and what each of them waits for."""

    def __init__(self, columns, rows, rates, hop_s=0.0, paced=False):
        self.columns, self.rows, self.hop_s, self.paced = columns, rows, hop_s, paced
        self.seconds_per_byte = [1.0 / rates[d // 2] for d in range(4)] * (columns * rows)
        self.routes, self.sizes, self.waits, self.then = [], [], [], []
        self.followers, self.pauses, self.ends = {}, {}, {}
        self.channels = {}  # of packets that are not in the first one
        self.received = [0.0] * (columns * rows)

    def route(self, source, target):
        """Links along the row, then along the column."""
        (y, x), (to_y, to_x) = divmod(source, self.columns), divmod(target, self.columns)
        links = []
        while x != to_x:
            links.append(4 * (y * self.columns + x) + (0 if to_x > x else 1))
            x += 1 if to_x > x else -1
        while y != to_y:
            links.append(4 * (y * self.columns + x) + (2 if to_y > y else 3))
            y += 1 if to_y > y else -1
        return tuple(links)

    def _add(self, route, size, after):
        node = len(self.routes)
        after = [a for a in after if a is not None]
        self.routes.append(route)
        self.sizes.append(size)
        self.waits.append(len(after))
        self.then.append([])
        for a in after:
            self.then[a].append(node)
        return node

    def send(self, source, target, size, after, behind=None):
        """Add a packet: after what has to arrive, and behind one that has to leave before it."""
        self.received[target] += size
        return self.send_along(self.route(source, target), size, after, behind)

    def send_along(self, route, size, after, behind=None, channel=0):
        """Add a packet that takes the given links, in one of their two channels."""
        node = self._add(route, size, after)
        if channel:
            self.channels[node] = channel
        if self.paced and behind is not None:
            self.waits[node] += 1
            self.followers[behind] = node
        return node

    def join(self, after):
        """Something that takes no time once everything in `after` has arrived."""
        return self._add((), 0.0, after)

    def pause(self, seconds, after):
        """Work: something that takes so long once everything in `after` has arrived."""
        node = self._add((), 0.0, after)
        self.pauses[node] = seconds
        return node

    def play(self):
        """Seconds until the last packet has arrived; `ends` has when each one did."""
        links = [_Link(seconds) for seconds in self.seconds_per_byte]
        waits = list(self.waits)
        order = itertools.count()
        start = self.pauses.get
        events = [
            (start(node, 0.0), next(order), node, 0) for node, left in enumerate(waits) if not left
        ]
        heapq.heapify(events)
        now, arrived = 0.0, 0

        def pushed(time_s, node, at, turn):
            """Add an event; of those at the same time, the one with the lowest turn comes first."""
            heapq.heappush(events, (time_s, turn, node, at))

        while events:
            now, _, node, at = heapq.heappop(events)
            released = ()
            if at == LEFT:
                released = (self.followers[node],)
            elif at == FREE or at < len(self.routes[node]):
                number = node if at == FREE else self.routes[node][at]
                link = links[number]
                if at != FREE:  # turns are those of its coming, however long it waits
                    packet = (node, at, next(order), next(order))
                    link.add(self.channels.get(node, 0), packet, self.sizes[node])
                if now < link.free_s:
                    if not link.called:  # once it is free
                        link.called = True
                        pushed(link.free_s, number, FREE, next(order))
                    continue
                link.called = False
                node, at, arrives, leaves = link.take(now)
                pushed(link.free_s + self.hop_s, node, at + 1, arrives)
                if at == 0 and node in self.followers:
                    pushed(link.free_s, node, LEFT, leaves)
                if link.waiting():
                    link.called = True
                    pushed(link.free_s, number, FREE, next(order))
            else:
                arrived += 1
                self.ends[node] = now
                released = self.then[node]
            for other in released:
                waits[other] -= 1
                if not waits[other]:
                    pushed(now + start(other, 0.0), other, 0, next(order))
        if arrived != len(self.routes):
            raise ValueError("packets wait for one another")
        return now


class _Link:
    """Takes one packet at a time, of its two channels by turns, byte for byte."""

    def __init__(self, seconds_per_byte):
        self.seconds_per_byte, self.free_s, self.called = seconds_per_byte, 0.0, False
        self.queues, self.taken, self.now = (deque(), deque()), [0.0, 0.0], 0.0

    def add(self, channel, packet, size):
        if not self.queues[channel]:  # bytes it did not send while idle are not made up for
            self.taken[channel] = max(self.taken[channel], self.now)
        self.queues[channel].append((packet, size))

    def waiting(self):
        return bool(self.queues[0] or self.queues[1])

    def take(self, now):
        ready = [channel for channel in (0, 1) if self.queues[channel]]
        channel = min(ready, key=self.taken.__getitem__)
        packet, size = self.queues[channel].popleft()
        self.now = self.taken[channel]
        self.taken[channel] += size
        self.free_s = now + size * self.seconds_per_byte
        return packet


# ---- which dies belong together ----


def _members(columns, rectangle, runs):
    """Each group of the rectangle: its dies by their position in each run."""
    x0, y0, width, height = rectangle
    for axis, size, stride in runs:
        if (width, height)[axis] % (size * stride):
            raise ValueError("the runs do not tile the rectangle")
    for y, x in itertools.product(range(height), range(width)):
        if any((x, y)[axis] // stride % size for axis, size, stride in runs):
            continue
        group = {}
        for at in itertools.product(*(range(size) for _, size, _ in runs)):
            to = [x0 + x, y0 + y]
            for i, (axis, _, stride) in zip(at, runs, strict=True):
                to[axis] += i * stride
            group[at] = to[1] * columns + to[0]
        yield group


def lines(columns, rectangle, run):
    """Dies of each line of a run."""
    for group in _members(columns, rectangle, [run]):
        yield [group[i,] for i in range(run[1])]


def cycles(columns, rectangle, runs):
    """Dies of each group in the order of a closed walk from neighbour to neighbour."""
    along, across = runs if runs[1][1] % 2 == 0 else runs[::-1]
    if across[1] % 2 or along[0] == across[0]:
        raise ValueError("no closed walk")
    walk = []
    for j in range(across[1]):  # to and fro, and home through the first of each
        there = range(1, along[1])
        walk += [(i, j) for i in (there if j % 2 == 0 else reversed(there))]
    walk += [(0, j) for j in reversed(range(across[1]))]
    for group in _members(columns, rectangle, [along, across]):
        yield [group[at] for at in walk]


# ---- one step of a collective on some dies ----
# `ready` maps a die to what it waits for before it has its own part; `done` collects what each die
# receives for itself. A chunk is cut in `packets`.


def _pass_on(traffic, order, size, after, behind, done=None):
    """One packet from die to die; gives its first hop and its last."""
    first = packet = None
    for here, there in itertools.pairwise(order):
        waits = [packet, after.get(here)] if done is None or packet is None else [packet]
        packet = traffic.send(here, there, size, waits, behind if first is None else None)
        first = packet if first is None else first
        if done is not None:
            done[there].append(packet)
    return first, packet


def gather_line(traffic, dies, chunk, packets, ready, done):
    """Pass on what comes from one side to the other side."""
    for order in (dies, dies[::-1]):
        for at in range(len(order) - 1):
            first = None
            for _ in range(packets):
                first, _ = _pass_on(traffic, order[at:], chunk / packets, ready, first, done)


def reduce_line(traffic, dies, chunk, packets, ready, done):
    """Send sums towards each die from both ends, the farthest first."""
    for order in (dies, dies[::-1]):
        first = None
        for owner in range(len(order) - 1, 0, -1):
            for _ in range(packets):
                path = order[: owner + 1]
                first, last = _pass_on(traffic, path, chunk / packets, ready, first)
                done[order[owner]].append(last)


def exchange_line(traffic, dies, chunk, packets, ready, done):
    """Send each other die its own chunk, the farthest first."""
    for order in (dies, dies[::-1]):
        for at, source in enumerate(order):
            packet = None
            for target in reversed(order[at + 1 :]):
                for _ in range(packets):
                    after = [ready.get(source)]
                    packet = traffic.send(source, target, chunk / packets, after, packet)
                    done[target].append(packet)


def gather_cycle(traffic, dies, chunk, packets, ready, done):
    """Pass half of each chunk round one way, half the other way."""
    for order in (dies, dies[::-1]):
        for at in range(len(order)):
            path, first = order[at:] + order[:at], None
            for _ in range(packets):
                first, _ = _pass_on(traffic, path, chunk / 2 / packets, ready, first, done)


def reduce_cycle(traffic, dies, chunk, packets, ready, done):
    """Add up half of each chunk round one way, half the other way, up to its owner."""
    for order in (dies, dies[::-1]):
        for at, owner in enumerate(order):
            path, first = order[at + 1 :] + order[: at + 1], None
            for _ in range(packets):
                first, last = _pass_on(traffic, path, chunk / 2 / packets, ready, first)
                done[owner].append(last)


# ---- whole collectives ----


@dataclass(frozen=True)
class Collective:
    op: str
    algorithm: str
    bytes: float
    rectangle: tuple
    runs: tuple


def _gathers(runs, volume):
    """Steps of an all-gather that ends with `volume`: one run after the other."""
    steps = []
    for run in reversed(runs):
        steps.insert(0, (gather_line, (run,), volume / run[1]))
        volume /= run[1]
    return steps


def chains(work, rates):
    """Lists of steps that each wait for the one before; the lists run side by side."""
    if work.op == "all-to-all":
        return [[(exchange_line, (run,), work.bytes / run[1]) for run in work.runs]]
    if work.algorithm == "ring":
        size = work.runs[0][1] * work.runs[1][1]
        halves = [[(gather_cycle, work.runs, work.bytes / size)]]
    elif work.algorithm == "split":
        halves = [_gathers(order, work.bytes / 2) for order in (work.runs, work.runs[::-1])]
    else:
        slowest_first = sorted(work.runs, key=lambda run: -run[2] / rates[run[0]])
        halves = [_gathers(slowest_first, work.bytes)]
    back = {gather_line: reduce_line, gather_cycle: reduce_cycle}
    reduced = [[(back[kind], runs, chunk) for kind, runs, chunk in half[::-1]] for half in halves]
    if work.op == "all-gather":
        return halves
    if work.op == "reduce-scatter":
        return reduced
    return [first + second for first, second in zip(reduced, halves, strict=True)]


def build(columns, rows, links, works, packets=24, in_step=True, paced=False):
    """All packets of some collectives that start together."""
    rates, hop_s = links[:2], links[2]
    traffic = Traffic(columns, rows, rates, hop_s, paced)
    todo = [(work.rectangle, chain) for work in works for chain in chains(work, rates)]
    ready = [{} for _ in todo]
    for at in range(max((len(chain) for _, chain in todo), default=0)):
        arrived = []
        for mine, (rectangle, chain) in enumerate(todo):
            if at >= len(chain):
                continue
            kind, runs, chunk = chain[at]
            x0, y0, width, height = rectangle
            here = [y * columns + x for y in range(y0, y0 + height) for x in range(x0, x0 + width)]
            done = {die: [ready[mine].get(die)] for die in here}
            walk = cycles if kind in (gather_cycle, reduce_cycle) else lines
            for dies in walk(columns, rectangle, runs if walk is cycles else runs[0]):
                kind(traffic, dies, chunk, packets, ready[mine], done)
            ready[mine] = {die: traffic.join(after) for die, after in done.items()}
            arrived += ready[mine].values()
        if in_step:
            barrier = traffic.join(arrived)
            ready = [dict.fromkeys(range(columns * rows), barrier) for _ in todo]
    return traffic


def simulate(columns, rows, links, works, **how):
    """Seconds of collectives that start together.

    `links` is bytes per second along x and along y, and seconds per hop. In step, no die begins
    its next step before all have ended theirs; else each begins once it has what it needs.
    """
    return build(columns, rows, links, works, **how).play()


def block(runs):
    """Sides of the smallest rectangle that the groups of these runs tile."""
    sides = [1, 1]
    for axis, size, stride in runs:
        sides[axis] = math.lcm(sides[axis], size * stride)
    return tuple(sides)


def simulate_alone(op, runs, links, algorithm="ordered", volume=1e6, **how):
    """Seconds of one collective and of all its cosets in the smallest rectangle."""
    width, height = block(runs)
    work = Collective(op, algorithm, volume, (0, 0, width, height), tuple(runs))
    return simulate(width, height, links, [work], **how)


def random_work(rng, columns, rows, ops):
    """A collective over some groups of some rectangle."""
    runs = []
    while not runs:
        for axis, side in ((0, columns), (1, rows)):
            stride = 1
            for _ in range(rng.randint(0, 2)):
                size = rng.choice([2, 3, 4])
                stride *= rng.choice([1, 1, 2])
                if size * stride <= side:
                    runs.append((axis, size, stride))
                    stride *= size
    rng.shuffle(runs)
    sides = block(runs)
    width = sides[0] * rng.randint(1, columns // sides[0])
    height = sides[1] * rng.randint(1, rows // sides[1])
    at = (rng.randint(0, columns - width), rng.randint(0, rows - height))
    op, algorithms = rng.choice(ops), ["ordered"]
    if op != "all-to-all" and sorted(axis for axis, _, _ in runs) == [0, 1]:
        algorithms.append("split")
        if runs[0][1] % 2 == 0 or runs[1][1] % 2 == 0:
            algorithms.append("ring")
    volume = rng.choice([0.73e6, 1e6, 2e6, 4e6])
    return Collective(op, rng.choice(algorithms), volume, (*at, width, height), tuple(runs))


# ---- routes around dead dies ----


def distances(columns, rows, dead, source):
    """Hops from a die to each die that can be reached past the dead ones."""
    found, queue = {source: 0}, deque([source])
    while queue:
        here = queue.popleft()
        y, x = divmod(here, columns)
        for dx, dy in STEPS:
            to = (y + dy) * columns + x + dx
            inside = 0 <= x + dx < columns and 0 <= y + dy < rows
            if inside and (x + dx, y + dy) not in dead and to not in found:
                found[to] = found[here] + 1
                queue.append(to)
    return found


def straight(columns, dead, source, target):
    """Links along the row and the column, else along the column and the row, else None."""
    (y, x), (to_y, to_x) = divmod(source, columns), divmod(target, columns)
    row_first = [(i, y) for i in _between(x, to_x)] + [(to_x, j) for j in _between(y, to_y)[1:]]
    column_first = [(x, j) for j in _between(y, to_y)] + [(i, to_y) for i in _between(x, to_x)[1:]]
    for path in (row_first, column_first):
        if not dead & set(path):
            steps = [
                (b[1] * columns + b[0], STEPS.index((b[0] - a[0], b[1] - a[1])))
                for a, b in itertools.pairwise(path)
            ]
            return [4 * (to - STEPS[d][1] * columns - STEPS[d][0]) + d for to, d in steps]
    return None


def follow(columns, links, source):
    """Dies from the source on, along links of which each is taken once."""
    leaving = {int(link) // 4: int(link) % 4 for link in links}
    if len(leaving) != len(links):
        raise ValueError("two links leave one die")
    walk = [source]
    while walk[-1] in leaving:
        dx, dy = STEPS[leaving.pop(walk[-1])]
        walk.append(walk[-1] + dy * columns + dx)
    if leaving:
        raise ValueError("links beside the way")
    return walk


def _between(a, b):
    return list(range(a, b + 1)) if b >= a else list(range(a, b - 1, -1))


class Switch(Traffic):
    """Dies that have one link up to a switch and one down from it; it sums where that is asked."""

    def __init__(self, dies, rate, hop_s, packets=60):
        super().__init__(1, 1, (rate, rate), hop_s, paced=True)
        self.dies, self.packets = dies, packets
        self.seconds_per_byte = [1.0 / rate] * (2 * dies)

    def to_each(self, group, chunk):
        """Every die sends every other one a chunk of its own, the next die first."""
        size = len(group)
        for at, source in enumerate(group):
            behind = None
            for step in range(1, size):
                target = group[(at + step) % size]
                for _ in range(self.packets):
                    route = (source, self.dies + target)
                    behind = self.send_along(route, chunk / self.packets, [], behind)

    def summed(self, group, volume):
        """Every packet goes up from all; its sum comes down to all."""
        parts = self.packets * len(group)
        ups = dict.fromkeys(group)
        for _ in range(parts):
            for die in group:
                ups[die] = self.send_along((die,), volume / parts, [], ups[die])
            sum_ = self.join(list(ups.values()))
            for die in group:
                self.send_along((self.dies + die,), volume / parts, [sum_])
