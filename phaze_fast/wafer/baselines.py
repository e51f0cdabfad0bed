"""Other systems' plans of a model on a wafer: as they come, and tuned by their rules.

Every plan is an encoding and is scored by the same evaluation as ours. `default` is what a user
gets who follows the system's own advice; `tuned` tries everything its rules leave open. Megatron-LM
and ZeRO-3 number dies row by row, so each is tuned twice: in that linear order, and with its groups
laid out as best they can be (`tiled`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from phaze_fast import _core
from phaze_fast.errors import InvalidInputError
from phaze_fast.wafer.accpar import accpar, hypar
from phaze_fast.wafer.baseline_rules import (
    OFF_WAFER,
    Candidate,
    Candidates,
    all_layouts,
    data_layouts,
    heads,
    is_linear,
    largest,
    megatron_candidates,
    megatron_shapes,
    off_wafer_rules,
    zero3_candidates,
)
from phaze_fast.wafer.bounds import roofline
from phaze_fast.wafer.encoding import Encoding
from phaze_fast.wafer.evaluate import Evaluation, evaluation_of
from phaze_fast.wafer.layout import Layout
from phaze_fast.wafer.packing import tiles
from phaze_fast.wafer.plans import RECOMPUTE, megatron_op_mappings, outputs_of
from phaze_fast.wafer.problem import Problem

__all__ = ["BASELINES", "Baseline", "baselines", "baselines_on", "best_candidate"]

Array = np.ndarray[Any, Any]
BASELINES = ("megatron", "zero3", "accpar", "hypar", *OFF_WAFER)
"""Other systems; the last ones need memory off the wafer."""

_NODE = 8  # devices of a node: Megatron-LM's widest tensor parallelism by its own advice


@dataclass(frozen=True)
class Baseline:
    """One system's plans on one wafer."""

    name: str
    default: Evaluation
    tuned: Evaluation
    """Best of what its rules allow, groups in linear rank order."""
    tiled: Evaluation
    """The same with its groups laid out as best they can be on the mesh."""
    evaluations: int
    default_is_tuned: bool = False
    """Whether the advice leaves no plan here, and the tuned one stands in for it."""

    @property
    def best(self) -> Evaluation:
        """The faster of `tuned` and `tiled`; what fits comes before what does not."""
        return min((self.tuned, self.tiled), key=lambda found: found.rank)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "default": {**self.default.to_dict(), "is_tuned": self.default_is_tuned},
            "tuned": self.tuned.to_dict(),
            "tiled": self.tiled.to_dict(),
        }

    @classmethod
    def from_dict(cls, name: str, data: Mapping[str, Any], evaluations: int) -> Baseline:
        """Read what `to_dict` gives."""
        plans = {way: Evaluation.from_dict(data[way]) for way in ("default", "tuned", "tiled")}
        stands_in = data["default"]["is_tuned"]
        return cls(name, **plans, evaluations=evaluations, default_is_tuned=stands_in)


