"""The command `explain`: what limits the time of a plan, or how it differs from another."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from phaze_fast.cli.options import PlanFile, PlanProblem, StoredPlan
from phaze_fast.cli.output import PageOutput, fields, note, table, typed
from phaze_fast.errors import InvalidInputError
from phaze_fast.export.kineto import Comparison, compare_profile, read_profile
from phaze_fast.planning import Training, WhyNot, read_asked, timeline
from phaze_fast.planning import plan as find_plans
from phaze_fast.planning import why_not as why_not_fastest
from phaze_fast.report.explain import Explanation, difference, explain_plan
from phaze_fast.report.plan_page import compare_page
from phaze_fast.units import format_bytes, format_time

_PATH = 8


# ---- tables ----


def _explained(explanation: Explanation) -> list[RenderableType]:
    total = explanation.plan.time_s
    path = [[part, format_time(s), f"{s / total:.1%}"] for part, s in explanation.path[:_PATH]]
    rest = sum(seconds for _, seconds in explanation.path[_PATH:])
    if rest > 0:
        path.append(["all others", format_time(rest), f"{rest / total:.1%}"])
    worth = [
        [rate.what, f"{rate.elasticity:+.3f}", f"{rate.doubled - 1:+.1%}"]
        for rate in explanation.worth
    ]
    return [
        fields(
            f"{explanation.plan}", [(str(k + 1), line) for k, line in enumerate(explanation.binds)]
        ),
        table("The critical path of the step", ["what", "time>", "share>"], path),
        table(
            "What each rate is worth",
            ["rate", "change for +1% (%)>", "twice as good>"],
            worth,
            "Change of the step, the plan as it is; a latency that is twice as good is halved.",
        ),
    ]


def _shown(value: object) -> str:
    if isinstance(value, list):
        return " ".join("+".join(map(str, v)) if isinstance(v, list) else str(v) for v in value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _compared(comparison: dict[str, Any]) -> list[RenderableType]:
    how = {"memory_bytes": format_bytes, "time_s": format_time}
    measures = [
        [name.replace("_", " "), *(how.get(name, lambda v: f"{v:,.4g}")(v) for v in pair)]
        for name, pair in comparison["measures"].items()
    ]
    changed = [[name, *map(_shown, pair)] for name, pair in comparison["fields"].items()]

    def rows(part: str, show: Any) -> list[list[str]]:
        return [
            [name.replace("_", " "), show(a), show(b), ("-" if d < 0 else "+") + show(abs(d))]
            for name, (a, b, d) in comparison[part].items()
        ]

    faster = f"The second is {comparison['speedup']:.3f} times as fast"
    parts: list[RenderableType] = [
        table(faster, ["what", "a>", "b>"], measures),
        table("What differs", ["field", "a", "b"], changed),
        table("Seconds of a step", ["part", "a>", "b>", "b - a>"], rows("parts_s", format_time)),
        table("Memory", ["term", "a>", "b>", "b - a>"], rows("memory", format_bytes)),
    ]
    return parts


def _profiled(comparison: Comparison) -> list[RenderableType]:
    rows = []
    for family in comparison.families:
        seconds = [format_time(s) for s in (family.measured_s, family.predicted_s)]
        sign = "-" if family.difference_s < 0 else "+"
        seconds.append(sign + format_time(abs(family.difference_s)))
        rows.append([family.family, *seconds, f"{family.kernels:,}"])
    off = comparison.predicted_step_s / comparison.measured_step_s - 1
    whole = [
        ("measured step", format_time(comparison.measured_step_s)),
        ("predicted step", f"{format_time(comparison.predicted_step_s)} ({off:+.1%})"),
        ("no kernel runs", format_time(comparison.measured_idle_s)),
        ("predicted waiting", format_time(comparison.predicted_idle_s)),
    ]
    headings = ["kernels", "measured>", "predicted>", "difference>", "count>"]
    note_ = "Seconds of a step on one device; kernels that run at the same time count each."
    return [
        fields(f"A device of stage {comparison.stage}", whole),
        table("Where measured and predicted time differ", headings, rows, note_),
    ]


# ---- the command ----


def _why_not(stored: StoredPlan, fields_of_plan: str, threads: int | None) -> WhyNot:
    """Search for the best plan with some fields fixed, and compare it with the best of all."""
    names = {"global_batch", "seq", "optimizer", "precision", "software", "reserved_bytes"}
    names |= {"fusion", "sequence_parallel", "expert_imbalance", "expert_overlap"}
    fixed_fields = read_asked(fields_of_plan)
    step = stored.spec.model_dump(include=names)
    training = Training.from_dict({**step, "overlap_experts": stored.spec.asked_overlap})
    plans = find_plans(stored.model, stored.cluster, training, threads=threads)
    return why_not_fastest(plans, fixed_fields, threads)


@dataclass(frozen=True)
class Against:
    """What to compare the plan with (at most one option)."""

    against: Annotated[Path | None, typer.Option(metavar="PLAN")] = None
    """Another plan: what differs, and where the time and the memory go. Each is timed on its own
    cluster, or on the one that the options name; with --report as a page."""
    why_not: str | None = None
    """Fields of a plan you have in mind, such as tp=8,pp=4: the best such plan against the fastest
    of the same training step."""
    trace: Annotated[Path | None, typer.Option(metavar="PROFILE")] = None
    """Measured kernels: a trace of PyTorch's profiler (JSON, or JSON in gzip)."""
    stage: int | None = None
    """With --trace: stage of the profiled device; by default its rank's."""
    steps: int | None = None
    """With --trace: steps in it; by default as the profiler marked."""
    threads: int | None = None
    """With --why-not: at most so many threads; by default all cores."""


