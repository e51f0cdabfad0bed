"""A training step on a mesh of dies, operator by operator: the oracle of `_core.Mapping`.

Slow and plain, in two layers. Below (`reference.mapping_layouts`), dies and index digits: a tensor's
index has, along every slot of the rectangle, one digit for its batch, one for its rows and one for
its features, and what a die holds is a set of (digits, term of a sum). Which collective two layouts
need is read off these sets. Above, the sums of docs/wafer.md: terms of each operator and of each
tensor, outputs tried in every way, stages, the step. Nothing is remembered from one mapping to the
next.

A layout has a letter per slot: B, M or N where the tensor is split, "-" where each die holds all,
"+" where each holds a part of the sum. An operator mapping has a role per slot: B, M, N, K or R.
"""

import itertools
import math
from collections import namedtuple
from dataclasses import dataclass
from types import SimpleNamespace

from reference.mapping_layouts import SPLITS, convert, overlapped, seconds

ROLES = "BMNKR"
MODES = ("replicated", "zero1", "zero2", "zero3", "stream", "offload")
STASH, RECOMPUTE, OFFLOAD = range(3)
INSIDE, ENTRY, WRAP, EXIT = range(4)


OperatorMapping = namedtuple("OperatorMapping", "roles mode algorithm", defaults=(0, 0))


@dataclass
class Op:
    part: int
    roles: str
    outputs: tuple = (STASH,)
    product: bool = False
    limit: tuple = (64, 64, 64, 64)
    kept: bool = True
    expert: bool = False
    stat_bytes: float = 0.0
    gather_bytes: float = 0.0
    overlaps: str = ""  # tensor whose conversion may overlap with it in pieces: "input", "output"


Edge = namedtuple("Edge", "source target kind bytes again", defaults=(False,))


@dataclass
class Case:
    slots: tuple  # (axis, size, stride)
    ops: list
    edges: list
    rules: dict
    tables: dict  # name -> (op, (b, m, n, k)) -> value
    blocks: tuple
    boundary_s: tuple
    chain: tuple
    cross_stage_s: tuple = ()  # of a stage, of another: seconds for a byte either way, for one of each
    own_stages: range | None = None  # that streams are priced for; all

    @property
    def sizes(self):
        return tuple(size for _, size, _ in self.slots)


# ---- terms ----
# Letters of a layout by role: what an operator makes, takes, and the same of gradients.

MADE, HOME = "BMN+-", "BMN--"


def layout(op, op_mapping, letters):
    found = "".join(letters[ROLES.index(role)] for role in op_mapping.roles)
    return found.replace("M", "E") if op.expert else found


def taken(op, op_mapping):
    return layout(op, op_mapping, "BM-N-" if op.product else "BMN--")


def gradient_made(op, op_mapping):
    return layout(op, op_mapping, "BM+N-" if op.product else "BMN--")


class Part:
    """Sums over a block or an end; pairs are of the forward and of the backward pass."""

    def __init__(self):
        self.work, self.blocking, self.hidden = [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]
        self.stream_s = self.sync_s = self.step_s = 0.0
        self.weight_s = 0.0  # of the backward pass, what makes weight gradients
        self.state_bytes = self.stream_bytes = self.stash_bytes = 0.0
        self.live_bytes = self.gathered_bytes = 0.0  # of the operator that has most
        self.taken_bytes = self.given_bytes = 0.0  # between a die and the rim, a micro-batch

    def seconds(self, more=(0.0, 0.0, 0.0), stream_s=0.0, links_s=0.0):
        """Both passes, with what else is done in the backward pass: waiting, work, beside work.

        What is moved off the wafer takes `links_s` of the mesh in the forward pass, and again in
        the backward pass.
        """
        forward = self.blocking[0] + max(self.work[0], self.hidden[0] + links_s)
        backward = max(self.work[1] + more[1], self.hidden[1] + more[2] + links_s)
        return max(forward + self.blocking[1] + more[0] + backward, self.stream_s + stream_s)


def factors(case, op_mapping):
    return tuple(
        math.prod(p for role, p in zip(op_mapping.roles, case.sizes, strict=True) if role == r)
        for r in "BMNK"
    )


def _slots(op_mapping, roles):
    return tuple(k for k, role in enumerate(op_mapping.roles) if role in roles)


