"""The whole pipeline in one call: search for the best chip and plan, and compare with baselines."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import Any

from phaze_fast.errors import InvalidInputError, check_type
from phaze_fast.explore import Budget, Progress, best_pair, find_chips, paper_setup
from phaze_fast.hardware import ArchitectureSpace, Cluster
from phaze_fast.models import Model, load
from phaze_fast.papers.comparison import Baselines, baselines_of, gain_by_cause, sensitivity_of
from phaze_fast.planning import Training
from phaze_fast.report.result import SearchResult, result_of
from phaze_fast.robust import (
    TOLERANCE,
    UncertainSearch,
    Uncertainty,
    information,
    robust_chip,
)
from phaze_fast.software import planned_model
from phaze_fast.threads import thread_count


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
        The model to train, or its name; for several models, one chip is found for all.
    space
        The chips to choose from, or the name or file of a space.
    cluster
        Devices and their interconnect; its chip, if any, is ignored.
    training
        The step, and what is fixed or free.
    weights
        Weights of several models in the geometric mean of their times; by default equal.
    top
        Number of the best chips to find and prove.
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
        Where the work is done instead of in threads: any executor, or a name such as
        ``processes``, ``dask://host:port`` or ``ray``.
    resume
        Directory that keeps the plans found so far, so that a search that was killed resumes.
    cache
        Directory of outcomes of complete searches, looked up by the content of the problem.
    progress
        Called with a `Progress` after every wave.
    uncertainty
        Constants as intervals, for which the chip of least largest regret is found as well:
        ``default``, a file, or ``{name: [low, high]}``; see docs/robust.md.
    tolerance
        How far the least largest regret may be from its bound, as a fraction.
    samples
        Where more than zero: draw so many points from the intervals and count how often each chip
        is the best, and find which constant, if known, would leave the fewest possible winners.
    seed
        Seed of the samples.
    say
        Called with a line of text on the progress of the search over the intervals.
    stop
        Called after every wave; where it returns true, the search ends and returns the best chips
        so far with their bound.

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
    models, space, cluster, training = _checked(model, space, cluster, training)
    intervals = _intervals(uncertainty, space, cluster, objective)
    threads = thread_count(threads)
    wanted: dict[str, Any] = {"weights": weights, "top": top, "pareto": pareto}
    wanted |= {"threads": threads, "objective": objective}
    outcome = find_chips(
        models,
        space,
        cluster,
        training,
        budget=Budget(time_limit_s=time_limit_s, max_points=max_points, stop=stop),
        executor=executor,
        resume=resume,
        cache=cache,
        progress=progress,
        **wanted,
    )
    result = result_of(models, space, cluster, training, outcome, **wanted)
    if not outcome.winners:
        return result
    remaining_s = max(time_limit_s - outcome.seconds, 0.0)
    if portfolio:
        how: dict[str, Any] = {"weights": weights, "objective": objective, "threads": threads}
        how |= {"single": outcome.winners[0], "time_limit_s": remaining_s, "say": say}
        pair = best_pair(models, space, cluster, training, **how)
        result = replace(result, portfolio=pair)
    return _with_uncertainty(
        result,
        models,
        cluster,
        training,
        uncertainty=intervals,
        tolerance=tolerance,
        time_limit_s=remaining_s,
        samples=samples,
        seed=seed,
        say=say,
    )


def _checked(
    model: Model | str | Sequence[Model | str],
    space: ArchitectureSpace | str | None,
    cluster: Cluster | None,
    training: Training | None,
) -> tuple[list[Model], ArchitectureSpace, Cluster, Training]:
    """Load arguments that are names, fill in defaults, and refuse wrong types."""
    listed: list[Any] = list(model) if isinstance(model, list | tuple) else [model]
    if not listed:
        raise InvalidInputError("model: none is not accepted; expected at least one")
    for each in listed:
        check_type("model", each, Model | str, "a TransformerModel or the name of one")
    if space is None or not isinstance(space, ArchitectureSpace):
        space = "published" if space is None else space
        check_type("space", space, str | Path, "ArchitectureSpace, or the name or file of one")
        space = ArchitectureSpace.load(space)
    usual_cluster, usual_training = paper_setup()
    cluster = usual_cluster if cluster is None else cluster
    check_type("cluster", cluster, Cluster, "Cluster")
    training = usual_training if training is None else training
    check_type("training", training, Training, "Training")
    loaded = [load(each) if isinstance(each, str) else each for each in listed]
    planned = [planned_model(each, training.software, training.seq) for each in loaded]
    return planned, space, cluster, training


def _intervals(
    uncertainty: str | Path | Mapping[str, Any] | Uncertainty | None,
    space: ArchitectureSpace,
    cluster: Cluster,
    objective: str,
) -> Uncertainty | None:
    """Load the intervals of constants; only the objective ``time`` accepts them."""
    if uncertainty is None:
        return None
    intervals = Uncertainty.load(uncertainty, space, cluster)
    if objective != "time":
        raise InvalidInputError(
            f"objective: {objective} is not accepted with uncertainty; expected time"
        )
    return intervals


def _with_uncertainty(
    result: SearchResult,
    models: list[Model],
    cluster: Cluster,
    training: Training,
    *,
    uncertainty: Uncertainty | None,
    tolerance: float,
    time_limit_s: float,
    samples: int,
    seed: int,
    say: Callable[[str], None] | None,
) -> SearchResult:
    """Add the chip of least largest regret over the intervals, if any, and sample statistics."""
    if uncertainty is None:
        return result
    search = UncertainSearch(
        tuple(models), result.space, cluster, training, tuple(result.weights), result.threads
    )
    limits = {"tolerance": tolerance, "time_limit_s": time_limit_s}
    robust = robust_chip(search, uncertainty, result.outcome.winners[0], **limits, say=say)
    if not samples:
        return replace(result, robust=robust)
    sampled = information(search, uncertainty, samples=samples, seed=seed, robust=robust.index)
    return replace(result, robust=robust, information=sampled)


def compare(
    found: SearchResult,
    baselines: Baselines = "tpuv4",
    sensitivity: bool = False,
    threads: int | None = None,
    seed: int = 0,
    say: Callable[[str], None] | None = None,
) -> SearchResult:
    """Compare the result of a search with other methods, and compute its sensitivity.

    Parameters
    ----------
    found
        The result of the search.
    baselines
        ``tpuv4``: the TPUv4-like chip with the published hand plan, the best Megatron-style plan
        and the best of all plans, TPU v4 as it was built, and the gain over TPU v4 by cause.
        ``all``: also the published early stop, random and Bayesian search (the extra ``opt``), at
        equal evaluations and at equal time. ``none``. Also chips of your own, with the best plan on
        each: records, presets or files, such as ``("tpuv4", "h100", "my_chip.yaml")``.
    sensitivity
        Whether to search again with every rate and area term halved and doubled.
    threads
        At most this many threads, by default all cores.
    seed
        Seed of random and Bayesian search.
    say
        Called with a line of text on the progress.

    Returns
    -------
    SearchResult
        The result with `baselines`, `gain` and `sensitivity` filled in.

    Examples
    --------
    >>> import phaze_fast as pf
    >>> few = pf.ArchitectureSpace.published()[40_000:40_060]
    >>> cluster = pf.Cluster(devices=8, fabric="tpuv4-pod")
    >>> found = search("bert-large", few, cluster, pf.Training(global_batch=64, micro_batch=2))
    >>> sorted(compare(found).baselines)
    ['built', 'hand_plan', 'megatron_plan', 'our_plan']
    """
    check_type("found", found, SearchResult, "what search() gave")
    if found.objective != "time":
        raise InvalidInputError(
            f"found: a search for the least {found.objective} is not accepted; expected one for "
            "the least time, which other methods are compared by"
        )
    threads = thread_count(threads)
    problem = (found.problems, found.space, found.weights, found.outcome)
    others = baselines_of(*problem, which=baselines, threads=threads, seed=seed, say=say)
    gain: list[dict[str, Any]] = []
    if "built" in others and others["built"]["time_s"] is not None:
        best = found.best
        gain = gain_by_cause(found.problems[0], best.chip, best.time_s)
    variations = []
    if sensitivity:
        variations = sensitivity_of(*problem, threads=threads, say=say)
    return replace(found, baselines=others, gain=gain, sensitivity=variations)
