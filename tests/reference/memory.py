"""Bytes of one stage, term by term, in plain Python: the oracle of the memory kernel."""

from functools import cache

from reference import pipeline_events as events


def order_of(schedule, stages, stage, micro_batches, vpp):
    """The passes of one device, as docs/pipelines.md has them."""
    p, v, m, d = stages, vpp, micro_batches, stage
    if schedule == "zb-h1":
        return events.zero_bubble(min(m, p - d), d, m)
    if schedule == "zb-h2":
        return events.zero_bubble(min(m, 2 * (p - d) - 1), 2 * d, m)
    if schedule == "dualpipe":
        return events.dual(p // 2, min(d, p - 1 - d), m // 2, d >= p // 2)
    if schedule == "dualpipe-v":
        return events.dual(p, d, m, False)
    make = {"gpipe": events.gpipe, "1f1b": events.one_f_one_b, "zb-v": events.zb_v}
    return make.get(schedule, events.interleaved)(p, v, m, d)


@cache
def held(schedule, stages, stage, micro_batches, vpp):
    """Micro-batches a device holds at most, by walking along its order; chunks are alike."""
    now = most = 0
    for parts in order_of(schedule, stages, stage, micro_batches, vpp):
        now += sum(kind == "F" for kind, _, _ in parts)
        most = max(most, now)
        now -= sum(kind in "BW" for kind, _, _ in parts)
    return most / vpp


def in_flight(schedule, stages, stage, micro_batches, vpp):
    """Micro-batches a stage is taken to hold: by its order, struck-out passes counted as run.

    Orders of interleaved chunks are written for whole groups of micro-batches, that of ZB-V for
    2p - 1 at least.
    """
    written = micro_batches
    if schedule == "interleaved":
        written = -(-micro_batches // stages) * stages
    if schedule == "zb-v":
        written = max(micro_batches, 2 * stages - 1)
    return min(held(schedule, stages, stage, written, vpp), micro_batches)


def stage_terms(row, schedules, fragmentation):
    """All terms of one row."""
    d, zero = int(row["dp"]), int(row["zero"])
    params, experts = float(row["parameters"]), float(row["expert_parameters"])
    own = max(1, d / (float(row["ep"]) or 1.0))  # replicas of an expert

    def shared(each, least, count, inside):
        if zero < least:
            return count * each
        return (count - inside) * each / d + inside * each / own

    weight = float(row["weight_bytes"])
    if row["packed_parameters"]:
        unpacked = params - float(row["packed_parameters"])
        weight = (unpacked * weight + float(row["packed_bytes"])) / params
    trained = params - float(row["frozen_parameters"])
    trained_experts = experts - float(row["frozen_experts"])
    weights = shared(weight, 3, params, experts)
    copies = float(row["copy_bytes"])
    if zero == 3 and params > 0:
        copies *= ((params - experts) / d + experts / own) / params
    weights += copies
    gradients = shared(float(row["gradient_bytes"]), 2, trained, trained_experts)
    optimizer = shared(float(row["state_bytes"]), 1, trained, trained_experts)
    more = float(row["more_state_bytes"])
    if zero and trained > 0:
        more *= shared(1.0, 1, trained, trained_experts) / trained
    optimizer += more
    waiting = in_flight(
        schedules[row["schedule"]],
        int(row["stages"]),
        int(row["stage"]),
        int(row["micro_batches"]),
        int(row["vpp"]),
    )
    gathered = 0.0
    if zero == 3:
        moved = float(row["gather_bytes"])
        if row["packed_parameters"]:
            moved = (unpacked * moved + float(row["packed_bytes"])) / params
        whole = float(row["largest_layer"]) * moved
        gathered = 2 * (whole - whole / d)
    if zero >= 2 and not row["late_gradients"]:  # of the running layer, of the one being reduced
        whole = float(row["largest_trained"]) * float(row["gradient_bytes"])
        gathered += 2 * (whole - whole / d)
    always = {"weights": weights, "optimizer": optimizer}
    always["communication"] = float(row["buffer_bytes"]) + gathered
    late = [0.0, 0.0, 0.0]
    if row["late_gradients"]:
        each = float(row["gradient_bytes"])
        last, first = float(row["last_parameters"]), float(row["first_parameters"])
        if zero >= 2:
            inside = float(row["first_experts"])
            last, first = last / d, (first - inside) / d + inside / own
        late, gradients = [gradients, last * each, first * each], 0.0
    return peak_terms(
        always,
        gradients,
        late,
        kept=float(row["stash_bytes"]),
        first_kept=float(row["first_stash_bytes"]) if row["late_gradients"] else 0.0,
        live=float(row["live_bytes"]),
        logits=float(row["head_bytes"]),
        waiting=waiting,
        micro_batches=int(row["micro_batches"]),
        fragmentation=fragmentation,
    )


def peak_terms(
    always, gradients, late, kept, first_kept, live, logits, waiting, micro_batches, fragmentation
):
    """Terms of the instant at which a stage holds most; the earliest of several alike.

    `late` are gradients that come with the first backward pass: all, those after the blocks, those
    of the first block and what is before it.
    """
    everything, tail, head = late
    others = max(waiting - 1, 0) * kept
    before = everything if micro_batches > waiting else None
    # activations, recomputed and working, logits, late gradients
    instants = [
        (waiting * kept, 0.0, min(waiting, 1) * logits, before or 0.0),
        (waiting * kept, live, 0.0, tail if before is None else before),
    ]
    if before is None:
        instants.append((others + first_kept, live, 0.0, everything - head))
        instants.append((others, live if waiting > 1 else 0.0, 0.0, everything))
    found = None
    for code, (activations, recompute, loss, grown) in enumerate(instants):
        terms = {
            **always,
            "gradients": gradients + grown,
            "activations": activations,
            "recompute": recompute,
            "logits": loss,
        }
        moving = activations + recompute + loss + always["communication"]
        terms["fragmentation"] = fragmentation * moving
        terms["total"] = sum(terms.values())
        if found is None or terms["total"] > found["total"] * (1 + 1e-15):
            found = {**terms, "instant": 1 if code == 3 and waiting > 1 else code}
    return found
