"""The command `export`: a plan as a file that a training framework runs, or as a trace."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from phaze_fast.cli.option_groups import with_groups
from phaze_fast.cli.output import AsJson, note, write_text
from phaze_fast.cli.plan_files import GivenPlan, PlanFile, PlanProblem
from phaze_fast.errors import InvalidInputError, nearest
from phaze_fast.export import FORMATS, export_plan
from phaze_fast.planning import layer_schedules, timeline
from phaze_fast.planning.layouts import node_devices

__all__ = ["add_commands"]

_TRACES = ("perfetto", "perfetto-layers", "chakra")


def _ranks(text: str | None) -> list[int] | None:
    """Read numbers and ranges of ranks, divided by commas."""
    if text is None:
        return None
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal() or len(first + last) > 14:
            raise InvalidInputError(
                f"--ranks: {text!r} is not accepted; expected ranks and ranges, such as 0-7,64"
            )
        found += range(int(first), int(last or first) + 1)
    return found


def _delivered(text: str, output: Path | None) -> None:
    if output is None or str(output) == "-":
        sys.stdout.write(text)
        return
    write_text(output, text)
    note(f"wrote {output}")


def _trace(given: GivenPlan, name: str, output: Path | None, ranks: str | None) -> None:
    if name == "perfetto-layers":
        from phaze_fast.export.perfetto import layer_trace

        layers = layer_schedules(given.model, given.cluster, given.spec)
        _delivered(json.dumps(layer_trace([layer.schedule for layer in layers])) + "\n", output)
        return
    if name == "perfetto":
        from phaze_fast.export.perfetto import step_trace

        played = timeline(given.model, given.cluster, given.spec)
        _delivered(json.dumps(step_trace(played)) + "\n", output)
        return
    from phaze_fast.export.chakra import chakra_trace

    if output is None:
        raise InvalidInputError("-o: missing; expected a folder for the traces, one file a rank")
    made = chakra_trace(given.model, given.cluster, given.spec)
    written = made.write(output, _ranks(ranks))
    note(f"wrote {len(written) - 1} traces and their groups to {output}")


@with_groups
def export(
    plan: PlanFile,
    problem: PlanProblem,
    to: Annotated[
        str,
        typer.Option(
            help="What to write: megatron (Megatron-LM arguments), bridge (Megatron Bridge, NeMo), "
            "deepspeed (JSON), torchtitan (TOML) or maxtext (flags) to run the plan; perfetto "
            "(JSON) to look at its step in ui.perfetto.dev, perfetto-layers at the schedules of "
            "its layers; chakra (a folder with a trace for each "
            "rank) to simulate it, with ASTRA-sim for example."
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Where to write; for chakra a folder."),
    ] = None,
    ranks: Annotated[
        str | None,
        typer.Option(help="Of chakra: which ranks, such as 0-7,64; by default all."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a plan as a file that a training framework runs, or as a trace of its step.

    What a framework cannot express is listed on standard error and in the file; nothing is left
    out silently. `predict --plan FILE` reads such files back.

    Example: phaze-fast export plan.json --to megatron -o run.sh
    """
    name = to.lower()
    if name not in (*FORMATS, *_TRACES):
        raise InvalidInputError(f"--to: {to!r} is not accepted; {nearest(name, FORMATS + _TRACES)}")
    given = problem.read(plan)
    if name in _TRACES:
        _trace(given, name, output, ranks)
        return
    spec = given.spec if given.spec.stages is not None else given.predicted()
    found = export_plan(spec, given.model, name, node_devices(given.cluster))
    for item in found.unexpressed:
        note(f"not expressed by {name}: {item}")
    _delivered(json.dumps(found.to_dict(), indent=2) + "\n" if as_json else found.text, output)


def add_commands(app: typer.Typer) -> None:
    """Add the command of this file."""
    app.command("export")(export)
