"""Tables of layers and placement problems, drawn at random and small enough to enumerate."""

from phaze_fast.papers import LayerTable, PublishedProblem


def seconds(rng, count):
    """Small integers, any numbers with some zeros, or many alike."""
    kind = rng.randrange(3)
    if kind == 0:
        return [float(rng.randint(0, 6)) for _ in range(count)]
    if kind == 1:
        return [0.0 if rng.random() < 0.15 else rng.uniform(0.1, 10.0) for _ in range(count)]
    return [rng.choice((1.0, 2.0, 2.0, 5.0)) for _ in range(count)]


def some(rng, count, most, chance=0.6):
    """Integers up to the most, or nothing at all."""
    present = rng.random() < chance
    return [float(rng.randint(0, most)) if present else 0.0 for _ in range(count)]


def chain(rng, most=7):
    count = rng.randint(1, most)
    return count, [(i, i + 1) for i in range(count - 1)]


def branching(rng, most=7):
    """Two or three branches between the first layer and the last, edges that skip, loose ends."""
    count = rng.randint(4, most)
    ends, edges = [0] * rng.randint(2, 3), []
    for layer in range(1, count - 1):
        at = rng.randrange(len(ends))
        edges.append((ends[at], layer))
        ends[at] = layer
    edges += [(end, count - 1) for end in sorted(set(ends))]
    for _ in range(rng.randint(0, 2)):
        edge = tuple(sorted(rng.sample(range(count), 2)))
        if edge not in edges:
            edges.append(edge)
    if rng.random() < 0.2:
        edges.pop(rng.randrange(len(edges)))
    return count, edges


def random_table(rng, count, edges):
    return LayerTable(
        names=range(count),
        forward_s=seconds(rng, count),
        backward_s=seconds(rng, count),
        stash_bytes=some(rng, count, 9),
        resident_bytes=some(rng, count, 9, 0.9),
        once_bytes=some(rng, count, 4),
        sync_s=[v * rng.choice((0.2, 1.0, 4.0)) for v in some(rng, count, 9)],
        wide=[rng.random() < 0.7 for _ in range(count)],
        edges=edges,
        edge_s=some(rng, len(edges), 3) if rng.random() < 0.5 else seconds(rng, len(edges)),
        edge_bytes=some(rng, len(edges), 9, 0.8),
    )


def random_memory(rng, table):
    """Memory for everything, for all layers at once, for a part, or for about a layer."""
    whole = table.resident_bytes.sum() + table.once_bytes.sum() + table.stash_bytes.sum()
    part = whole * rng.uniform(0.2, 1.0)
    layer = whole / len(table.names) * rng.uniform(1.0, 3.0) + rng.randint(0, 9)
    return float(max(1, int(rng.choice((1e9, whole, part, layer)))))


def random_published(rng, shape):
    count, edges = shape(rng)
    widths = rng.sample((1, 2, 4), rng.randint(1, 3))
    tables = {width: random_table(rng, count, edges) for width in widths}
    return PublishedProblem(
        tables,
        devices=rng.randint(1, 10),
        memory_bytes=random_memory(rng, tables[widths[0]]),
        micro_batches=rng.randint(1, 12),
        recompute=rng.random() < 0.5,
    )
