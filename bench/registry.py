"""What is measured: a frozen list of subjects, each with the stage it belongs to.

A subject builds its input once, runs the timed call, and checks the answer. `items` is how many
evaluations one call makes, so that the report can give a rate. Adding an entry to `SUBJECTS` is all
it takes to measure something new; CI runs every entry once, untimed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Subject:
    """One thing to measure."""

    name: str
    stage: str
    """The package it belongs to: hardware, cost, schedule, ..."""
    items: int
    """Evaluations per call."""
    build: Callable[[], Any]
    """Makes the input; not timed."""
    run: Callable[[Any], Any]
    """The timed call; gets what `build` made."""
    check: Callable[[Any, Any], None]
    """Asserts that the answer (second argument) to the input (first) is right."""
    target: str = ""
    """What it should reach, for the report's reader."""
    smoke: Callable[[], Any] | None = None
    """Makes a smaller input for the run that only checks answers; by default the same."""
    rounds: int | None = None
    """How often a long call is timed; by default as often as the plugin likes."""

    @property
    def id(self) -> str:
        """Name in reports and in pytest."""
        return f"{self.stage}-{self.name}"


SUBJECTS: list[Subject] = []


def register(subject: Subject) -> Subject:
    """Add a subject; names are unique within a stage."""
    if any(other.id == subject.id for other in SUBJECTS):
        raise ValueError(f"{subject.id} is registered twice")
    SUBJECTS.append(subject)
    return subject
