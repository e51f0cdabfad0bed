"""A traced model as plain frozen records: operators, layers, edges.

Nothing here knows where the operators come from; `from_torch` is the first source.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PRODUCTS", "TRACED_KINDS", "TracedLayer", "TracedModel", "TracedOp"]

TRACED_KINDS = (
    "gemm",
    "batched-gemm",
    "attention",
    "norm",
    "softmax",
    "activation",
    "elementwise",
    "embedding",
)
"""Kinds of a traced operator. A gemm multiplies by weights, a batched-gemm two activations."""
PRODUCTS = ("gemm", "batched-gemm")


@dataclass(frozen=True)
class TracedOp:
    """One operator of a layer.

    Examples
    --------
    >>> TracedOp("fc", "gemm", (-1,), 1, 32, 64, 256, 32 * 256, 2.0 * 32 * 64 * 256, 64 * 256).flops
    1048576.0
    """

    name: str
    """Module path within the layer and operator; no two of a layer are the same."""
    kind: str
    """One of `TRACED_KINDS`."""
    inputs: tuple[int, ...]
    """Positions of the operators it reads, in the same layer; -1 is what enters the layer."""
    b: int
    """Products side by side; of attention, sequences x query heads; 1 for the rest."""
    m: int
    """Rows of the result; of attention, queries."""
    k: int
    """Inner dimension of a product; of attention, the width of a head; 0 for the rest."""
    n: int
    """Columns of the result; of attention, keys."""
    elements: int
    """Elements written; those read, where an operator reduces them."""
    flops: float
    """FLOPs of products (two per multiply-add); 0 for the rest."""
    weight_elements: int
    """Elements of the weights it reads, biases included."""


@dataclass(frozen=True)
class TracedLayer:
    """Operators of one kind of layer, in topological order, and how often it stands in a model."""

    name: str
    """Module path of the first such layer, or where it stands: ``before``, ``after``."""
    count: int
    """Layers of this kind."""
    ops: tuple[TracedOp, ...]
    """Operators of one of them."""

    @property
    def flops(self) -> float:
        """Forward FLOPs of one such layer."""
        return sum(op.flops for op in self.ops)


@dataclass(frozen=True)
class TracedModel:
    """A module as its operators: each kind of layer once, and how data passes them.

    Examples
    --------
    >>> fc = TracedOp("fc", "gemm", (-1,), 1, 4, 8, 8, 32, 512.0, 64)
    >>> model = TracedModel("mlp", (TracedLayer("0", 3, (fc,)),), (0, 0, 0), ((0, 1), (1, 2)), 192)
    >>> model.gemms()
    [(1, 4, 8, 8), (1, 4, 8, 8), (1, 4, 8, 8)]
    >>> model.flops
    1536.0
    """

    name: str
    """What to call it."""
    layers: tuple[TracedLayer, ...]
    """Each kind of layer once."""
    order: tuple[int, ...]
    """Positions in `layers`, in order of execution."""
    edges: tuple[tuple[int, int], ...]
    """Pairs of positions in `order`: the second reads what the first made."""
    parameters: int
    """Parameters of the module; what is tied counts once."""

    def gemms(self) -> list[tuple[int, int, int, int]]:
        """(b, m, k, n) of every matrix product of the model, in order of execution."""
        return [
            (op.b, op.m, op.k, op.n)
            for position in self.order
            for op in self.layers[position].ops
            if op.kind in PRODUCTS
        ]

    @property
    def flops(self) -> float:
        """FLOPs of one forward pass over the example inputs."""
        return sum(layer.count * layer.flops for layer in self.layers)

    @property
    def is_chain(self) -> bool:
        """Whether every layer feeds only the next."""
        return self.edges == tuple((i, i + 1) for i in range(len(self.order) - 1))
