"""A cluster and its software calibrated by a handful of whole runs.

A few physical constants (called numbers here) are fitted to the seconds of the runs: their most
probable values, given what is known of other clusters and software (the priors) and a Student
distribution of errors, so that one outlier does not decide the values. Errors are logarithms of
predicted over measured seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from phaze_fast.calibration.calibrate import FittedConstant
from phaze_fast.calibration.published import (
    PublishedRun,
    RowRefusedError,
    UnsupportedError,
    read_run,
)
from phaze_fast.documents import csv_rows
from phaze_fast.errors import InvalidInputError, PhazeError
from phaze_fast.hardware import Accelerator, AnyFabric, Cluster, TieredFabric, presets
from phaze_fast.models import TransformerModel
from phaze_fast.planning import PlanSpec, predict, step_s
from phaze_fast.software import UNKNOWN, Software, chip_as_run, load_software
from phaze_fast.tables import Array

NOISE = 0.08
"""Scale of errors around a calibrated prediction, unless the runs themselves determine it: 6 to 7%
between equal runs of one cluster, and what a few constants cannot explain."""
_FREEDOM = 2.0  # degrees of freedom of the distribution of errors: one run of ten is an outlier
_PRIOR_FREEDOM = 4.0  # degrees of freedom of the priors: some software is like no other
_LEFT = 0.13  # standard deviation of the errors, outliers among them, after a calibration
_NOISE_RUNS = 4.0  # how many runs `_LEFT` counts as, beside the runs that were measured
_STEP = 0.04  # step of a logarithm in finite differences: wider than kinks of the step time
_ROUNDS = 8
_SCAN = (-1.5, -0.75, 0.75, 1.5)  # values that are tried first, in standard deviations
_STARTS = (-2.0, -3.5)  # further starts of the first number, where an error stays above `_FAR`
_FAR = 3.0  # in units of NOISE
_LEAST_GAIN = 1e-2  # the fit ends where the logarithm of the density gains less in a step
_TOLD = 0.8  # a constant is determined where its spread shrinks to this share or less
_UNTOLD = "not determined by these runs"
_T90 = 1.645  # half of a 90% interval, in standard deviations
_T80 = (3.078, 1.886, 1.638, 1.533, 1.476, 1.440, 1.415, 1.397, 1.383, 1.372)
"""90% quantiles of Student's distribution, for 1 to 10 degrees of freedom."""


# ---- the numbers ----


@dataclass(frozen=True)
class RunConstant:
    """A physical constant that can be fitted to whole runs."""

    name: str
    unit: str
    middle: float
    """Most probable value before any run."""
    spread: float
    """Standard deviation of its logarithm before any run: how much clusters and software differ."""
    least: float
    most: float


def constants_of(software: Software, chip: Accelerator | None = None) -> tuple[RunConstant, ...]:
    """Return the constants to fit, with their priors.

    Parameters
    ----------
    software
        The profile to begin from.
    chip
        Limits how fast products can be: none is faster than the chip's rated peak.

    Examples
    --------
    >>> from phaze_fast.software import load_software
    >>> [c.name for c in constants_of(load_software("generic"))][:2]
    ['product_speed', 'host_s']
    """
    exposed = max(software.overlap_slowdown - 1.0, 0.1)
    # Software without a profile is slower than what chips are calibrated with. The host takes as
    # long for an operator as in most profiles whose operators Python launches one by one (58 to
    # 64 us), and a copy of a slice is little more than the launch of a kernel. These middles, the
    # spreads below and NOISE were chosen on samples of nanotron's, BLOOM's and vTrain's runs.
    unknown = software.name == UNKNOWN
    middle, host_s = (0.87, 60e-6) if unknown else (1.0, software.host_s or 10e-6)
    most = 1.9 if chip is None else _most_speed(chip, software)
    slice_s = software.slice_host_s or (4e-6 if unknown else 0.0)
    hidden = software.hidden_tensor or (0.1 if unknown else 0.0)
    found = [
        RunConstant("product_speed", "of the chip's rate in a running job", middle, 0.3, 0.1, most),
        RunConstant("host_s", "s an operator", host_s, 0.7, 1e-6, 1e-3),
        RunConstant("network_share", "of the bandwidth beyond a node", 1.0, 0.5, 0.02, 2.0),
        RunConstant("node_share", "of the bandwidth inside a node", 1.0, 0.3, 0.05, 2.0),
    ]
    if slice_s:
        found.append(
            RunConstant("slice_host_s", "s a matrix and replica", slice_s, 1.2, 1e-8, 1e-4)
        )
    if hidden:
        found.append(
            RunConstant("hidden_tensor", "of tensor-parallel collectives", hidden, 1.0, 0.01, 0.95)
        )
    if software.overlap_gradients:
        found.append(
            RunConstant("exposed_gradients", "s of delay a hidden s", exposed, 1.0, 0.01, 50.0)
        )
    return tuple(found)


