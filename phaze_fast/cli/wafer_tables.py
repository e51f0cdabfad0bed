"""Answers of the command `wafer`: as a document, as tables, and drawn on the dies."""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType
from rich.text import Text

from phaze_fast.cli.output import fields, table
from phaze_fast.tables import Table, joined_columns
from phaze_fast.units import format_bytes, format_time
from phaze_fast.wafer import Evaluation, Problem
from phaze_fast.wafer.mapping.details import (
    causes,
    die_map,
    link_map,
    operator_times,
    step_energy,
    step_mfu,
)
from phaze_fast.wafer.mapping.traffic import describe, step_loads
from phaze_fast.wafer.search.result import MappingResult
from phaze_fast.wafer.search.session import Session
from phaze_fast.wafer.studies.comparison import PUBLISHED, PUBLISHED_MEMORY, Comparison
from phaze_fast.wafer.studies.fault_study import FaultStudy
from phaze_fast.wafer.studies.spaces import WaferFront, WaferResult

_NAMES = {
    "megatron": "Megatron-LM",
    "zero3": "ZeRO-3",
    "accpar": "AccPar",
    "hypar": "HyPar",
    "megatron_offload": "Megatron-LM with offload",
    "zero_offload": "ZeRO-Offload",
    "zero_infinity": "ZeRO-Infinity",
    "weight_streaming": "Weight streaming",
}
_WAYS = {"default": "default", "tuned": "tuned", "tiled": "tiled"}


def _op_mapping_rows(problem: Problem, found: Evaluation) -> list[list[str]]:
    def along(runs: tuple[tuple[str, int], ...]) -> str:
        return " . ".join(f"{role} {factor}" for role, factor in runs) or "-"

    rows = []
    every = [m for stage_class in found.encoding.classes for m in stage_class.operator_mappings]
    operators = problem.work.operators * len(found.encoding.classes)
    for op, op_mapping in zip(operators, every, strict=True):
        outputs = [f"{op_mapping.output.count(o)} x {o}" for o in dict.fromkeys(op_mapping.output)]
        shown = op_mapping.output[0] if len(op_mapping.output) == 1 else ", ".join(outputs)
        shown = shown if op.kept_bytes else "-"
        weights = op_mapping.weights if op.parameters else "-"
        rows.append([op_mapping.operator, along(op_mapping.x), along(op_mapping.y), shown, weights])
    return rows


def _summary(problem: Problem, found: Evaluation, pairs: list[tuple[str, str]]) -> RenderableType:
    """Lay out the time and memory of a mapping, with further rows."""
    layout, wafer = found.encoding.layout, problem.wafer
    shapes = [stage_class.layout for stage_class in found.encoding.classes]
    counts = [count for shape in shapes for count in shape.blocks]
    sequences = problem.training.global_batch
    first = [
        ("step", format_time(found.time_s) if found.fits else found.reason),
        ("sequences/s", f"{sequences / found.time_s:,.1f}" if found.fits else "-"),
        (
            "memory per die",
            f"{format_bytes(found.memory_bytes)} of "
            f"{format_bytes(found.capacity_bytes)} {found.tier}",
        ),
        (
            "stages",
            f"{' and '.join(f'{s.stages} of {s.width} x {s.height}' for s in shapes)} dies"
            + f"; {found.encoding.dies} of {wafer.dies} dies"
            + (f"; blocks {' + '.join(map(str, counts))}" if counts else ""),
        ),
        ("micro-batch", f"{layout.micro_batch} of {sequences} sequences"),
        (
            "one block",
            f"{format_time(found.compute_s)} of work, waits {format_time(found.blocking_s)} for "
            "collectives",
        ),
    ]
    if found.fits:
        energy = step_energy(problem, found)
        joules, watts = energy.total_j, energy.total_j / found.time_s
        limit = wafer.power_cap_w
        over = f", more than the {limit / 1e3:g} kW supplied" if limit and watts > limit else ""
        share = step_mfu(problem, found)
        first.append(("utilisation", f"{share:.1%} of peak by the model's FLOPs"))
        first.append(("energy", f"{joules:,.1f} J a step, {watts / 1e3:,.2f} kW on average{over}"))
    if found.stream_bytes > 0:
        first.insert(3, ("off the wafer", f"{format_bytes(found.stream_bytes)} a die"))
    return fields(f"{problem.model.name} on {wafer.name}", [*first, *pairs])


