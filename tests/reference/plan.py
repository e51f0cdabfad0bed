"""What a step takes by a parallel plan, stage by stage and pass by pass: the oracle of plans.

Every stage is a list of positions; `reference.plan_layers` has the layers and the ranks.
"""

from functools import cache, lru_cache
from itertools import accumulate, combinations, pairwise, permutations, product

from phaze_fast.memory import TERMS
from phaze_fast.planning.training import RECOMPUTE
from reference import memory
from reference.pipeline_events import makespan, simulate
from reference.plan_layers import Layers, Network, offloads, on_device

FOLDED = ("zb-v", "dualpipe-v")

BUCKET_BYTES = 100e6
FRAGMENTATION = 0.03

# ---- stages ----


def even_chunks(layers, spec):
    """Blocks shared evenly by stages, later chunks of a stage longer, ends with the outer chunks.

    Where there are fewer blocks than chunks the ends count as layers.
    """
    total, chunks = len(layers.order), places(spec)
    shared = [i for i in range(total) if layers.is_block(i)]
    if len(shared) < chunks:
        shared = list(range(total))
    own = [[] for _ in range(spec.pp)]
    for chunk in range(chunks):
        own[stage_of(spec, chunk)].append(chunk)
    sizes = [0] * chunks
    for stage, of_stage in enumerate(own):
        share = (stage + 1) * len(shared) // spec.pp - stage * len(shared) // spec.pp
        for k, chunk in enumerate(of_stage):
            sizes[chunk] = (share + k) // len(of_stage)
    starts = [0, *(shared[sum(sizes[:c])] for c in range(1, chunks))]
    return [list(range(a, b)) for a, b in zip(starts, [*starts[1:], total], strict=True)]


def chunks_of(layers, spec):
    """Positions of each chunk, in the order of the model."""
    if spec.stages is None:
        return even_chunks(layers, spec)
    found, at = [], 0
    for size in spec.stages:
        found.append(list(range(at, at + size)))
        at += size
    return found


def places(spec):
    """Chunks of the model; by DualPipe two devices hold each of them."""
    return spec.pp if spec.schedule == "dualpipe" else spec.pp * spec.vpp


def stage_of(spec, c, way=0):
    """Stage that holds chunk c of the model, for micro-batches that go one way."""
    p = spec.pp
    if spec.schedule == "dualpipe":
        return p - 1 - c if way else c
    if spec.schedule in FOLDED and c >= p:
        return 2 * p - 1 - c
    return c % p


def chunks_on(spec, k):
    """Chunks of the model that stage k holds, in their order."""
    if spec.schedule == "dualpipe":
        return [k, spec.pp - 1 - k]
    return [c for c in range(spec.pp * spec.vpp) if stage_of(spec, c) == k]


def mode_of(text, number):
    """What the block with a number, from 1, of a chunk recomputes by a stage's text."""
    first, _, rest = text.partition("/")
    more, _, count = first.partition(":")
    if not count or number <= int(count):
        return more
    return rest or "none"


def modes_of(layers, chunks, text):
    """What each layer of a stage recomputes, by position."""
    found = {}
    for chunk in chunks:
        number = 0
        for i in chunk:
            number += layers.is_block(i)
            found[i] = mode_of(text, number) if layers.is_block(i) else "none"
    return found


def messages_in(edges, chunk):
    """Layers before a chunk whose output it reads."""
    return len({a for a, b in edges if a < chunk[0] and b in chunk})


def messages_back(edges, chunk):
    """Layers of a chunk whose output is read after it: each sends one gradient back."""
    return len({a for a, b in edges if a in chunk and b > chunk[-1]})


def message_bytes(model, spec):
    rows = spec.micro_batch * (spec.seq or model.seq) / spec.cp
    share = spec.tp if spec.sequence_parallel and spec.tp > 1 else 1
    return 2 * rows * model.hidden / share


def in_flight(spec, stage):
    m = spec.global_batch // (spec.dp * spec.micro_batch)
    return memory.in_flight(spec.schedule, spec.pp, stage, m, spec.vpp)


@lru_cache(maxsize=256)
def held_chunks(schedule, p, v, m):
    """What each device holds of each chunk, moment by moment, read off the events of a step."""
    ones = [[1.0] * v] * p
    found = []
    timeline = simulate(schedule, ones, ones, [[0.5] * v] * p, m)
    for device in range(p):
        now, moments = [0] * v, set()
        for parts in (parts for d, parts, _, _ in timeline if d == device):
            for kind, c, _ in parts:
                now[c] += kind == "F"
            moments.add(tuple(now))
            for kind, c, _ in parts:
                now[c] -= kind in "BW"
        found.append(moments)
    return found


