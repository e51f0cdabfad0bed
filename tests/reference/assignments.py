"""All assignments of layers to the chunks of a pipeline at once: the oracle of `plan` for them.

Every number of an assignment is an entry of an array; a schedule is played pass by pass, in the
orders of `reference.pipeline_events`, for all assignments together.
"""

from itertools import accumulate, product

import numpy as np

from reference.pipeline_events import orders, stage_of
from reference.plan import (
    BUCKET_BYTES,
    chunks_on,
    exchange,
    partitions,
    passes,
    stage_backward,
    stage_memory,
)
from reference.plan_layers import Layers, Network


def play_all(schedule, forward, backward, weight_grad, micro_batches):
    """Seconds of a step of each assignment; arguments by stage and chunk of it, arrays."""
    p, v = len(forward), len(forward[0])
    waiting = [list(order) for order in orders(schedule, p, v, micro_batches)]
    places = {(d, c): stage_of(schedule, p, d, c) for d in range(p) for c in range(v)}
    last = max(place for _, place in places.values())
    ends, clocks = {}, [0.0 * forward[0][0] for _ in range(p)]

    def needs(d, parts):
        for kind, c, k in parts:
            way, place = places[d, c]
            if kind == "F" and place > 0:
                yield "F", way, place - 1, k
            if kind in ("B", "I") and place < last:
                yield "B", way, place + 1, k

    def seconds(d, kind, c):
        if kind == "F":
            return forward[d][c]
        if kind == "I":
            return backward[d][c] - weight_grad[d][c]
        return (backward if kind == "B" else weight_grad)[d][c]

    at = [0] * p
    moved = True
    while moved:
        moved = False
        for d in range(p):
            while at[d] < len(waiting[d]):
                parts = waiting[d][at[d]]
                inputs = list(needs(d, parts))
                if any(one not in ends for one in inputs):
                    break
                for one in inputs:
                    clocks[d] = np.maximum(clocks[d], ends[one])
                clocks[d] = clocks[d] + sum(seconds(d, kind, c) for kind, c, _ in parts)
                for kind, c, k in parts:
                    if kind != "W":
                        ends[("F" if kind == "F" else "B", *places[d, c], k)] = clocks[d]
                at[d] += 1
                moved = True
    assert at == [len(order) for order in waiting]
    return np.max(clocks, axis=0)


class AllAssignments:
    """Every assignment of a layout whose chunks differ by a layer at most, each mode of each stage.

    `least_s` is the least step of all that fit; infinite where none does.
    """

    def __init__(self, model, cluster, spec, modes):
        self.model, self.cluster, self.spec, self.modes = model, cluster, spec, modes
        self.layers = Layers(model, cluster, spec, Network(cluster, spec))
        found = {tuple(map(len, chunks)): chunks for chunks in partitions(self.layers, spec)}
        self.sizes, self.one = np.array(list(found)), next(iter(found.values()))
        self.ends = np.cumsum(self.sizes, axis=1)
        self.held = [chunks_on(spec, k) for k in range(spec.pp)]

    def sums(self, seconds):
        """Sum a function of a layer over each chunk of each assignment."""
        before = np.array([0.0, *accumulate(map(seconds, range(len(self.layers.order))))])
        return before[self.ends] - before[self.ends - self.sizes]

    def fitting(self):
        """Whether each stage of each assignment fits, by mode."""
        limit = self.cluster.chip.hbm.capacity_bytes - self.spec.reserved_bytes
        known = {}

        def fits(k, bounds):
            if (k, bounds) not in known:
                chunks = [list(range(*pair)) for pair in bounds]
                known[k, bounds] = [
                    sum(stage_memory(self.model, self.layers, self.spec, chunks, k, mode).values())
                    <= limit * (1 + 1e-12)
                    for mode in self.modes
                ]
            return known[k, bounds]

        begins = (self.ends - self.sizes).tolist()
        return np.array(
            [
                [fits(k, tuple((b[c], e[c]) for c in own)) for k, own in enumerate(self.held)]
                for b, e in zip(begins, self.ends.tolist(), strict=True)
            ]
        )

    def tails(self):
        """The longest tail of each assignment, by the rule of `reference.plan.longest_tail`."""
        layers, spec = self.layers, self.spec
        bucket = layers.network.collective(
            "all-reduce", BUCKET_BYTES, layers.network.replicas(experts=False)
        )
        back = self.sums(lambda i: layers.backward(i, "none")) / spec.vpp
        sync, step = self.sums(layers.sync), self.sums(layers.step)
        longest = before = np.zeros(len(self.sizes))
        for own in self.held:
            here = sync[:, own].sum(axis=1)
            exposed = np.minimum(here, np.maximum(here - back[:, own].sum(axis=1), bucket))
            lost = (here - exposed) * (1 - 1 / spec.software.overlap_slowdown)
            longest = np.maximum(longest, exposed + lost + step[:, own].sum(axis=1) - before)
            before = before + back[:, own].sum(axis=1)
        return longest

    def columns(self, chosen):
        """Forward, backward and weight-gradient seconds by stage and chunk, messages included."""
        layers = self.layers
        f0, b0, _ = passes(self.model, layers, self.spec, self.one, [self.modes[0]] * self.spec.pp)
        forward, weight = self.sums(layers.forward), self.sums(layers.weight_grad)
        forward += np.array(f0) - forward[0]
        backward = np.empty_like(forward)
        first = [stage_backward(layers, [chunk], self.modes[0]) for chunk in self.one]
        for k, own in enumerate(self.held):
            mode = self.modes[chosen[k]]
            in_mode = self.sums(
                lambda i, m=mode: layers.backward(i, m if layers.is_block(i) else "none")
            )
            for c in own:
                backward[:, c] = in_mode[:, c] + (b0[c] - first[c])
        weight = np.minimum(weight, backward)
        return [
            [[column[:, c] for c in own] for own in self.held]
            for column in (forward, backward, weight)
        ]

    @property
    def least_s(self):
        """The least step of all assignments and modes that fit."""
        spec = self.spec
        fits, tails = self.fitting(), self.tails()
        m = spec.global_batch // (spec.dp * spec.micro_batch)
        best = np.inf
        for chosen in product(range(len(self.modes)), repeat=spec.pp):
            here = fits[:, range(spec.pp), chosen].all(axis=1)
            if not here.any():
                continue
            step_s = play_all(spec.schedule, *self.columns(chosen), m) + tails
            best = min(best, float(step_s[here].min()))
        return best + exchange(self.layers, spec)
