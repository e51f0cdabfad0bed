"""Optimisers by name: bytes of state per parameter, and the products that a step computes.

Most optimisers keep the same bytes for every parameter. Three do not: Muon applies to the matrices
of blocks, and AdamW to embeddings, head, norms and biases; Adafactor keeps one number per row and
column of a matrix; 8-bit Adam keeps moments of vectors in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from phaze_fast.errors import InvalidInputError, nearest
from phaze_fast.records import Count, Quantity, Record

Matrices = Sequence[tuple[int, int, int]]
"""Matrices of parameters: number of equal matrices, rows and columns."""

_BLOCK = 2048
"""Elements of an 8-bit moment that share a scale (Dettmers et al. 2022, arXiv:2110.02861)."""

OTHER_KERNELS = 7
"""Kernels besides products that `torch.optim.Muon` launches for a matrix: two averages of gradient
and momentum, norm, clamp and division, weight decay and update."""


class Optimizer(Record):
    """Bytes per parameter of weights, gradients and optimiser state."""

    what: ClassVar[str] = "optimizer"
    name: str
    """Name of the optimiser."""
    weight_bytes: Quantity
    """Bytes of a weight as the forward pass reads it."""
    gradient_bytes: Quantity
    """Bytes of an accumulated gradient."""
    state_bytes: Quantity
    """Bytes of master weight and moments together."""
    vector_state_bytes: Quantity | None = None
    """Bytes of master weight and moments of a parameter in no matrix, where they differ."""
    factor_bytes: Quantity = 0.0
    """Bytes of state for each row and each column of a matrix."""
    newton_schulz_steps: Count | None = None
    """Steps of the Newton-Schulz iteration that makes the momentum of each matrix of a block
    orthogonal; none: no such iteration. Tables of embedding and head then count as vectors."""

    @property
    def gathered_bytes(self) -> float:
        """Bytes of a weight that replicas gather: fp32 weights are cast to bf16 first.

        Examples
        --------
        >>> OPTIMIZERS["adam-fp32"].gathered_bytes
        2.0
        """
        return min(self.weight_bytes, 2.0)

    def more_state_bytes(self, parameters: int, matrices: Matrices, table: bool) -> float:
        """Return the bytes of optimiser state in addition to `state_bytes` per trained parameter.

        Parameters
        ----------
        parameters
            Trained parameters.
        matrices
            The matrices among the trained parameters.
        table
            Whether the matrices are tables of an embedding or a head.

        Examples
        --------
        >>> OPTIMIZERS["adafactor"].more_state_bytes(110, [(1, 10, 10)], table=False)
        120.0
        """
        if not self.factor_bytes and self.vector_state_bytes is None:
            return 0.0
        if self.newton_schulz_steps is not None and table:
            matrices = ()
        more = self.factor_bytes * sum(count * (rows + cols) for count, rows, cols in matrices)
        if self.vector_state_bytes is not None:
            vectors = parameters - sum(count * rows * cols for count, rows, cols in matrices)
            more += max(vectors, 0) * (self.vector_state_bytes - self.state_bytes)
        return more

    def products(self, matrices: Matrices) -> list[tuple[int, int, int, int]]:
        """Return the products (b, m, k, n) of one step on matrices of a block, in bf16.

        Each Newton-Schulz step on X of n x m with n <= m computes A = X X^T, A A and B X, where B
        is a polynomial in A: 4 n^2 m + 2 n^3 FLOPs (Jordan et al. 2024, Muon; Liu et al. 2025,
        arXiv:2502.16982, section 2.1).

        Examples
        --------
        >>> OPTIMIZERS["muon"].products([(1, 64, 256)])[:3]
        [(1, 64, 256, 64), (1, 64, 64, 64), (1, 64, 64, 256)]
        """
        products = []
        for count, rows, cols in matrices:
            n, m = min(rows, cols), max(rows, cols)
            step = [(count, n, m, n), (count, n, n, n), (count, n, n, m)]
            products += step * (self.newton_schulz_steps or 0)
        return products


_SIZES = ("weight_bytes", "gradient_bytes", "state_bytes", "vector_state_bytes", "factor_bytes")
OPTIMIZERS = {
    name: Optimizer(
        name=name,
        newton_schulz_steps=5 if name.startswith("muon") else None,
        **dict(zip(_SIZES, sizes, strict=False)),
    )
    for name, *sizes in (
        # bf16 weights, fp32 master weights and two fp32 moments (ZeRO, SC 2020: 16 with 2-byte
        # gradients; Megatron-LM accumulates them in fp32: 18).
        ("adam", 2.0, 4.0, 12.0),
        ("adam-bf16-grad", 2.0, 2.0, 12.0),
        ("adam-bf16", 2.0, 2.0, 4.0),
        ("adam-fp32", 4.0, 4.0, 8.0),
        # fp32 weights that layers read in bf16, whose gradients are bf16 until the optimiser.
        ("adam-fp32-bf16-grad", 4.0, 2.0, 8.0),
        # Two moments of one byte, without master weights.
        ("adam-8bit", 2.0, 2.0, 2.0 * (1.0 + 4.0 / _BLOCK), 8.0),
        # One fp32 number per row and column of a matrix (Shazeer and Stern 2018, arXiv:1804.04235).
        ("adafactor", 2.0, 4.0, 4.0, 8.0, 4.0),
        ("adafactor-bf16", 2.0, 2.0, 0.0, 2.0, 2.0),
        # One moment (Chen et al. 2023, arXiv:2302.06675).
        ("lion", 2.0, 4.0, 8.0),
        ("lion-bf16", 2.0, 2.0, 2.0),
        # Momentum of matrices in blocks, AdamW for the rest.
        ("muon", 2.0, 4.0, 8.0, 12.0),
        ("muon-bf16", 2.0, 2.0, 2.0, 4.0),
        ("sgd-momentum", 2.0, 4.0, 8.0),
        ("sgd-momentum-bf16", 2.0, 2.0, 2.0),
        ("sgd", 2.0, 4.0, 4.0),
        ("sgd-bf16", 2.0, 2.0, 0.0),
    )
}
"""Optimisers by name, in mixed precision unless the name says otherwise."""


def optimizer(name: str | Optimizer) -> Optimizer:
    """Look up an optimiser.

    Examples
    --------
    >>> spec = optimizer("adam")
    >>> spec.weight_bytes + spec.gradient_bytes + spec.state_bytes
    18.0
    """
    if isinstance(name, Optimizer):
        return name
    if name not in OPTIMIZERS:
        raise InvalidInputError(f"optimizer: {name!r} is not accepted; {nearest(name, OPTIMIZERS)}")
    return OPTIMIZERS[name]
