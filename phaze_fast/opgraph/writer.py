"""What the sub-layers of a block share: its shapes, its norms, and the ends of parallel regions.

Around each pair of projections lies a tensor-parallel region: an all-reduce leaves it (and one
enters it backward); with sequence parallelism it is entered by an all-gather and left by a
reduce-scatter, and norms, residuals and dropouts work on a share of the rows (Korthikanti et al.
2022).
"""

from __future__ import annotations

from phaze_fast.models import TransformerModel
from phaze_fast.opgraph.builder import ELEMENT_BYTES, LayerBuilder
from phaze_fast.opgraph.strategy import Shapes, Strategy, shapes

__all__ = ["FLOAT_BYTES", "BlockWriter", "keep_norm_input"]

FLOAT_BYTES = 4  # statistics are kept in fp32


def keep_norm_input(
    builder: LayerBuilder, name: str, model: TransformerModel, elements: int, x: int, made: int
) -> None:
    """Keep what a norm's gradient reads: its input `x`, or copies that its own operators made."""
    if model.norm_by_steps:
        builder.keep(f"{name}-input-fp32", FLOAT_BYTES * elements, made)
        builder.keep(f"{name}-scaled", ELEMENT_BYTES * elements, made)
        builder.keep(f"{name}-input", ELEMENT_BYTES * elements, x, instead_of=made)
    else:
        builder.keep(f"{name}-input", ELEMENT_BYTES * elements, x)


class BlockWriter:
    """One layer builder, and the pieces that its sub-layers are written with."""

    def __init__(self, model: TransformerModel, strategy: Strategy, kind: str) -> None:
        self.model, self.strategy, self.kind = model, strategy, kind
        self.shapes: Shapes = shapes(model, strategy)
        self.builder = LayerBuilder(f"{model.name}/{kind}")
        self.split = strategy.sequence_parallel and strategy.tp > 1
        self.row_bytes = ELEMENT_BYTES * self.shapes.rows * model.hidden
        self.causal = model.causal and kind != "encoder-block"
        self.windowed = kind.startswith("window-")
        """Whether tokens see `model.window` others at most."""

    # ---- ends of the tensor-parallel region ----

    def enter(self, name: str, x: int) -> int:
        """Begin a region in which devices hold different columns."""
        if self.strategy.tp == 1:
            return x
        if self.split:
            x = self._ordered(name, x)
            gather = ("all-gather", self.row_bytes, "tensor")
            scatter = ("reduce-scatter", self.row_bytes, "tensor")
            return self.builder.network(f"{name}-gather", x, gather, scatter, regather=True)
        reduce = ("all-reduce", self.row_bytes, "tensor")
        return self.builder.network(f"{name}-enter", x, None, reduce)

    def leave(self, name: str, x: int) -> int:
        """End it: sum the devices' parts."""
        if self.strategy.tp == 1:
            return x
        if self.split:
            x = self._ordered(name, x)
            scatter = ("reduce-scatter", self.row_bytes, "tensor")
            gather = ("all-gather", self.row_bytes, "tensor")
            return self.builder.network(f"{name}-scatter", x, scatter, gather)
        return self.builder.network(
            f"{name}-reduce", x, ("all-reduce", self.row_bytes, "tensor"), None
        )

    def _ordered(self, name: str, x: int) -> int:
        """Put rows of several devices in the order of sequences, or back, where software does.

        Before a gather it stands for the copy after it, which has the same bytes.
        """
        if not self.model.gathers_copied:
            return x
        rows, hidden = self.shapes.rows, self.model.hidden
        return self.builder.vector(f"{name}-order", "multiply", (x,), rows, hidden, function="copy")

    def enter_experts(self, name: str, x: int, rows: int) -> int:
        """Begin a region in which the devices of each expert hold different columns."""
        if self.strategy.expert_width == 1:
            return x
        size = float(ELEMENT_BYTES * rows * self.model.hidden)
        gather = ("all-gather", size, "expert-tensor")
        scatter = ("reduce-scatter", size, "expert-tensor")
        return self.builder.network(f"{name}-gather", x, gather, scatter, regather=True)

    def leave_experts(self, name: str, x: int, rows: int) -> int:
        """End it: sum the devices' parts."""
        if self.strategy.expert_width == 1:
            return x
        size = float(ELEMENT_BYTES * rows * self.model.hidden)
        scatter = ("reduce-scatter", size, "expert-tensor")
        return self.builder.network(
            f"{name}-scatter", x, scatter, ("all-gather", size, "expert-tensor")
        )

    # ---- norms and residuals ----

    def norm(self, name: str, x: int) -> int:
        """Normalise the residual stream, or a share of its rows."""
        return self.norm_of(name, x, self.shapes.split_rows, self.model.hidden)

    def norm_of(self, name: str, x: int, rows: int, width: int) -> int:
        """Normalise rows of a width."""
        made = self.builder.vector(name, "norm", (x,), rows, width, function=self.model.norm)
        keep_norm_input(self.builder, name, self.model, rows * width, x, made)
        values = 2 if self.model.norm == "layernorm" else 1  # mean and spread, or spread alone
        self.builder.keep(f"{name}-statistics", values * FLOAT_BYTES * rows, made, statistic=True)
        return made

    def add_residual(self, name: str, x: int, skip: int) -> int:
        """Add a sub-layer's output to the residual stream, dropout before."""
        rows, hidden = self.shapes.split_rows, self.model.hidden
        if self.model.dropout:
            x = self.builder.vector(f"{name}-dropout", "dropout", (x,), rows, hidden)
            self.builder.keep(f"{name}-dropout-mask", rows * hidden, x)
        return self.builder.vector(f"{name}-residual", "residual", (x, skip), rows, hidden, reads=2)

    def keep_input(self, name: str, x: int, routed: bool = False) -> None:
        """Keep what a sub-layer's first projections read, and a router where it is `routed`."""
        self.builder.keep(
            f"{name}-input",
            ELEMENT_BYTES * self.shapes.split_rows * self.model.hidden,
            x,
            operand="" if routed else "only",
        )
