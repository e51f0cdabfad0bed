"""One micro-batch of a whole mapping, played packet by packet on the wafer's links.

Every stage runs its parts in order: collectives that it waits for, one after the other, as packets;
work as a pause, with the collectives beside it as packets meanwhile; last it sends its tensors to
the next stage and its gradients back. Stages stand on one mesh and start at times of their own, so
that what one sends meets what another does. Memory off the wafer is one more link each way, or one
link for both, that all dies of all stages share; what comes from there or goes there also passes
the mesh, between the dies at the rim and its own die.
"""

from dataclasses import replace

from reference.mesh_simulator import (
    Collective,
    Traffic,
    chains,
    cycles,
    gather_cycle,
    lines,
    reduce_cycle,
)


def rim_routes(columns, rows, edges, die):
    """Links from the rim to a die: (route, share of its bytes) for each die that carries I/O.

    Each carries as much. A route enters at a right angle to the edge; at a corner of two edges,
    half of the bytes go each way.
    """
    entered = {}
    for edge in edges:
        for k in range(rows if edge in ("left", "right") else columns):
            far = columns - 1 if edge == "right" else 0
            port = (far, k) if edge in ("left", "right") else (k, rows - 1)
            port = (k, 0) if edge == "top" else port
            entered.setdefault(port, set()).add(edge in ("left", "right"))
    found = []
    for (x, y), ways in entered.items():
        for row_first in ways:
            corner = (die[0], y) if row_first else (x, die[1])
            route = _links(columns, (x, y), corner) + _links(columns, corner, die)
            found.append((tuple(route), 1.0 / len(entered) / len(ways)))
    return found


def back(columns, route):
    """The opposite links, in the opposite order."""
    steps = (1, -1, columns, -columns)
    return tuple(4 * (link // 4 + steps[link % 4]) + (link % 4 ^ 1) for link in reversed(route))


def _links(columns, here, there):
    (x, y), (u, v) = here, there
    found = []
    while (x, y) != (u, v):
        way = (0 if u > x else 1) if x != u else (2 if v > y else 3)
        found.append(4 * (y * columns + x) + way)
        x, y = (x + (1, -1)[way], y) if way < 2 else (x, y + (1, -1)[way - 2])
    return found


class Player:
    """Stages of a mapping as packets on one mesh."""

    def __init__(self, columns, rows, links, stream_rates=(), packets=12):
        self.rates, hop_s = links[:2], links[2]
        self.columns, self.packets = columns, packets
        self.traffic = Traffic(columns, rows, self.rates, hop_s, paced=True)
        self.stream = len(self.traffic.seconds_per_byte)
        self.traffic.seconds_per_byte += [1.0 / rate for rate in stream_rates]

    def collective(self, work: Collective, after):
        """Add a collective behind a node; no die begins a step before all have ended theirs."""
        x0, y0, width, height = work.rectangle
        here = [y * self.columns + x for y in range(y0, y0 + height) for x in range(x0, x0 + width)]
        todo = chains(work, self.rates)
        packets = self.packets * (1 if all(run[2] == 1 for run in work.runs) else 2)
        for step in zip(*todo, strict=True):
            ready, arrived = dict.fromkeys(here, after), [after]
            for kind, runs, chunk in step:
                done = {die: [] for die in here}
                walk = cycles if kind in (gather_cycle, reduce_cycle) else lines
                for dies in walk(self.columns, work.rectangle, runs if walk is cycles else runs[0]):
                    kind(self.traffic, dies, chunk, packets, ready, done)
                arrived += [node for nodes in done.values() for node in nodes]
            after = self.traffic.join(arrived)
        return after

    def in_turn(self, works, after):
        """Add collectives one after the other."""
        for work in works:
            after = self.collective(work, after)
        return after

    def beside(self, work_s, works, after, flows=()):
        """Add work, and meanwhile collectives and then messages along given routes."""
        moved = self.along(flows, self.in_turn(works, after))
        return self.traffic.join([self.traffic.pause(work_s, [after]), moved])

    def along(self, flows, after):
        """Add (route, bytes) messages off the wafer that start together, packet by packet.

        They have a virtual channel of their own: collectives and they get as many bytes each over
        a link that both want.
        """
        ends, packets = [after], 2 * self.packets
        for route, size in flows:
            behind = None
            for _ in range(packets if route else 0):
                behind = self.traffic.send_along(route, size / packets, [after], behind, 1)
                ends.append(behind)
        return self.traffic.join(ends)

    def in_pieces(self, pieces, work_s, works, after, others=None, piece_s=0.0):
        """Add collectives cut into pieces, and work on each piece once it is there.

        `others` gives collectives that fill so many seconds: between two pieces that each take
        `piece_s`, and beside the work on the last one.
        """
        link = done = after
        each_s = work_s / pieces
        for k in range(pieces):
            parts = [replace(work, bytes=work.bytes / pieces) for work in works]
            link = self.in_turn(parts, link)
            done = self.traffic.pause(each_s, [link, done])
            if others is not None:
                last = k == pieces - 1
                link = self.in_turn(others(each_s if last else max(0.0, each_s - piece_s)), link)
        return self.traffic.join([done, link])

    def streamed(self, shares, after):
        """Add (link, bytes) of each die to or from off the wafer, all dies by turns."""
        ends = []
        for link, size in shares:
            behind = None
            for _ in range(self.packets):
                part = size / self.packets
                behind = self.traffic.send_along((self.stream + link,), part, [after], behind)
                ends.append(behind)
        return self.traffic.join(ends)

    def sends(self, pairs, size, after):
        """Add messages from die to die that start together."""
        ends = []
        for source, target in pairs:
            behind = None
            for _ in range(self.packets):
                part = size / self.packets
                behind = self.traffic.send(source, target, part, [after], behind)
                ends.append(behind)
        return self.traffic.join(ends)

    def played_sends(self, placed, encoding, how, after):
        """Add what stages send on, all at once, and then what they send back.

        `how` has for each stage the bytes of a die, and a collective behind what it receives. Gives for each stage the (start, end) of each message it sends and of each copy it spreads.
        """
        sides = (encoding.layout.width, encoding.layout.height)
        barrier, found = self.traffic.join(after), [[] for _ in placed]
        for way in (1, -1):
            ends = []
            for k, dies in enumerate(placed):
                if not 0 <= k + way < len(placed):
                    continue
                pairs = [
                    (y * self.columns + x, v * self.columns + u)
                    for (x, y), (u, v) in zip(dies, placed[k + way], strict=True)
                ]
                end = self.sends(pairs, how[k][0], barrier)
                found[k].append((barrier, end))
                ends.append(end)
            barrier = self.traffic.join(ends)
            ends = []
            for k, dies in enumerate(placed):
                if how[k][1] is not None and 0 <= k - way < len(placed):
                    op, algorithm, held, runs = how[k][1]
                    work = Collective(op, algorithm, held, (*dies[0], *sides), runs)
                    ends.append(self.collective(work, barrier))
                    found[k].append((barrier, ends[-1]))
            barrier = self.traffic.join([barrier, *ends])
        return found
