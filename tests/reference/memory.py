"""Bytes of one stage, term by term, in plain Python: the oracle of the memory kernel."""


def in_flight(schedule, stages, stage, microbatches, virtual):
    """Micro-batches a stage holds, by playing the schedule's warm-up forward."""
    if schedule == "gpipe":
        return microbatches
    if schedule == "interleaved":
        # Megatron-LM runs this many chunks forward before the first backward, and one more.
        warm_up = (stages - stage - 1) * 2 + (virtual - 1) * stages
        held = 0
        for _ in range(min(warm_up, microbatches * virtual)):
            held += 1
        if held < microbatches * virtual:
            held += 1
        return held / virtual
    # The weight gradient of ZB-H1 waits for as long as the first stage's first backward pass does.
    full = stages if schedule == "zero-bubble" else stages - stage
    held = worst = 0
    done = 0
    for issued in range(1, microbatches + 1):  # one forward each; a backward once the pipe is full
        held += 1
        worst = max(worst, held)
        if issued >= full:
            held -= 1
            done += 1
    return worst


def stage_terms(row, schedules, fragmentation):
    """All terms of one row."""
    d, zero = int(row["data_parallel"]), int(row["zero"])
    params, experts = float(row["parameters"]), float(row["expert_parameters"])
    own = max(1, d / max(1, int(row["expert_parallel"])))  # replicas of an expert

    def shared(name, least):
        each = float(row[name])
        if zero < least:
            return params * each
        return (params - experts) * each / d + experts * each / own

    weights = shared("weight_bytes", 3)
    gradients = shared("gradient_bytes", 2)
    optimizer = shared("state_bytes", 1)
    waiting = in_flight(
        schedules[row["schedule"]],
        int(row["stages"]),
        int(row["stage"]),
        int(row["microbatches"]),
        int(row["virtual"]),
    )
    gathered = 0.0
    if zero == 3:
        whole = float(row["largest_layer"]) * float(row["weight_bytes"])
        gathered = 2 * (whole - whole / d)
    terms = {
        "weights": weights,
        "gradients": gradients,
        "optimizer": optimizer,
        "activations": waiting * float(row["stash_bytes"]),
        "recompute": float(row["live_bytes"]),
        "logits": min(waiting, 1) * float(row["head_bytes"]),
        "communication": float(row["buffer_bytes"]) + gathered,
    }
    moving = sum(terms[t] for t in ("activations", "recompute", "logits", "communication"))
    terms["fragmentation"] = fragmentation * moving
    terms["total"] = sum(terms.values())
    return terms
