"""Takes a pipeline problem and a count of chunks, gives the even interleaved plan, or none.

Chunk c of p x v lies on stage c mod p; blocks are dealt out evenly, the embedding goes with the
first chunk and the head with the last, as Megatron-LM has it.
"""

from __future__ import annotations

import numpy as np

from phaze_fast.placement.problems import PipelineProblem, Placement
from phaze_fast.placement.table import LayerTable

__all__ = ["chunk_layers", "interleaved"]

_ENDS = ("embedding", "head")


def chunk_layers(table: LayerTable, stages: int, virtual: int) -> list[list[list[int]]]:
    """Positions of the layers of each chunk of each stage."""
    blocks = [i for i, name in enumerate(table.names) if name not in _ENDS]
    size = len(blocks) // (stages * virtual)
    chunks = [blocks[k * size : (k + 1) * size] for k in range(stages * virtual)]
    chunks[0] = [*range(blocks[0]), *chunks[0]]
    chunks[-1] = [*chunks[-1], *range(blocks[-1] + 1, len(table))]
    return [[chunks[v * stages + i] for v in range(virtual)] for i in range(stages)]


def interleaved(problem: PipelineProblem, stages: int, virtual: int) -> Placement | None:
    """Evaluate the even interleaved plan; none where a stage does not fit in any variant."""
    table, m = problem.table, problem.microbatches
    blocks = sum(name not in _ENDS for name in table.names)
    if blocks % (stages * virtual) or m % stages:
        return None
    send_s = float(table.edge_s.max(initial=0.0))
    chunks = chunk_layers(table, stages, virtual)
    loads, tails, variants, before_s = [], [], [], 0.0
    for i, own in enumerate(chunks):
        at = [layer for chunk in own for layer in chunk]
        flying = 2 * (stages - i - 1) + (virtual - 1) * stages + 1
        waiting = min(flying, m * virtual) / virtual
        fixed = float((table.resident_bytes[at] + table.once_bytes[at]).sum()) + problem.piped_bytes
        gather = float(table.gather_bytes[at].max())
        held = (
            fixed
            + gather
            + waiting * table.stash_bytes[:, at].sum(axis=1)
            + table.live_bytes[:, at].max(axis=1)
        )
        ends = (i == 0) + (i == stages - 1)  # a chunk sends and receives, but for the two ends
        load = (table.forward_s[:, at] + table.backward_s[:, at]).sum(axis=1)
        load = np.where(held <= problem.memory_bytes, load, np.inf)
        best = int(np.argmin(load))
        if not np.isfinite(load[best]):
            return None
        loads.append(float(load[best]) + (2 * virtual - ends) * send_s)
        variants.append(table.variants[best])
        sync, backward = float(table.sync_s[at].sum()), float(table.backward_s[0, at].sum())
        exposed = min(sync, max(sync - backward / virtual, problem.bucket_s))
        tails.append(max(0.0, exposed + float(table.step_s[at].sum()) - before_s / virtual))
        before_s += backward
    time_s = (m - 1 / virtual) * max(loads) + sum(loads) / virtual + max(tails)
    return Placement(
        status="optimal",
        time_s=time_s,
        max_load_s=max(loads),
        width=1,
        replicas=1,
        devices=stages,
        stages=tuple(tuple(layer for chunk in own for layer in chunk) for own in chunks),
        variants=tuple(variants),
        table=table,
    )