def _most_speed(chip: Accelerator, software: Software) -> float:
    """Return the largest factor on the speed of products that stays within the chip's peak."""
    known = software.product_speed.get(chip.name, 1.0)
    for percent in range(190, 100, -2):
        speed = min(percent / 100.0 * known, 2.0)
        try:
            chip_as_run(chip, software.replace(product_speed={chip.name: speed}))
        except InvalidInputError:
            continue
        return percent / 100.0
    return 1.0


# ---- habits ----


@dataclass(frozen=True)
class Habit:
    """Something that software may do, which runs do not state and no constant can express."""

    words: str
    fields: Mapping[str, Any]
    """Fields of the software's profile with the values that they take."""
    prior: float
    """Probability before any run."""


def habits_of(runs: Sequence[PublishedRun], software: Software) -> tuple[Habit, ...]:
    """List what the software of some runs may do; one entry where its profile is known.

    Blocks may be divided over stages by work or evenly; where the two differ much, with heads of
    large vocabularies, most users divide by work. Attention may be computed explicitly, mostly
    where whole layers are recomputed, since its scores fill the memory otherwise.

    Examples
    --------
    >>> from phaze_fast.software import load_software
    >>> [habit.words for habit in habits_of([], load_software("megatron-core"))]
    ['as the profile says']
    """
    if software.name != UNKNOWN:
        return (Habit("as the profile says", {}, 1.0),)
    found = [
        Habit("stages of equal work", {"stage_division": "work"}, 0.75),
        Habit("stages of equal depth", {}, 0.25),
    ]
    if any(run.plan.software.attention == "eager" for run in runs):
        return tuple(found)
    explicit = 0.75 if all(run.plan.recompute == "full" for run in runs) else 0.1
    kinds: tuple[tuple[str, dict[str, Any], float], ...] = (
        ("fused attention", {}, 1.0 - explicit),
        ("explicit attention", {"attention": "eager", "dropout": True}, explicit),
    )
    return tuple(
        Habit(f"{own.words}, {words}", {**own.fields, **fields}, own.prior * p)
        for own in found
        for words, fields, p in kinds
    )


def scaled_fabric(fabric: AnyFabric, node_share: float, network_share: float) -> AnyFabric:
    """Return an interconnect with shares of its bandwidth inside and beyond a node."""
    if not isinstance(fabric, TieredFabric):
        return fabric
    shares = [node_share, *[network_share] * (len(fabric.tiers) - 1)]
    tiers = [
        tier.replace(bandwidth_bytes_per_s=tier.bandwidth_bytes_per_s * share)
        for tier, share in zip(fabric.tiers, shares, strict=True)
    ]
    return fabric.replace(tiers=tiers)


def _applied(
    values: Mapping[str, float], cluster: Cluster, software: Software
) -> tuple[Cluster, Software]:
    """Return cluster and software with given values of the numbers."""
    assert cluster.chip is not None
    chip = cluster.chip.name
    speed = values["product_speed"] * software.product_speed.get(chip, 1.0)
    changed: dict[str, Any] = {
        "product_speed": {**software.product_speed, chip: min(speed, 2.0)},
        "host_s": values["host_s"],
    }
    changed |= {name: values[name] for name in ("slice_host_s", "hidden_tensor") if name in values}
    if "exposed_gradients" in values:
        changed["overlap_slowdown"] = 1.0 + values["exposed_gradients"]
    fabric = scaled_fabric(cluster.fabric, values["node_share"], values["network_share"])
    return cluster.replace(fabric=fabric), software.replace(**changed)


# ---- the fit ----


