"""The command `wafer`: the fastest mappings of models on wafers, and other systems' plans."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from phaze_fast.cli.interrupts import ends_interrupted, say_where_to_resume, stop_on_interrupt
from phaze_fast.cli.options import LongRun, ModelNames, load_model
from phaze_fast.cli.output import (
    Output,
    TableOutput,
    at_least,
    fields,
    note,
    progress_bar,
    table,
    write_text,
)
from phaze_fast.documents import read_document
from phaze_fast.errors import InfeasibleError, InvalidInputError, UndecidedError, nearest
from phaze_fast.models import GraphModel, Model, TransformerModel, recognised
from phaze_fast.report import report_page
from phaze_fast.tables import Table, joined_columns
from phaze_fast.units import format_bytes, format_time
from phaze_fast.wafer import (
    WAFER_SPACES,
    WAFERS,
    Comparison,
    Effort,
    Encoding,
    Evaluation,
    FaultStudy,
    MappingResult,
    Problem,
    Wafer,
    WaferFront,
    WaferResult,
    WaferSpace,
    WaferTraining,
    compare_mappings,
    describe,
    die_map,
    evaluate,
    fault_study,
    load_faults,
    search_front,
    search_mappings,
    search_wafers,
    step_energy,
    step_loads,
    step_mfu,
)
from phaze_fast.wafer.hardware.space import load_wafer_or_space
from phaze_fast.wafer.mapping.details import causes, link_map, operator_times
from phaze_fast.wafer.mapping.traffic import output_text, runs_text
from phaze_fast.wafer.search.baselines import VARIANTS
from phaze_fast.wafer.search.session import Session
from phaze_fast.wafer.studies.comparison import PUBLISHED, PUBLISHED_MEMORY
from phaze_fast.wafer.studies.spaces import OBJECTIVES, check_objectives

# ---- reading the problem ----


def _transformer(model: Model) -> TransformerModel:
    """Return the transformer that a model is or is recognised as; refuse any other graph."""
    known = recognised(model) if isinstance(model, GraphModel) else model
    if known is not None:
        return known
    raise InvalidInputError(
        f"model: {model.name} is a traced graph that is not recognised as a transformer; "
        "wafers need one"
    )


def _wafer(name: str) -> Wafer | WaferSpace:
    """Look a wafer or a space of wafers up: a preset, or a file of either kind."""
    known = [*WAFERS.names, *WAFER_SPACES.names]
    if name not in known and not name.endswith((".yaml", ".yml", ".json")):
        raise InvalidInputError(
            f"--wafer: {name!r} is not accepted; {nearest(name, known)}, or a file"
        )
    return load_wafer_or_space(name)


def _wafers(names: list[str] | None, count: int, faults: Path | None) -> list[Wafer | WaferSpace]:
    """Look wafers up and apply --wafer-count and --faults, which are not accepted with a space."""
    wafers = [_wafer(name) for name in names or ["dram-wafer"]]
    changes: dict[str, Callable[[Wafer], Wafer]] = {}
    if count > 1:
        changes["--wafer-count"] = lambda wafer: wafer.replace(wafer_count=count)
    if faults is not None:
        fault_map, path = load_faults(faults), str(faults)
        changes["--faults"] = lambda wafer: fault_map.on(wafer, path)
    for option, change in changes.items():
        for k, wafer in enumerate(wafers):
            if isinstance(wafer, WaferSpace):
                raise InvalidInputError(
                    f"{option}: {wafer.name} is not accepted with it; expected wafers, not a space"
                )
            wafers[k] = change(wafer)
    return wafers


def _front_objectives(
    text: str | None, wafers: list[Wafer | WaferSpace], others: bool
) -> tuple[str, ...]:
    """Read --front, which is not accepted with single wafers or other studies."""
    if text is None:
        return ()
    if others or any(isinstance(wafer, Wafer) for wafer in wafers):
        raise InvalidInputError(
            "--front: expected spaces of wafers with it, and neither --compare nor --fault-maps"
        )
    names = OBJECTIVES if text == "all" else tuple(name.strip() for name in text.split(","))
    check_objectives(names, "--front")
    return names


# ---- tables ----

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


def _op_mapping_rows(problem: Problem, found: Evaluation) -> list[list[str]]:
    rows = []
    mapped = zip(problem.work.operators, found.encoding.operator_mappings, strict=True)
    for op, op_mapping in mapped:
        outputs = output_text(op_mapping) if op.kept_bytes else "-"
        along = (runs_text(runs) or "-" for runs in (op_mapping.x, op_mapping.y))
        weights = op_mapping.weights if op.parameters else "-"
        rows.append([op_mapping.operator, *along, outputs, weights])
    return rows


def _shapes(found: Evaluation) -> str:
    layout = found.encoding.layout
    return f"{layout.stages} of {layout.width} x {layout.height}"


def _on(wafer: Wafer) -> str:
    """Return the words after a figure that several wafers share; empty for one wafer."""
    return f" of {wafer.wafer_count} wafers" if wafer.wafer_count > 1 else ""


def _summary(problem: Problem, found: Evaluation, pairs: list[tuple[str, str]]) -> RenderableType:
    """Lay out the time and memory of a mapping, with further rows."""
    layout, wafer = found.encoding.layout, problem.wafer
    each = f" in each of {layout.replicas} pipelines" if layout.replicas > 1 else ""
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
            f"{_shapes(found)} dies{each}; "
            f"{found.encoding.dies:,} of {wafer.all_dies:,} dies{_on(wafer)}"
            + (f"; blocks {' + '.join(map(str, layout.blocks))}" if layout.blocks else ""),
        ),
        ("micro-batch", f"{layout.micro_batch} of {sequences} sequences"),
        (
            "one block",
            f"{format_time(found.compute_s)} of work, "
            f"{format_time(found.blocking_s)} of blocking collectives",
        ),
    ]
    if found.fits:
        energy = step_energy(problem, found)
        joules, watts = energy.total_j, energy.total_j / found.time_s
        limit_w = wafer.all_power_cap_w
        over = ""
        if watts > limit_w:
            over = f", more than the {limit_w / 1e3:g} kW supplied{_on(wafer)}"
        share = step_mfu(problem, found)
        first.append(("utilisation", f"{share:.1%} of peak by the model's FLOPs"))
        first.append(("energy", f"{joules:,.1f} J a step, {watts / 1e3:,.2f} kW on average{over}"))
    if found.stream_bytes > 0:
        first.insert(3, ("off the wafer", f"{format_bytes(found.stream_bytes)} a die"))
    return fields(f"{problem.model.name} on {wafer.name}", [*first, *pairs])


def _over(name: str, space: str) -> list[tuple[str, str]]:
    """List the conditions of the mappings that a bound holds for, one on each line."""
    return [
        (name if k == 0 else "", part) for k, part in enumerate(filter(None, space.split("; ")))
    ]


def _proof(found: MappingResult) -> list[tuple[str, str]]:
    """Lay out the status, the bound and the gap of a mapping, and the counts of the search."""
    bounded = math.isfinite(found.bound_s)
    bound = f"no mapping takes less than {format_time(found.bound_s)}" if bounded else "-"
    return [
        ("status", found.status),
        ("bound", f"{bound}; gap {found.gap:.1%}" if found.best.fits else bound),
        *_over("bound holds over", found.bound_space if bounded else ""),
        (
            "layouts",
            f"{found.layouts:,}, of which {found.pruned:,} pruned by a bound"
            + (f", {found.unseen:,} not examined" if found.unseen else ""),
        ),
        (
            "evaluations",
            f"{found.evaluations:,}; {found.evaluations_per_s:,.0f} per second of a core",
        ),
    ]


_CAUSES = {
    "work_s": "work of the slowest stage",
    "collectives_s": "its collectives",
    "other_s": "recomputation, boundary layers, messages, streams",
    "bubble_s": "pipeline bubble",
    "tail_s": "gradient sums and optimiser",
}


def study_rows(study: FaultStudy) -> list[tuple[str, str]]:
    """Lay out the throughput of a wafer over fault maps."""
    data = study.to_dict()
    expected = f"{data['expected_per_s']:,.1f} sequences/s expected, {data['worst_per_s']:,.1f} at "
    expected += f"worst; {data['whole_per_s']:,.1f} where nothing is dead"
    rows = [(f"over {data['maps']} fault maps", expected)]
    for row in data["by_spares"]:
        said = f"{row['share']:.0%} of wafers, each at least {row['least_per_s']:,.1f} sequences/s"
        rows.append((f"with {row['spares']} spare dies", said))
    return rows


def _picture(problem: Problem, found: Evaluation) -> list[RenderableType]:
    """Draw the dies of a mapping, and list where its time goes and its operators."""
    times = causes(problem, found)
    whole = sum(times.values())
    rows = [[_CAUSES[key], format_time(s), f"{s / whole:.1%}"] for key, s in times.items()]
    slow = []
    for row in operator_times(problem, found):
        passes = [format_time(row[f"{way}_s"]) for way in ("forward", "backward")]
        slow.append([row["operator"], row["part"], *passes, f"{row['of_peak']:.0%}"])
    return [
        Text("Dies and their stages (. idle, X dead)", style="bold"),
        Text(die_map(problem.wafer, found.encoding.layout)),
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


def _front_table(front: WaferFront) -> RenderableType:
    """List the non-dominated wafers, fastest first."""
    rows = []
    for point in front.points:
        wafer, best = point.result.problem.wafer, point.result.best
        figures = [f"{point.area_mm2:,.0f}", f"{point.power_w / 1e3:,.2f}"]
        figures += [f"{point.cost_usd:,.0f}", f"{point.expected_per_s:,.4g}"]
        stages = f"{_shapes(best)}, {best.encoding.layout.micro_batch}"
        first = [wafer.name, f"{wafer.all_dies}", format_time(point.time_s)]
        rows.append([*first, *figures, f"{point.result.gap:.1%}", stages])
    headings = ["wafer", "dies>", "step>", "mm2>", "kW>", "$>", "expected/s>", "gap>", "stages"]
    caption = (
        f"No other wafer is better in all of {', '.join(front.objectives)}. "
        f"{front.searched:,} searched, {front.bounded:,} pruned by a bound, {front.misfits:,} "
        f"on which no mapping fits, {front.undecided:,} on which none was found, "
        f"{front.unseen:,} not examined."
    )
    return table("Pareto front", headings, rows, caption)


def _space_rows(found: WaferResult) -> list[tuple[str, str]]:
    """Lay out the best wafer of a space, and how many others were rejected, pruned or searched."""
    rejected = ", ".join(f"{rule} {n:,}" for rule, n in found.rejected.items()) or "none"
    rows = [
        ("status over all", found.status),
        ("wafer", str(found.best.problem.wafer)),
        ("wafers", f"{found.wafers:,} meet all rules; broken: {rejected}"),
        (
            "left out",
            f"{found.contained:,} inside another, {found.bounded:,} by a bound, "
            f"{found.unseen:,} not examined; {found.searched:,} searched",
        ),
    ]
    if found.best.best.fits:
        rows.append(("bound over all", f"{format_time(found.bound_s)}; gap {found.gap:.1%}"))
        rows += _over("which holds over", found.bound_space)
    if found.base is not None and found.base.best.fits:
        rows.append(("the space's own wafer", format_time(found.base.best.time_s)))
    return rows


# ---- the cases of a command ----


@dataclass(frozen=True)
class Case:
    """The answer for one model on one wafer or space."""

    answer: MappingResult | Comparison
    space: WaferResult | None
    study: FaultStudy | None = None
    front: WaferFront | None = None

    @property
    def result(self) -> MappingResult:
        """Our own search."""
        return self.answer.ours if isinstance(self.answer, Comparison) else self.answer

    @property
    def best(self) -> Evaluation:
        """The best mapping."""
        return self.result.best

    @property
    def status(self) -> str:
        """The status of the search: over a space of wafers, if there is one."""
        return (self.space or self.result).status

    @property
    def reason(self) -> str:
        """Why there is no mapping; empty if there is."""
        return (self.space or self.result).reason

    def document(self) -> dict[str, Any]:
        """Return the answer of this case as plain data."""
        answer = self.answer.to_dict()
        if self.study is not None:
            answer["fault_study"] = self.study.to_dict()
        if self.front is not None:
            answer["front"] = self.front.to_dict()
        if self.space is None:
            return answer
        whole = self.space.to_dict()  # bound, counts and wafer of the search over the whole space
        return {**answer, **{key: whole[key] for key in whole if key != "ours"}}

    def rows(self) -> dict[str, Any]:
        """Columns of the wafers, the plans compared, or the best mappings."""
        columns = (self.front or self.space or self.answer).to_columns()
        count = len(next(iter(columns.values())))
        return {"model": [self.result.problem.model.name] * count, **columns}

    def tables(self, with_operators: bool) -> list[RenderableType]:
        """Describe this case."""
        pairs = _proof(self.result) + (_space_rows(self.space) if self.space is not None else [])
        pairs += study_rows(self.study) if self.study is not None else []
        parts = [_summary(self.result.problem, self.best, pairs)]
        parts += [_front_table(self.front)] if self.front is not None else []
        return [*parts, *_picture(self.result.problem, self.best)] if with_operators else parts


def _case_rows(case: Case) -> list[list[str]]:
    compared, ours, problem = case.answer, case.best, case.result.problem
    assert isinstance(compared, Comparison), "chosen so"
    remark = f"gap {case.result.gap:.1%}" if ours.fits else _cell(ours, ours)[3]
    rows = [
        [f"{problem.model.name} on {problem.wafer.name}", "", "", "", ""],
        ["ours", *_cell(ours, ours)[:3], remark],
    ]
    for name, baseline in compared.baselines.items():
        for variant in VARIANTS:
            cells = _cell(getattr(baseline, variant), ours)
            if variant == "tiled" and name in compared.memory_at_equal_speed and ours.fits:
                equal_speed = compared.memory_at_equal_speed[name]
                cells[3] = f"ours as fast in {format_bytes(equal_speed.memory_bytes)}"
            rows.append([f"{_NAMES[name]}, {variant}", *cells])
    # Where a single wafer was given, there is no ablation that searches other wafers.
    left_out = "no_architecture" if case.space is None else ""
    return rows + [
        [f"ours, {name.replace('_', ' ')}", *_cell(found, ours)]
        for name, found in compared.ablations.items()
        if name != left_out
    ]


def _comparison_table(cases: list[Case]) -> RenderableType:
    """Tabulate our mappings and other systems' plans."""
    published = ", ".join(f"{_NAMES[name]} {speed}x" for name, speed in PUBLISHED.items())
    memory = " and ".join(f"{_NAMES[name]} {x}x" for name, x in PUBLISHED_MEMORY.items())
    caption = (
        "tuned: in linear rank order; tiled: groups laid out as best they can be. TMAC publishes "
        f"{published}, and less memory than {memory}; docs/wafer.md explains"
    )
    columns = ["plan", "step>", "of ours>", "memory/die>", "remark"]
    return table("Ours and others", columns, [row for c in cases for row in _case_rows(c)], caption)


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
        rows: list[dict[str, Any]] = []
        for columns in (case.rows() for case in self.cases):
            values = zip(*columns.values(), strict=True)
            rows += [dict(zip(columns, row, strict=True)) for row in values]
        return joined_columns(rows)

    def tables(self, with_traffic: bool) -> list[RenderableType]:
        """Describe all cases, and compare them."""
        parts: list[RenderableType] = []
        for case in self.cases:
            parts += case.tables(len(self.cases) == 1)
            if with_traffic:
                parts.append(Text(describe(case.result.problem, case.best.encoding)))
        compared = [case for case in self.cases if isinstance(case.answer, Comparison)]
        if compared:
            parts.append(_comparison_table(compared))
        if self.recalled:
            parts.append(Text(f"Results kept from earlier runs: {self.recalled:,}"))
        return parts


