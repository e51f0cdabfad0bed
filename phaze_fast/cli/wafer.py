"""The command `wafer`: the fastest mappings of models on wafers, and other systems' plans."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from phaze_fast.cli.interrupts import ends_interrupted, say_where_to_resume, stop_on_interrupt
from phaze_fast.cli.options import LongRun, ModelNames, load_model
from phaze_fast.cli.output import Output, TableOutput, is_watched, note, write_text
from phaze_fast.cli.wafer_tables import Case, Cases, mapping_tables
from phaze_fast.documents import read_document
from phaze_fast.errors import InfeasibleError, InvalidInputError, nearest
from phaze_fast.models import GraphModel, Model, TransformerModel, recognised
from phaze_fast.report import report_page
from phaze_fast.units import format_time
from phaze_fast.wafer import (
    WAFER_SPACES,
    WAFERS,
    Encoding,
    Problem,
    Wafer,
    WaferSpace,
    WaferTraining,
    evaluate,
    load_faults,
    load_wafer,
    load_wafer_space,
)
from phaze_fast.wafer.search.result import Effort, MappingResult
from phaze_fast.wafer.search.search import search_mappings
from phaze_fast.wafer.search.session import Session
from phaze_fast.wafer.studies.comparison import Comparison, compare_mappings
from phaze_fast.wafer.studies.fault_study import FaultStudy, fault_study
from phaze_fast.wafer.studies.spaces import OBJECTIVES, WaferFront, search_front, search_wafers

# ---- reading the problem ----


def _transformer(model: Model) -> TransformerModel:
    """Refuse a graph: operators of a mesh are split by the rules of a transformer's fields."""
    known = recognised(model) if isinstance(model, GraphModel) else model
    if known is not None:
        return known
    raise InvalidInputError(
        f"model: {model.name} is a traced graph that is not recognised as a transformer; "
        "wafers need one"
    )


def _wafer(name: str) -> Wafer | WaferSpace:
    """Look a wafer or a space of wafers up: a preset, or a file of either kind."""
    if name in WAFER_SPACES.names:
        return load_wafer_space(name)
    if name in WAFERS.names:
        return load_wafer(name)
    if not name.endswith((".yaml", ".yml", ".json")):
        known = [*WAFERS.names, *WAFER_SPACES.names]
        raise InvalidInputError(
            f"--wafer: {name!r} is not accepted; {nearest(name, known)}, or a file"
        )
    data = read_document(name)
    if isinstance(data, dict) and "axes" in data:
        return WaferSpace.from_dict(data, source=name)
    return Wafer.from_dict(data, source=name)


def _each_wafer(
    wafers: list[Wafer | WaferSpace], option: str, change: Callable[[Wafer], Wafer]
) -> list[Wafer | WaferSpace]:
    """Change every wafer as an option says, which is not accepted with a space."""
    changed: list[Wafer | WaferSpace] = []
    for wafer in wafers:
        if isinstance(wafer, WaferSpace):
            raise InvalidInputError(
                f"{option}: {wafer.name} is not accepted with it; expected wafers, not a space"
            )
        changed.append(change(wafer))
    return changed


def _wafers(names: list[str] | None, count: int, faults: Path | None) -> list[Wafer | WaferSpace]:
    wafers = [_wafer(name) for name in names or ["dram-wafer"]]
    if count > 1:
        wafers = _each_wafer(
            wafers, "--wafer-count", lambda wafer: wafer.replace(wafer_count=count)
        )
    if faults is not None:
        fault_map, path = load_faults(faults), str(faults)
        wafers = _each_wafer(wafers, "--faults", lambda wafer: fault_map.on(wafer, path))
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
    for name in names:
        if name not in OBJECTIVES:
            raise InvalidInputError(
                f"--front: {name!r} is not accepted; {nearest(name, [*OBJECTIVES, 'all'])}"
            )
    return names


# ---- running ----


@contextlib.contextmanager
def _shown_progress(quiet: bool) -> Iterator[tuple[Callable[[str], None], Callable[..., None]]]:
    """Show a bar on standard error; yield what names the work, and what shows its progress."""
    watched = is_watched(sys.stderr) and not quiet
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[best]}"),
        TimeElapsedColumn(),
        transient=True,
        disable=not watched,
        console=Console(stderr=True, quiet=not watched),
    ) as bar:
        task = bar.add_task("", total=None, best="")

        def say(name: str) -> None:
            bar.update(task, description=name, completed=0, total=None)

        def show(done: int, total: int, best: float) -> None:
            text = f"best {format_time(best)}" if math.isfinite(best) else ""
            bar.update(task, completed=done, total=total, best=text)

        yield say, show


