"""Takes a space, a cluster and a workload's totals, gives what the stages can say so far.

The stages are called in order, one line each. Until the search is complete this is a survey: the
whole space with its areas, the compute bound of every chip, and what the fabric charges.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from phaze_fast.cost import CollectiveCost, collective
from phaze_fast.errors import InfeasibleError, InvalidInputError, InvalidTypeError
from phaze_fast.explore import ADAM_STATE_BYTES, compute_bound_s, training_flops
from phaze_fast.explore.comparison import baselines_of, sensitivity_of
from phaze_fast.explore.search import find_chips
from phaze_fast.explore.searcher import Budget, Moment
from phaze_fast.hardware import ArchitectureSpace, Cluster
from phaze_fast.models import TransformerModel, load
from phaze_fast.placement import Training
from phaze_fast.report.result import SearchResult, result_of
from phaze_fast.units import format_bytes

__all__ = ["Survey", "compare", "search", "survey"]


@dataclass(frozen=True, eq=False)
class Survey:
    """Every chip of a space with its lower bound on step time; best first."""

    space: ArchitectureSpace
    cluster: Cluster
    flops: float
    """Matrix FLOPs of one step, all devices together."""
    bound_s: np.ndarray[Any, Any]
    """Lower bound on the step time of each chip, seconds, in the order of the space; infinite where
    the training state does not fit its HBM."""
    order: np.ndarray[Any, Any]
    """Positions in the space by (bound, area, index)."""
    gradient_sync: CollectiveCost
    """All-reduce of bf16 gradients over all devices, if the plan were data-parallel only."""

    @property
    def ties(self) -> int:
        """Chips whose bound equals the best one's."""
        return int(np.count_nonzero(self.bound_s == self.bound_s[self.order[0]]))


def survey(space: ArchitectureSpace, cluster: Cluster, parameters: float, tokens: float) -> Survey:
    """Bound the step time of every chip of a space from below.

    Parameters
    ----------
    space
        The chips to look at.
    cluster
        How many of them there are, and how they are wired.
    parameters
        Parameters of the model.
    tokens
        Tokens of one training step (global batch x sequence length).

    Raises
    ------
    InfeasibleError
        Where the space is empty, or even the largest HBM cannot hold the training state.

    Examples
    --------
    >>> from phaze_fast.hardware import presets
    >>> cluster = Cluster(devices=1024, fabric=presets.fabric("tpuv4-pod"))
    >>> found = survey(ArchitectureSpace.tpuv4_area(), cluster, 175e9, 4096 * 2048)
    >>> len(found.order)
    29360
    """
    flops = training_flops(parameters, tokens)
    if len(space) == 0:
        raise InfeasibleError(
            f"{space.spec.name}: no chip of the grid passes the area and power limits"
        )
    rate = space.spec.base.tensor_core.rates.get("bf16")
    if rate is None:
        raise InfeasibleError(f"{space.spec.name}: its chips do not multiply bf16")
    state = ADAM_STATE_BYTES * parameters
    _require_room_for_state(space, cluster, state)
    bound_s = compute_bound_s(space.chips, flops, cluster.devices, rate)
    bound_s[space.chips["hbm_bytes"] * float(cluster.devices) < state] = np.inf
    order = np.lexsort((space.index, space.area_mm2, bound_s))
    for array in (bound_s, order):
        array.setflags(write=False)
    sync = collective(cluster, "all-reduce", 2.0 * parameters, cluster.devices)
    return Survey(space, cluster, flops, bound_s, order, sync)


def _require_room_for_state(space: ArchitectureSpace, cluster: Cluster, state_bytes: float) -> None:
    """Raise `InfeasibleError` where no chip's HBM, all devices together, holds the state."""
    one = float(space.chips["hbm_bytes"].max())
    if one == 0.0:
        raise InfeasibleError(f"{space.spec.name}: no chip has HBM to hold the training state")
    held = one * cluster.devices
    if state_bytes > held:
        raise InfeasibleError(
            f"training state of {format_bytes(state_bytes)} exceeds the HBM of {cluster.devices} "
            f"devices, {format_bytes(held)}, by {format_bytes(state_bytes - held)}; "
            f"{math.ceil(state_bytes / one)} devices would hold it"
        )