@dataclass(frozen=True)
class Posterior:
    """Posterior distribution of the fitted constants, given the measured runs."""

    constants: tuple[RunConstant, ...]
    point: Array
    """Logarithms of the most probable values."""
    covariance: Array
    """Covariance of the logarithms."""
    errors: Array
    """ln(predicted / measured) of every run at `point`."""
    noise: float
    """Standard deviation of the error of a new run, were the constants known."""
    evidence: float
    """Logarithm of the probability of the runs, up to a constant (Laplace's approximation)."""

    def values(self, point: Array | None = None) -> dict[str, float]:
        """Return the constants by name, at `point` or at the most probable values."""
        at = self.point if point is None else point
        return {c.name: float(np.exp(x)) for c, x in zip(self.constants, at, strict=True)}


LogSeconds = Callable[[Mapping[str, float]], Array]
"""Function of the numbers that returns ln(predicted seconds) of every run."""


def slopes_of(log_seconds: LogSeconds, names: Sequence[str], point: Array, base: Array) -> Array:
    """Return how much ln(seconds) of each run changes with the logarithm of each number."""
    columns = []
    for i in range(len(point)):
        moved = point.copy()
        moved[i] -= _STEP  # downwards: no product is faster than the chip's peak
        values = dict(zip(names, np.exp(moved).tolist(), strict=True))
        columns.append((base - log_seconds(values)) / _STEP)
    return np.stack(columns, axis=1)


def fit_runs(
    log_seconds: LogSeconds, measured_s: Sequence[float], constants: Sequence[RunConstant]
) -> Posterior:
    """Fit the numbers to measured runs.

    First the best of a few values of each number in turn, because a number may have no effect near
    its usual value (the host's time, where devices are slower); then Gauss-Newton steps on the
    logarithms. Runs are weighted as by a Student distribution of errors, whose weight falls with
    the square of a large error; where a large error remains, low values of the first number are
    tried as starts too, because steps alone do not reach a distant optimum.

    Parameters
    ----------
    log_seconds
        Predicts the runs.
    measured_s
        Seconds of a step of each run.
    constants
        The numbers to fit, with their priors.

    Examples
    --------
    >>> import numpy as np
    >>> speed = RunConstant("speed", "", 1.0, 0.2, 0.3, 2.0)
    >>> found = fit_runs(lambda v: -np.log(v["speed"]) * np.ones(3), [1.2, 1.2, 9.0], [speed])
    >>> 0.8 < found.values()["speed"] < 0.88
    True
    """
    problem = _Fit(log_seconds, np.log(np.asarray(measured_s)), tuple(constants))
    best = problem.descended(*problem.scanned())
    if np.abs(best[2]).max() > _FAR * NOISE:
        others = [problem.descended(*problem.scanned(share)) for share in _STARTS]
        best = min([best, *others], key=lambda one: one[1])
    return problem.posterior(best[0], best[2])


