"""Takes a pipeline problem and a count of chunks, gives the even interleaved plan, or none.

Chunk c of p x v lies on stage c mod p; blocks are dealt out evenly, the embedding goes with the
first chunk and the head with the last, as Megatron-LM has it.
"""

from __future__ import annotations

import numpy as np

from phaze_fast import _core
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
    chunks = chunk_layers(table, stages, virtual)
    forward, backward = np.zeros((stages, virtual)), np.zeros((stages, virtual))
    variants, tails, before_s = [], [], 0.0
    for i, own in enumerate(chunks):
        at = [layer for chunk in own for layer in chunk]
        best = _fastest(problem, at, (stages, i, virtual))
        if best is None:
            return None
        variants.append(table.variants[best])
        for v, chunk in enumerate(own):
            forward[i, v] = table.forward_s[best, chunk].sum()
            backward[i, v] = table.backward_s[best, chunk].sum()
        sync, own_s = float(table.sync_s[at].sum()), float(table.backward_s[0, at].sum())
        exposed = min(sync, max(sync - own_s / virtual, problem.bucket_s))
        tails.append(max(0.0, exposed + float(table.step_s[at].sum()) - before_s / virtual))
        before_s += own_s
    # Every chunk receives, but for the first going forward and the last coming back.
    send_s = float(table.edge_s.max(initial=0.0))
    forward += send_s
    backward += send_s
    forward[0, 0] -= send_s
    backward[-1, -1] -= send_s
    step_s = _core.interleaved_step(forward.reshape(-1), backward.reshape(-1), stages, m)
    return Placement(
        status="optimal",
        time_s=step_s + max(tails),
        max_load_s=float((forward + backward).sum(axis=1).max()),
        width=1,
        replicas=1,
        devices=stages,
        stages=tuple(tuple(layer for chunk in own for layer in chunk) for own in chunks),
        variants=tuple(variants),
        table=table,
        tail_s=max(tails),
    )


def _fastest(problem: PipelineProblem, at: list[int], where: tuple[int, int, int]) -> int | None:
    """Find the fastest variant of a stage that fits."""
    table, (stages, i, virtual) = problem.table, where
    flying = 2 * (stages - i - 1) + (virtual - 1) * stages + 1
    waiting = min(flying, problem.microbatches * virtual) / virtual
    fixed = float((table.resident_bytes[at] + table.once_bytes[at]).sum()) + problem.piped_bytes
    held = (
        fixed
        + float(table.gather_bytes[at].max())
        + waiting * table.stash_bytes[:, at].sum(axis=1)
        + table.live_bytes[:, at].max(axis=1)
    )
    load = (table.forward_s[:, at] + table.backward_s[:, at]).sum(axis=1)
    load = np.where(held <= problem.memory_bytes, load, np.inf)
    best = int(np.argmin(load))
    return best if np.isfinite(load[best]) else None
