"""The whole pipeline in one call: search for the best chip and plan, and compare with baselines."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import Any

from phaze_fast.errors import InvalidInputError, InvalidTypeError
from phaze_fast.explore import Budget, Progress, best_pair, find_chips, paper_setup
from phaze_fast.hardware import ArchitectureSpace, Cluster
from phaze_fast.models import Model, load
from phaze_fast.papers.comparison import Baselines, baselines_of, sensitivity_of
from phaze_fast.planning import Training
from phaze_fast.report.result import SearchResult, result_of
from phaze_fast.robust import (
    TOLERANCE,
    Information,
    RobustResult,
    Uncertainty,
    information,
    robust_chip,
)
from phaze_fast.software import planned_model
from phaze_fast.threads import thread_count

__all__ = ["compare", "search"]


def search(
    model: Model | str | Sequence[Model | str],
    space: ArchitectureSpace | str | None = None,
    cluster: Cluster | None = None,
    training: Training | None = None,
    *,
    weights: Sequence[float] | None = None,
    top: int = 10,
    pareto: Sequence[str] = (),
    objective: str = "time",
    portfolio: bool = False,
    time_limit_s: float = math.inf,
    max_points: float = math.inf,
    threads: int | None = None,
    executor: Executor | str | None = None,
    resume: Path | str | None = None,
    cache: Path | str | None = None,
    progress: Callable[[Progress], None] | None = None,
    uncertainty: str | Path | Mapping[str, Any] | Uncertainty | None = None,
    tolerance: float = TOLERANCE,
    samples: int = 0,
    seed: int = 0,
    say: Callable[[str], None] | None = None,
    stop: Callable[[], bool] | None = None,
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
        So many of the best chips are found and proven, not only the first.
    pareto
        Objectives of a front to find as well: ``time``, ``area``, ``energy``, ``hbm``, ``cost``.
    objective
        What the best chips have least of: ``time`` of a step, ``energy`` (most samples per joule),
        ``cost`` (per dollar of devices), ``area`` (per mm2), ``tokens`` (dollars for a trillion
        tokens: devices and electricity); see docs/robust.md.
    portfolio
        Whether to find the best two chips as well, each of several models on its better one.
    time_limit_s
        Stop after so many seconds, with a bound and a gap.
    max_points
        Stop after so many candidates (chips under a strategy) were placed, with a bound and a gap.
    threads
        At most this many threads, by default all cores; the answer does not depend on it.
    executor
        Where the work is done instead: any executor, or a name such as ``processes``,
        ``dask://host:port`` or ``ray``.
    resume
        Directory that keeps what is found, so that a search which was killed goes on from there.
    cache
        Directory of outcomes of complete searches, looked up by the content of the problem.
    progress
        Called with a `Progress` after every wave.
    uncertainty
        Constants as intervals, for which the chip of least largest regret is found as well:
        ``default``, a file, or ``{name: [low, high]}``; see docs/robust.md.
    tolerance
        How far that least largest regret may be from its bound, as a fraction.
    samples
        Where more than zero: draw so many points from the intervals and say how often each chip is
        the best, and which constant, known better, would leave the fewest possible winners.
    seed
        Of the samples.
    say
        Called with what is done next over the intervals.
    stop
        Asked after every wave: whether to end with what is found so far, and its bound.

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
    >>> found = search("bert-large", few, cluster, pf.Training(global_batch=64, micro_batch=(1, 2)))
    >>> found.status, found.gap, found.best.plan.dp
    ('optimal', 0.0, 8)
    """
    named = [model] if isinstance(model, Model | str) else _listed(model)
    _check_types(space, cluster, training)
    loaded = [load(each) if isinstance(each, str) else each for each in named]
    chips = space if isinstance(space, ArchitectureSpace) else None
    if chips is None:
        chips = ArchitectureSpace.load(space or "published")  # type: ignore[arg-type]
    usual_cluster, usual_step = paper_setup()
    wired, step = cluster or usual_cluster, training or usual_step
    loaded = [planned_model(each, step.software) for each in loaded]
    budget = Budget(time_s=time_limit_s, points=max_points, stop=stop)
    workers = thread_count(threads)
    box = None if uncertainty is None else Uncertainty.load(uncertainty, chips, wired)
    if box is not None and objective != "time":
        raise InvalidInputError(
            f"objective: {objective} is not accepted with uncertainty; expected time"
        )
    searched = (loaded, chips, wired, step)
    outcome = find_chips(
        *searched,
        weights=weights,
        top=top,
        pareto=pareto,
        budget=budget,
        threads=workers,
        executor=executor,
        resume=resume,
        cache=cache,
        progress=progress,
        objective=objective,
    )
    found = result_of(*searched, outcome, weights, top, pareto, workers, objective)
    if not outcome.winners:
        return found
    left_s, nominal = max(time_limit_s - outcome.seconds, 0.0), outcome.winners[0]
    if portfolio:
        pair = best_pair(
            *searched,
            single=nominal,
            weights=weights,
            objective=objective,
            time_limit_s=left_s,
            threads=workers,
            say=say,
        )
        found = replace(found, portfolio=pair)
    if box is None:
        return found
    robust = robust_chip(
        *searched,
        uncertainty=box,
        nominal=nominal,
        weights=found.weights,
        tolerance=tolerance,
        time_limit_s=left_s,
        threads=workers,
        say=say,
    )
    return replace(found, robust=robust, information=_information(found, robust, samples, seed))


