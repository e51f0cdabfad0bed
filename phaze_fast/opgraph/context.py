"""What the devices of a context-parallel group exchange around attention.

- all-gather: keys and values of all tokens before attention, once more in the backward pass, whose
  gradients are reduced and scattered (Llama 3: Grattafiori et al. 2024, section 3.3.2)
- ring: keys and values go round while attention works on those that are there; the backward pass
  sends them round again with their gradients (Liu et al. 2023, arXiv:2310.01889). Of n steps, each
  attention a and a transfer c, the first step has its own keys: n a, or (n - 1) c + a if that is
  longer. Two operators say the same: (n - 1) a beside (n - 1) c, then a. Of the transfers those
  seconds count that outlast the attention beside them.
- ulysses: rows of all heads for all rows of some heads, and back (Jacobs et al. 2023,
  arXiv:2309.14509)
"""

from __future__ import annotations

from typing import NamedTuple

from phaze_fast.opgraph.writer import BlockWriter

__all__ = ["BESIDE_RING", "RING", "Exchanged", "attention_shape", "exchange", "exchange_back"]

RING, BESIDE_RING = "kv-ring", "attention-early"
"""How the names of a ring and of the attention that runs beside it end."""


class Exchanged(NamedTuple):
    """Operators that attention reads, and what is on its way while it works."""

    query: int
    key: int
    value: int
    arriving: int | None = None
    """The ring that brings the other keys and values; None where all are there."""


def _kind(w: BlockWriter) -> str:
    return w.strategy.cp_kind if w.strategy.cp > 1 else "none"


def attention_shape(w: BlockWriter) -> tuple[int, int]:
    """Heads and queries of each sequence that a device attends with."""
    s, cp = w.shapes, w.strategy.cp
    if _kind(w) == "ulysses":
        return s.heads // cp, s.seq
    return s.heads, s.seq // cp


def exchange(
    w: BlockWriter, prefix: str, made: tuple[int, int, int], query_bytes: float, kv_bytes: float
) -> Exchanged:
    """Write what brings queries, keys and values together.

    Parameters
    ----------
    w
        Writes the block.
    prefix
        Of the operators' names.
    made
        Operators that make queries, keys and values of a device's own rows.
    query_bytes, kv_bytes
        Of its own queries; of its own keys and values.
    """
    q, k, v = made
    width, kind = w.strategy.cp, _kind(w)
    if kind == "none":
        return Exchanged(q, k, v)
    if kind == "ulysses":
        swap = ("all-to-all", query_bytes + kv_bytes, "context")
        all_rows = w.builder.network(f"{prefix}heads-exchange", (q, k, v), swap, swap)
        return Exchanged(all_rows, all_rows, all_rows)
    gather = ("all-gather", kv_bytes * width, "context")
    if kind == "ring":
        back = ("reduce-scatter", 2.0 * kv_bytes * width, "context")
        arriving = w.builder.network(f"{prefix}{RING}", (k, v), gather, back)
        return Exchanged(q, k, v, arriving)
    scatter = ("reduce-scatter", kv_bytes * width, "context")
    whole = w.builder.network(f"{prefix}kv-gather", (k, v), gather, scatter, regather=True)
    return Exchanged(q, whole, whole)


def exchange_back(w: BlockWriter, prefix: str, context: int, query_bytes: float) -> int:
    """Write what brings a device's own rows of all heads back after attention."""
    if _kind(w) != "ulysses":
        return context
    swap = ("all-to-all", query_bytes, "context")
    made = w.builder.network(f"{prefix}rows-exchange", context, swap, swap)
    w.builder.keep(f"{prefix}context-rows", query_bytes, made)
    return made