class _Tuner:
    """Tries candidates layout by layout and keeps the best."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.roofline = roofline(problem)
        self.evaluations = 0
        self.compiled: dict[Layout, _core.Mapping | None] = {}
        self.tiled: dict[tuple[bytes, int], Array] = {}

    def mapping(self, layout: Layout) -> _core.Mapping | None:
        if layout not in self.compiled:
            try:
                self.compiled[layout] = self.problem.mapping(layout)
            except InvalidInputError:
                self.compiled[layout] = None
        return self.compiled[layout]

    def outputs(self, codes: Array, stages: int) -> Array:
        """Codes of all stages, which are those of one."""
        key = (codes.tobytes(), stages)
        if key not in self.tiled:
            self.tiled[key] = np.tile(codes, stages)
        return self.tiled[key]

    def best(
        self,
        wanted: Iterable[Layout],
        candidates: Candidates,
    ) -> Evaluation | None:
        """Fastest candidate that fits, else the one that is over by least; None without any."""
        queue = sorted((self.roofline.bound_s(self.problem, each), each) for each in set(wanted))
        top: tuple[float, float] = (float("inf"), float("inf"))
        found: tuple[Layout, Array, Array | None] | None = None
        for least, layout in queue:
            if top[0] <= 0.0 and least >= top[1]:
                break
            mapping = self.mapping(layout)
            if mapping is None:
                continue
            for op_mappings, codes in candidates(layout):
                try:
                    mapping.assign(op_mappings)
                except InvalidInputError:
                    continue
                outputs = None if codes is None else self.outputs(codes, layout.stages)
                score = mapping.score(outputs)[0]
                self.evaluations += 1
                over = float(score["over_bytes"] + score["stream_over_bytes"])
                rank = (over, float(score["time_s"]))
                if rank < top:
                    top, found = rank, (layout, op_mappings, outputs)
        if found is None:
            return None
        layout, op_mappings, outputs = found
        mapping = self.mapping(layout)
        assert mapping is not None
        mapping.assign(op_mappings)
        return evaluation_of(self.problem, layout, mapping, outputs)


def best_candidate(
    problem: Problem,
    wanted: Iterable[Layout],
    candidates: Candidates,
) -> Evaluation | None:
    """Score candidates of several layouts; the fastest that fits, or the one over by least."""
    return _Tuner(problem).best(wanted, candidates)


def _megatron_default(problem: Problem, tuner: _Tuner) -> Evaluation | None:
    """Tensor parallelism as wide as a node, fewest stages that fit, one sequence at a time."""
    for width in (_NODE, 4, 2, 1):
        found = _megatron_at(problem, tuner, width) if heads(problem) % width == 0 else None
        if found is not None:
            return found
    return None


def _megatron_at(problem: Problem, tuner: _Tuner, width: int) -> Evaluation | None:
    best: Evaluation | None = None
    codes = outputs_of(problem, "full")

    def candidates(layout: Layout) -> Iterator[Candidate]:
        for t, axis_assignment in megatron_shapes(problem, layout, True):
            if t == width and layout.micro_batch == layout.dies // t:
                yield megatron_op_mappings(problem, axis_assignment, False, "replicated"), codes

    by_stages: dict[int, list[Layout]] = {}
    for layout in all_layouts(problem, True):
        if layout.dies % width == 0 and layout.micro_batch == layout.dies // width:
            by_stages.setdefault(layout.stages, []).append(layout)
    for stages in sorted(by_stages):
        most = max(layout.dies for layout in by_stages[stages])
        widest = [layout for layout in by_stages[stages] if layout.dies == most]
        found = tuner.best(widest, candidates)
        if found is not None and (best is None or found.rank < best.rank):
            best = found
        if best is not None and best.fits:
            break
    return best


def _typed_candidates(problem: Problem, plan: Callable[[Problem, Layout], Encoding]) -> Candidates:
    codes = outputs_of(problem, "none")

    @cache  # the same layouts are tried in rank order and in tiles
    def op_mappings_on(layout: Layout) -> Array:
        found = plan(problem, layout).arrays(problem)[0]
        found.setflags(write=False)
        return found

    def candidates(layout: Layout) -> Iterator[Candidate]:
        yield op_mappings_on(layout), codes

    return candidates


def _whole_wafer(problem: Problem) -> list[Layout]:
    """Largest rectangle that has no dead die, one stage, all of its batch at once."""
    columns, rows = problem.wafer.grid
    replicas, batch = problem.wafer.joined, problem.training.global_batch
    sides = [(w, h) for h in range(1, rows + 1) for w in range(1, columns + 1)]
    if batch % replicas:
        return []
    whole = [
        Layout(w, h, 1, batch // replicas, replicas=replicas)
        for w, h in sides
        if tiles(problem.wafer, w, h)
    ]
    return largest(whole)


def baselines_on(problem: Problem) -> tuple[str, ...]:
    """Names of the systems that a wafer suits.

    Some need memory off it; all but Megatron-LM put the whole model on each of several joined
    wafers, which then have to divide the batch.

    Examples
    --------
    >>> baselines_on(Problem("bertlarge", "dram-wafer"))
    ('megatron', 'zero3', 'accpar', 'hypar')
    """
    shared = problem.training.global_batch % problem.wafer.joined == 0
    known = [n for n in BASELINES if n not in OFF_WAFER or problem.stream is not None]
    return tuple(n for n in known if shared or n.startswith("megatron"))


def baselines(
    problem: Problem,
    names: Iterable[str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Baseline]:
    """Score other systems' plans of a model on a wafer.

    Parameters
    ----------
    problem
        The model, the wafer and the step.
    names
        Which of `BASELINES`; by default those that the wafer suits.
    progress
        Called with the name of each before it is tuned.

    Examples
    --------
    >>> from phaze_fast import models
    >>> from phaze_fast.hardware import presets
    >>> problem = Problem(models.load("bertlarge"), presets.wafer("dram-wafer"))
    >>> found = baselines(problem, ["zero3"])["zero3"]
    >>> found.tuned.time_s <= found.default.time_s
    True
    """
    tuner = _Tuner(problem)
    found: dict[str, Baseline] = {}
    for name in baselines_on(problem) if names is None else names:
        if name not in baselines_on(problem):
            raise InvalidInputError(
                f"baselines: {name!r} is not accepted; accepted on {problem.wafer.name}: "
                f"{', '.join(baselines_on(problem))}"
            )
        if progress is not None:
            progress(name)
        before = tuner.evaluations
        default, tuned, tiled = _three(problem, tuner, name)
        stands_in = default is None
        tuned = _or(tuned, tiled, default)
        default = _or(default, tuned)
        # What a system does without tuning it can do tuned, and in rows it can do in tiles.
        tuned = min((tuned, default), key=lambda plan: plan.rank)
        tiled = min((_or(tiled, tuned), tuned), key=lambda plan: plan.rank)
        count = tuner.evaluations - before
        found[name] = Baseline(name, default, tuned, tiled, count, stands_in)
    return found


def _or(wanted: Evaluation | None, *others: Evaluation | None) -> Evaluation:
    """Stand in for a plan whose rules leave no layout at all."""
    for each in (wanted, *others):
        if each is not None:
            return each
    raise InvalidInputError("baselines: no rectangle of this wafer suits any plan")


def _three(
    problem: Problem, tuner: _Tuner, name: str
) -> tuple[Evaluation | None, Evaluation | None, Evaluation | None]:
    if name == "megatron":
        every, straight = all_layouts(problem, False), all_layouts(problem, True)
        return (
            _megatron_default(problem, tuner),
            tuner.best(straight, megatron_candidates(problem, True)),
            tuner.best(every, megatron_candidates(problem, False)),
        )
    if name == "zero3":
        every, straight = data_layouts(problem, False), data_layouts(problem, True)
        one_each = [layout for layout in straight if layout.micro_batch == layout.dies]
        return (
            tuner.best(largest(one_each), zero3_candidates(problem, ["none"])),
            tuner.best(straight, zero3_candidates(problem, RECOMPUTE)),
            tuner.best(every, zero3_candidates(problem, RECOMPUTE)),
        )
    if name in OFF_WAFER:
        in_ranks = off_wafer_rules(problem, name, linear=True)
        return None, tuner.best(*in_ranks), tuner.best(*off_wafer_rules(problem, name, False))
    plan = accpar if name == "accpar" else hypar
    candidates = _typed_candidates(problem, plan)
    one_stage = [layout for layout in all_layouts(problem, False) if layout.stages == 1]
    straight = [layout for layout in one_stage if is_linear(problem, layout)]
    return (
        tuner.best(_whole_wafer(problem), candidates),
        tuner.best(straight, candidates),
        tuner.best(one_stage, candidates),
    )
