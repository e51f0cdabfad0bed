"""The partitions that AccPar and HyPar would choose for a model's products on a mesh.

AccPar (Song et al., HPCA 2020) cuts the array of accelerators in two again and again. At each cut
a dynamic program along the layers gives each one of three types - by the batch (I), by the inner
dimension (II), by the columns (III) - so that communication, and the work that it hides behind,
cost least. HyPar (Song et al., HPCA 2019) is the same with types I and II and bytes alone. Equal
parts have equal work, so on equal dies only the bytes decide. Both keep all activations and
replicate weights over what the batch is split by. The costs are theirs, not ours: a partial sum is
always made whole, and bytes take the bandwidth of one link.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from phaze_fast.wafer.encoding import Encoding
from phaze_fast.wafer.layout import Layout, slots_of
from phaze_fast.wafer.plans import from_types
from phaze_fast.wafer.problem import Problem

__all__ = ["TYPES", "LayerSize", "accpar", "hypar", "inter_layer", "intra_layer", "types_of"]

TYPES = ("batch", "inner", "columns")
"""AccPar's types I, II and III by what they cut."""


@dataclass(frozen=True)
class LayerSize:
    """One product as AccPar sees it, in elements."""

    name: str
    inputs: float
    """F_l: rows times inner dimension; as many as E_l."""
    outputs: float
    """F_(l+1): rows times columns; as many as E_(l+1)."""
    weights: float

    def cut(self, kind: str, parts: int) -> LayerSize:
        """Give what one part works on."""
        return LayerSize(
            self.name,
            self.inputs / (parts if kind in ("batch", "inner") else 1),
            self.outputs / (parts if kind in ("batch", "columns") else 1),
            self.weights / (parts if kind in ("inner", "columns") else 1),
        )


def intra_layer(kind: str, layer: LayerSize) -> float:
    """Elements of the partial sum that a type leaves: dW, F_(l+1) or E_l."""
    return {"batch": layer.weights, "inner": layer.outputs, "columns": layer.inputs}[kind]


def inter_layer(before: str, after: str, size: float, parts: int = 2) -> float:
    """Elements that one part fetches between two layers, of F and of E together.

    Parameters
    ----------
    before, after
        Types of a layer and of the next.
    size
        Elements of the tensor between them, the same for F and E.
    parts
        Equal parts of the cut.

    Examples
    --------
    AccPar's table for equal halves: types I to II exchange a quarter each of F and of E.

    >>> inter_layer("batch", "inner", 8.0)
    4.0
    >>> [inter_layer(a, "columns", 8.0) for a in TYPES]
    [4.0, 0.0, 4.0]
    """
    mine, others = 1.0 / parts, 1.0 - 1.0 / parts
    table = {
        ("batch", "inner"): 2.0 * mine * others,
        ("batch", "columns"): others,
        ("inner", "batch"): others,
        ("inner", "inner"): others,
        ("columns", "batch"): 2.0 * mine * others,
        ("columns", "columns"): others,
    }
    return size * table.get((before, after), 0.0)


def types_of(
    layers: Sequence[LayerSize], parts: int, kinds: Sequence[str] = TYPES
) -> tuple[str, ...]:
    """Type of each layer of a chain at one cut: fewest elements moved, by dynamic programming.

    Examples
    --------
    Large weights and few rows are not cut by the batch:

    >>> types_of([LayerSize("a", 8.0, 8.0, 4096.0), LayerSize("b", 8.0, 8.0, 4096.0)], 2)
    ('columns', 'inner')
    """
    cost = {kind: intra_layer(kind, layers[0]) for kind in kinds}
    back: list[dict[str, str]] = []
    for previous, layer in pairwise(layers):
        step, following = {}, {}
        for kind in kinds:
            best = min(
                kinds,
                key=lambda k: (
                    cost[k] + inter_layer(k, kind, previous.outputs, parts),
                    kinds.index(k),
                ),
            )
            step[kind] = best
            following[kind] = (
                cost[best]
                + inter_layer(best, kind, previous.outputs, parts)
                + intra_layer(kind, layer)
            )
        back.append(step)
        cost = following
    chosen = [min(kinds, key=lambda k: (cost[k], kinds.index(k)))]
    for step in reversed(back):
        chosen.append(step[chosen[-1]])
    return tuple(reversed(chosen))


def _products(problem: Problem, micro_batch: int) -> list[LayerSize]:
    """Products in the order data passes them; those side by side follow one another."""
    found = []
    for op in problem.work.operators:
        if op.product:
            rows = float(op.spec.b * op.spec.m * micro_batch)  # of all experts, where there are
            weights = float(op.spec.b * op.spec.k * op.spec.n)
            found.append(LayerSize(op.name, rows * op.spec.k, rows * op.spec.n, weights))
    return found


def _partition(problem: Problem, layout: Layout, kinds: Sequence[str]) -> Encoding:
    layers = _products(problem, layout.micro_batch)
    slots = slots_of(layout.width, layout.height)
    left = {
        op.name: {r: op.limit(r, layout.micro_batch) for r in TYPES}
        for op in problem.work.operators
        if op.product
    }
    assigned: list[Mapping[str, str]] = [{} for _ in slots]
    # The first cut is the coarsest: the outermost slots, the longer side first.
    for position in sorted(range(len(slots)), key=lambda k: -slots[k].stride):
        size = slots[position].size
        chosen = types_of(layers, size, kinds)
        accepted = {}
        following = []
        for layer, kind in zip(layers, chosen, strict=True):
            if left[layer.name][kind] < size:
                kind = max(kinds, key=lambda k: left[layer.name][k])
            left[layer.name][kind] //= size
            accepted[layer.name] = kind
            following.append(layer.cut(kind, size))
        assigned[position] = accepted
        layers = following
    return from_types(problem, layout, assigned)


def accpar(problem: Problem, layout: Layout) -> Encoding:
    """Partition as AccPar does: its own costs, types I, II and III, one cut per slot.

    Examples
    --------
    >>> from phaze_fast import models
    >>> from phaze_fast.hardware import presets
    >>> problem = Problem(models.load("bertlarge"), presets.wafer("dram-wafer"))
    >>> len(accpar(problem, Layout(4, 2, 1, 64)).operator_mappings) == len(problem.work.operators)
    True
    """
    return _partition(problem, layout, TYPES)


def hypar(problem: Problem, layout: Layout) -> Encoding:
    """Partition as HyPar does: types I and II, one cut per slot.

    Examples
    --------
    >>> from phaze_fast import models
    >>> from phaze_fast.hardware import presets
    >>> problem = Problem(models.load("bertlarge"), presets.wafer("dram-wafer"))
    >>> plan = hypar(problem, Layout(4, 2, 1, 64))
    >>> {m.partition["columns"] for m in plan.operator_mappings if m.operator == "up"}
    {1}
    """
    return _partition(problem, layout, TYPES[:2])
