"""A whole training run: days, device-hours, energy and dollars of a token budget, and its goodput.

Failures arrive at random (a Poisson process), each costs a restart and the work since the last
checkpoint (Daly, A higher order estimate of the optimum checkpoint interval for restart dumps,
2006). docs/throughput.md derives the formulas.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from phaze_fast.errors import not_accepted

_DAY_S = 86400.0
_KWH_J = 3.6e6


def _check(least: float, **values: float | None) -> None:
    """Raise where a value is not a finite number of at least `least`."""
    for name, value in values.items():
        if value is not None and not (least <= value < math.inf):
            raise not_accepted(name, value, f"a number of at least {least:g}")


# ---- goodput ----


@dataclass(frozen=True)
class Goodput:
    """The fraction of a run's time spent on steps that count."""

    fraction: float
    """Seconds of steps that count over all seconds of the run."""
    interval_s: float
    """Seconds of work between two checkpoints; infinite where none are written."""
    checkpoint: float
    """Fraction of the time that writing checkpoints takes."""
    lost: float
    """Fraction of the time that failures cost: work since the last checkpoint, and restarts."""
    mtbf_s: float
    """Mean seconds between failures of the whole cluster; infinite where nothing fails."""
    failures_per_day: float
    """Failures of the whole cluster in one day."""

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain data; infinite values are None."""
        return {k: (v if math.isfinite(v) else None) for k, v in asdict(self).items()}


def optimal_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """Seconds of work between checkpoints that lose the least time.

    The exact optimum of Daly's cost function: the root of (1 - x) e^x = e^(-c/M) with x the
    interval over M. For checkpoints that are short against M it is Young's sqrt(2 c M) (1974).

    Parameters
    ----------
    checkpoint_s
        Seconds for which writing one checkpoint stops training, c.
    mtbf_s
        Mean seconds between failures of the whole cluster, M; may be infinite.

    Examples
    --------
    >>> round(optimal_interval_s(300.0, 24 * 3600.0) / 60)  # Daly's figure 3: 117 minutes
    117
    """
    _check(0.0, checkpoint_s=checkpoint_s)
    if not mtbf_s > 0.0:
        raise not_accepted("mtbf_s", mtbf_s, "a number greater than 0")
    if mtbf_s == math.inf:
        return math.inf
    target = checkpoint_s / mtbf_s
    if target == 0.0:
        return 0.0
    low, high = 0.0, 1.0  # x + log(1 - x) decreases from 0; bisect for -target
    for _ in range(200):
        middle = 0.5 * (low + high)
        if middle in (low, high):
            break
        low, high = (middle, high) if -_x_plus_log(middle) < target else (low, middle)
    return mtbf_s * 0.5 * (low + high)


def _x_plus_log(x: float) -> float:
    """Return x + log(1 - x), by its series for small x, where the terms nearly cancel."""
    if x > 0.03:
        return x + math.log1p(-x)
    return -sum(x**k / k for k in range(2, 12))


def goodput(
    devices: int,
    failures_per_device_day: float,
    checkpoint_s: float = 0.0,
    restart_s: float = 0.0,
    interval_s: float | None = None,
) -> Goodput:
    """Compute the fraction of a run's time that is spent on steps that count.

    With failures at rate 1/M, work of w seconds and a checkpoint of c that must pass without one,
    and restarts of R seconds that may fail too, a segment takes M e^(R/M) (e^((w+c)/M) - 1) seconds
    on average; the goodput is w over that.

    Parameters
    ----------
    devices
        Devices; the failure of any one stops the whole run.
    failures_per_device_day
        Failures of one device (with its share of hosts, network and software) in one day.
    checkpoint_s
        Seconds for which writing one checkpoint stops training.
    restart_s
        Seconds from a failure until training goes on from the last checkpoint.
    interval_s
        Seconds of work between checkpoints; by default the best.

    Raises
    ------
    InvalidInputError
        Where a number is negative or not finite, or the interval is 0 and checkpoints take time.

    Examples
    --------
    >>> run = goodput(16384, 4.7e-4, checkpoint_s=10.0, restart_s=300.0)
    >>> round(run.fraction, 3), round(run.interval_s), round(run.failures_per_day, 1)
    (0.933, 467, 7.7)
    """
    _check(1.0, devices=devices)
    _check(
        0.0,
        failures_per_device_day=failures_per_device_day,
        checkpoint_s=checkpoint_s,
        restart_s=restart_s,
        interval_s=interval_s,
    )
    per_day = devices * failures_per_device_day
    mtbf = _DAY_S / per_day if per_day > 0.0 else math.inf
    work = optimal_interval_s(checkpoint_s, mtbf) if interval_s is None else interval_s
    if work == 0.0 and checkpoint_s > 0.0:
        raise not_accepted("interval_s", interval_s, "more than 0 seconds of work")
    useful = _useful(work, checkpoint_s, restart_s, mtbf)
    writing = 0.0 if work in (0.0, math.inf) else useful * checkpoint_s / work
    lost = max(0.0, 1.0 - useful - writing)
    return Goodput(useful, work, writing, lost, mtbf, per_day)


def _useful(work: float, checkpoint: float, restart: float, mtbf: float) -> float:
    """Return the work of a segment divided by its mean duration."""
    if mtbf == math.inf:
        return 1.0 if work in (0.0, math.inf) else work / (work + checkpoint)
    if work == 0.0:  # no work between checkpoints
        return math.exp(-restart / mtbf)
    if (work + checkpoint + restart) / mtbf > 700.0:  # no segment ever completes without a failure
        return 0.0
    return work / (mtbf * math.exp(restart / mtbf) * math.expm1((work + checkpoint) / mtbf))


# ---- a token budget ----


@dataclass(frozen=True)
class TrainingRun:
    """Time, devices, energy and cost of a token budget."""

    tokens: float
    """Tokens to train on."""
    steps: int
    """Steps until that many tokens are reached, rounded up."""
    step_s: float
    devices: int
    goodput: float
    """Fraction of the time spent on steps that count."""
    days: float
    """From beginning to end, failures included."""
    device_hours: float
    """Hours of the run times devices, failures included."""
    energy_j: float
    """Joules of the devices, times the overhead of the building; failures included."""
    device_usd: float
    """Dollars for device-hours; 0 where no price was given."""
    electricity_usd: float
    """Dollars for energy; 0 where no price was given."""

    @property
    def usd(self) -> float:
        """Total cost in dollars."""
        return self.device_usd + self.electricity_usd

    @property
    def energy_kwh(self) -> float:
        """Energy in kilowatt-hours."""
        return self.energy_j / _KWH_J

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain data, `usd` and `energy_kwh` included."""
        return {**asdict(self), "usd": self.usd, "energy_kwh": self.energy_kwh}