# ---- running ----


@contextlib.contextmanager
def _shown_progress(quiet: bool) -> Iterator[tuple[Callable[[str], None], Callable[..., None]]]:
    """Show a bar on standard error; yield a function to name the work and one for its progress."""
    with progress_bar("", not quiet) as update:

        def say(name: str) -> None:
            update(description=name, completed=0, total=None)

        def show(done: int, total: int, best: float) -> None:
            text = f"best {format_time(best)}" if math.isfinite(best) else ""
            update(completed=done, total=total, text=text)

        yield say, show


@dataclass(frozen=True)
class Faults:
    """Faults."""

    faults: Path | None = None
    """Dead dies and links by row and column: a YAML or JSON file."""
    fault_maps: Annotated[int, at_least(0)] = 0
    """Draw so many maps of dead dies and links at random, and find the throughput expected and at
    worst."""
    die_fault: float | None = None
    """With --fault-maps: probability that a die is dead; by default by its yield."""
    link_fault: float = 0.0
    """With --fault-maps: probability that a link is dead."""


@dataclass(frozen=True)
class _Study:
    """What is searched for every model and wafer, and how."""

    session: Session
    training: WaferTraining
    effort: Effort
    seed: int
    compare: bool
    say: Callable[[str], None]
    """Names the work that starts, for the progress bar."""
    show: Callable[[int, int, float], None]
    """Shows the progress of the work: done, total and the best seconds so far."""
    path: Path | None
    """The file that finished cases are written to."""
    faults: Faults
    front: tuple[str, ...]
    """Objectives of a front of wafers; none where only the fastest is searched for."""

    def cases(self, pairs: list[tuple[Any, Wafer | WaferSpace]]) -> Iterator[Case]:
        """Answer each case; finished cases are in the file `path` before the next one starts."""
        cases: list[Case] = []
        single = [Problem(m, w, self.training) for m, w in pairs if isinstance(w, Wafer)]
        if not self.session.sequential and not self.compare:  # all at once, so that no worker waits
            self.say(f"{len(single)} mappings")
            search_mappings(single, self.effort, self.seed, **self._run)
        for model, where in pairs:
            if isinstance(where, Wafer):
                cases.append(self._on_wafer(Problem(model, where, self.training)))
            elif self.front:
                cases.append(self._front_of(model, where))
            else:
                cases.append(self._in_space(model, where))
            yield cases[-1]
            if self.effort.stop is not None and self.effort.stop():
                return
            if self.path is not None and len(cases) < len(pairs):
                text = json.dumps({"cases": [case.document() for case in cases]}, indent=2)
                write_text(self.path, text + "\n")

    @property
    def _run(self) -> dict[str, Any]:
        return {"progress": self.show, "session": self.session}

    def _compared(self, problem: Problem, known: MappingResult | None = None) -> Comparison:
        name = f"{problem.model.name} on {problem.wafer.name}"
        self.say(name)
        return compare_mappings(
            problem,
            self.effort,
            self.seed,
            known=[] if known is None else [known.best],
            report=lambda part: self.say(f"{name}: {part}"),
            **self._run,
        )

    def _on_wafer(self, problem: Problem) -> Case:
        if self.compare:
            answer: MappingResult | Comparison = self._compared(problem)
        else:
            self.say(f"{problem.model.name} on {problem.wafer.name}")
            answer = search_mappings([problem], self.effort, self.seed, **self._run)[0]
        return Case(answer, None, self._fault_study(problem))

    def _in_space(self, model: Any, space: WaferSpace) -> Case:
        self.say(f"{model.name} on {space.name}")
        result = search_wafers(model, space, self.training, self.effort, self.seed, **self._run)
        best: MappingResult | Comparison = result.best
        if self.compare:
            best = self._compared(result.best.problem, known=result.best)
            if result.base is not None:
                best.ablations["no_architecture"] = result.base.best
        return Case(best, result, self._fault_study(result.best.problem))

    def _front_of(self, model: Any, space: WaferSpace) -> Case:
        """Search the non-dominated wafers of a space; the file `path` has the front so far."""

        def so_far(front: WaferFront) -> None:
            if self.path is not None:
                data = {"model": model.name, "space": space.name, "front": front.to_dict()}
                write_text(self.path, json.dumps(data, indent=2) + "\n")

        self.say(f"{model.name} on {space.name}: front")
        settings = (self.training, self.effort, self.seed)
        front = search_front(
            model, space, *settings, objectives=self.front, so_far=so_far, **self._run
        )
        if not front.points and front.unseen + front.undecided:
            raise UndecidedError(
                f"{space.name}: no mapping of {model.name} that fits was found; {front.unseen:,} "
                f"wafers were not examined, {front.undecided:,} without a proof that none fits"
            )
        if not front.points:
            raise InfeasibleError(
                f"{space.name}: {model.name} is proven to fit on none of {front.misfits:,} wafers"
            )
        return Case(front.points[0].result, None, front=front)

    def _fault_study(self, problem: Problem) -> FaultStudy | None:
        """Draw fault maps of a wafer and find its throughput under each."""
        drawn = (self.faults.fault_maps, self.faults.die_fault, self.faults.link_fault)
        if not self.faults.fault_maps:
            return None
        self.say(f"{problem.model.name} on {problem.wafer.name}: fault maps")
        return fault_study(problem, *drawn, seed=self.seed, **self._run)


