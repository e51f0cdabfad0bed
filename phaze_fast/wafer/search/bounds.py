"""Lower bounds on the step time of mappings: rooflines, and tight bounds of one layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from phaze_fast import _core
from phaze_fast.cost import estimate_costs
from phaze_fast.memory import optimizer
from phaze_fast.opgraph.graph import loose
from phaze_fast.tables import Array
from phaze_fast.units import format_bytes
from phaze_fast.wafer.mapping.layout import Layout
from phaze_fast.wafer.mapping.operators import PARTS, passes
from phaze_fast.wafer.mapping.problem import LeastWork, Problem

_NEAR = 0.9  # weight of work, against collectives, at which weights below 1 are tested first
_START_PRICES = (0.0, 4.0, 8.0, 12.0)  # exponents: a price is 2**at times _scale()
_PRICES = tuple(float(at) for at in range(-12, 13, 2))  # exponents, as above
_STREAMS = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)  # weights of the off-wafer stream


@dataclass(frozen=True)
class Roofline:
    """Time of a step at the dies' peak rates: a quick lower bound."""

    work: LeastWork
    """Die-seconds of one sequence, by part of the model."""
    state_bytes: float
    """Bytes of weights, gradients and optimiser state of the whole model."""
    streamed_share: float
    """Share of the off-wafer state that one micro-batch moves."""

    def bound_s(self, problem: Problem, layout: Layout) -> float:
        """Lower bound of the step time in a layout; infinite if the state alone does not fit."""
        if self.state_bytes > self._memory_bytes(problem, layout):
            return float("inf")
        here = layout.micro_batch / layout.dies
        batches = problem.batches(layout)
        streamed_s = batches * self._stream_s(problem, layout)
        return max(_step_s(problem, layout, self.work, here), streamed_s)

    def _memory_bytes(self, problem: Problem, layout: Layout) -> float:
        """Memory of a pipeline's dies and off its wafers, for one copy of the state."""
        memory = layout.dies * layout.stages * problem.capacity_bytes
        if problem.stream is not None:
            wafers = problem.wafer.wafer_count // layout.replicas
            memory += wafers * problem.wafer.dies * problem.stream.capacity_bytes
        return memory * (1.0 + 1e-9)  # rounding

    def _stream_s(self, problem: Problem, layout: Layout) -> float:
        """Seconds per micro-batch to stream the state that does not fit on the wafer."""
        stream = problem.stream
        if stream is None or problem.volume:
            return 0.0
        dies = layout.dies * layout.stages
        outside = max(0.0, self.state_bytes - dies * problem.capacity_bytes)
        wafers = problem.wafer.wafer_count // layout.replicas
        every = wafers * problem.wafer.dies * stream.bandwidth_bytes_per_s
        return outside * self.streamed_share / every


def state_shortfall(problem: Problem) -> str:
    """Return why the model's state fits in no placement at all; empty if it may fit.

    The memory of all working dies and of all off-wafer memory holds at least one copy.

    Examples
    --------
    >>> state_shortfall(Problem("bertlarge", "dram-wafer"))
    ''
    >>> state_shortfall(Problem("gpt3-175b", "dram-wafer"))
    'weights, gradients and optimiser state take 2.55 TiB; all 40 dies have 1.164 TiB'
    """
    wafer, state_bytes = problem.wafer, roofline(problem).state_bytes
    memory_bytes = wafer.all_dies * problem.capacity_bytes
    off_wafer = ""
    if problem.stream is not None:
        memory_bytes += wafer.all_dies * problem.stream.capacity_bytes
        off_wafer = " together with their off-wafer memory"
    if state_bytes <= memory_bytes * (1.0 + 1e-9):  # rounding
        return ""
    return (
        f"weights, gradients and optimiser state take {format_bytes(state_bytes)}; all "
        f"{wafer.all_dies:,} dies{off_wafer} have {format_bytes(memory_bytes)}"
    )


class LeastMemory(NamedTuple):
    """Least memory that any mapping of one layout needs on the dies of its fullest stage."""

    needed_bytes: float
    limit_bytes: float
    off_wafer: bool
    """Whether a die's share of off-wafer memory is included in both numbers of bytes."""
    op_mappings: Array
    """Operator mappings that need only `needed_bytes`."""

    @property
    def proves_oom(self) -> bool:
        """Whether no mapping of the layout fits."""
        return self.needed_bytes * (1.0 - 1e-9) > self.limit_bytes  # rounding


