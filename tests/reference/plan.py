"""What a step takes by a parallel plan, stage by stage and pass by pass: the oracle of plans.

Every stage is a list of positions; `reference.plan_layers` has the layers and the ranks.
"""

from itertools import combinations, pairwise

from reference.plan_layers import MODES, Layers, Network

BUCKET_BYTES = 100e6
FRAGMENTATION = 0.03

# ---- stages ----


def even_chunks(layers, chunks):
    """Blocks dealt out evenly, the ends with the first and the last chunk."""
    total = len(layers.order)
    blocks = [i for i in range(total) if layers.is_block(i)]
    starts = [blocks[c * len(blocks) // chunks] for c in range(chunks)]
    starts[0] = 0
    return [list(range(a, b)) for a, b in zip(starts, [*starts[1:], total], strict=True)]


def chunks_of(layers, spec):
    """Positions of each chunk, in the order of the model; chunk c is on stage c mod stages."""
    if spec.stages is None:
        return even_chunks(layers, spec.pp * spec.virtual)
    found, at = [], 0
    for size in spec.stages:
        found.append(list(range(at, at + size)))
        at += size
    return found


def messages_in(edges, chunk):
    """Layers before a chunk whose output it reads."""
    return len({a for a, b in edges if a < chunk[0] and b in chunk})


def messages_back(edges, chunk):
    """Layers of a chunk whose output is read after it: each sends one gradient back."""
    return len({a for a, b in edges if a in chunk and b > chunk[-1]})


def message_bytes(model, spec):
    rows = spec.microbatch * (spec.seq or model.seq) / spec.cp
    share = spec.tp if spec.sequence_parallel and spec.tp > 1 else 1
    return 2 * rows * model.hidden / share


def in_flight(spec, stage):
    m = spec.global_batch // (spec.dp * spec.microbatch)
    p, v = spec.pp, spec.virtual
    if spec.schedule == "interleaved":
        return min(2 * (p - stage - 1) + (v - 1) * p + 1, m * v) / v
    return min(m, p) if spec.schedule == "zero-bubble" else min(m, p - stage)


def stage_memory(model, layers, spec, positions, stage, mode):
    """Bytes of a device of a stage, by term."""
    opt, zero = layers.optimizer, spec.zero
    held = sum(layers.parameters(i)[0] for i in positions)
    share = sum(layers.share(i) for i in positions)
    stash = live = logits = largest = 0.0
    for i in positions:
        forward = layers.layer(i).forward
        kind = layers.layer(i).kind
        if kind == "head":
            logits += forward.stashed_bytes()
        elif kind == "embedding":
            stash += forward.stashed_bytes()
        else:
            kept = forward.stashed_bytes(mode)
            stash += kept
            live = max(live, forward.stashed_bytes() - kept)
            largest = max(largest, layers.parameters(i)[0] * opt.weight_bytes)
    rows = spec.microbatch * (spec.seq or model.seq) / spec.cp
    buffers = 2 * rows * model.hidden if spec.sequence_parallel and spec.tp > 1 else 0.0
    if spec.pp > 1:
        buffers += 2 * message_bytes(model, spec)
    if zero == 3:
        buffers += 2 * largest * (1 - 1 / layers.shards)
    terms = {
        "weights": (share if zero >= 3 else held) * opt.weight_bytes,
        "gradients": (share if zero >= 2 else held) * opt.gradient_bytes,
        "optimizer": (share if zero >= 1 else held) * opt.state_bytes,
        "activations": in_flight(spec, stage) * stash,
        "recompute": live,
        "logits": logits,
        "communication": buffers,
    }
    moving = sum(terms[name] for name in ("activations", "recompute", "logits", "communication"))
    return {**terms, "fragmentation": FRAGMENTATION * moving}


def chosen_modes(model, cluster, layers, spec, stages):
    """What each stage recomputes; auto: the first mode that fits, or that which needs least."""
    if isinstance(spec.recompute, tuple):
        return list(spec.recompute)
    if spec.recompute != "auto":
        return [spec.recompute] * spec.pp
    room = max(0.0, cluster.chip.hbm.capacity_bytes - spec.reserved_bytes)
    found = []
    for k, positions in enumerate(stages):
        needed = {
            mode: sum(stage_memory(model, layers, spec, positions, k, mode).values())
            for mode in MODES
        }
        fitting = [mode for mode in MODES if needed[mode] <= room * (1 + 1e-12)]
        found.append(fitting[0] if fitting else min(MODES, key=needed.__getitem__))
    return found


# ---- schedules ----


def time_1f1b(f, b, m):
    total = trip = 0.0
    for r in range(len(f)):
        stage = len(f) - 1 - r
        if r >= m:
            wait = max(0.0, trip - (m - 1) * f[stage])
        else:
            wait = max(0.0, trip - r * f[stage]) + max(0.0, trip - r * b[stage])
        both = f[stage] + b[stage]
        total = max(total + both, m * both + wait)
        trip += both
    return total


def time_zero_bubble(f, b, w, m):
    total = ends = trip = 0.0
    for stage in reversed(range(len(f))):
        r = len(f) - 1 - stage
        wait = max(0.0, trip - r * f[stage]) + max(0.0, trip - r * b[stage])
        work = m * (f[stage] + b[stage]) + wait
        total = max(total + f[stage], work)
        ends = max(ends + f[stage] + b[stage] - w[stage], work - (stage + 1) * w[stage])
        trip += f[stage] + b[stage] - w[stage]
    return max(total, ends + w[0])


def megatron_order(p, v, m, stage):
    """Passes of one stage in order: (is forward, chunk of the model, micro-batch)."""
    ahead, back = [], []
    for first in range(0, m, p):
        for c in range(v):
            ahead += [(True, c * p + stage, k) for k in range(first, first + p)]
        for c in reversed(range(v)):
            back += [(False, c * p + stage, k) for k in range(first, first + p)]
    warm = min(m * v, 2 * (p - stage - 1) + (v - 1) * p)
    order, ahead = ahead[:warm], ahead[warm:]
    while back:
        if ahead:
            order.append(ahead.pop(0))
        order.append(back.pop(0))
    return order


def time_interleaved(f, b, p, m):
    """Makespan where chunk c of the model is on stage c mod p; seconds by chunk."""
    chunks = len(f)

    def awaited(forward, c, k):
        found = [] if forward else [(True, c, k)]
        before = c - 1 if forward else c + 1
        return [*found, (forward, before, k)] if 0 <= before < chunks else found

    left = [megatron_order(p, chunks // p, m, stage) for stage in range(p)]
    clock, ended = [0.0] * p, {}
    while any(left):
        for stage, order in enumerate(left):
            while order and all(other in ended for other in awaited(*order[0])):
                now = order.pop(0)
                begin = max([clock[stage], *(ended[other] for other in awaited(*now))])
                clock[stage] = ended[now] = begin + (f if now[0] else b)[now[1]]
    return max(clock)


# ---- a step ----


def passes(model, layers, spec, chunks, modes):
    """Forward, backward and deferrable seconds of each chunk, messages received included."""
    network, p = layers.network, spec.pp
    payload, edges = message_bytes(model, spec), layers.graph.edges
    f, b, w = [], [], []
    for c, chunk in enumerate(chunks):
        before = network.message(payload, (c - 1) % p, c % p)
        after = network.message(payload, c % p, (c + 1) % p)
        received = messages_in(edges, chunk) * before
        returned = messages_back(edges, chunk) * after
        f.append(received + sum(layers.forward(i) for i in chunk))
        b.append(returned + sum(layers.backward(i, modes[c % p]) for i in chunk))
        w.append(sum(layers.weight_grad(i) for i in chunk))
    return f, b, w


def longest_tail(layers, spec, stages):
    """Gradients, weights and optimiser that outlast the backward passes before a stage."""
    bucket = layers.network.collective(
        "all-reduce", BUCKET_BYTES, layers.network.replicas(experts=False)
    )
    longest = before = 0.0
    for positions in stages:
        back = sum(layers.backward(i, "none") for i in positions) / spec.virtual
        sync = sum(layers.sync(i) for i in positions)
        step = sum(layers.step(i) for i in positions)
        exposed = min(sync, max(sync - back, bucket))
        longest = max(longest, exposed + step - before)
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
    stages = [[i for chunk in chunks[k::p] for i in chunk] for k in range(p)]
    modes = chosen_modes(model, cluster, layers, spec, stages)
    f, b, w = passes(model, layers, spec, chunks, modes)
    m = spec.global_batch // (spec.dp * spec.microbatch)
    if spec.schedule == "interleaved":
        pipeline = time_interleaved(f, b, p, m)
    elif spec.schedule == "zero-bubble":
        pipeline = time_zero_bubble(f, b, w, m)
    else:
        pipeline = time_1f1b(f, b, m)
    tail, tied = longest_tail(layers, spec, stages), exchange(layers, spec)
    memory = [
        stage_memory(model, layers, spec, positions, k, modes[k])
        for k, positions in enumerate(stages)
    ]
    return {
        "time_s": pipeline + tail + tied,
        "memory_bytes": max(sum(terms.values()) for terms in memory),
        "pipeline_s": pipeline,
        "tail_s": tail,
        "exchange_s": tied,
        "stages": [
            {
                "layers": positions,
                "recompute": modes[k],
                "load_s": sum(f[k::p]) + sum(b[k::p]),
                "memory": memory[k],
            }
            for k, positions in enumerate(stages)
        ],
    }


# ---- the best of all ----


def least_memory(model, cluster, spec, modes=MODES):
    """Bytes of the fullest device in the best of all partitions, each stage in its best mode."""
    layers = Layers(model, cluster, spec, Network(cluster, spec))
    count = len(layers.order)
    known = {}

    def needed(positions, k):
        key = (positions, k)
        if key not in known:
            known[key] = min(
                sum(stage_memory(model, layers, spec, positions, k, mode).values())
                for mode in modes
            )
        return known[key]

    if spec.schedule == "interleaved":  # dealt out evenly, nothing to choose
        chunks = chunks_of(layers, spec)
        stages = [tuple(i for c in chunks[k :: spec.pp] for i in c) for k in range(spec.pp)]
        return max(needed(positions, k) for k, positions in enumerate(stages))
    best = float("inf")
    for cuts in combinations(range(1, count), spec.pp - 1):
        ends = [0, *cuts, count]
        stages = [tuple(range(a, b)) for a, b in pairwise(ends)]
        best = min(best, max(needed(positions, k) for k, positions in enumerate(stages)))
    return best
