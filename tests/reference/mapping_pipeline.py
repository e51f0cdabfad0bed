"""Micro-batches in flight and seconds of a step, by schedule."""


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