def _information(
    found: SearchResult, robust: RobustResult, samples: int, seed: int
) -> Information | None:
    """Draw samples of the intervals; none without samples."""
    if not samples:
        return None
    first = found.problems[0]
    return information(
        [problem.model for problem in found.problems],
        found.space,
        first.cluster,
        first.training,
        uncertainty=robust.uncertainty,
        weights=found.weights,
        samples=samples,
        seed=seed,
        threads=found.threads,
        robust=robust.index,
    )


def _check_types(space: object, cluster: object, training: object) -> None:
    """Raise InvalidTypeError where an argument of a search has another type."""
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


def _listed(models: object) -> list[Model | str]:
    """Several models, or what is wrong with them."""
    listed: list[Any] = list(models) if isinstance(models, list | tuple) else [models]
    for each in listed:
        if not isinstance(each, Model | str):
            raise InvalidTypeError(
                f"model: {type(each).__name__} is not accepted; expected a TransformerModel or the "
                "name of one"
            )
    if not listed:
        raise InvalidInputError("model: none is not accepted; expected at least one")
    return listed


def compare(
    found: SearchResult,
    baselines: Baselines = "tpuv4",
    sensitivity: bool = False,
    threads: int | None = None,
    seed: int = 0,
    say: Callable[[str], None] | None = None,
) -> SearchResult:
    """Compare what a search found with other methods, and see how the winner moves.

    Parameters
    ----------
    found
        The search's result.
    baselines
        ``tpuv4``: the TPUv4-like chip with the published hand plan, the best Megatron-style plan
        and the best of all. ``all``: also the published early stop, random and Bayesian search
        (the extra ``opt``), at equal evaluations and at equal time. ``none``. Also chips of your
        own, of which the best plan is found: records, presets or files, such as
        ``("tpuv4", "h100", "my_chip.yaml")``.
    sensitivity
        Whether to search again with every rate and area term halved and doubled.
    threads
        At most this many, by default all cores.
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
    >>> found = search("bert-large", few, cluster, pf.Training(global_batch=64, micro_batch=2))
    >>> sorted(compare(found).baselines)
    ['hand_plan', 'megatron_plan', 'our_plan']
    """
    if not isinstance(found, SearchResult):
        raise InvalidTypeError(
            f"found: {type(found).__name__} is not accepted; expected what search() gave"
        )
    if found.objective != "time":
        raise InvalidInputError(
            f"found: a search for the least {found.objective} is not accepted; expected one for "
            "the least time, which other methods are compared by"
        )
    searched = (found.problems, found.space, found.weights, found.outcome)
    workers = thread_count(threads)
    others = baselines_of(*searched, baselines, threads=workers, seed=seed, say=say)
    moved = sensitivity_of(*searched, threads=workers, say=say) if sensitivity else []
    return replace(found, baselines=others, sensitivity=moved)