def least_memory(problem: Problem, mapping: _core.Mapping) -> list[LeastMemory]:
    """Return the least memory of a compiled layout: on the die, and with off-wafer memory.

    Examples
    --------
    >>> problem = Problem("llama3-70b", "wse3-like")
    >>> mapping = problem.mapping(Layout(12, 7, 1, 1))
    >>> [(least.off_wafer, least.proves_oom) for least in least_memory(problem, mapping)]
    [(False, False), (True, False)]
    """
    kinds = (False,) if problem.stream is None else (False, True)
    minima = []
    for off_wafer in kinds:
        needed_bytes, limit_bytes, op_mappings = mapping.least_memory(float(off_wafer))
        minima.append(LeastMemory(needed_bytes, limit_bytes, off_wafer, op_mappings))
    return minima


def _step_s(problem: Problem, layout: Layout, work: LeastWork, share: float = 1.0) -> float:
    """Seconds of a step that consists of a share of `work` and of nothing else."""
    blocks = problem.blocks(layout)
    loads = [count * work.block_s for count in blocks]
    loads[0] += work.before_s
    loads[-1] += work.behind_s
    slowest = max(loads)
    idle = 1.0 / layout.chunks
    if layout.schedule == "zb-h1":
        idle = max(0.0, 1.0 - 2.0 * work.weight_share)
    step_s = problem.batches(layout) * slowest + idle * (sum(loads) - slowest)
    return step_s * share + problem.outer_tail_s(layout)


def work_bound(problem: Problem, layout: Layout) -> float:
    """Lower bound of a layout's step: each operator at its fastest split, no communication.

    Examples
    --------
    >>> problem = Problem("bertlarge", "dram-wafer")
    >>> layout = Layout(4, 2, 1, 8)
    >>> roofline(problem).bound_s(problem, layout) < work_bound(problem, layout)
    True
    >>> work_bound(problem, layout) < float(problem.mapping(layout).score()["time_s"][0])
    True
    """
    return _step_s(problem, layout, problem.least_work(layout)) * (1.0 - 1e-9)  # rounding


def roofline(problem: Problem) -> Roofline:
    """Add up the operators of a model at peak rates, forward and backward.

    Examples
    --------
    >>> problem = Problem("bertlarge", "dram-wafer")
    >>> work_s = float(problem.mapping(Layout(1, 1, 1, 1)).score()["compute_s"][0])
    >>> roofline(problem).work.block_s < work_s
    True
    """
    spec = optimizer(problem.training.optimizer)
    parameter_bytes = spec.weight_bytes + spec.gradient_bytes + spec.state_bytes
    directions = (2.0 * spec.weight_bytes, spec.gradient_bytes)  # in and out
    off = problem.wafer.off_wafer
    busier = max(directions) if off is not None and off.duplex else sum(directions)
    # If weights stay on the wafer, gradients alone move to the state off it.
    streamed_share = spec.gradient_bytes / (spec.gradient_bytes + spec.state_bytes)
    moved = min(busier / parameter_bytes, streamed_share) * (1.0 - 1e-9)
    state = parameter_bytes * problem.work.parameters
    seconds = dict.fromkeys(PARTS, 0.0)
    if not problem.volume:
        for op, least_s in zip(problem.work.operators, _least_s(problem), strict=True):
            seconds[op.part] += least_s * (1.0 - 1e-9)  # rounding
    work = LeastWork(seconds["before"], seconds["block"], seconds["behind"], weight_share=1.0)
    return Roofline(work, state, moved)


def quickest_s(problem: Problem) -> float:
    """Lower bound over all layouts of a wafer: the minimum of their rooflines."""
    over = roofline(problem)
    every = problem.layouts()
    return min(over.bound_s(problem, layout) for layout in every)


def _least_s(problem: Problem) -> list[float]:
    """Die-seconds of each operator for one sequence, a lower bound for every split.

    Products run at the peak rate, since their memory traffic depends on the buffer. All other
    operators scale with their rows, so that a part takes at least its share of the time.
    """
    chip = problem.chip.replace(launch_latency_s=0.0)
    every = [passes(op.spec) for op in problem.work.operators]
    flat = [(spec, 1) for some in every for spec in some]
    bounds = iter(estimate_costs(loose("roofline", flat), chip, bounds_only=True).time_s(0)[0])
    seconds = []
    for spec, *backward in every:
        scaled = sum(float(next(bounds)) for _ in (spec, *backward))
        product_s = 3.0 * spec.flops / chip.peak_flops()
        seconds.append(product_s if "gemm" in spec.kind else scaled)
    return seconds


