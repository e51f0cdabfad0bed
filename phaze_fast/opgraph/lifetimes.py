"""What a layer's backward pass holds beside what its forward pass kept, tensor by tensor."""

from __future__ import annotations

from phaze_fast.opgraph.gradients import SUM
from phaze_fast.opgraph.graph import KINDS, OpGraph

__all__ = ["backward_work_bytes"]

_OWN_OUTPUT = frozenset({"attention", "softmax", "dropout", "norm"})
"""Kinds whose gradient reads what their forward pass wrote."""


def _base(name: str) -> str:
    """Name the forward operator that a backward one belongs to."""
    base = name.removeprefix("d-")
    for end in ("-x", "-w", "-left", "-right"):
        base = base.removesuffix(end)
    return base


def _last_uses(forward: OpGraph, backward: OpGraph) -> dict[str, int]:
    """Position of the last backward operator that reads what a forward operator made."""
    gradient_of: dict[str, int] = {}
    for i, name in enumerate(backward.names):
        gradient_of[_base(name)] = max(i, gradient_of.get(_base(name), -1))
    fed = [False] * len(forward)
    found: dict[str, int] = {}
    for source, reader in forward.edges():
        fed[reader] = True
        name, use = forward.names[source], gradient_of.get(forward.names[reader], -1)
        found[name] = max(found.get(name, -1), use)
    for i, name in enumerate(forward.names):
        if KINDS[int(forward.ops["kind"][i])] in _OWN_OUTPUT:
            found[name] = max(found.get(name, -1), gradient_of.get(name, -1))
    return found


def _last_readers(backward: OpGraph) -> dict[int, int]:
    """Position of the last operator that reads what each makes.

    Sums of gradients are made in place: what they read is there until the sum is read.
    """
    readers: dict[int, int] = {}
    for source, reader in sorted(backward.edges(), key=lambda edge: -edge[0]):
        end = readers.get(reader, reader) if backward.names[reader].endswith(SUM) else reader
        readers[source] = max(end, readers.get(source, -1))
    return readers


def backward_work_bytes(forward: OpGraph, backward: OpGraph) -> float:
    """Bytes that a layer holds at most in its backward pass beyond what its forward pass kept.

    Operators run in the order in which they stand. Each writes the gradients of its inputs, which
    go when the last operator that reads them has run, as does a kept tensor. Gradients of weights
    are not counted.

    Examples
    --------
    >>> from phaze_fast import models
    >>> from phaze_fast.opgraph import layer_graph
    >>> block = layer_graph(models.load("llama2-7b").replace(seq=1024)).layers[1]
    >>> round(backward_work_bytes(block.forward, block.backward) / (2 * 1024 * 11008), 2)
    2.0
    """
    uses = _last_uses(forward, backward)
    freed = [0.0] * (len(backward) + 1)  # of what was kept, after each operator
    for tensor in forward.tensors:
        if tensor.producer != "input" and not tensor.instead_of:
            freed[uses.get(tensor.producer, len(backward) - 1)] += tensor.bytes
    readers = _last_readers(backward)
    gone: list[float] = [0.0] * len(backward)
    held = most = 0.0
    for i, op in enumerate(backward.ops):
        if not backward.names[i].endswith(("-w", SUM)):
            size = float(op["write_bytes"]) or float(op["payload_bytes"])
            held += size
            if i in readers:
                gone[readers[i]] += size
        most = max(most, held)
        held -= gone[i] + freed[i]
    return most
