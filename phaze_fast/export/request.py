"""What is exported: a plan whose stages and recomputation are all spelled out, and its model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import gcd
from typing import Any

from phaze_fast import _core
from phaze_fast.errors import InvalidInputError
from phaze_fast.memory import SCHEDULES, places
from phaze_fast.models import TransformerModel
from phaze_fast.planning import Plan, PlanSpec
from phaze_fast.planning.training import split_recompute

__all__ = ["Chunk", "Exported", "ReadPlan", "Request", "Unexpressed", "facts_unsaid"]


@dataclass(frozen=True)
class Unexpressed:
    """A part of a plan that a format cannot say."""

    what: str
    """The part and its value, named as the option of `predict` is."""
    why: str
    """What the format lacks, or does instead."""

    def __str__(self) -> str:
        return f"{self.what}: {self.why}"


def facts_unsaid(spec: PlanSpec) -> list[Unexpressed]:
    """List what a plan says of data and library, for which no format has a setting."""
    found = []
    if spec.ep > 1 and spec.expert_imbalance != 1.0:
        what = f"--expert-imbalance {spec.expert_imbalance}"
        found.append(Unexpressed(what, "the data and the router decide"))
    if spec.ep > 1 and spec.expert_overlap:
        what = f"--expert-overlap {spec.expert_overlap}"
        found.append(Unexpressed(what, "the library's dispatcher decides"))
    return found


@dataclass(frozen=True)
class Exported:
    """A plan as a training framework reads it."""

    format: str
    text: str
    """The file."""
    unexpressed: tuple[Unexpressed, ...]
    """Parts of the plan that the file does not say; empty where it says all."""

    @property
    def complete(self) -> bool:
        """Whether the file says all of the plan that the time of a step depends on."""
        return not self.unexpressed

    def to_dict(self) -> dict[str, Any]:
        """Give it as plain data."""
        return {
            "format": self.format,
            "complete": self.complete,
            "unexpressed": [{"what": u.what, "why": u.why} for u in self.unexpressed],
            "text": self.text,
        }


@dataclass(frozen=True)
class ReadPlan:
    """A plan that was read from a framework's file."""

    spec: PlanSpec
    notes: tuple[str, ...]
    """What the file says that the prediction does not look at."""


@dataclass(frozen=True)
class Chunk:
    """A run of layers that one stage holds together."""

    embedding: bool
    blocks: range
    """Numbers of its blocks, from 0."""
    head: bool
    recompute: str
    """What its stage recomputes."""


@dataclass(frozen=True)
class Request:
    """A plan to be exported."""

    spec: PlanSpec
    model: TransformerModel
    node_devices: int
    """Devices of a node."""
    title: str = ""
    """What a file says of itself in its first line."""

    @classmethod
    def of(
        cls,
        plan: Plan | PlanSpec | Mapping[str, Any],
        model: TransformerModel,
        node_devices: int,
    ) -> Request:
        """Read a plan and spell out its stages.

        Raises
        ------
        InvalidInputError
            Where its stages or what they recompute are not given.
        """
        spec = PlanSpec.of(plan)
        if spec.recompute == "auto":
            raise InvalidInputError(
                "recompute: auto is not accepted; expected what each stage recomputes, as "
                "`plan --json` and `predict --json` write it"
            )
        if spec.stages is None:
            blocks, chunks = _blocks(model), places(spec.schedule, spec.pp, spec.vpp)
            if blocks % chunks:
                raise InvalidInputError(
                    f"stages: missing, and {blocks} blocks are not a multiple of pp x vpp = "
                    f"{chunks}; expected layers of each stage, as `predict --json` writes them"
                )
            sizes = [blocks // chunks] * chunks
            sizes[0] += 1
            sizes[-1] += 1
            spec = spec.replace(stages=tuple(sizes))
        if sum(spec.stages or ()) != _blocks(model) + 2:
            raise InvalidInputError(
                f"stages: {sum(spec.stages or ())} layers are not accepted; {model.name} has "
                f"{_blocks(model) + 2}, embedding and head counted"
            )
        return cls(spec, model, node_devices, f"{model.name} on {spec.devices} devices")

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """Chunks in the order of the model."""
        spec, last = self.spec, _blocks(self.model) + 1
        stages = spec.stages or ()
        code = SCHEDULES.index(spec.schedule)
        chain = _core.pipeline_chain(code, spec.pp, spec.vpp).tolist()
        words = spec.recompute if isinstance(spec.recompute, tuple) else (spec.recompute,) * spec.pp
        found = []
        for k, (i, j) in enumerate(pairwise([0, *accumulate(stages)])):
            stage = chain.index(k) // spec.vpp
            blocks = range(max(i, 1) - 1, min(j, last) - 1)
            found.append(Chunk(i == 0, blocks, j == last + 1, words[stage]))
        return tuple(found)

    @property
    def even(self) -> bool:
        """Whether all chunks have as many blocks, and the ends lie with the first and last."""
        return len({len(chunk.blocks) for chunk in self.chunks}) == 1

    @cached_property
    def modes(self) -> frozenset[str]:
        """Ways to recompute that blocks have."""
        return frozenset(
            mode for chunk in self.chunks for mode, count in self._modes(chunk).items() if count
        )

    @cached_property
    def full_blocks(self) -> int | None:
        """So many first blocks of every chunk are recomputed and others keep all; None: not so."""
        if not self.modes <= {"full", "none"}:
            return None
        counts = [(self._modes(chunk).get("full", 0), len(chunk.blocks)) for chunk in self.chunks]
        parted = {full for full, blocks in counts if full < blocks}
        most = max((full for full, blocks in counts if full == blocks), default=0)
        if not parted:
            return most
        number = parted.pop()
        return number if not parted and most <= number else None

    @property
    def world(self) -> tuple[int, int]:
        """Nodes, and devices that are used of each."""
        devices = self.spec.devices
        each = self.node_devices if devices % self.node_devices == 0 else 0
        each = each or (devices if devices < self.node_devices else gcd(devices, self.node_devices))
        return devices // each, each

    def _modes(self, chunk: Chunk) -> dict[str, int]:
        """How many blocks of a chunk are recomputed in which way."""
        rest, more, count = split_recompute(chunk.recompute)
        count = min(count, len(chunk.blocks))
        found: dict[str, int] = {}
        for mode, blocks in ((more, count), (rest, len(chunk.blocks) - count)):
            # Fused attention has no scores to compute again.
            idle = mode == "selective" and self.model.attention == "flash"
            found["none" if idle else mode] = found.get("none" if idle else mode, 0) + blocks
        return found


def _blocks(model: TransformerModel) -> int:
    return model.layers + model.encoder_layers