class _Fit:
    """The negative logarithm of the posterior density, its Gauss-Newton steps and its curvature."""

    def __init__(
        self, log_seconds: LogSeconds, target: Array, constants: tuple[RunConstant, ...]
    ) -> None:
        self.log_seconds, self.target, self.constants = log_seconds, target, constants
        self.names = [c.name for c in constants]
        self.prior = np.log([c.middle for c in constants])
        self.low, self.high = (
            np.log([getattr(c, end) for c in constants]) for end in ("least", "most")
        )
        self.spread = np.array([c.spread for c in constants])

    def loss(self, point: Array) -> tuple[float, Array]:
        values = dict(zip(self.names, np.exp(point).tolist(), strict=True))
        errors = self.log_seconds(values) - self.target
        tail = 0.5 * (_FREEDOM + 1.0) * np.log1p((errors / NOISE) ** 2 / _FREEDOM).sum()
        away = 0.5 * _PRIOR_FREEDOM * np.log1p(self._away(point) ** 2 / _PRIOR_FREEDOM).sum()
        return float(tail + away), errors

    def _away(self, point: Array) -> Array:
        """How far the numbers are from their usual values, in standard deviations."""
        return np.asarray((point - self.prior) / self.spread)

    def _prior_weights(self, point: Array) -> Array:
        far = self._away(point) ** 2
        return np.asarray(_PRIOR_FREEDOM / (_PRIOR_FREEDOM + far) / self.spread**2)

    def scanned(self, first: float | None = None) -> tuple[Array, float, Array]:
        """Return the best of a few values of each number in turn, its loss and its errors.

        The first number stays `first` standard deviations from its usual value where that is given.
        """
        point = self.prior.copy()
        point[0] += (first or 0.0) * self.spread[0]
        point = np.clip(point, self.low, self.high)
        loss, errors = self.loss(point)
        for i, spread in enumerate(self.spread):
            for share in () if i == 0 and first is not None else _SCAN:
                tried = point.copy()
                tried[i] = np.clip(self.prior[i] + share * spread, self.low[i], self.high[i])
                found = self.loss(tried)
                if found[0] < loss:
                    point, (loss, errors) = tried, found
        return point, loss, errors

    def descended(self, point: Array, loss: float, errors: Array) -> tuple[Array, float, Array]:
        """Return where Gauss-Newton steps from a point end, its loss and its errors."""
        for _ in range(_ROUNDS):
            step = np.clip(self.step(point, errors), -1.0, 1.0)
            tried = [np.clip(point + n * step, self.low, self.high) for n in (1.0, 0.5, 0.2)]
            found = next(((at, *new) for at in tried if (new := self.loss(at))[0] < loss), None)
            if found is None:
                break
            gained = loss - found[1]
            point, loss, errors = found
            if gained < _LEAST_GAIN:
                break
        return point, loss, errors

    def _normal(self, point: Array, errors: Array, noise: float) -> tuple[Array, Array, Array]:
        slopes = slopes_of(self.log_seconds, self.names, point, errors + self.target)
        weights = _weights(errors) / noise**2
        prior = np.diag(self._prior_weights(point))
        return slopes.T @ (slopes * weights[:, None]) + prior, slopes, weights

    def step(self, point: Array, errors: Array) -> Array:
        normal, slopes, weights = self._normal(point, errors, NOISE)
        away = (point - self.prior) * self._prior_weights(point)
        gradient = slopes.T @ (errors * weights) + away
        return np.linalg.solve(normal, -gradient)

    def posterior(self, point: Array, errors: Array) -> Posterior:
        told = float((_weights(errors) * errors**2).sum())
        noise = float(np.sqrt((_NOISE_RUNS * _LEFT**2 + told) / (_NOISE_RUNS + len(errors))))
        sharp, _, _ = self._normal(point, errors, NOISE)
        volume = 0.5 * float(np.linalg.slogdet(sharp)[1]) + float(np.log(self.spread).sum())
        covariance = np.linalg.inv(self._normal(point, errors, noise)[0])
        evidence = -self.loss(point)[0] - volume
        return Posterior(self.constants, point, covariance, errors, noise, evidence)


def _weights(errors: Array) -> Array:
    """Weights of runs in a fit with a Student distribution of errors."""
    return (_FREEDOM + 1.0) / (_FREEDOM + (errors / NOISE) ** 2)


# ---- runs of one cluster ----


@dataclass(frozen=True)
class OneCluster:
    """Runs of one chip, interconnect and software."""

    runs: tuple[PublishedRun, ...]
    software: Software

    def log_seconds(self, values: Mapping[str, float]) -> Array:
        """Predict ln(seconds) of the runs with given values of the numbers."""
        return np.log([step_s(*self.arguments(run, values)) for run in self.runs])

    def arguments(
        self, run: PublishedRun, values: Mapping[str, float]
    ) -> tuple[TransformerModel, Cluster, PlanSpec]:
        """Return the arguments of `predict` for a run with given values of the numbers."""
        cluster, software = _applied(values, run.cluster, self.software)
        plan = run.plan.replace(software=software, optimizer=run.plan.optimizer_name)
        return run.model, cluster, plan

    @property
    def constants(self) -> tuple[RunConstant, ...]:
        """The numbers to fit."""
        return constants_of(self.software, self.runs[0].cluster.chip)

    def fitted(self) -> Posterior:
        """Fit the numbers to the runs."""
        return fit_runs(self.log_seconds, [run.time_s for run in self.runs], self.constants)


@dataclass(frozen=True)
class Explained:
    """Runs explained by one habit of their software."""

    habit: Habit
    cluster: OneCluster
    posterior: Posterior

    @property
    def log_density(self) -> float:
        """Logarithm of the joint probability of the habit and the runs, up to a constant."""
        return self.posterior.evidence + float(np.log(self.habit.prior))