def training_run(
    tokens: float,
    tokens_per_step: int,
    step_s: float,
    devices: int,
    goodput: float = 1.0,
    step_j: float = 0.0,
    pue: float = 1.0,
    usd_per_device_hour: float = 0.0,
    usd_per_kwh: float = 0.0,
) -> TrainingRun:
    """Compute the days, device-hours, energy and dollars of a token budget.

    Parameters
    ----------
    tokens
        Number of tokens to train on.
    tokens_per_step
        Sequences of a step times their tokens.
    step_s
        Seconds of a step.
    devices
        All devices that are paid for.
    goodput
        Fraction of the time spent on steps that count, from `goodput`.
    step_j
        Joules of one step on all devices.
    pue
        Power usage effectiveness: energy of the building over that of the devices.
    usd_per_device_hour, usd_per_kwh
        Prices.

    Raises
    ------
    InvalidInputError
        Where a number is out of its range.

    Examples
    --------
    >>> run = training_run(15.6e12, 2048 * 8192, 6.7, 16384, goodput=0.9, usd_per_device_hour=2.0)
    >>> run.steps, round(run.days), round(run.device_hours / 1e6, 1), round(run.usd / 1e6, 1)
    (929833, 80, 31.5, 63.0)
    """
    _check(1.0, tokens=tokens, tokens_per_step=tokens_per_step, devices=devices, pue=pue)
    _check(0.0, step_j=step_j, usd_per_device_hour=usd_per_device_hour, usd_per_kwh=usd_per_kwh)
    if not 0.0 < step_s < math.inf:
        raise not_accepted("step_s", step_s, "more than 0 seconds")
    if not 0.0 < goodput <= 1.0:
        raise not_accepted("goodput", goodput, "more than 0, at most 1")
    steps = math.ceil(tokens / tokens_per_step)
    seconds = steps * step_s / goodput
    hours = devices * seconds / 3600.0
    joules = steps * step_j / goodput * pue
    return TrainingRun(
        tokens=float(tokens),
        steps=steps,
        step_s=step_s,
        devices=devices,
        goodput=goodput,
        days=seconds / _DAY_S,
        device_hours=hours,
        energy_j=joules,
        device_usd=hours * usd_per_device_hour,
        electricity_usd=joules / _KWH_J * usd_per_kwh,
    )
