"""The front of wafers that the command `wafer` searches with --front."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from phaze_fast.cli.output import write_text
from phaze_fast.cli.wafer_cases import Case
from phaze_fast.cli.wafer_progress import shown
from phaze_fast.errors import InfeasibleError, InvalidInputError, nearest
from phaze_fast.wafer import Wafer, WaferSpace, WaferTraining
from phaze_fast.wafer.search.result import Effort
from phaze_fast.wafer.search.session import Session
from phaze_fast.wafer.studies.pareto import OBJECTIVES, WaferFront, search_front

__all__ = ["front_case", "objectives_of"]


def front_case(
    session: Session,
    model: Any,
    space: WaferSpace,
    given: tuple[WaferTraining, Effort, int, tuple[str, ...]],
    quiet: bool,
    to_file: Path | None,
) -> Case:
    """Search the wafers of a space that no other beats; the file has what is found so far."""

    def so_far(found: WaferFront) -> None:
        if to_file is not None and str(to_file) != "-":
            data = {"model": model.name, "space": space.name, "front": found.to_dict()}
            write_text(to_file, json.dumps(data, indent=2) + "\n")

    with shown(quiet) as (say, show):
        say(f"{model.name} on {space.name}: front")
        training, effort, seed, objectives = given
        found = search_front(
            model,
            space,
            training,
            effort,
            seed,
            objectives=objectives,
            progress=show,
            so_far=so_far,
            session=session,
        )
    if not found.points:
        raise InfeasibleError(
            f"{space.name}: {found.misfits} wafers searched, none has room for {model.name}"
            if found.misfits
            else f"{space.name}: stopped before a wafer was searched"
        )
    return Case(found.points[0].result, None, front=found)


def objectives_of(
    given: str | None, wafers: list[Wafer | WaferSpace], more: bool
) -> tuple[str, ...]:
    """Read --front."""
    if given is None:
        return ()
    if more or any(isinstance(where, Wafer) for where in wafers):
        raise InvalidInputError(
            "--front: expected spaces of wafers with it, and neither --compare nor --fault-maps"
        )
    names = OBJECTIVES if given == "all" else tuple(name.strip() for name in given.split(","))
    for name in names:
        if name not in OBJECTIVES:
            raise InvalidInputError(
                f"--front: {name!r} is not accepted; {nearest(name, [*OBJECTIVES, 'all'])}"
            )
    return names