def explanations(cluster: OneCluster) -> list[tuple[Explained, float]]:
    """Fit runs under every habit of their software; with probabilities, the most probable first."""
    found, fits = [], {}
    for habit in habits_of(cluster.runs, cluster.software):
        own = replace(cluster, software=cluster.software.replace(**habit.fields))
        seen = tuple(own.log_seconds({c.name: c.middle for c in own.constants}).tolist())
        if seen not in fits:  # habits that these runs cannot tell apart share a fit
            fits[seen] = own.fitted()
        found.append(Explained(habit, own, fits[seen]))
    found.sort(key=lambda one: -one.log_density)
    shares = np.exp([one.log_density - found[0].log_density for one in found])
    return list(zip(found, (shares / shares.sum()).tolist(), strict=True))


def read_cluster_runs(
    path: Path | str, software: Software | str | None = None
) -> tuple[OneCluster, list[str]]:
    """Read runs of one cluster and software from a table.

    Parameters
    ----------
    path
        Table of runs, as `phaze_fast.calibration.validate_runs` reads it.
    software
        The profile to begin from; by default the one that the rows name, or ``generic``.

    Returns
    -------
    runs, notes
        The runs, and a line for each row that is left out.

    Raises
    ------
    InvalidInputError
        Where no row is accepted, or rows differ in chip, interconnect or software.
    """
    given = load_software(software) if isinstance(software, str) else software
    runs, notes = [], []
    for line, cells in csv_rows(path)[1]:
        try:
            run = read_run(line, cells, given)
            if run.status != "ok":
                raise UnsupportedError(f"status {run.status}: no seconds")
            predict(run.model, run.cluster, run.plan)
            runs.append(run)
        except RowRefusedError as error:
            notes.append(str(error))
        except PhazeError as error:
            notes.append(f"row {line}: {str(error).splitlines()[0]}")
    if not runs:
        raise InvalidInputError(f"{path}: no row is accepted: {(notes or ['it has none'])[0]}")
    for what, kinds in (
        ("chips", {run.chip for run in runs}),
        ("interconnects", {run.cluster.fabric.name for run in runs}),
        ("software", {run.plan.software.name for run in runs}),
    ):
        if len(kinds) > 1:
            raise InvalidInputError(
                f"{path}: {what} {', '.join(sorted(kinds))} are not accepted together; expected "
                "runs of one cluster and software"
            )
    return OneCluster(tuple(runs), runs[0].plan.software), notes


# ---- memory ----

_RESERVED = (0.1, 0.15)
"""Prior of the memory that allocators reserve beyond bytes in use, a share: middle and spread."""
_MEMORY_NOISE = 0.12


