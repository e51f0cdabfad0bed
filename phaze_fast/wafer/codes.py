"""Names of what a mapping chooses from, in the order of their codes in the compiled evaluator."""

from __future__ import annotations

__all__ = ["BESIDE", "EDGE_KINDS", "OUTPUTS", "PIECES", "ROW_WISE", "WEIGHTS"]

WEIGHTS = ("replicated", "zero1", "zero2", "zero3", "stream", "offload")
"""How weights, gradients and optimiser state are kept, in the order of their codes."""

OUTPUTS = ("stash", "recompute", "offload")
"""What becomes of an operator's output until the backward pass, in the order of their codes."""

EDGE_KINDS = ("inside", "entry", "wrap", "exit")

PIECES = 4
"""That a collective of activations is cut into where it runs beside work."""

ROW_WISE = ("proj", "down", "expert-down", "shared-down")
"""Products whose inner dimension Megatron-LM splits: partial sums leave them."""

BESIDE = ("", "takes", "makes")
"""What a product may work beside, in pieces: nothing, the tensor it takes, the one it makes."""
