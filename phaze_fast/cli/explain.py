"""The commands `explain`, `diff` and `trace-compare`: why a plan takes what it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from phaze_fast.cli.option_groups import with_groups
from phaze_fast.cli.output import AsJson, ToFile, ToPage, emit, fields, note, table, typed
from phaze_fast.cli.plan_files import PlanFile, PlanProblem
from phaze_fast.export.kineto import Comparison, compare_profile, read_profile
from phaze_fast.planning import timeline
from phaze_fast.report.explain import Explanation, difference, explain_plan
from phaze_fast.units import format_bytes, format_time

__all__ = ["add_commands"]

_PATH = 8


def _explained(found: Explanation) -> list[RenderableType]:
    total = found.plan.time_s
    path = [[what, format_time(s), f"{s / total:.1%}"] for what, s in found.path[:_PATH]]
    rest = sum(seconds for _, seconds in found.path[_PATH:])
    if rest > 0:
        path.append(["all others", format_time(rest), f"{rest / total:.1%}"])
    worth = [
        [each.what, f"{each.elasticity:+.3f}", f"{each.doubled - 1:+.1%}"] for each in found.worth
    ]
    return [
        fields(f"{found.plan}", [(str(k + 1), line) for k, line in enumerate(found.binds)]),
        table("The critical path of the step", ["what", "time>", "share>"], path),
        table(
            "What each rate is worth",
            ["rate", "change for +1% (%)>", "twice as good>"],
            worth,
            "Change of the step, the plan as it is; a latency that is twice as good is halved.",
        ),
    ]


@with_groups
def explain(
    plan: PlanFile, problem: PlanProblem, as_json: AsJson = False, to_file: ToFile = None
) -> None:
    """Say what binds a plan, its critical path, and what each rate of the hardware is worth.

    Example: phaze-fast explain plan.json
    """
    given = problem.read(plan)
    for line in given.notes:
        note(line)
    found = explain_plan(given.model, given.cluster, given.spec)
    emit(found.to_dict, lambda: _explained(found), as_json, to_file)


def _shown(value: object) -> str:
    if isinstance(value, list):
        return " ".join("+".join(map(str, v)) if isinstance(v, list) else str(v) for v in value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _differences(found: dict[str, Any]) -> list[RenderableType]:
    how = {"memory_bytes": format_bytes, "time_s": format_time}
    measures = [
        [name.replace("_", " "), *(how.get(name, lambda v: f"{v:,.4g}")(v) for v in pair)]
        for name, pair in found["measures"].items()
    ]
    changed = [[name, *map(_shown, pair)] for name, pair in found["fields"].items()]

    def rows(part: str, show: Any) -> list[list[str]]:
        return [
            [name.replace("_", " "), show(a), show(b), ("-" if d < 0 else "+") + show(abs(d))]
            for name, (a, b, d) in found[part].items()
        ]

    parts: list[RenderableType] = [
        table(
            f"The second is {found['speedup']:.3f} times as fast", ["what", "a>", "b>"], measures
        ),
        table("What differs", ["field", "a", "b"], changed),
        table("Seconds of a step", ["part", "a>", "b>", "b - a>"], rows("parts_s", format_time)),
        table("Memory", ["term", "a>", "b>", "b - a>"], rows("memory", format_bytes)),
    ]
    return parts


@with_groups
def diff(
    one: PlanFile,
    other: PlanFile,
    problem: PlanProblem,
    report: ToPage = None,
    as_json: AsJson = False,
    to_file: ToFile = None,
) -> None:
    """Set two plans side by side: what differs, and where the time and the memory go.

    Each plan is timed again on its own cluster, or on the one that the options name.

    Example: phaze-fast diff a.json b.json
    """
    given = [problem.read(path) for path in (one, other)]
    played = [timeline(each.model, each.cluster, each.spec) for each in given]
    found = difference(played[0].plan, played[1].plan)
    if report is not None:
        from phaze_fast.report.plan_page import compare_page, write_page

        names = [one.name, other.name if other.name != one.name else str(other)]
        write_page(compare_page(played[0], played[1], names, typed()), report)
        note(f"wrote {report}")
    emit(lambda: found, lambda: _differences(found), as_json, to_file)


def _compared(found: Comparison) -> list[RenderableType]:
    rows = [
        [
            each.family,
            format_time(each.measured_s),
            format_time(each.predicted_s),
            ("-" if each.difference_s < 0 else "+") + format_time(abs(each.difference_s)),
            f"{each.kernels:,}",
        ]
        for each in found.families
    ]
    off = found.predicted_step_s / found.measured_step_s - 1
    whole = [
        ("measured step", format_time(found.measured_step_s)),
        ("predicted step", f"{format_time(found.predicted_step_s)} ({off:+.1%})"),
        ("no kernel runs", format_time(found.measured_idle_s)),
        ("predicted waiting", format_time(found.predicted_idle_s)),
    ]
    headings = ["kernels", "measured>", "predicted>", "difference>", "count>"]
    note_ = "Seconds of a step on one device; kernels that run at the same time count each."
    return [
        fields(f"A device of stage {found.stage}", whole),
        table("Where measured and predicted time differ", headings, rows, note_),
    ]


@with_groups
def trace_compare(
    plan: PlanFile,
    profile: Annotated[
        Path, typer.Argument(help="A trace of PyTorch's profiler (JSON, or JSON in gzip).")
    ],
    problem: PlanProblem,
    stage: Annotated[
        int | None,
        typer.Option(help="Stage of the profiled device; by default that of its rank."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Steps in the profile; by default as the profiler marked.")
    ] = None,
    as_json: AsJson = False,
    to_file: ToFile = None,
) -> None:
    """Line measured kernels up with a plan's prediction and say where the time differs.

    Example: phaze-fast trace-compare plan.json profile.json
    """
    given = problem.read(plan)
    measured = read_profile(profile, steps)
    found = compare_profile(given.model, given.cluster, given.spec, measured, stage)
    emit(found.to_dict, lambda: _compared(found), as_json, to_file)


def add_commands(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command("explain")(explain)
    app.command("diff")(diff)
    app.command("trace-compare")(trace_compare)