def tight_bound(
    problem: Problem,
    layout: Layout,
    relaxation: _core.Relaxation,
    least_s: float = 0.0,
    enough_s: float = float("inf"),
) -> float:
    """Return the best of several Lagrangian relaxations of one layout.

    Each relaxation drops the constraints that couple operators across the chain of a block and
    replaces the memory limit by a price (multiplier): at every price it is a lower bound for
    mappings that fit.

    Parameters
    ----------
    problem, layout
        The problem and the layout to bound.
    relaxation
        Relaxation of the compiled layout.
    least_s
        A known lower bound.
    enough_s
        Value at which the bound need not be improved further.
    """
    scale = _scale(problem, layout, relaxation.bound(1.0, 0.0)[0])
    best, price = _priced(relaxation, 1.0, 0.0, scale, enough_s)
    if relaxation.bound(_NEAR, price, 0.0, enough_s)[0] > best:
        best = max(best, _priced(relaxation, 0.5, 0.0, scale, enough_s)[0])
    if problem.stream is not None:
        best = max(best, _streamed(relaxation, scale, enough_s))
    return max(best, least_s)


def _streamed(relaxation: _core.Relaxation, scale: float, enough_s: float) -> float:
    """Return the bound at the best weight of the off-wafer stream.

    The best bound over prices is a concave function of that weight.
    """
    tried: dict[float, float] = {}

    def bound_s(phi: float) -> float:
        tried[phi] = _priced(relaxation, 1.0, phi, scale, enough_s)[0]
        return tried[phi]

    last = 0.0
    for phi in _STREAMS:
        if last >= enough_s or bound_s(phi) < last:
            break
        last = tried[phi]
    peak = max(tried, key=lambda phi: tried[phi])
    for step in (0.5, 0.25):
        for phi in (peak * (1.0 - step / 2), peak * (1.0 + step)):
            if max(tried.values()) < enough_s and phi <= 1.0:
                bound_s(phi)
        peak = max(tried, key=lambda phi: tried[phi])
    return tried[peak]


def priced_mappings(
    problem: Problem, layout: Layout, relaxation: _core.Relaxation, free_s: float
) -> list[Any]:
    """Return operator mappings of relaxations with rising prices of memory.

    A relaxation chooses them jointly along the chain of a block, so that they are good starts where
    memory is scarce and no single change helps.
    """
    scale = _scale(problem, layout, free_s)
    weights = ((1.0, 0.0),) if problem.stream is None else ((1.0, 0.0), (1.0, 0.5))
    return [
        relaxation.bound(theta, scale * 2.0**at, phi)[1]
        for theta, phi in weights
        for at in _START_PRICES
    ]


def _scale(problem: Problem, layout: Layout, free: float) -> float:
    """Return the scale of prices: time of a block per byte of a die's memory."""
    passes = problem.batches(layout) * problem.work.blocks
    return free / passes / problem.capacity_bytes


def _priced(
    relaxation: _core.Relaxation, theta: float, phi: float, scale: float, enough_s: float
) -> tuple[float, float]:
    """Return the best bound over prices of memory, and the price that gives it.

    The bound is the maximum of a concave function of the price and its value at price zero. Once
    it falls, or has returned to that value, it does not rise again.
    """
    free = relaxation.bound(theta, 0.0, phi, enough_s)[0]
    tried = {float("-inf"): free}

    def bound_s(at: float) -> float:
        tried[at] = relaxation.bound(theta, scale * 2.0**at, phi, enough_s)[0]
        return tried[at]

    last = free
    for at in _PRICES:
        if last >= enough_s or bound_s(at) <= free or tried[at] < last:
            break
        last = tried[at]
    peak = max(tried, key=lambda at: tried[at])
    for step in (1.0, 0.5, 0.25):
        if free < tried[peak] < enough_s:
            for at in (peak - step, peak + step):
                bound_s(at)
            peak = max(tried, key=lambda at: tried[at])
    return tried[peak], scale * 2.0**peak


def quick_bound(
    problem: Problem,
    layout: Layout,
    relaxation: _core.Relaxation,
    free: float,
    enough_s: float = float("inf"),
) -> float:
    """Bound a layout before its search: at price zero and, if dies stream, at more prices.

    Parameters
    ----------
    problem, layout, relaxation, enough_s
        As for `tight_bound`.
    free
        The bound at price zero.
    """
    best = free
    if problem.stream is None:
        return best
    scale = _scale(problem, layout, best)
    for at in (2.0, 6.0, 10.0):
        if best < enough_s:
            best = max(best, relaxation.bound(1.0, scale * 2.0**at, 1.0, enough_s)[0])
    return best