def activations(spec, stage, kept):
    """Bytes of the activations that a stage holds at its worst moment; `kept` is by chunk."""
    m = spec.global_batch // (spec.dp * spec.micro_batch)
    counted = in_flight(spec, stage) * sum(kept)
    if spec.vpp == 1 or spec.pp == 1:
        return counted
    moments = held_chunks(spec.schedule, spec.pp, spec.vpp, m)[stage]
    return max(counted, *(sum(n * b for n, b in zip(now, kept, strict=True)) for now in moments))


def context_bytes(model, spec, rows):
    """Bytes that a layer holds for a moment to attend to rows of other devices."""
    if spec.cp == 1:
        return 0.0
    queries = model.heads // spec.tp * model.head_width
    keys = max(1, (model.kv_heads or model.heads) // spec.tp) * model.head_width
    own = 2 * rows * 2 * keys
    if spec.cp_kind == "all-gather":
        return 2 * own * spec.cp  # of all devices, and their gradients
    if spec.cp_kind == "ring":
        return 4 * own  # the part in use and the one arriving, each with its gradient
    sent = 2 * rows * queries + own  # in exchange for heads
    return sent if spec.cp_kind == "ulysses" else sent + 4 * own


def first_layers(layers, chunks):
    """Positions of a stage's first block in the order of the model, and of what is before it."""
    lowest = min((chunk for chunk in chunks if len(chunk)), key=lambda chunk: chunk[0])
    found = []
    for i in lowest:
        found.append(i)
        if layers.is_block(i):
            break
    return found if layers.is_block(found[-1]) else found[:1]


def head_table(model, width):
    """Weights of a head's largest product on one device."""
    logits = -(-model.vocab // width)
    columns = {"none": 0, "classifier": model.classes, "mlm": max(logits, model.hidden)}
    return model.hidden * columns.get(model.head, logits)


def stage_memory(model, layers, spec, chunks, stage, text):
    """Bytes of a device of a stage, by term."""
    opt, zero = layers.optimizer, spec.zero
    modes, positions = modes_of(layers, chunks, text), [i for chunk in chunks for i in chunk]
    held = sum(layers.parameters(i)[0] for i in positions)
    share = sum(layers.share(i) for i in positions)
    live = logits = unsharded = 0.0
    local = model.moe.experts // spec.ep if model.moe else 1
    stashes = dict.fromkeys(positions, 0.0)
    for i in positions:
        forward = layers.layer(i).forward
        kind = layers.layer(i).kind
        if kind == "head":
            logits += forward.stashed_bytes()
            if spec.software.gradient_stand_ins:
                logits += 2 * head_table(model, spec.tp)
        elif kind == "embedding":
            stashes[i] = forward.stashed_bytes()
        else:
            copied = forward.stashed_bytes(on_device(modes[i])) if offloads(modes[i]) else 0
            kept = 0 if copied else forward.stashed_bytes(modes[i])
            stashes[i] = kept
            work = layers.layer(i).work_bytes
            # Of a copied block all is there, and what the next one brings.
            live = max(live, forward.stashed_bytes() - kept + work + copied)
            whole, routed = layers.parameters(i)
            parts = min(opt.gathered_bytes, spec.precision.gathered_weight_bytes) * (zero == 3)
            parts += opt.gradient_bytes * (zero >= 2) * spec.software.resident_gradients
            own = spec.software.whole_layers * parts * whole * (1 - 1 / layers.shards)
            if spec.software.gradient_stand_ins:
                own += 2 * (whole - routed + routed / local)
            unsharded = max(unsharded, own)
    rows = spec.micro_batch * (spec.seq or model.seq) / spec.cp
    buffers = 2 * rows * model.hidden if spec.sequence_parallel and spec.tp > 1 else 0.0
    buffers += context_bytes(model, spec, rows)
    if spec.ep > 1 and spec.dispatcher == "all-gather":  # all rows that experts choose from
        devices = (spec.etp or spec.tp) * spec.ep
        of_row = 2 * model.hidden + 3 * model.moe.experts
        buffers += rows / spec.tp * devices * of_row
    if spec.pp > 1:
        buffers += 2 * message_bytes(model, spec)
    buffers += unsharded
    resident = (share if zero >= 2 else held) * opt.gradient_bytes
    late, first_kept = [0.0, 0.0, 0.0], 0.0
    if not spec.software.resident_gradients:
        begun = first_layers(layers, chunks)
        late = [
            opt.gradient_bytes
            * sum(layers.share(i) if zero >= 2 else layers.parameters(i)[0] for i in some)
            for some in (positions, [i for i in positions if layers.layer(i).kind == "head"], begun)
        ]
        resident, first_kept = 0.0, sum(stashes[i] for i in begun)
    buffers += spec.software.workspace_bytes
    found = memory.peak_terms(
        {
            "weights": (share if zero >= 3 else held) * opt.weight_bytes,
            "optimizer": 0.0
            if spec.offload_optimizer
            else (share if zero >= 1 else held) * opt.state_bytes,
            "communication": buffers,
        },
        resident,
        late,
        kept=activations(spec, stage, [sum(stashes[i] for i in chunk) for chunk in chunks])
        / in_flight(spec, stage),
        first_kept=first_kept,
        live=live,
        logits=logits,
        waiting=in_flight(spec, stage),
        micro_batches=spec.global_batch // (spec.dp * spec.micro_batch),
        fragmentation=FRAGMENTATION,
    )
    return {term: found[term] for term in TERMS}


def recompute_texts(blocks, modes):
    """Everything a stage may recompute whose longest chunk has so many blocks."""
    yield from modes
    for more, rest in permutations(modes, 2):
        yield from (f"{more}:{count}/{rest}" for count in range(1, blocks))


def stage_backward(layers, chunks, text):
    modes = modes_of(layers, chunks, text)
    return sum(layers.backward(i, mode) for i, mode in modes.items())


def chosen_modes(model, cluster, layers, spec, stages):
    """What each stage recomputes; auto: the fastest that fits, or the mode that needs least."""
    if isinstance(spec.recompute, tuple):
        return list(spec.recompute)
    if spec.recompute != "auto":
        return [spec.recompute] * spec.pp
    room = max(0.0, cluster.chip.hbm.capacity_bytes - spec.reserved_bytes)
    found = []
    for k, chunks in enumerate(stages):

        def needed(text, chunks=chunks, k=k):
            return sum(stage_memory(model, layers, spec, chunks, k, text).values())

        longest = max(sum(map(layers.is_block, chunk)) for chunk in chunks)
        fitting = [
            t for t in recompute_texts(longest, RECOMPUTE) if needed(t) <= room * (1 + 1e-12)
        ]
        found.append(
            min(fitting, key=lambda t, chunks=chunks: stage_backward(layers, chunks, t))
            if fitting
            else min(RECOMPUTE, key=needed)
        )
    return found


# ---- a step ----


def passes(model, layers, spec, chunks, modes, way=0):
    """Forward, backward and deferrable seconds of each chunk, messages received included."""
    network, last = layers.network, len(chunks) - 1
    payload, edges = message_bytes(model, spec), layers.graph.edges
    f, b, w = [], [], []
    for c, chunk in enumerate(chunks):
        here = stage_of(spec, c, way)
        received = returned = 0.0
        if c > 0 and stage_of(spec, c - 1, way) != here:
            ends = (
                sorted((stage_of(spec, c - 1, way), here)) if way else (stage_of(spec, c - 1), here)
            )
            received = messages_in(edges, chunk) * network.message(payload, *ends)
        if c < last and stage_of(spec, c + 1, way) != here:
            ends = (
                sorted((here, stage_of(spec, c + 1, way))) if way else (here, stage_of(spec, c + 1))
            )
            returned = messages_back(edges, chunk) * network.message(payload, *ends)
        f.append(received + sum(layers.forward(i) for i in chunk))
        b.append(returned + stage_backward(layers, [chunk], modes[here]))
        w.append(min(b[-1], sum(layers.weight_grad(i) for i in chunk)))
    return f, b, w


def played(spec, f, b, w, back=None):
    """The pipeline's seconds, event by event; `f`, `b` and `w` are by chunk of the model.

    By DualPipe `back` has the same for micro-batches that go the other way.
    """
    p, m = spec.pp, spec.global_batch // (spec.dp * spec.micro_batch)
    if p == 1:
        return m * (sum(f) + sum(b))
    held = [chunks_on(spec, k) for k in range(p)]
    by_stage = [[[seconds[c] for c in own] for own in held] for seconds in (f, b, w)]
    if spec.schedule == "dualpipe":
        both = zip((f, b, w), back, strict=True)
        by_stage = [[[one[k], other[p - 1 - k]] for k in range(p)] for one, other in both]
    return makespan(simulate(spec.schedule, *by_stage, m))


def longest_tail(layers, spec, stages):
    """Gradients, weights and optimiser that outlast the backward passes before a stage."""
    bucket = layers.network.collective(
        "all-reduce", BUCKET_BYTES, layers.network.replicas(experts=False)
    )
    longest = before = 0.0
    for positions in stages:
        back = sum(layers.backward(i, "none") for i in positions) / spec.vpp
        sync = sum(layers.sync(i) for i in positions)
        step = sum(layers.step(i) for i in positions)
        exposed = min(sync, max(sync - back, bucket))
        lost = (sync - exposed) * (1 - 1 / spec.software.overlap_slowdown)
        longest = max(longest, exposed + lost + step - before)
        if spec.schedule != "dualpipe":  # whose devices end together
            before += back
    return longest


def exchange(layers, spec):
    """Both copies of a tied embedding add their gradients."""
    if not layers.copied:
        return 0.0
    payload = layers.optimizer.gradient_bytes * layers.copied
    if spec.zero >= 2:
        payload /= layers.shards
    # Each sends the other half of its gradients, then half of the sums.
    return 2 * layers.network.message(payload / 2, 0, spec.pp - 1)


def evaluate(model, cluster, spec):
    """Seconds and bytes of a plan: time_s, memory_bytes, and of each stage the same and more."""
    layers = Layers(model, cluster, spec, Network(cluster, spec))
    chunks, p = chunks_of(layers, spec), spec.pp
    stages = [[chunks[c] for c in chunks_on(spec, k)] for k in range(p)]
    positions = [[i for chunk in own for i in chunk] for own in stages]
    modes = chosen_modes(model, cluster, layers, spec, stages)
    f, b, w = passes(model, layers, spec, chunks, modes)
    other = (
        passes(model, layers, spec, chunks, modes, way=1) if spec.schedule == "dualpipe" else None
    )
    pipeline = played(spec, f, b, w, other)
    loads = [sum(f[c] + b[c] for c in chunks_on(spec, k)) for k in range(p)]
    if other is not None:
        turned = [p - 1 - k for k in range(p)]
        loads = [(f[k] + b[k] + other[0][q] + other[1][q]) / 2 for k, q in enumerate(turned)]
    tail, tied = longest_tail(layers, spec, positions), exchange(layers, spec)
    memory = [stage_memory(model, layers, spec, own, k, modes[k]) for k, own in enumerate(stages)]
    return {
        "time_s": pipeline + tail + tied,
        "memory_bytes": max(sum(terms.values()) for terms in memory),
        "pipeline_s": pipeline,
        "tail_s": tail,
        "exchange_s": tied,
        "stages": [
            {
                "layers": positions[k],
                "recompute": modes[k],
                "load_s": loads[k],
                "memory": memory[k],
                "chunks": own,
            }
            for k, own in enumerate(stages)
        ],
    }


# ---- the best of all ----


def divided_by_work(work, stages):
    """The cuts whose largest work of a stage is least, early stages as long as they can be."""

    @cache
    def least(begin, left):
        if left == 1:
            return sum(work[begin:])
        ends = range(begin + 1, len(work) - left + 2)
        return min(max(sum(work[begin:end]), least(end, left - 1)) for end in ends)

    most, cuts = least(0, stages) * (1 + 1e-9), [0]
    for left in range(stages - 1, 0, -1):
        ends = range(cuts[-1] + 1, len(work) - left + 1)
        cuts.append(max(end for end in ends if sum(work[cuts[-1] : end]) <= most))
    return (*cuts, len(work))


def all_cuts(layers, blocks, schedule, stages, vpp, micro_batches, work=None):
    """Positions at which chunks begin, and the end, of every partition of a schedule.

    Any cuts where stages may differ, else chunks that differ by a layer at most, with the embedding
    and the head counted as layers or not, and the division by `work`, where the software has it.
    """
    count = stages if schedule == "dualpipe" else stages * vpp
    searched = schedule == "1f1b" or (schedule == "zb-h1" and micro_batches >= stages)
    if stages == 1 or searched:
        yield from ((0, *cuts, layers) for cuts in combinations(range(1, layers), count - 1))
        return
    for first, last in product((0, 1), repeat=2):
        each, extras = divmod(blocks + first + last, count)
        for longer in combinations(range(count), extras) if each else ():
            ends = list(accumulate(each + (c in longer) for c in range(count)))
            yield (0, *(1 - first + end for end in ends[:-1]), layers)
    if work and vpp == 1 and stages <= layers:
        yield divided_by_work(work, stages)


def partitions(layers, spec):
    """Every partition that a plan of this schedule may have, as positions of each chunk."""
    count, m = len(layers.order), spec.global_batch // (spec.dp * spec.micro_batch)
    blocks = sum(map(layers.is_block, range(count)))
    for cuts in all_cuts(count, blocks, spec.schedule, spec.pp, spec.vpp, m):
        yield [list(range(a, b)) for a, b in pairwise(cuts)]


def least_memory(model, cluster, spec, modes=RECOMPUTE):
    """Bytes of the fullest device in the best of all partitions, each stage in its best mode."""
    layers = Layers(model, cluster, spec, Network(cluster, spec))
    known = {}

    def needed(chunks, k):
        key = (str(chunks), k)
        if key not in known:
            known[key] = min(
                sum(stage_memory(model, layers, spec, chunks, k, mode).values()) for mode in modes
            )
        return known[key]

    best = float("inf")
    for chunks in partitions(layers, spec):
        stages = [[chunks[c] for c in chunks_on(spec, k)] for k in range(spec.pp)]
        best = min(best, max(needed(own, k) for k, own in enumerate(stages)))
    return best