def reserved_share(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the share of memory that is reserved beyond bytes in use, and its spread.

    Parameters
    ----------
    ratios
        Measured over predicted bytes in use, one for each run that reports memory.

    Examples
    --------
    >>> share, spread = reserved_share([1.3, 1.3, 1.3, 5.0])
    >>> 0.2 < share < 0.35
    True
    """
    middle, spread = _RESERVED
    if not ratios:
        return middle, spread
    told = float(np.median(ratios)) - 1.0
    noise = _MEMORY_NOISE * 1.25 / np.sqrt(len(ratios))  # standard error of a median
    weight = 1.0 / noise**2 / (1.0 / noise**2 + 1.0 / spread**2)
    share = float(middle + weight * (told - middle))
    return min(max(share, 0.0), 0.99), float(spread * np.sqrt(1.0 - weight))


# ---- which run to add ----


@dataclass(frozen=True)
class NextRun:
    """The further run that would reduce the spread of predictions most."""

    plan: PlanSpec
    devices: int
    spread_before: float
    """Standard deviation of predicted ln(seconds), root mean square over the candidate layouts."""
    spread_after: float
    """That standard deviation once this run is added."""

    def __str__(self) -> str:
        plan = self.plan
        return (
            f"tp {plan.tp} pp {plan.pp} dp {plan.dp} micro-batch {plan.micro_batch} on "
            f"{self.devices} devices: layouts like it would be known to "
            f"{self.spread_after:.1%} instead of {self.spread_before:.1%}"
        )


def _candidates(run: PublishedRun, most: int = 24) -> list[PlanSpec]:
    """List layouts of a run's model, devices and batch, spread over widths and micro-batches."""
    devices, plan, found = run.cluster.devices, run.plan, []
    powers = [2**k for k in range(13)]
    for tp in (p for p in powers if p <= 8 and devices % p == 0):
        for pp in (p for p in powers if p <= run.model.layers and devices // tp % p == 0):
            for micro_batch in (1, 2, 4, 8):
                dp = devices // (tp * pp * plan.cp)
                changed = {"tp": tp, "pp": pp, "dp": dp, "micro_batch": micro_batch, "etp": None}
                changed |= {"schedule": "1f1b", "vpp": 1, "stages": None, "shard": None}
                try:
                    found.append(plan.replace(**changed))
                except PhazeError:  # the widths do not divide the batch or the experts
                    continue
    order = np.random.default_rng(0).permutation(len(found))[:most]
    return [found[k] for k in sorted(order)]


def next_run(cluster: OneCluster, posterior: Posterior) -> NextRun | None:
    """Return the layout whose measurement reduces the spread of all candidates most.

    The candidates are layouts of the largest run's model, devices and batch that fit in memory; the
    reduction is that of Bayesian linear regression on the logarithms.
    """
    run = max(cluster.runs, key=lambda run: run.cluster.devices)
    best, names = posterior.values(), [c.name for c in posterior.constants]
    rows = []
    for plan in _candidates(run):
        one = OneCluster((replace(run, plan=plan),), cluster.software)
        try:
            predicted = predict(*one.arguments(one.runs[0], best))
            if predicted.over_bytes == 0:
                base = np.log([predicted.time_s])
                rows.append((plan, slopes_of(one.log_seconds, names, posterior.point, base)[0]))
        except PhazeError:
            continue
    if not rows:
        return None
    slopes = np.stack([slope for _, slope in rows])
    chosen, before, after = most_telling(slopes, posterior.covariance, posterior.noise)
    return NextRun(rows[chosen][0], run.cluster.devices, before, after)


def most_telling(slopes: Array, covariance: Array, noise: float) -> tuple[int, float, float]:
    """Return the row whose measurement leaves the least spread, and that spread before and after.

    Parameters
    ----------
    slopes
        Derivatives of each row's ln(seconds) by the constants' logarithms, shape (rows, constants).
    covariance
        Covariance of the logarithms of the constants.
    noise
        Standard deviation of the logarithm of a measurement.
    """
    joint = slopes @ covariance @ slopes.T
    before = np.diag(joint)
    gains = (joint**2).sum(axis=0) / (before + noise**2)
    chosen = int(np.argmax(gains))
    after = before.mean() - gains[chosen] / len(slopes)
    return chosen, float(np.sqrt(before.mean())), float(np.sqrt(max(after, 0.0)))


# ---- the calibration ----


@dataclass(frozen=True)
class ClusterCalibration:
    """A chip, an interconnect and software as calibrated by runs."""

    name: str
    runs: tuple[PublishedRun, ...]
    constants: tuple[FittedConstant, ...]
    errors_before: tuple[float, ...]
    """Relative errors of the runs before the fit."""
    errors: tuple[float, ...]
    """Relative errors of the runs as fitted."""
    fabric: AnyFabric
    software: Software
    habits: Mapping[str, float]
    """What the software may do that its runs do not state, with its probability given the runs; the
    first is assumed."""
    next_run: NextRun | None
    notes: tuple[str, ...]
    """Rows that were left out, and why."""

    @property
    def document(self) -> dict[str, Any]:
        """The calibration as the content of a file that the option `--calibration` takes."""
        chip = self.runs[0].cluster.chip
        assert chip is not None
        known = chip.name in presets.chip_names() and presets.chip(chip.name) == chip
        return {
            "calibration": self.name,
            "chip": chip.name if known else chip.to_dict(),
            "fabric": self.fabric.to_dict(),
            "software": self.software.to_dict(),
            "constants": {c.name: self._constant(c) for c in self.constants},
            "habits": {words: round(share, 4) for words, share in self.habits.items()},
            "runs": len(self.runs),
        }

    @staticmethod
    def _constant(constant: FittedConstant) -> dict[str, Any]:
        told = {"value": constant.value, "low": constant.low, "high": constant.high}
        return {**told, "unit": constant.unit, "determined": not constant.note}

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            **self.document,
            "errors_before": list(self.errors_before),
            "errors": list(self.errors),
            "next_run": None if self.next_run is None else str(self.next_run),
            "notes": list(self.notes),
        }


def _fitted_constants(posterior: Posterior) -> list[FittedConstant]:
    deviations = np.sqrt(np.diag(posterior.covariance))
    return [
        FittedConstant(
            c.name,
            c.middle,
            float(np.exp(x)),
            float(np.exp(x - _T90 * deviation)),
            float(np.exp(x + _T90 * deviation)),
            "" if deviation <= _TOLD * c.spread else _UNTOLD,
            c.unit,
        )
        for c, x, deviation in zip(posterior.constants, posterior.point, deviations, strict=True)
    ]


def _step_ratios(cluster: OneCluster, posterior: Posterior) -> tuple[float, float]:
    """Return the 80% interval of measured over predicted seconds of a further run."""
    names = [c.name for c in posterior.constants]
    base = cluster.log_seconds(posterior.values())
    slopes = slopes_of(cluster.log_seconds, names, posterior.point, base)
    variance = float(np.einsum("ij,jk,ik->i", slopes, posterior.covariance, slopes).mean())
    freedom = min(int(_NOISE_RUNS) + len(base), len(_T80))
    half = _T80[freedom - 1] * float(np.sqrt(posterior.noise**2 + 2.0 * variance))
    return float(np.exp(-half)), float(np.exp(half))


def calibrate_runs(
    path: Path | str, name: str = "", software: Software | str | None = None
) -> ClusterCalibration:
    """Calibrate a cluster and its software by a handful of whole runs.

    Parameters
    ----------
    path
        Table of runs of one cluster and software, as `validate_runs` reads it; 3 to 10 are enough.
    name
        Name of the result, by default ``NAME-calibrated`` for a profile NAME.
    software
        The profile to begin from; by default the one that the rows name, or ``generic``.

    Raises
    ------
    InvalidInputError
        Where no row is accepted, or rows are of several clusters.
    """
    cluster, notes = read_cluster_runs(path, software)
    return calibrated_cluster(cluster, name, tuple(notes))


def calibrated_cluster(
    cluster: OneCluster, name: str = "", notes: tuple[str, ...] = (), advise: bool = True
) -> ClusterCalibration:
    """Calibrate a cluster by runs that are read already; see `calibrate_runs`.

    Without `advise`, no further run is looked for.
    """
    runs, start = cluster.runs, cluster.software
    explained = explanations(cluster)
    best = explained[0][0]
    values = best.posterior.values()
    memory, reserved = _memory(best, values)
    changed, calibrated = _applied(values, runs[0].cluster, best.cluster.software)
    called = name or f"{start.name}-calibrated"
    profile = calibrated.replace(
        name=called,
        reserved_share=memory.value if reserved else start.reserved_share,
        step_ratios=_step_ratios(best.cluster, best.posterior),
        fitted=[*values, *best.habit.fields, *(["reserved_share"] if reserved else [])],
        sources=[*start.sources, f"calibrate: {len(runs)} runs, beginning from {start.name}"],
    )
    before = [step_s(run.model, run.cluster, run.plan) / run.time_s - 1.0 for run in runs]
    return ClusterCalibration(
        name=called,
        runs=runs,
        constants=(*_fitted_constants(best.posterior), memory),
        errors_before=tuple(before),
        errors=tuple(float(np.expm1(error)) for error in best.posterior.errors),
        fabric=changed.fabric.replace(name=called),
        software=profile,
        habits={one.habit.words: share for one, share in explained},
        next_run=next_run(best.cluster, best.posterior) if advise else None,
        notes=notes,
    )


def _memory(best: Explained, values: Mapping[str, float]) -> tuple[FittedConstant, bool]:
    """Return the share that the allocator reserves, and whether any run reports memory."""
    ratios = [
        run.memory_bytes / run.reported_bytes(predict(*best.cluster.arguments(run, values)))
        for run in best.cluster.runs
        if run.memory_bytes > 0
    ]
    share, spread = reserved_share(ratios)
    low, high = max(share - _T90 * spread, 0.0), share + _T90 * spread
    note = "" if ratios else _UNTOLD
    told = ("reserved_share", _RESERVED[0], share, low, high, note, "of bytes in use")
    return FittedConstant(*told), bool(ratios)