def add_op(case, i, op_mapping, part):
    """Add an operator's own terms; gives (forward work, forward waiting)."""
    op, rules = case.ops[i], case.rules
    b, m, n, _ = cut = factors(case, op_mapping)
    forward, backward, stash, live, parameters = (
        case.tables[name][i, cut] for name in ("forward", "backward", "stash", "live", "parameters")
    )

    def over(kind, roles, size):
        return seconds(case, kind, _slots(op_mapping, roles), size, op_mapping.algorithm)

    statistics = over("all-reduce", "N", op.stat_bytes / (b * m)) if op.stat_bytes else 0.0
    gathered = over("all-gather", "M", op.gather_bytes / (b * n)) if op.gather_bytes else 0.0
    part.work[0] += forward
    part.work[1] += backward
    part.weight_s += case.tables["weight_grad"][i, cut]
    part.blocking[0] += statistics + gathered
    part.blocking[1] += statistics + gathered
    part.hidden[1] += gathered
    part.stash_bytes += stash
    part.live_bytes = max(part.live_bytes, live)
    waits = (forward, statistics + gathered)
    if not parameters:
        return waits
    weights, gradients, state = (
        parameters * rules[name] for name in ("weight_bytes", "gradient_bytes", "state_bytes")
    )
    same = "B" if op.expert else "BM"  # dies that work with the same weights
    holders = math.prod(case.sizes[k] for k in _slots(op_mapping, same + "R"))
    summed = over("reduce-scatter", same, gradients)
    spread = over("all-gather", same + "R", weights)
    mode = MODES[op_mapping.mode]
    kept = [weights, gradients, state]  # bytes that a die keeps
    split = {"offload": 2}.get(mode, min(op_mapping.mode, 3))
    for at in range(3 - split, 3):
        kept[at] /= holders
    if mode == "replicated":
        part.sync_s += over("all-reduce", same, gradients)
    elif mode == "zero1":
        part.sync_s += summed + spread
    elif mode in ("zero2", "offload"):
        part.hidden[1] += summed
        part.sync_s += spread
    else:
        part.hidden[0] += spread
        part.hidden[1] += spread + summed
    buffers = {"zero2": gradients, "zero3": weights + gradients, "stream": weights + gradients}
    buffers["offload"] = gradients
    part.gathered_bytes = max(part.gathered_bytes, buffers.get(mode, 0.0))
    if mode == "stream":
        part.stream_bytes += sum(kept)
        part.taken_bytes += 2 * weights / holders
        part.given_bytes += gradients / holders
        part.stream_s += stream_seconds(rules, 2 * weights, gradients) / holders
        part.hidden[0] += own_link_seconds(case, weights / holders, 0.0)
        part.hidden[1] += own_link_seconds(case, weights / holders, gradients / holders)
    elif mode == "offload":  # gradients leave with each micro-batch, new weights come back
        part.state_bytes += kept[0]
        part.stream_bytes += kept[1] + kept[2]
        part.given_bytes += gradients / holders
        part.stream_s += gradients / holders / rules["stream_bytes_per_s"]
        part.hidden[1] += own_link_seconds(case, 0.0, gradients / holders)
        back_s = weights / holders / rules["stream_bytes_per_s"]
        part.step_s += max(back_s, link_seconds(rules, weights / holders, 0.0))
    else:
        part.state_bytes += sum(kept)
        updated = parameters if mode == "replicated" else parameters / holders
        part.step_s += updated * rules["step_bytes"] / rules["memory_bytes_per_s"]
    return waits


def tensor_terms(case, op_mappings, source, kind):
    """Forward, backward and repeated seconds of what one operator sends along one kind of edge,
    and those forward and backward that pass beside work.

    Consumers that take the same layout share one conversion, there and back; it is beside the work
    of the chain's next operator, else of the first of them.
    """
    op_mapping = op_mappings[source]
    edges = [e for e in case.edges if (e.source, e.kind) == (source, kind)]
    size, algorithm = edges[0].bytes, op_mapping.algorithm
    home = layout(case.ops[source], op_mapping, HOME)
    if kind == ENTRY:
        enters = edges[0].target  # what the block before hands on there is what an entry must match
        homes = [e.source for e in case.edges if (e.target, e.kind) == (enters, WRAP)]
        last = homes[-1] if homes else case.chain[-1]
        between = layout(case.ops[last], op_mappings[last], HOME)
        there = convert(
            case, source, layout(case.ops[source], op_mapping, MADE), between, size, algorithm
        )[0]
        return there, convert(case, source, between, home, size, algorithm)[0], 0.0, 0.0, 0.0
    after = dict(itertools.pairwise(case.chain)).get(source) if kind == INSIDE else None
    there, back, repeats = {}, {}, set()  # by layout, who pays
    for e in sorted(edges, key=lambda e: e.target != after):
        consumer = case.ops[e.target], op_mappings[e.target]
        there.setdefault(taken(*consumer), e.target)
        repeats |= {taken(*consumer)} if e.again else set()
        back.setdefault(gradient_made(*consumer), e.target)
    made = layout(case.ops[source], op_mapping, MADE)
    repeated = sum(convert(case, source, made, to, size, algorithm)[1] for to in repeats)
    ways = ([(made, to, who) for to, who in there.items()], "forward")
    ways_back = ([(arrives, home, who) for arrives, who in back.items()], "backward")
    found = [_beside(case, op_mappings, source, size, *both) for both in (ways, ways_back)]
    return found[0][0], found[1][0], repeated, found[0][1], found[1][1]


