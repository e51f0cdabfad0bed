"""The command `export`: a plan as a file that a training framework runs, or as a trace."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from phaze_fast.cli.options import PlanFile, PlanProblem, StoredPlan
from phaze_fast.cli.output import note, write_text
from phaze_fast.errors import InvalidInputError, check_one_of, not_accepted
from phaze_fast.export import FORMATS, export_plan
from phaze_fast.planning import layer_schedules, timeline
from phaze_fast.planning.layouts import node_devices

_TRACES = ("perfetto", "perfetto-layers", "chakra")


def _ranks(text: str | None) -> list[int] | None:
    """Read numbers and ranges of ranks, separated by commas."""
    if text is None:
        return None
    ranks: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers = first.isdecimal() and (last or first).isdecimal() and len(first + last) <= 14
        if not numbers or int(first) > int(last or first):
            raise not_accepted("--ranks", text, "ranks and rising ranges, such as 0-7,64")
        ranks += range(int(first), int(last or first) + 1)
    return ranks


def _deliver(text: str, output: Path | None) -> None:
    if output is None or str(output) == "-":
        sys.stdout.write(text)
        return
    write_text(output, text)
    note(f"wrote {output}")


def _trace(plan: StoredPlan, name: str, output: Path | None, ranks: str | None) -> None:
    given = plan.model, plan.cluster, plan.spec
    if name != "chakra":
        from phaze_fast.export.perfetto import layer_trace, step_trace

        if name == "perfetto":
            trace = step_trace(timeline(*given))
        else:
            trace = layer_trace([layer.schedule for layer in layer_schedules(*given)])
        _deliver(json.dumps(trace) + "\n", output)
        return
    from phaze_fast.export.chakra import chakra_trace

    if output is None:
        raise InvalidInputError("-o: missing; expected a folder for the traces, one file a rank")
    written = chakra_trace(*given).write(output, _ranks(ranks))
    note(f"wrote {len(written) - 1} traces and their groups to {output}")


@dataclass(frozen=True)
class ExportOutput:
    """Output."""

    to: str
    """What to write: megatron (Megatron-LM arguments), bridge (Megatron Bridge, NeMo), deepspeed
    (JSON), torchtitan (TOML) or maxtext (flags) to run the plan; perfetto (JSON) to look at its
    step in ui.perfetto.dev, perfetto-layers at the schedules of its layers; chakra (a folder with a
    trace for each rank) to simulate it, with ASTRA-sim for example."""
    path: Annotated[Path | None, typer.Option("-o", "--output")] = None
    """Where to write; for chakra a folder."""
    ranks: str | None = None
    """Of chakra: which ranks, such as 0-7,64; by default all."""
    as_json: Annotated[bool, typer.Option("--json")] = False
    """Print one JSON document instead of the file's text."""


def export(
    plan: PlanFile,
    problem: PlanProblem,
    output: ExportOutput,
) -> None:
    """Write a plan as a framework's configuration or as a trace.

    What a framework cannot express is listed on standard error and in the file; nothing is left
    out silently. `predict --plan FILE` reads such files back.

    Example: phaze-fast export plan.json --to megatron -o run.sh
    """
    name = output.to.lower()
    check_one_of("--to", name, FORMATS + _TRACES)
    stored = problem.read(plan)
    path = output.path
    if path is not None and path.exists() and plan.exists() and path.samefile(plan):
        raise not_accepted("-o", str(path), "another file than the plan that is read")
    if name in _TRACES:
        _trace(stored, name, output.path, output.ranks)
        return
    spec = stored.spec if stored.spec.stages is not None else stored.predicted()
    exported = export_plan(spec, stored.model, name, node_devices(stored.cluster))
    for item in exported.unexpressed:
        note(f"not expressed by {name}: {item}")
    document = json.dumps(exported.to_dict(), indent=2) + "\n"
    _deliver(document if output.as_json else exported.text, output.path)