@dataclass(frozen=True)
class Faults:
    """Faults."""

    faults: Path | None = None
    """Dead dies and links by row and column: a YAML or JSON file."""
    fault_maps: Annotated[int, typer.Option(min=0)] = 0
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
    quiet: bool
    path: Path | None
    """The file that finished cases are written to."""
    faults: Faults
    front: tuple[str, ...]
    """Objectives of a front of wafers; none where only the fastest is searched for."""

    def cases(self, pairs: list[tuple[Any, Wafer | WaferSpace]]) -> Iterator[Case]:
        """Answer each case; what is finished is in the file before the next one starts."""
        cases: list[Case] = []
        single = [Problem(m, w, self.training) for m, w in pairs if isinstance(w, Wafer)]
        if not self.session.sequential and not self.compare:  # all at once, so that no worker waits
            with _shown_progress(self.quiet) as (say, show):
                say(f"{len(single)} mappings")
                search_mappings(single, self.effort, self.seed, progress=show, session=self.session)
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

    def _compared(self, problem: Problem, known: MappingResult | None = None) -> Comparison:
        with _shown_progress(self.quiet) as (say, show):
            name = f"{problem.model.name} on {problem.wafer.name}"
            say(name)
            return compare_mappings(
                problem,
                self.effort,
                self.seed,
                known=[] if known is None else [known.best],
                progress=show,
                report=lambda part: say(f"{name}: {part}"),
                session=self.session,
            )

    def _on_wafer(self, problem: Problem) -> Case:
        if self.compare:
            return Case(self._compared(problem), None, self._fault_study(problem))
        with _shown_progress(self.quiet) as (say, show):
            say(f"{problem.model.name} on {problem.wafer.name}")
            best = search_mappings(
                [problem], self.effort, self.seed, progress=show, session=self.session
            )[0]
        return Case(best, None, self._fault_study(problem))

    def _in_space(self, model: Any, space: WaferSpace) -> Case:
        with _shown_progress(self.quiet) as (say, show):
            say(f"{model.name} on {space.name}")
            result = search_wafers(
                model,
                space,
                self.training,
                self.effort,
                self.seed,
                progress=show,
                session=self.session,
            )
        best: MappingResult | Comparison = result.best
        if self.compare:
            best = self._compared(result.best.problem, known=result.best)
            if result.base is not None:
                best.ablations["no_architecture"] = result.base.best
        return Case(best, result, self._fault_study(result.best.problem))

    def _front_of(self, model: Any, space: WaferSpace) -> Case:
        """Search the non-dominated wafers of a space; the file has what is found so far."""

        def so_far(front: WaferFront) -> None:
            if self.path is not None:
                data = {"model": model.name, "space": space.name, "front": front.to_dict()}
                write_text(self.path, json.dumps(data, indent=2) + "\n")

        with _shown_progress(self.quiet) as (say, show):
            say(f"{model.name} on {space.name}: front")
            front = search_front(
                model,
                space,
                self.training,
                self.effort,
                self.seed,
                objectives=self.front,
                progress=show,
                so_far=so_far,
                session=self.session,
            )
        if not front.points:
            raise InfeasibleError(
                f"{space.name}: {front.misfits} wafers searched, {model.name} fits on none"
                if front.misfits
                else f"{space.name}: stopped before a wafer was searched"
            )
        return Case(front.points[0].result, None, front=front)

    def _fault_study(self, problem: Problem) -> FaultStudy | None:
        """Draw fault maps of a wafer and find its throughput under each."""
        if not self.faults.fault_maps:
            return None
        with _shown_progress(self.quiet) as (say, show):
            say(f"{problem.model.name} on {problem.wafer.name}: fault maps")
            return fault_study(
                problem,
                self.faults.fault_maps,
                self.faults.die_fault,
                self.faults.link_fault,
                seed=self.seed,
                progress=show,
                session=self.session,
            )


# ---- the command ----


@dataclass(frozen=True)
class WaferProblem:
    """The wafers and the training step."""

    on: Annotated[list[str] | None, typer.Option("--wafer")] = None
    """A wafer, or a space of wafers to choose from: a preset (`phaze-fast show wafer` lists them)
    or a file; may be given several times; by default dram-wafer."""
    wafer_count: Annotated[int, typer.Option(min=1)] = 1
    """Wafers of this kind that work together over their I/O."""
    global_batch: int = 512
    """Sequences of one training step."""
    seq: int | None = None
    """Tokens of a sequence; by default the model's."""
    optimizer: str = "adam-bf16-grad"
    """The optimiser, whose state takes memory."""


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
    problem: WaferProblem,
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
    training = WaferTraining(problem.global_batch, problem.seq, problem.optimizer)
    effort = Effort(search.seeds, search.steps, search.promising, search.budget)
    loaded = [_transformer(load_model(name, problem.seq)) for name in model]
    wafers = _wafers(problem.on, problem.wafer_count, faults.faults)
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
    ):
        study = _Study(
            session,
            training,
            replace(effort, stop=stop),
            seed=search.seed,
            compare=goal.compare,
            quiet=run.quiet,
            path=output.path,
            faults=faults,
            front=objectives,
        )
        pairs = [(loaded_model, where) for where in wafers for loaded_model in loaded]
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
    if not any(case.best.fits for case in cases.cases):
        raise InfeasibleError(cases.cases[0].best.reason)


def _score(problem: Problem, path: Path, describe: bool, output: Output) -> None:
    """Score a mapping from a file: a list of operator mappings, or any answer of this command."""
    data = read_document(path)
    if isinstance(data, dict):
        data = data.get("ours", data)
        data = data.get("encoding", data) if isinstance(data, dict) else data
    mapping = evaluate(problem, Encoding.from_list(data, str(path)))
    output.emit(
        lambda: {"ours": mapping.to_dict()}, lambda: mapping_tables(problem, mapping, describe)
    )
    if not mapping.fits:
        raise InfeasibleError(mapping.reason)