def _over(name: str, space: str) -> list[tuple[str, str]]:
    """List the mappings that a bound holds for, one condition a line."""
    return [
        (name if k == 0 else "", part) for k, part in enumerate(filter(None, space.split("; ")))
    ]


def _proof(found: MappingResult) -> list[tuple[str, str]]:
    """Lay out the bound and the gap of a mapping, and the counts of the search."""
    bound = f"no mapping takes less than {format_time(found.bound_s)}; gap {found.gap:.1%}"
    return [
        ("bound", bound if found.best.fits else "-"),
        *_over("bound holds over", found.bound_space if found.best.fits else ""),
        (
            "layouts",
            f"{found.layouts:,}, of which {found.pruned:,} left out by a bound"
            + (f", {found.unseen:,} not looked at" if found.unseen else ""),
        ),
        (
            "evaluations",
            f"{found.evaluations:,}; {found.evaluations_per_s:,.0f} per second of a core",
        ),
    ]


_CAUSES = {
    "work_s": "work of the slowest stage",
    "collectives_s": "its collectives",
    "other_s": "recomputation, ends, sends, streams",
    "bubble_s": "pipeline bubble",
    "tail_s": "gradient sums and optimiser",
}


def study_rows(study: FaultStudy) -> list[tuple[str, str]]:
    """Lay out the throughput of a wafer over fault maps."""
    data = study.to_dict()
    rows = [
        (
            f"over {data['maps']} fault maps",
            f"{data['expected_per_s']:,.1f} sequences/s expected, {data['worst_per_s']:,.1f} at "
            f"worst; {data['whole_per_s']:,.1f} where nothing is dead",
        )
    ]
    if data["with_two_classes"]:
        rows.append(("two classes of stages", f"under {data['with_two_classes']} of the maps"))
    for row in data["by_spares"]:
        said = f"{row['share']:.0%} of wafers, each at least {row['least_per_s']:,.1f} sequences/s"
        rows.append((f"with {row['spares']} spare dies", said))
    return rows


def _picture(problem: Problem, found: Evaluation) -> list[RenderableType]:
    """Draw the dies of a mapping, and list where its time goes and its operators."""
    times = causes(problem, found)
    whole = sum(times.values())
    rows = [[_CAUSES[key], format_time(s), f"{s / whole:.1%}"] for key, s in times.items()]
    seen = {(row.get("class", 0), row["operator"]): row for row in operator_times(problem, found)}
    slow = [
        [
            name,
            row["part"],
            format_time(row["forward_s"]),
            format_time(row["backward_s"]),
            f"{row['of_peak']:.0%}",
        ]
        for (_, name), row in seen.items()
    ]
    return [
        Text("Dies and their stages (. idle, X dead)", style="bold"),
        Text(
            die_map(problem.wafer, *(stage_class.layout for stage_class in found.encoding.classes))
        ),
        Text("Load of links, 9 = the busiest (. none, x dead)", style="bold"),
        Text(link_map(problem.wafer, step_loads(problem, found.encoding))),
        table("Time of a step", ["cause", "time>", "share>"], rows),
        table(
            "Operators of one micro-batch, on one die",
            ["operator", "part", "forward>", "backward>", "of peak>"],
            slow,
        ),
        table(
            "Operators",
            ["operator", "along x", "along y", "output", "weights"],
            _op_mapping_rows(problem, found),
            "innermost first; all blocks share their operator mappings",
        ),
    ]


