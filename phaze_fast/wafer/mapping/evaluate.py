"""Step time and memory of a mapping on a wafer, and what it is over by.

What does not fit is a result with a reason, not an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from phaze_fast import _core
from phaze_fast.tables import flat_row
from phaze_fast.units import format_bytes, format_time
from phaze_fast.wafer.mapping.classes import Classes
from phaze_fast.wafer.mapping.encoding import Encoding
from phaze_fast.wafer.mapping.layout import Layout
from phaze_fast.wafer.mapping.problem import Problem

__all__ = [
    "Evaluation",
    "StageUse",
    "evaluate",
    "evaluation_of",
    "evaluation_of_classes",
    "score_op_mappings",
]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class StageUse:
    """What one stage of the pipeline does and holds, per die."""

    load_s: float
    """Seconds of one micro-batch, forward and backward."""
    memory_bytes: float
    state_bytes: float
    """Of weights, gradients and optimiser state."""
    activation_bytes: float
    """Kept for the backward pass, of all micro-batches in flight."""
    blocks: int


@dataclass(frozen=True)
class Evaluation:
    """One mapping, scored."""

    encoding: Encoding
    time_s: float
    """Of one training step; where it does not fit, what it would take if memory had no limit."""
    memory_bytes: float
    """Of the fullest die, in the wafer's local tier."""
    over_bytes: float
    """By how much that exceeds the local tier; 0 where it fits."""
    stream_bytes: float
    """Off the wafer, a die's share."""
    stream_over_bytes: float
    compute_s: float
    """Work of one block and micro-batch, forward and backward, without recomputation; of two
    classes of stages, in the one that has the slowest stage, as all of one block here."""
    blocking_s: float
    """Collectives that a block waits for."""
    hidden_s: float
    """Collectives that run beside its work."""
    tail_s: float
    """Gradient sums and optimiser step after the last micro-batch."""
    stages: tuple[StageUse, ...]
    tier: str
    """Name of the local tier."""
    capacity_bytes: float

    @property
    def fits(self) -> bool:
        """Whether every die has room in every tier."""
        return self.over_bytes <= 0.0 and self.stream_over_bytes <= 0.0

    @property
    def rank(self) -> tuple[float, float]:
        """Bytes over in all tiers, then seconds: the smaller of two is the better mapping."""
        return (self.over_bytes + self.stream_over_bytes, self.time_s)

    @property
    def reason(self) -> str:
        """Why it does not fit; empty where it does."""
        if self.over_bytes > 0.0:
            return (
                f"OOM: {format_bytes(self.over_bytes)} over {format_bytes(self.capacity_bytes)} of "
                f"{self.tier} per die"
            )
        if self.stream_over_bytes > 0.0:
            return f"OOM: {format_bytes(self.stream_over_bytes)} over a die's share off the wafer"
        return ""

    def __str__(self) -> str:
        layout = self.encoding.layout
        step = format_time(self.time_s) if self.fits else self.reason
        return (
            f"step {step}, {format_bytes(self.memory_bytes)} per die; {self.encoding.stages_text}, "
            f"micro-batch {layout.micro_batch}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; time is null where it does not fit."""
        return {
            "status": "ok" if self.fits else "oom",
            "time_s": self.time_s if self.fits else None,
            "time_without_limit_s": self.time_s,
            "memory_bytes_per_die": self.memory_bytes,
            "over_bytes": self.over_bytes,
            "stream_bytes_per_die": self.stream_bytes,
            "stream_over_bytes": self.stream_over_bytes,
            "reason": self.reason,
            "tier": self.tier,
            "capacity_bytes": self.capacity_bytes,
            "block": {
                "compute_s": self.compute_s,
                "blocking_s": self.blocking_s,
                "hidden_s": self.hidden_s,
            },
            "tail_s": self.tail_s,
            "stages": [
                {
                    "load_s": s.load_s,
                    "blocks": s.blocks,
                    "memory_bytes": s.memory_bytes,
                    "state_bytes": s.state_bytes,
                    "activation_bytes": s.activation_bytes,
                }
                for s in self.stages
            ],
            "layout": self.encoding.layouts_dict(),
            "encoding": self.encoding.to_list(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Evaluation:
        """Read what `to_dict` gives."""
        return cls(
            encoding=Encoding.from_list(data["encoding"]),
            time_s=data["time_without_limit_s"],
            memory_bytes=data["memory_bytes_per_die"],
            over_bytes=data["over_bytes"],
            stream_bytes=data["stream_bytes_per_die"],
            stream_over_bytes=data["stream_over_bytes"],
            **data["block"],
            tail_s=data["tail_s"],
            stages=tuple(StageUse(**stage) for stage in data["stages"]),
            tier=data["tier"],
            capacity_bytes=data["capacity_bytes"],
        )

    def to_row(self) -> dict[str, Any]:
        """Return one row of a table: seconds, bytes and the layout."""
        layout = self.encoding.layout
        data = {**self.to_dict(), "layout": {}}
        sizes = {"width": layout.width, "height": layout.height}
        return {
            **flat_row(data),
            **sizes,
            "stages": len(self.stages),
            "micro_batch": layout.micro_batch,
        }


def evaluation_of(
    problem: Problem, layout: Layout, mapping: _core.Mapping, outputs: Array | None = None
) -> Evaluation:
    """Describe what a compiled mapping holds; outputs are chosen exactly unless given."""
    score = mapping.score(outputs)[0]
    stages, chosen = mapping.stages(outputs)
    encoding = Encoding.from_arrays(problem, layout, mapping.op_mappings(), chosen)
    blocks = problem.blocks(layout)
    return Evaluation(
        encoding=encoding,
        time_s=float(score["time_s"]),
        memory_bytes=float(score["memory_bytes"]),
        over_bytes=float(score["over_bytes"]),
        stream_bytes=float(score["stream_bytes"]),
        stream_over_bytes=float(score["stream_over_bytes"]),
        compute_s=float(score["compute_s"]),
        blocking_s=float(score["blocking_s"]),
        hidden_s=float(score["hidden_s"]),
        tail_s=float(score["tail_s"]),
        stages=tuple(
            StageUse(float(r[0]), float(r[1]), float(r[2]), float(r[3]), blocks[k])
            for k, r in enumerate(stages)
        ),
        tier="dram" if problem.chip.hbm is not None else "sram",
        capacity_bytes=problem.capacity_bytes,
    )


def score_op_mappings(problem: Problem, layout: Layout, op_mappings: Array) -> Evaluation:
    """Score operator mappings in one layout, outputs chosen exactly."""
    mapping = problem.mapping(layout)
    mapping.assign(op_mappings)
    return evaluation_of(problem, layout, mapping)


def evaluate(problem: Problem, encoding: Encoding, choose_outputs: bool = False) -> Evaluation:
    """Score one mapping.

    Parameters
    ----------
    problem
        The model, the wafer and the step.
    encoding
        The mapping; it must be legal.
    choose_outputs
        Choose what is kept, computed again or moved off the wafer exactly, instead of as encoded.

    Raises
    ------
    InvalidInputError
        Where the mapping breaks a rule.

    Examples
    --------
    >>> from phaze_fast import models
    >>> from phaze_fast.wafer import load_wafer, megatron
    >>> problem = Problem(models.load("bertlarge"), load_wafer("dram-wafer"))
    >>> plan = megatron(problem, Layout(4, 2, 1, 16), tp=4)
    >>> evaluate(problem, plan).fits
    True
    """
    encoding.check(problem)
    if encoding.then is not None:
        return _evaluate_classes(problem, encoding, choose_outputs)
    mapping = problem.mapping(encoding.layout)
    op_mappings, outputs = encoding.arrays(problem)
    mapping.assign(op_mappings)
    return evaluation_of(problem, encoding.layout, mapping, None if choose_outputs else outputs)


def evaluation_of_classes(
    classes: Classes, outputs: tuple[Array | None, Array | None] = (None, None)
) -> Evaluation:
    """Describe two compiled classes of stages; outputs are chosen exactly unless given."""
    score = classes.score(outputs)
    parts = []
    for which, layout in enumerate(classes.layouts):
        mapping = classes.beside(which, outputs[1 - which])
        parts.append(evaluation_of(classes.problem, layout, mapping, outputs[which]))
    first, second = (part.encoding for part in parts)
    slowest = max(parts, key=lambda part: max(stage.load_s for stage in part.stages))
    return replace(
        slowest,
        encoding=replace(first, then=second),
        stages=parts[0].stages + parts[1].stages,
        time_s=score["time_s"],
        tail_s=score["tail_s"],
        memory_bytes=score["memory_bytes"],
        over_bytes=score["over_bytes"],
        stream_bytes=score["stream_bytes"],
        stream_over_bytes=score["stream_over_bytes"],
    )


def _evaluate_classes(problem: Problem, encoding: Encoding, choose_outputs: bool) -> Evaluation:
    classes = encoding.compiled(problem)
    outputs: list[Array | None] = []
    for each, mapping in zip(encoding.classes, classes.mappings, strict=True):
        op_mappings, kept = each.arrays(problem)
        mapping.assign(op_mappings)
        outputs.append(None if choose_outputs else kept)
    return evaluation_of_classes(classes, (outputs[0], outputs[1]))
