"""Options and output of a token budget: days, device-hours, energy, dollars and goodput."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from dataclasses import fields as fields_of
from typing import Any

from rich.console import RenderableType

from phaze_fast.cli.options import numbers, one_for_each
from phaze_fast.cli.output import fields
from phaze_fast.errors import InvalidInputError, not_accepted
from phaze_fast.planning import Goodput, TrainingRun, goodput, training_run
from phaze_fast.units import format_time, parse_quantity

_TOKENS = re.compile(r"\s*(\d+(?:[._]\d+)*(?:[eE]\+?\d+)?)\s*([kKMBGT]?)\s*")
_SCALES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}


def _token_count(text: str) -> float:
    """Read a number of tokens: 300B, 15.6T, 3e11.

    Examples
    --------
    >>> _token_count("15.6T")
    15600000000000.0
    """
    match = _TOKENS.fullmatch(text)
    try:
        count = float(match.group(1)) * _SCALES[match.group(2)] if match else 0.0
    except ValueError:
        count = 0.0
    if not 1.0 <= count < 1e24:
        raise not_accepted("--tokens", text, "a number of tokens, such as 300B or 15T")
    return count


def _seconds(text: str, option: str) -> float:
    try:
        seconds = parse_quantity(text, "s")
    except InvalidInputError as error:
        raise InvalidInputError(f"{option}: {error}") from None
    if not 0.0 <= seconds < float("inf"):
        raise not_accepted(option, text, "0 seconds or more")
    return seconds


def _duration(seconds: float) -> str:
    """Format seconds, or minutes or hours where that is shorter.

    Examples
    --------
    >>> _duration(12.0), _duration(600.0), _duration(9000.0)
    ('12 s', '10 min', '2.5 h')
    """
    for scale, unit in ((3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * scale:
            return f"{seconds / scale:.3g} {unit}"
    return format_time(seconds)


@dataclass(frozen=True)
class BudgetAnswer:
    """Time, energy and cost of a token budget with one plan."""

    run: TrainingRun
    goodput: Goodput

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain data."""
        return {**self.run.to_dict(), "goodput_parts": self.goodput.to_dict()}

    def table(self) -> RenderableType:
        """Return the figures as a table."""
        run, parts = self.run, self.goodput
        rows = [
            ("steps", f"{run.steps:,} of {format_time(run.step_s)}"),
            ("days", f"{run.days:,.1f}"),
            ("device-hours", f"{run.device_hours:,.0f}"),
        ]
        if parts.failures_per_day > 0:
            every = _duration(parts.interval_s)
            said = f"{run.goodput:.1%}, {parts.failures_per_day:,.2f} failures a day"
            lost = f"{parts.checkpoint:.1%} writing checkpoints, {parts.lost:.1%} lost"
            rows.append(("goodput", f"{said}; a checkpoint every {every}: {lost}"))
        elif run.goodput < 1.0:
            rows.append(("goodput", f"{run.goodput:.1%}: checkpoints, no failures"))
        rows.append(("energy", f"{run.energy_kwh / 1e3:,.1f} MWh"))
        if run.usd > 0:
            shares = f"{run.device_usd:,.0f} devices, {run.electricity_usd:,.0f} electricity"
            rows.append(("dollars", f"{run.usd:,.0f} ({shares})"))
        return fields(f"For {run.tokens:,.0f} tokens", rows)


@dataclass(frozen=True)
class Budget:
    """A whole training run."""

    tokens: str | None = None
    """Tokens to train on, such as 300B or 15T; without it, nothing is said of a whole run."""
    usd_per_device_hour: str = "0"
    """Dollars for one device and hour; of several chips for all of them or one for each."""
    usd_per_kwh: float = 0.0
    """Dollars for a kilowatt-hour of electricity."""
    pue: float = 1.0
    """Power usage effectiveness: energy of the building over that of the devices."""
    failures_per_device_day: float = 0.0
    """Failures of one device a day that stop the run."""
    checkpoint_s: str = "0 s"
    """How long writing a checkpoint stops training, such as 30s."""
    interval_s: str | None = None
    """Work between two checkpoints, such as 1h; by default what loses least."""
    restart_s: str = "0 s"
    """How long from a failure until training goes on, such as 10min."""

    @property
    def _price(self) -> float:
        return numbers(self.usd_per_device_hour, "--usd-per-device-hour", float)[0]

    def each(self, count: int) -> list[Budget]:
        """Return the budgets of several clusters, which may differ in the price of a device."""
        prices = one_for_each(self.usd_per_device_hour, count, "--usd-per-device-hour")
        return [replace(self, usd_per_device_hour=price) for price in prices]

    def check(self, devices: int) -> None:
        """Refuse bad options before any work is done."""
        if self.tokens is not None:
            self.answer(tokens_per_step=1, step_s=1.0, devices=devices, step_j=0.0)
            return
        for field in fields_of(self):
            if getattr(self, field.name) != field.default:
                option = field.name.replace("_", "-")
                raise InvalidInputError(f"--{option}: means nothing without --tokens")

    def answer(
        self,
        tokens_per_step: int,
        step_s: float,
        devices: int,
        step_j: float,
    ) -> BudgetAnswer | None:
        """Compute the time, energy and cost of the budget from the tokens and seconds of a step."""
        if self.tokens is None:
            return None
        interval_s = None if self.interval_s is None else _seconds(self.interval_s, "--interval-s")
        parts = goodput(
            devices,
            self.failures_per_device_day,
            _seconds(self.checkpoint_s, "--checkpoint-s"),
            _seconds(self.restart_s, "--restart-s"),
            interval_s,
        )
        if parts.fraction <= 0.0:
            raise InvalidInputError(
                f"failures_per_device_day: {self.failures_per_device_day!r} is not accepted; "
                f"at {parts.failures_per_day:,.0f} failures a day nothing is ever finished"
            )
        run = training_run(
            tokens=_token_count(self.tokens),
            tokens_per_step=tokens_per_step,
            step_s=step_s,
            devices=devices,
            goodput=parts.fraction,
            step_j=step_j,
            pue=self.pue,
            usd_per_device_hour=self._price,
            usd_per_kwh=self.usd_per_kwh,
        )
        return BudgetAnswer(run, parts)
