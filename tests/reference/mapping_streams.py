"""What streams between a wafer and what is off it take: over links, and from other stages."""


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
