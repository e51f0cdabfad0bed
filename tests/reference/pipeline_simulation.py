"""One training step through a pipeline, played event by event: the oracle of the formulas.

Seconds are per stage, first to last. A forward pass includes what the stage receives from the one
before, a backward pass what it receives from the one after. Any kind of number will do; with
integers or fractions the makespan is exact.
"""

from reference.pipeline_events import makespan, simulate


def one_f_one_b(stages, stage, micro_batches):
    """Order of a stage by 1F1B, as ("F" or "B", micro-batch)."""
    warm_up = min(micro_batches, stages - stage)
    order = [("F", k) for k in range(warm_up)]
    for k in range(micro_batches):
        order.append(("B", k))
        if warm_up + k < micro_batches:
            order.append(("F", warm_up + k))
    return order


def simulate_1f1b(forward, backward, micro_batches):
    """Makespan of a step by 1F1B."""
    columns = [[[seconds] for seconds in stages] for stages in (forward, backward, backward)]
    return makespan(simulate("1f1b", *columns, micro_batches))


def simulate_zero_bubble(forward, input_grad, weight_grad, micro_batches, patience=0.0):
    """Makespan of a step by ZB-H1.

    Forward passes and input gradients keep the order of 1F1B. A stage whose next one is not ready,
    or that holds as many micro-batches as there are stages, runs a weight gradient that waits. With
    patience it stays idle instead when what it needs comes within that share of the gradient.
    """
    p = len(forward)
    orders = [one_f_one_b(p, i, micro_batches) for i in range(p)]
    at, pending, held, busy_until = [0] * p, [0] * p, [0] * p, [0] * p
    ended = {}
    now = 0

    def arrival(i):
        """When the stage's next operation can begin; None where that is not known yet."""
        if at[i] == len(orders[i]):
            return None
        kind, k = orders[i][at[i]]
        if kind == "F":
            if held[i] == p:
                return None
            return 0 if i == 0 else ended.get((i - 1, "F", k))
        return ended[i, "F", k] if i + 1 == p else ended.get((i + 1, "B", k))

    while True:
        awaited = []
        for i in range(p):
            if busy_until[i] > now:
                continue
            comes = arrival(i)
            if comes is not None and comes <= now:
                kind, k = orders[i][at[i]]
                at[i] += 1
                busy_until[i] = now + (forward if kind == "F" else input_grad)[i]
                ended[i, kind, k] = busy_until[i]
                if kind == "F":
                    held[i] += 1
                else:
                    pending[i] += 1
            elif comes is not None and comes < now + patience * weight_grad[i]:
                awaited.append(comes)
            elif pending[i]:
                pending[i] -= 1
                held[i] -= 1
                busy_until[i] = now + weight_grad[i]
        later = [end for end in busy_until + awaited if end > now]
        if not later:
            return now
        now = min(later)


PATIENCE = (0.0, 0.15, 0.3, 0.45, 0.6, 0.8, 1.0)


def best_zero_bubble(forward, input_grad, weight_grad, micro_batches):
    """Makespan with the patience that suits best."""
    return min(
        simulate_zero_bubble(forward, input_grad, weight_grad, micro_batches, patience)
        for patience in PATIENCE
    )


# ---- times that can be built up from the last stage to the first ----


def built_up_1f1b(forward, backward, micro_batches):
    """Most of what any stage works and waits for, with the passes through the stages before it."""
    bound = trip = 0
    for after, (f, b) in enumerate(zip(forward[::-1], backward[::-1], strict=True)):
        if after < micro_batches:
            waits = max(0, trip - after * f) + max(0, trip - after * b)
        else:
            waits = max(0, trip - (micro_batches - 1) * f)
        bound = max(bound + f + b, micro_batches * (f + b) + waits)
        trip += f + b
    return bound


def built_up_zero_bubble(forward, input_grad, weight_grad, micro_batches):
    """Likewise, for at least as many micro-batches as stages.

    Stage i may leave i + 1 weight gradients until its last input gradient is sent on.
    """
    p = len(forward)
    over = sent = trip = 0
    for i in reversed(range(p)):
        f, b, w, after = forward[i], input_grad[i], weight_grad[i], p - 1 - i
        waits = max(0, trip - after * f) + max(0, trip - after * (b + w))
        works = micro_batches * (f + b + w) + waits
        over = max(over + f, works)
        sent = max(sent + f + b, works - (i + 1) * w)
        trip += f + b
    return max(over, sent + weight_grad[0])