def _cell(found: Evaluation, ours: Evaluation) -> list[str]:
    if not found.fits:
        over = format_bytes(found.over_bytes or found.stream_over_bytes)
        return ["OOM", "-", format_bytes(found.memory_bytes), f"{over} over"]
    ratio = f"{found.time_s / ours.time_s:.2f}x" if ours.fits else "-"
    return [format_time(found.time_s), ratio, format_bytes(found.memory_bytes), ""]


def _case_rows(case: Comparison, searched: bool) -> list[list[str]]:
    ours, problem = case.ours.best, case.ours.problem
    remark = f"gap {case.ours.gap:.1%}" if ours.fits else _cell(ours, ours)[3]
    rows = [
        [f"{problem.model.name} on {problem.wafer.name}", "", "", "", ""],
        ["ours", *_cell(ours, ours)[:3], remark],
    ]
    for name, baseline in case.baselines.items():
        for variant, label in _WAYS.items():
            cells = _cell(getattr(baseline, variant), ours)
            if variant == "tiled" and name in case.memory_at_equal_speed and ours.fits:
                equal_speed = case.memory_at_equal_speed[name]
                cells[3] = f"ours as fast in {format_bytes(equal_speed.memory_bytes)}"
            rows.append([f"{_NAMES[name]}, {label}", *cells])
    for name, each_one in case.ablations.items():
        if name == "no_architecture" and not searched:
            continue  # the wafer was given
        rows.append([f"ours, {name.replace('_', ' ')}", *_cell(each_one, ours)])
    return rows


def _comparison_table(cases: list[tuple[Comparison, bool]]) -> RenderableType:
    """Tabulate our mappings and other systems' plans."""
    rows = [row for case, searched in cases for row in _case_rows(case, searched)]
    published = ", ".join(f"{_NAMES[name]} {speed}x" for name, speed in PUBLISHED.items())
    memory = " and ".join(f"{_NAMES[name]} {x}x" for name, x in PUBLISHED_MEMORY.items())
    caption = (
        "tuned: in linear rank order; tiled: groups laid out as best they can be. TMAC publishes "
        f"{published}, and less memory than {memory}; docs/wafer.md explains"
    )
    columns = ["plan", "step>", "of ours>", "memory/die>", "remark"]
    return table("Ours and others", columns, rows, caption)


def _front_table(front: WaferFront) -> RenderableType:
    """List the wafers that no other beats, the fastest first."""
    rows = []
    for point in front.points:
        wafer, encoding = point.result.problem.wafer, point.result.best.encoding
        shapes = [stage_class.layout for stage_class in encoding.classes]
        stages = [f"{shape.stages} of {shape.width} x {shape.height}" for shape in shapes]
        rows.append(
            [
                wafer.name,
                f"{wafer.wafer_count * wafer.dies}",
                format_time(point.time_s),
                f"{point.area_mm2:,.0f}",
                f"{point.power_w / 1e3:,.2f}",
                f"{point.cost_usd:,.0f}",
                f"{point.expected_per_s:,.4g}",
                f"{point.result.gap:.1%}",
                f"{' and '.join(stages)}, {encoding.layout.micro_batch}",
            ]
        )
    headings = ["wafer", "dies>", "step>", "mm2>", "kW>", "$>", "expected/s>", "gap>", "stages"]
    caption = (
        f"No other wafer is better in all of {', '.join(front.objectives)}. "
        f"{front.searched:,} searched, {front.bounded:,} left out by a bound, {front.misfits:,} "
        f"without room, {front.unseen:,} not looked at."
    )
    return table("Pareto front", headings, rows, caption)