# ---- the command ----


@dataclass(frozen=True)
class Wafers:
    """The wafers."""

    on: Annotated[list[str] | None, typer.Option("--wafer")] = None
    """A wafer, or a space of wafers to choose from: a preset (`phaze-fast show wafer` lists them)
    or a file; may be given several times; by default dram-wafer."""
    wafer_count: Annotated[int, at_least(1)] = 1
    """Wafers of this kind that work together over their I/O."""


@dataclass(frozen=True)
class WaferGoal:
    """What to find."""

    compare: bool = False
    """Also score other systems' plans, and parts of ours."""
    front: str | None = None
    """Of a space: keep all wafers that no other beats in these objectives, separated by commas:
    time_s, area_mm2, power_w, cost_usd, expected_per_s; or all."""
    encoding: Path | None = None
    """Score the mapping of this JSON file instead of searching for one."""
    describe: bool = False
    """Also show how each operator is split and what it communicates."""


@dataclass(frozen=True)
class WaferEffort:
    """Effort of the search."""

    seeds: int = 4
    """Runs of simulated annealing for each promising layout."""
    steps: int = 20_000
    """Evaluations of each run."""
    promising: int = 6
    """How many layouts count as promising."""
    seed: int = 0
    """Seed of all random choices."""
    budget: float | None = None
    """Examine no further layout after so many seconds."""