def _beside(case, op_mappings, source, size, ways, table):
    """Seconds that work waits for conversions, and that they take beside it."""
    pieces, algorithm = case.rules.get("pieces", 1), op_mappings[source].algorithm

    def took(before, after, part=1):
        return convert(case, source, before, after, size / part, algorithm)[0]

    def work(i):
        return case.tables[table][i, factors(case, op_mappings[i])]

    if case.ops[source].overlaps == "output":
        whole, piece = (sum(took(a, b, part) for a, b, _ in ways) for part in (1, pieces))
        return overlapped(pieces, whole, piece, work(source))
    waits = beside = 0.0
    for before, after, who in ways:
        own = work(who) if case.ops[who].overlaps == "input" else 0.0
        more = overlapped(pieces, took(before, after), took(before, after, pieces), own)
        waits, beside = waits + more[0], beside + more[1]
    return waits, beside


def _unkept(case, op):
    """Operators without a kept output that have to run again before this one can."""
    found, todo = set(), [op] if case.ops[op].kept else []
    while todo:
        at = todo.pop()
        for e in case.edges:
            kept = case.ops[e.source].kept
            inside = e.kind == INSIDE and e.target == at and case.ops[e.source].part == 1
            if inside and not kept and e.source not in found:
                found.add(e.source)
                todo.append(e.source)
    return found


def _reentry(case, op_mappings, e):
    """Seconds to take in a kept tensor that the backward pass does not convert again anyway."""
    if e.again or not case.ops[e.source].kept:
        return 0.0
    takes = taken(case.ops[e.target], op_mappings[e.target])
    for other in case.edges:
        alike = (other.source, other.kind) == (e.source, e.kind) and other.again
        if alike and taken(case.ops[other.target], op_mappings[other.target]) == takes:
            return 0.0
    op_mapping = op_mappings[e.source]
    return convert(
        case,
        e.source,
        layout(case.ops[e.source], op_mapping, MADE),
        takes,
        e.bytes,
        op_mapping.algorithm,
    )[1]


def parts_of(case, op_mappings):
    """Sums of what stands before the blocks, of one block, of what stands behind; and its items."""
    parts = [Part(), Part(), Part()]
    waits = [
        add_op(case, i, op_mapping, parts[case.ops[i].part])
        for i, op_mapping in enumerate(op_mappings)
    ]
    sent = {i: [0.0, 0.0, 0.0] for i in range(len(op_mappings))}
    for source, kind in sorted({(e.source, e.kind) for e in case.edges}):
        forward, backward, repeated, *beside = tensor_terms(case, op_mappings, source, kind)
        part = parts[2 if kind == EXIT else case.ops[source].part]
        part.blocking[0] += forward
        part.blocking[1] += backward
        part.hidden[0] += beside[0]
        part.hidden[1] += repeated + beside[1]
        if kind != EXIT:
            for at, value in enumerate((forward, repeated, beside[0])):
                sent[source][at] += value
    items = []
    for i, op in enumerate(case.ops):
        stash = case.tables["stash"][i, factors(case, op_mappings[i])]
        options = [o for o in op.outputs if o != OFFLOAD or case.rules["stream_capacity_bytes"]]
        if op.part != 1 or not stash or options == [STASH]:
            continue
        runs = [i, *_unkept(case, i)]
        waiting = sum(waits[r][1] + sent[r][0] for r in runs)
        entering = runs if op.kept else runs[1:]
        waiting += sum(
            _reentry(case, op_mappings, e)
            for r in entering
            for e in case.edges
            if e.target == r and e.kind in (INSIDE, WRAP)
        )
        work = sum(waits[r][0] for r in runs)
        more = (waiting, work, sum(sent[r][2] for r in runs) - sent[i][1])
        items.append(SimpleNamespace(op=i, options=options, bytes=stash, again=more))
    return parts, items


