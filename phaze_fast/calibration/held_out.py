"""Errors on runs that a constant was not fitted on: one constant at a time, part by part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from phaze_fast.calibration.published import PublishedRun
from phaze_fast.calibration.validation import PredictedRun
from phaze_fast.hardware import Cluster
from phaze_fast.planning import PlanSpec, predict

__all__ = ["HeldOut", "held_out", "of_chip", "of_peak", "of_software"]

Changed = Callable[[PublishedRun, float], tuple[Cluster, PlanSpec]]
"""Gives a run's cluster and plan with a constant at some value."""
_FOLDS = 5


@dataclass(frozen=True)
class HeldOut:
    """One constant, fitted on all parts and on all but one in turn."""

    name: str
    runs: int
    best: float
    """Fitted on all runs."""
    lowest: float
    highest: float
    """Between these it lies when one part is left out."""
    seen: float
    """Mean absolute error with the constant fitted on all runs."""
    unseen: float
    """Mean absolute error of each part with the constant fitted on the others."""
    parts: str
    """What was left out in turn."""


def of_chip(run: PublishedRun, value: float) -> tuple[Cluster, PlanSpec]:
    """Set the bf16 rate of a running job on the run's chip."""
    chip = run.cluster.chip
    if chip is None:
        return run.cluster, run.plan
    tuning = chip.tuning.replace(step_flops={**chip.tuning.step_flops, "bf16": value})
    return run.cluster.replace(chip=chip.replace(tuning=tuning)), run.plan


def of_peak(run: PublishedRun, value: float) -> tuple[Cluster, PlanSpec]:
    """Set that rate as a share of the chip's peak."""
    chip = run.cluster.chip
    return of_chip(run, value * (0.0 if chip is None else chip.peak_flops("bf16")))


def of_software(field: str) -> Changed:
    """Set a field of the run's software profile."""

    def changed(run: PublishedRun, value: float) -> tuple[Cluster, PlanSpec]:
        used: Any = run.plan.software.replace(**{field: value})
        return run.cluster, run.plan.replace(software=used)

    return changed


def held_out(
    name: str,
    runs: Sequence[PublishedRun],
    values: Sequence[float],
    changed: Changed,
    by: Literal["source", "chip", "model"] = "source",
) -> HeldOut:
    """Fit one constant of some runs, on all of them and with part after part left out.

    Parameters
    ----------
    name
        What to call it.
    runs
        At least five. Runs of several sources (chips, models) are left out source by source, runs
        of one in five parts. What a model's name has in brackets does not make it another.
    values
        To choose from.
    changed
        Gives a run's cluster and plan with the constant at a value.
    by
        What parts are told apart by.
    """
    errors = np.array(
        [[PredictedRun(r, predict(r.model, *changed(r, v))).error for r in runs] for v in values]
    )
    size = np.abs(errors)
    names = [
        run.model.name.split(" (")[0] if by == "model" else str(getattr(run, by)) for run in runs
    ]
    kinds = sorted(set(names))
    part = np.array(
        [kinds.index(name) if len(kinds) > 1 else k % _FOLDS for k, name in enumerate(names)]
    )
    chosen, unseen = [], np.zeros(len(runs))
    for out in sorted(set(part.tolist())):
        at = int(np.argmin(size[:, part != out].mean(axis=1)))
        chosen.append(float(values[at]))
        unseen[part == out] = size[at, part == out]
    at = int(np.argmin(size.mean(axis=1)))
    return HeldOut(
        name=name,
        runs=len(runs),
        best=float(values[at]),
        lowest=min(chosen),
        highest=max(chosen),
        seen=float(size[at].mean()),
        unseen=float(unseen.mean()),
        parts=f"{by}s" if len(kinds) > 1 else "five parts",
    )