def map_on_wafers(
    model: ModelNames,
    where: Wafers,
    training: WaferTraining,
    goal: WaferGoal,
    faults: Faults,
    search: WaferEffort,
    run: LongRun,
    output: TableOutput,
) -> None:
    """Map a model's operators on a wafer of dies.

    Where a space of wafers is given, the best wafer is searched for too.

    Example: phaze-fast wafer bertlarge --wafer dojo-tile-like --global-batch 64 --compare
    """
    effort = Effort(search.seeds, search.steps, search.promising, search.budget)
    loaded = [_transformer(load_model(name, training.seq)) for name in model]
    wafers = _wafers(where.on, where.wafer_count, faults.faults)
    others = goal.compare or bool(faults.fault_maps)
    objectives = _front_objectives(goal.front, wafers, others)
    if goal.encoding is not None:
        if len(loaded) > 1 or len(wafers) > 1 or goal.compare:
            raise InvalidInputError(
                "--encoding: one model and one wafer are expected with it, and no --compare"
            )
        wafer = wafers[0] if isinstance(wafers[0], Wafer) else wafers[0].base
        _score(Problem(loaded[0], wafer, training), goal.encoding, goal.describe, output)
        return
    with (
        stop_on_interrupt() as stop,
        say_where_to_resume(run.resume),
        Session(run.executor, run.threads, run.resume, run.cache_folder) as session,
        _shown_progress(run.quiet) as (say, show),
    ):
        how = (search.seed, goal.compare, say, show, output.path, faults, objectives)
        study = _Study(session, training, replace(effort, stop=stop), *how)
        pairs = [(loaded_model, wafer) for wafer in wafers for loaded_model in loaded]
        cases = Cases(list(study.cases(pairs)), session)
        for message in session.notes:
            note(message)
    with ends_interrupted(stop()):
        _deliver(cases, goal.describe, output)