# ---- the step ----


def _sums(items, ways):
    """(bytes saved, bytes moved off, added seconds) of one way for every item."""
    run = [item for item, way in zip(items, ways, strict=True) if way == RECOMPUTE]
    moved = sum(item.bytes for item, way in zip(items, ways, strict=True) if way == OFFLOAD)
    more = tuple(sum(item.again[j] for item in run) for j in range(3))
    return moved + sum(item.bytes for item in run), moved, more


def stage_of(case, op_mappings, parts, items, k, given=None):
    """One stage; outputs as given (operator -> way), else the fastest of all ways that fit."""
    rules, count = case.rules, len(case.blocks)
    blocks, capacity = case.blocks[k], rules["capacity_bytes"]
    before, block, behind = parts
    ends = ([before] if k == 0 else []) + ([behind] if k == count - 1 else [])
    present = ends + ([block] if blocks else [])
    flight = in_flight(rules, count, k)
    copies = flight * blocks

    def total(name):
        return blocks * getattr(block, name) + sum(getattr(end, name) for end in ends)

    state, streamed = total("state_bytes"), total("stream_bytes")
    fixed = state + max((p.live_bytes for p in present), default=0.0)
    fixed += 2 * max((p.gathered_bytes for p in present), default=0.0)
    fixed += flight * sum(end.stash_bytes for end in ends)

    def memory(saved):
        """All blocks in flight keep their outputs; what is not kept exists in one block."""
        return fixed + (copies * (block.stash_bytes - saved) + saved if copies else 0.0)

    def per_block(ways):
        _, moved, more = _sums(items, ways)
        extra = stream_seconds(rules, moved, moved) if moved else 0.0
        return block.seconds(more, extra, own_link_seconds(case, moved, 0.0))

    every, least = [], math.nan
    if given is None:
        every = list(itertools.product(*(item.options for item in items)))
        least = min(memory(_sums(items, ways)[0]) for ways in every)
    chosen = tuple(STASH for _ in items)
    if given is not None:
        chosen = tuple(given.get(item.op, STASH) for item in items)
    elif memory(0.0) > capacity and copies > 1:
        room = max(0.0, rules["stream_capacity_bytes"] - streamed) / copies
        fits = [
            ways
            for ways in every
            if memory(_sums(items, ways)[0]) <= capacity and _sums(items, ways)[1] <= room
        ]
        again = (RECOMPUTE if RECOMPUTE in item.options else STASH for item in items)
        chosen = min(fits, key=per_block) if fits else tuple(again)
    saved, moved, _ = _sums(items, chosen)
    load = sum(end.seconds() for end in ends) + blocks * per_block(chosen)
    last = case.chain[-1]
    whole = layout(case.ops[last], op_mappings[last], HOME)
    cut = math.prod(p for p, at in zip(case.sizes, whole, strict=True) if at in SPLITS)
    copied = tuple(k for k, at in enumerate(whole) if at == "-")
    sending = case.boundary_s[k] * rules["boundary_bytes"]
    if count > 1:  # each copy is sent, or one of them and spread behind
        algorithm = op_mappings[case.chain[-1]].algorithm
        spread = seconds(case, "all-gather", copied, rules["boundary_bytes"] / cut, algorithm)
        received = 2 * rules["chunks"] - (k == 0) - (k == count - 1)
        many = math.prod(case.sizes[s] for s in copied)
        sending = min(sending * many, sending + received * spread)
    sync = total("sync_s")
    beside = max(0, blocks - 1) * block.work[1]
    exposed = max(sync - beside, min(sync, block.sync_s))
    return SimpleNamespace(
        load_s=load + sending,
        isolated_s=load + sending,  # without what it waits for others' streams
        block_s=per_block(chosen),
        block_moved_bytes=moved,
        memory_bytes=memory(saved),
        state_bytes=state,
        activation_bytes=memory(saved) - fixed + flight * sum(end.stash_bytes for end in ends),
        over_bytes=max(0.0, memory(saved) - capacity),
        stream_bytes=streamed + copies * moved,
        taken_bytes=total("taken_bytes") + blocks * moved,
        given_bytes=total("given_bytes") + blocks * moved,
        tail_s=exposed + total("step_s"),
        weight_s=total("weight_s"),
        outputs={item.op: way for item, way in zip(items, chosen, strict=True)},
        least_bytes=least,
    )


