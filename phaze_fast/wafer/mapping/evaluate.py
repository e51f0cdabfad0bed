"""Step time and memory of a mapping on a wafer, and the bytes by which it exceeds memory.

A mapping that does not fit is a result with a reason, not an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from phaze_fast import _core
from phaze_fast.tables import Array, flat_row, picked
from phaze_fast.units import format_bytes, format_time
from phaze_fast.wafer.mapping.encoding import Encoding
from phaze_fast.wafer.mapping.layout import Layout
from phaze_fast.wafer.mapping.problem import Problem

_BLOCK = ("compute_s", "blocking_s", "hidden_s")
_KEYS = {  # keys of plain data, by field
    "time_s": "time_without_limit_s",
    "memory_bytes": "memory_bytes_per_die",
    "stream_bytes": "stream_bytes_per_die",
    **{n: n for n in ("over_bytes", "stream_over_bytes", "tier", "capacity_bytes", "tail_s")},
}
_WHOLE = ("time_s", "tail_s", "memory_bytes", "over_bytes", "stream_bytes", "stream_over_bytes")
_SCORE = (*_WHOLE, *_BLOCK)  # fields of `_core.MAP_SCORE_DTYPE`
_STAGE = ("load_s", "memory_bytes", "state_bytes", "activation_bytes")


@dataclass(frozen=True)
class StageUse:
    """Time and memory of one stage of the pipeline, per die."""

    load_s: float
    """Seconds of one micro-batch, forward and backward."""
    memory_bytes: float
    state_bytes: float
    """Bytes of weights, gradients and optimiser state."""
    activation_bytes: float
    """Bytes of activations stored for the backward pass, for all micro-batches in flight."""
    blocks: int


@dataclass(frozen=True)
class Evaluation:
    """Step time and memory of one mapping."""

    encoding: Encoding
    time_s: float
    """Seconds of one training step, as if memory had no limit."""
    memory_bytes: float
    """Peak memory of any die in the wafer's local tier, bytes."""
    over_bytes: float
    """Bytes by which `memory_bytes` exceeds the capacity of the local tier; 0 if none."""
    stream_bytes: float
    """Bytes in off-wafer memory per die in use."""
    stream_over_bytes: float
    compute_s: float
    """Compute time of one block and micro-batch, forward and backward, without recomputation."""
    blocking_s: float
    """Time of the exposed collectives of one block and micro-batch."""
    hidden_s: float
    """Time of the collectives of one block and micro-batch that overlap with compute."""
    tail_s: float
    """Time of gradient sums and optimiser step after the last micro-batch."""
    stages: tuple[StageUse, ...]
    tier: str
    """Name of the local tier."""
    capacity_bytes: float

    @property
    def fits(self) -> bool:
        """Whether the mapping fits into every memory tier."""
        return self.over_bytes <= 0.0 and self.stream_over_bytes <= 0.0

    @property
    def rank(self) -> tuple[float, float]:
        """Bytes over the limits of all tiers, then seconds; smaller is better."""
        return (self.over_bytes + self.stream_over_bytes, self.time_s)

    @property
    def reason(self) -> str:
        """Reason why the mapping does not fit; empty if it does."""
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
        """Return plain data; the time is null if the mapping does not fit."""
        return {
            "status": "ok" if self.fits else "oom",
            "time_s": self.time_s if self.fits else None,
            **{key: getattr(self, name) for name, key in _KEYS.items()},
            "reason": self.reason,
            "block": picked(self, *_BLOCK),
            "stages": [asdict(stage) for stage in self.stages],
            "layout": self.encoding.layout.to_dict(),
            "encoding": self.encoding.to_list(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Evaluation:
        """Read the output of `to_dict`."""
        return cls(
            encoding=Encoding.from_list(data["encoding"]),
            stages=tuple(StageUse(**stage) for stage in data["stages"]),
            **{name: data[key] for name, key in _KEYS.items()},
            **data["block"],
        )

    def to_row(self) -> dict[str, Any]:
        """Return one row of a table: seconds, bytes and the layout."""
        sizes = picked(self.encoding.layout, "width", "height", "stages", "micro_batch")
        return {**flat_row({**self.to_dict(), "layout": {}}), **sizes}


def evaluation_of(
    problem: Problem, layout: Layout, mapping: _core.Mapping, outputs: Array | None = None
) -> Evaluation:
    """Evaluate a compiled mapping; outputs are chosen exactly unless given."""
    score = mapping.score(outputs)[0]
    stages, chosen = mapping.stages(outputs)
    encoding = Encoding.from_arrays(problem, layout, mapping.op_mappings(), chosen)
    return Evaluation(
        encoding=encoding,
        **{name: float(score[name]) for name in _SCORE},
        stages=tuple(
            StageUse(**{name: float(stage[name]) for name in _STAGE}, blocks=count)
            for stage, count in zip(stages, problem.blocks(layout), strict=True)
        ),
        tier="dram" if problem.chip.hbm is not None else "sram",
        capacity_bytes=problem.capacity_bytes,
    )


def score_op_mappings(problem: Problem, layout: Layout, op_mappings: Array) -> Evaluation:
    """Evaluate operator mappings in one layout; outputs are chosen exactly."""
    mapping = problem.mapping(layout)
    mapping.assign(op_mappings)
    return evaluation_of(problem, layout, mapping)


def evaluate(problem: Problem, encoding: Encoding, choose_outputs: bool = False) -> Evaluation:
    """Evaluate one mapping.

    Parameters
    ----------
    problem
        The model, the wafer and the step.
    encoding
        The mapping; it must be legal.
    choose_outputs
        Whether to choose exactly which outputs are stashed, recomputed or offloaded, instead of
        using the outputs of the encoding.

    Raises
    ------
    InvalidInputError
        Where the mapping breaks a rule.

    Examples
    --------
    >>> from phaze_fast.wafer import megatron
    >>> problem = Problem("bertlarge", "dram-wafer")
    >>> plan = megatron(problem, Layout(4, 2, 1, 16), tp=4)
    >>> evaluate(problem, plan).fits
    True
    """
    encoding.check(problem)
    mapping = problem.mapping(encoding.layout)
    op_mappings, outputs = encoding.arrays(problem)
    mapping.assign(op_mappings)
    return evaluation_of(problem, encoding.layout, mapping, None if choose_outputs else outputs)