def _deliver(cases: Cases, describe: bool, output: TableOutput) -> None:
    output.emit(cases.document, lambda: cases.tables(describe))
    output.write_page(lambda: report_page(cases.document()))
    if output.parquet is not None:
        cases.to_parquet(output.parquet)
        note(f"wrote {output.parquet}")
    unexamined = sum(case.result.unseen for case in cases.cases)
    if unexamined:
        note(f"stopped before {unexamined:,} layouts were examined; the bound covers them too")
    if any(case.best.fits for case in cases.cases):
        return
    for case in cases.cases:
        if case.status == "unknown":
            raise UndecidedError(case.reason)
    raise InfeasibleError(cases.cases[0].reason)


def _score(problem: Problem, path: Path, with_traffic: bool, output: Output) -> None:
    """Score a mapping from a file: a list of operator mappings, or any answer of this command."""
    data = read_document(path)
    if isinstance(data, dict):
        data = data.get("ours", data)
        data = data.get("encoding", data) if isinstance(data, dict) else data
    mapping = evaluate(problem, Encoding.from_list(data, str(path)))

    def tables() -> list[RenderableType]:
        traffic = [Text(describe(problem, mapping.encoding))] if with_traffic else []
        return [_summary(problem, mapping, []), *_picture(problem, mapping), *traffic]

    output.emit(lambda: {"ours": mapping.to_dict()}, tables)
    if not mapping.fits:
        raise InfeasibleError(mapping.reason)
