"""Placement on tiers by full enumeration: the oracle of the NEST kernel.

The problem is the one docs/nest.md states: every width, every way to cut the chain of layers, every
count of replicas; all sums and longest paths are written out on the graph itself. Nothing is shared
with the engine.
"""

import math
from itertools import combinations, pairwise


def in_order(nodes, edges):
    """Ids so that edges go forward; every layer must have an edge to the next one."""
    left = {node["id"] for node in nodes}
    ordered = []
    while left:
        ready = [
            i for i in left if not any(e["destId"] == i and e["sourceId"] in left for e in edges)
        ]
        assert len(ready) == 1, "consecutive layers are joined, so only one can be next"
        ordered += ready
        left -= set(ready)
    return ordered


class Network:
    """Devices in a tree of levels."""

    def __init__(self, data):
        self.sizes = data["devices_per_level"]
        self.rates = data["bws"]
        self.latencies = data["latency_per_level"]

    def tier(self, x, y):
        """Lowest level at which two devices are in one group."""
        inside = 1
        for level, size in enumerate(self.sizes):
            inside *= size
            if x // inside == y // inside:
                return level
        raise AssertionError("no such device")

    def message(self, size, tier):
        """Time of one message: to the slowest link below, twice above the lowest level."""
        slowest = min(self.rates[: tier + 1])
        once = size / slowest + self.latencies[tier]
        return once if tier == 0 else 2 * once

    def sync(self, replicas, size, apart):
        """Time of the gradients of `size` bytes over replicas that start `apart` devices apart."""
        if replicas == 1:
            return 0.0
        highest = self.tier(0, (replicas - 1) * apart)
        rounds = 0
        while 2 ** (rounds + 1) <= replicas:
            rounds += 1
        total = [sum(self.latencies[0] + size / (2**r * self.rates[0]) for r in range(rounds))]
        for level in range(1, highest + 1):
            own = 2 * (self.latencies[level] + size / self.rates[level])
            total.append(total[level - 1] + own + sum(total[1:level]))
        return total[highest]


class Layers:
    """The layers of one width, and what a stage of them takes."""

    def __init__(self, data, width):
        self.network = Network(data)
        self.again = data["activationRecomputation"]
        self.states = 2 + {"SGD": 0, "Adam": 6}[data["optimizerAlgorithm"]]
        self.per_stage = int(width) * data["ep_degree"] * data["cp_degree"]
        self.edges = data["edges"][width]
        self.ids = in_order(data["nodes"][width], self.edges)
        self.nodes = {node["id"]: node for node in data["nodes"][width]}

    def total(self, stage, field):
        """Sum of a field over a stage."""
        return math.fsum(self.nodes[i][field] for i in stage)

    def entering(self, stage):
        """Edges into a stage."""
        return [e for e in self.edges if e["destId"] in stage and e["sourceId"] not in stage]

    def forward(self, stage, tier):
        """Longest path through a stage; a message from outside is waited for."""
        done = {}
        for i in stage:
            start = 0.0
            for e in self.edges:
                if e["destId"] == i and e["sourceId"] in stage:
                    start = max(start, done[e["sourceId"]])
                elif e["destId"] == i:
                    start = max(start, self.network.message(e["communicationCost"], tier))
            done[i] = start + self.nodes[i]["optimalLatencyFw"]
        return max(done.values())

    def backward(self, stage, tier, earliest):
        """Longest path back through a stage; nothing begins before `earliest`."""
        done = {}
        for i in reversed(stage):
            start = earliest
            for e in self.edges:
                if e["sourceId"] == i and e["destId"] in stage:
                    start = max(start, done[e["destId"]])
                elif e["sourceId"] == i:
                    start = max(start, self.network.message(e["communicationCost"], tier))
            done[i] = start + self.nodes[i]["optimalLatencyBw"]
        return max(done.values())

    def memory(self, stage, s):
        """Bytes of a stage with s - 1 stages after it."""
        kept = self.total(stage, "activationSize")
        weights = self.total(stage, "parameterSize")
        stash = kept
        if self.again:
            stash = math.fsum(e["communicationCost"] for e in self.entering(stage))
        return self.states * weights + kept + (s - 1) * stash

    def load(self, stages, s, base):
        """Time of the stage with s - 1 after it, of the replica that starts at device `base`."""
        stage = stages[len(stages) - s]
        a, tier = self.per_stage, self.network.tier
        begin = base + (s - 1) * a
        into = tier(begin, begin + a) if s < len(stages) else None
        out = tier(begin - a, begin) if s > 1 else None
        earliest = self.total(stage, "optimalLatencyBw") if self.again and s > 1 else 0.0
        return self.forward(stage, into) + self.backward(stage, out, earliest)


def partitions(ids):
    """Every way to cut a chain."""
    for count in range(len(ids)):
        for cuts in combinations(range(1, len(ids)), count):
            ends = (0, *cuts, len(ids))
            yield [ids[a:b] for a, b in pairwise(ends)]


def fits(layers, stages, limit):
    """Whether every stage fits a device."""
    count = len(stages)
    return all(layers.memory(stages[count - s], s) <= limit for s in range(1, count + 1))


def largest_load(layers, stages, base):
    """Of the stages of the replica that starts at device `base`."""
    return max(layers.load(stages, s, base) for s in range(1, len(stages) + 1))


def batch_time(data, layers, stages, replicas, load):
    """Time of one batch, given the load of the slowest stage."""
    apart = len(stages) * layers.per_stage
    weights = layers.total(stages[0], "parameterSize")
    rounds = math.ceil(int(data["mbsInBatch"]) / replicas) + len(stages) - 1
    return load * rounds + layers.network.sync(replicas, weights, apart)


def time_of(data, width, stages, replicas, all_replicas=False):
    """Time of one plan; None where it needs too many devices or too much memory."""
    layers = Layers(data, width)
    apart = len(stages) * layers.per_stage
    if apart > data["maxDevices"] // replicas or replicas > int(data["mbsInBatch"]):
        return None
    if not fits(layers, stages, data["maxMemoryPerDevice"]):
        return None
    looked_at = range(replicas) if all_replicas else [0]
    load = max(largest_load(layers, stages, r * apart) for r in looked_at)
    return batch_time(data, layers, stages, replicas, load)


def best(data, all_replicas=False):
    """Least time of all plans, infinite where nothing fits."""
    least = math.inf
    for width in data["nodes"]:
        layers = Layers(data, width)
        for stages in partitions(layers.ids):
            apart = len(stages) * layers.per_stage
            most = min(data["maxDevices"] // apart, int(data["mbsInBatch"]))
            if most < 1 or not fits(layers, stages, data["maxMemoryPerDevice"]):
                continue
            load = 0.0
            for d in range(1, most + 1):
                if d == 1 or all_replicas:
                    load = max(load, largest_load(layers, stages, (d - 1) * apart))
                least = min(least, batch_time(data, layers, stages, d, load))
    return least