def evaluate(case, op_mappings, outputs=None):
    """Seconds of a step and its stages; `outputs` is a way per operator for each stage.

    Without them each stage has the fastest by itself. Of ways that tie, some stream more than
    others past other stages, so that a step has one time only once outputs are given.
    """
    parts, items = parts_of(case, op_mappings)
    stages = [
        stage_of(case, op_mappings, parts, items, k, None if outputs is None else outputs[k])
        for k in range(len(case.blocks))
    ]
    links_s = charge(case.rules, case.cross_stage_s, stages) if case.cross_stage_s else 0.0
    tail = max(stage.tail_s for stage in stages) + case.rules["outer_tail_s"]
    return pipeline_seconds(case.rules, stages, links_s) + tail, stages


# ---- schedules: micro-batches in flight, and seconds of a step ----


def in_flight(rules, count, k):
    """Micro-batches that a stage holds: as counted by a play of the schedule, see the tests."""
    batches, chunks = rules["micro_batches"], rules["chunks"]
    if rules["zero_bubble"]:
        return min(batches, count)
    if chunks > 1:
        return min(2 * (count - k - 1) + (chunks - 1) * count + 1, batches * chunks) / chunks
    return min(batches, count - k)


def pipeline_seconds(rules, stages, links_s=0.0):
    """The slowest stage for every micro-batch, and once what the others keep it waiting for.

    Every micro-batch but one takes as long as the links to the rim for what all of them stream.
    """
    slowest = max(range(len(stages)), key=lambda k: stages[k].load_s)
    others = [stage for k, stage in enumerate(stages) if k != slowest]
    waits = [
        max(0.0, stage.load_s - 2 * stage.weight_s) if rules["zero_bubble"] else stage.load_s
        for stage in others
    ]
    slowest_s = stages[slowest].load_s
    more_s = (rules["micro_batches"] - 1) * max(0.0, links_s - slowest_s)
    return rules["micro_batches"] * slowest_s + more_s + sum(waits) / rules["chunks"]


# ---- streams: over links, and from other stages ----


def stream_seconds(rules, in_bytes, out_bytes):
    """Seconds of what comes and goes off the wafer: one link, or one for each direction."""
    ways = [in_bytes + out_bytes] if rules["stream_shared"] else [in_bytes, out_bytes]
    return max(ways) / rules["stream_bytes_per_s"]


def link_seconds(rules, in_bytes, out_bytes):
    """Seconds of the busiest link to the rim where all stream at once."""
    costs = rules.get("stream_link_s", 0.0), rules.get("stream_both_s", 0.0)
    return both_ways(costs, in_bytes, out_bytes)


def both_ways(costs, in_bytes, out_bytes):
    """Bytes both ways at once, and the rest of one way."""
    both = min(in_bytes, out_bytes)
    return costs[1] * both + costs[0] * (max(in_bytes, out_bytes) - both)


def own_link_seconds(case, in_bytes, out_bytes):
    """Seconds of the busiest link where a stage streams alone: of the stage that stands worst."""
    if not case.cross_stage_s:
        return link_seconds(case.rules, in_bytes, out_bytes)
    own = [case.cross_stage_s[k][k] for k in case.own_stages or range(len(case.cross_stage_s))]
    return both_ways([max(costs) for costs in zip(*own, strict=True)], in_bytes, out_bytes)


def charge(rules, cross_stage_s, stages):
    """Add to each stage what it waits for others' streams; seconds of the links to the rim.

    Each stage streams once while the slowest one works; a faster one meets what passes in its time.
    """
    pace_s = max(stage.isolated_s for stage in stages)
    for k, stage in enumerate(stages):
        for j, other in enumerate(stages):
            if j == k or not max(other.taken_bytes, other.given_bytes):
                continue
            whole_s = both_ways(cross_stage_s[k][j], other.taken_bytes, other.given_bytes)
            stage.load_s += whole_s * stage.isolated_s / pace_s
    least = (min(getattr(s, name) for s in stages) for name in ("taken_bytes", "given_bytes"))
    return link_seconds(rules, *least)
