"""Takes a model on a wafer, gives times that no mapping beats: quick ones, and tight ones."""

from __future__ import annotations

from dataclasses import dataclass

from phaze_fast import _core
from phaze_fast.memory import optimizer
from phaze_fast.wafer.layout import Layout
from phaze_fast.wafer.problem import Problem

_MANY = 1500  # choices of an operator, from which on a relaxation takes seconds

__all__ = ["Roof", "quick_bound", "roof", "tight_bound"]


@dataclass(frozen=True)
class Roof:
    """Work of a step at the dies' peak rate: quick, and far below what any mapping takes."""

    block_s: float
    """Die-seconds of one block for one sequence."""
    ends_s: float
    """Die-seconds of everything else for one sequence."""
    state_bytes: float
    """Of weights, gradients and optimiser state of the whole model."""
    streamed_share: float
    """Of state off the wafer, the part that one micro-batch moves."""

    def bound_s(self, problem: Problem, layout: Layout) -> float:
        """No mapping in this layout takes less; infinite where state alone has no room."""
        dies = layout.dies * layout.stages
        if problem.stream is None and self.state_bytes > dies * problem.capacity_bytes:
            return float("inf")
        batches = problem.training.global_batch // layout.microbatch
        here = layout.microbatch / layout.dies
        blocks = problem.blocks(layout.stages)
        slowest = max(blocks) * self.block_s * here
        whole = (sum(blocks) * self.block_s + self.ends_s) * here
        return max((batches - 1) * slowest + whole, batches * self._stream_s(problem, layout))

    def _stream_s(self, problem: Problem, layout: Layout) -> float:
        """Seconds per micro-batch in which state that has no room on the wafer comes and goes."""
        stream = problem.stream
        if stream is None or problem.volume:
            return 0.0
        dies = layout.dies * layout.stages
        outside = max(0.0, self.state_bytes - dies * problem.capacity_bytes)
        every = problem.wafer.dies * stream.bandwidth_bytes_per_s
        return outside * self.streamed_share / every


def roof(problem: Problem) -> Roof:
    """Add up the products of a model at peak; forward once, backward twice.

    Examples
    --------
    >>> from phaze_fast import models
    >>> from phaze_fast.hardware import presets
    >>> problem = Problem(models.load("bertlarge"), presets.wafer("dram-wafer"))
    >>> work_s = float(problem.mapping(Layout(1, 1, 1, 1)).score()["compute_s"][0])
    >>> roof(problem).block_s < work_s
    True
    """
    peak = problem.chip.peak_flops()
    seconds = {"block": 0.0, "ends": 0.0}
    spec = optimizer(problem.training.optimizer)
    each = spec.weight_bytes + spec.gradient_bytes + spec.state_bytes
    moved = (2.0 * spec.weight_bytes + spec.gradient_bytes) / each * (1.0 - 1e-9)
    state = each * problem.work.parameters
    if problem.volume:
        return Roof(0.0, 0.0, state, moved)
    for op in problem.work.operators:
        causal = 0.5 if op.line.causal else 1.0
        part = "block" if op.part == "block" else "ends"
        seconds[part] += 3.0 * causal * op.line.flops / peak
    less = 1.0 - 1e-9  # rounding
    return Roof(seconds["block"] * less, seconds["ends"] * less, state, moved)


def tight_bound(
    problem: Problem, layout: Layout, mapping: _core.Mapping, least_s: float = 0.0
) -> float:
    """Take the best of several relaxations of one layout.

    Each leaves out what ties operators together across the chain of a block, and the limit of
    memory, which is priced instead: whatever the price, no mapping that fits takes less.

    Parameters
    ----------
    problem, layout
        What is bounded.
    mapping
        The compiled layout.
    least_s
        A bound that is known already.
    """
    best = least_s
    if max(len(mapping.choices(i)) for i in problem.work.chain) > _MANY:
        scale = _scale(problem, layout, least_s or mapping.bound(1.0, 0.0)[0])
        return max(best, *(mapping.bound(1.0, scale * 2.0**at)[0] for at in (2.0, 5.0, 8.0)))
    weights = [(1.0, 0.0), (0.5, 0.0)]
    if problem.stream is not None:
        weights += [(1.0, 0.5), (1.0, 1.0)]
    scale = _scale(problem, layout, mapping.bound(1.0, 0.0)[0])
    for theta, phi in weights:
        best = max(best, _priced(mapping, theta, phi, scale))
    return best


def _scale(problem: Problem, layout: Layout, free: float) -> float:
    """Give a block's time per byte of a die's memory: where a price begins to count."""
    passes = problem.training.global_batch // layout.microbatch * problem.work.blocks
    return free / passes / problem.capacity_bytes


def _priced(mapping: _core.Mapping, theta: float, phi: float, scale: float) -> float:
    """Look for the price of memory that bounds best; the bound is concave in it."""
    free = mapping.bound(theta, 0.0, phi)[0]
    tried = {float(at): mapping.bound(theta, scale * 2.0**at, phi)[0] for at in range(-2, 13, 2)}
    peak = max(tried, key=lambda at: tried[at])
    if tried[peak] <= free:
        return free
    for step in (1.0, 0.5, 0.25):
        for at in (peak - step, peak + step):
            tried[at] = mapping.bound(theta, scale * 2.0**at, phi)[0]
        peak = max(tried, key=lambda at: tried[at])
    return tried[peak]


def quick_bound(
    problem: Problem, layout: Layout, mapping: _core.Mapping, free: float | None = None
) -> float:
    """Bound one layout before it is searched: without a price, and with a few where that helps.

    `free` is the bound without a price where it is known already.
    """
    best = mapping.bound(1.0, 0.0)[0] if free is None else free
    if problem.stream is None:
        return best
    scale = _scale(problem, layout, best)
    for at in (2.0, 6.0, 10.0):
        best = max(best, mapping.bound(1.0, scale * 2.0**at, 1.0)[0])
    return best