def search(
    model: TransformerModel | str | Sequence[TransformerModel | str],
    space: ArchitectureSpace | str | None = None,
    cluster: Cluster | None = None,
    training: Training | None = None,
    *,
    weights: Sequence[float] | None = None,
    top: int = 10,
    pareto: Sequence[str] = (),
    time_limit_s: float = math.inf,
    max_points: float = math.inf,
    threads: int = 1,
    executor: Executor | str | None = None,
    resume: Path | str | None = None,
    cache: Path | str | None = None,
    progress: Callable[[Moment], None] | None = None,
) -> SearchResult:
    """Find the chip, the operator schedules and the parallel plan that train models fastest.

    Without a space, a cluster or a training step, those of the PHAZE paper are searched: 29,360
    chips with 32, 64 or 80 GiB of HBM, 1,024 of them on a TPUv4 pod's torus, a batch of 4,096,
    micro-batches and tensor-parallel widths of 1, 2, 4 and 8, recomputation decided for each stage.

    Parameters
    ----------
    model
        What is trained: a model or the name of one, or several, for which one chip is to serve.
    space
        The chips to choose from, or the name or file of a space.
    cluster
        Devices and their fabric; its chip, if any, is of no account.
    training
        The step, and what is fixed or free.
    weights
        Of several models in the geometric mean of their times; by default all alike.
    top
        So many of the best dies are found and proven, not only the first.
    pareto
        Objectives of a front to find as well: ``time``, ``area``, ``energy``, ``hbm``, ``cost``.
    time_limit_s
        Stop after so many seconds, with a bound and a gap.
    max_points
        Stop after so many pairs of die and strategy were placed, with a bound and a gap.
    threads
        At most this many threads; the answer does not depend on it.
    executor
        Where the work is done instead: any executor, or a name such as ``processes``,
        ``dask://host:port`` or ``ray``.
    resume
        Directory that keeps what is found, so that a search which was killed goes on from there.
    cache
        Directory of outcomes of complete searches, looked up by the content of the question.
    progress
        Called with a `Moment` after every wave.

    Returns
    -------
    SearchResult
        Best first, with status, bound and gap. Where nothing fits: status ``infeasible``.

    Raises
    ------
    InvalidInputError
        Where an argument is not accepted.

    Examples
    --------
    >>> import phaze_fast as pf
    >>> few = pf.ArchitectureSpace.published()[40_000:40_060]
    >>> cluster = pf.Cluster(devices=8, fabric="tpuv4-pod")
    >>> found = search("bert-large", few, cluster, pf.Training(global_batch=64, microbatch=(1, 2)))
    >>> found.status, found.gap, found.best.plan.dp
    ('optimal', 0.0, 8)
    """
    named = [model] if isinstance(model, TransformerModel | str) else _listed(model)
    for name, value, kind in (
        ("space", space, ArchitectureSpace | str | Path),
        ("cluster", cluster, Cluster),
        ("training", training, Training),
    ):
        if value is not None and not isinstance(value, kind):
            wanted = getattr(kind, "__name__", "ArchitectureSpace, or the name or file of one")
            raise InvalidTypeError(
                f"{name}: {type(value).__name__} is not accepted; expected {wanted}"
            )
    loaded = [load(each) if isinstance(each, str) else each for each in named]
    chips = space if isinstance(space, ArchitectureSpace) else None
    if chips is None:
        chips = ArchitectureSpace.load(space or "published")  # type: ignore[arg-type]
    wired = cluster or Cluster(devices=1024, fabric="tpuv4-pod")
    step = training or Training(global_batch=4096, tensor_parallel=(1, 2, 4, 8))
    budget = Budget(time_s=time_limit_s, points=max_points)
    options = (weights, top, pareto, budget, threads, executor, resume, cache, progress)
    outcome = find_chips(loaded, chips, wired, step, *options)
    return result_of(loaded, chips, wired, step, outcome, weights, top, pareto, threads)


def _listed(models: object) -> list[TransformerModel | str]:
    """Several models, or what is wrong with them."""
    listed: list[Any] = list(models) if isinstance(models, list | tuple) else [models]
    for each in listed:
        if not isinstance(each, TransformerModel | str):
            raise InvalidTypeError(
                f"model: {type(each).__name__} is not accepted; expected a TransformerModel or the "
                "name of one"
            )
    if not listed:
        raise InvalidInputError("model: none is not accepted; expected at least one")
    return listed


def compare(
    found: SearchResult,
    baselines: str = "tpuv4",
    sensitivity: bool = False,
    threads: int = 1,
    seed: int = 0,
    say: Callable[[str], None] | None = None,
) -> SearchResult:
    """Put other methods beside what a search found, and see how the winner moves.

    Parameters
    ----------
    found
        The search's result.
    baselines
        ``tpuv4``: the TPUv4-like chip with the published hand plan, the best Megatron-style plan
        and the best of all. ``all``: also the published early stop, random and Bayesian search
        (the extra ``opt``), at equal evaluations and at equal time. ``none``.
    sensitivity
        Whether to search again with every rate and area term halved and doubled.
    threads
        At most this many.
    seed
        Of random and Bayesian search.
    say
        Called with what is done next.

    Returns
    -------
    SearchResult
        The same with `baselines` and `sensitivity`.

    Examples
    --------
    >>> import phaze_fast as pf
    >>> few = pf.ArchitectureSpace.published()[40_000:40_060]
    >>> cluster = pf.Cluster(devices=8, fabric="tpuv4-pod")
    >>> found = search("bert-large", few, cluster, pf.Training(global_batch=64, microbatch=2))
    >>> sorted(compare(found).baselines)
    ['hand_plan', 'megatron_plan', 'our_plan']
    """
    if not isinstance(found, SearchResult):
        raise InvalidTypeError(
            f"found: {type(found).__name__} is not accepted; expected what search() gave"
        )
    asked = (found.questions, found.space, found.weights, found.outcome)
    beside = baselines_of(*asked, baselines, threads, seed, say)
    moved = sensitivity_of(*asked, threads, say) if sensitivity else []
    return replace(found, baselines=beside, sensitivity=moved)