def _space_rows(found: WaferResult) -> list[tuple[str, str]]:
    """Lay out the best wafer of a space, and how many others were rejected, pruned or searched."""
    rejected = ", ".join(f"{rule} {n:,}" for rule, n in found.rejected.items()) or "none"
    rows = [
        ("wafer", str(found.best.problem.wafer)),
        ("wafers", f"{found.wafers:,} meet all rules; broken: {rejected}"),
        (
            "left out",
            f"{found.contained:,} inside another, {found.bounded:,} by a bound, "
            f"{found.unseen:,} not looked at; {found.searched:,} searched",
        ),
    ]
    if found.best.best.fits:
        rows.append(("bound over all", f"{format_time(found.bound_s)}; gap {found.gap:.1%}"))
        rows += _over("which holds over", found.bound_space)
    if found.base is not None and found.base.best.fits:
        rows.append(("the space's own wafer", format_time(found.base.best.time_s)))
    return rows


# ---- the cases of a command ----


def mapping_tables(
    problem: Problem, mapping: Evaluation, with_traffic: bool
) -> list[RenderableType]:
    """Lay out one mapping that was scored, not searched for."""
    parts = [_summary(problem, mapping, []), *_picture(problem, mapping)]
    return [*parts, Text(describe(problem, mapping.encoding))] if with_traffic else parts


class Case:
    """The answer for one model on one wafer or space."""

    def __init__(
        self,
        result: MappingResult | Comparison,
        space: WaferResult | None,
        study: FaultStudy | None = None,
        front: WaferFront | None = None,
    ) -> None:
        self.comparison = result if isinstance(result, Comparison) else None
        self.result = result.ours if isinstance(result, Comparison) else result
        self.space, self.study, self.front = space, study, front

    @property
    def best(self) -> Evaluation:
        """The best mapping."""
        return self.result.best

    def document(self) -> dict[str, Any]:
        """Return this case as plain data."""
        answer = (self.comparison or self.result).to_dict()
        if self.study is not None:
            answer["fault_study"] = self.study.to_dict()
        if self.front is not None:
            answer["front"] = self.front.to_dict()
        if self.space is None:
            return answer
        whole = self.space.to_dict()  # its bound, counts and wafer are those of the whole space
        return {**answer, **{key: whole[key] for key in whole if key != "ours"}}

    def rows(self) -> dict[str, Any]:
        """Columns of the wafers, the plans compared, or the best mappings."""
        columns = (self.front or self.space or self.comparison or self.result).to_columns()
        count = len(next(iter(columns.values())))
        return {"model": [self.result.problem.model.name] * count, **columns}

    def tables(self, with_operators: bool) -> list[RenderableType]:
        """Describe this case."""
        pairs = _proof(self.result) + (_space_rows(self.space) if self.space is not None else [])
        pairs += study_rows(self.study) if self.study is not None else []
        parts = [_summary(self.result.problem, self.best, pairs)]
        parts += [_front_table(self.front)] if self.front is not None else []
        return [*parts, *_picture(self.result.problem, self.best)] if with_operators else parts


class Cases(Table):
    """The finished cases of a command: models on wafers or spaces of wafers."""

    def __init__(self, cases: list[Case], session: Session) -> None:
        self.cases, self.recalled = cases, session.recalled

    def document(self) -> dict[str, Any]:
        """Return one case, or all of them, as plain data."""
        every = [case.document() for case in self.cases]
        return every[0] if len(every) == 1 else {"cases": every}

    def to_columns(self) -> dict[str, Any]:
        """Return the rows of all cases as one table."""
        rows = []
        for case in self.cases:
            columns = case.rows()
            rows += [
                dict(zip(columns, values, strict=True))
                for values in zip(*columns.values(), strict=True)
            ]
        return joined_columns(rows)

    def tables(self, with_traffic: bool) -> list[RenderableType]:
        """Describe all cases, and compare them."""
        parts: list[RenderableType] = []
        for case in self.cases:
            parts += case.tables(len(self.cases) == 1)
            if with_traffic:
                parts.append(Text(describe(case.result.problem, case.best.encoding)))
        compared = [
            (case.comparison, case.space is not None)
            for case in self.cases
            if case.comparison is not None
        ]
        if compared:
            parts.append(_comparison_table(compared))
        if self.recalled:
            parts.append(Text(f"Results kept from earlier runs: {self.recalled:,}"))
        return parts