def explain(
    plan: PlanFile,
    problem: PlanProblem,
    against: Against,
    output: PageOutput,
) -> None:
    """Explain what limits a plan, or compare it with another.

    By itself: what limits it, its critical path, and what each rate of the hardware is worth.

    Example: phaze-fast explain plan.json --against other.json
    """
    others = (against.against, against.why_not, against.trace)
    if sum(option is not None for option in others) > 1:
        raise InvalidInputError("--against, --why-not, --trace: expected at most one of them")
    if output.report is not None and against.against is None:
        raise InvalidInputError("--report: is not accepted without --against")
    stored = problem.read(plan)
    for line in stored.notes:
        note(line)
    if against.against is not None:
        other = problem.read(against.against)
        _explain_against(stored, other, (plan, against.against), output)
    elif against.why_not is not None:
        answer = _why_not(stored, against.why_not, against.threads)
        output.emit(answer.to_dict, lambda: [f"Why not {answer}"])
    elif against.trace is not None:
        measured = read_profile(against.trace, against.steps)
        profile = compare_profile(
            stored.model, stored.cluster, stored.spec, measured, against.stage
        )
        output.emit(profile.to_dict, lambda: _profiled(profile))
    else:
        explanation = explain_plan(stored.model, stored.cluster, stored.spec)
        output.emit(explanation.to_dict, lambda: _explained(explanation))


def _explain_against(
    one: StoredPlan, other: StoredPlan, files: tuple[Path, Path], output: PageOutput
) -> None:
    timelines = [timeline(stored.model, stored.cluster, stored.spec) for stored in (one, other)]
    both = (one, other)
    given: dict[str, list[Any]] = {
        "model": [stored.model.name for stored in both],
        "seq": [stored.model.seq for stored in both],
        "chip": [stored.cluster.chip.name if stored.cluster.chip else "" for stored in both],
        "cluster": [stored.cluster.devices for stored in both],
        "interconnect": [stored.cluster.fabric.name for stored in both],
    }
    comparison = difference(timelines[0].plan, timelines[1].plan, given)
    names = [files[0].name, files[1].name if files[1].name != files[0].name else str(files[1])]
    output.write_page(lambda: compare_page(timelines[0], timelines[1], names, typed()))
    output.emit(lambda: comparison, lambda: _compared(comparison))
