"""The command `wafer`: the fastest mappings of models on wafers, and other systems' plans."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import RenderableType
from rich.text import Text

from phaze_fast.cli.interrupts import ends_interrupted, stopped_by_hand, told_where
from phaze_fast.cli.model_argument import load_model
from phaze_fast.cli.output import AsJson, ToFigures, ToFile, emit, folder, note, target, write_text
from phaze_fast.cli.search import default_cache
from phaze_fast.cli.wafer_argument import joined_wafers, wafer_of, with_faults
from phaze_fast.cli.wafer_cases import Case, Cases
from phaze_fast.cli.wafer_front import front_case, objectives_of
from phaze_fast.cli.wafer_progress import shown
from phaze_fast.cli.wafer_tables import picture, summary
from phaze_fast.documents import read_document
from phaze_fast.errors import InfeasibleError, InvalidInputError
from phaze_fast.models import GraphModel, Model, TransformerModel, recognised
from phaze_fast.wafer import Encoding, Problem, Wafer, WaferSpace, WaferTraining, evaluate
from phaze_fast.wafer.mapping.traffic import describe
from phaze_fast.wafer.search.result import Effort, MappingResult
from phaze_fast.wafer.search.search import search_mappings
from phaze_fast.wafer.search.session import Session
from phaze_fast.wafer.studies.comparison import Comparison, compare_mappings
from phaze_fast.wafer.studies.fault_study import FaultStudy, fault_study
from phaze_fast.wafer.studies.pareto import OBJECTIVES
from phaze_fast.wafer.studies.wafers import WaferResult, search_wafers

__all__ = ["add_commands"]


def _transformer(model: Model) -> TransformerModel:
    """Refuse a graph: operators of a mesh are split by the rules of a transformer's fields."""
    known = recognised(model) if isinstance(model, GraphModel) else model
    if known is not None:
        return known
    raise InvalidInputError(
        f"model: {model.name} is a traced graph that is not recognised as a transformer; "
        "wafers need one"
    )


# ---- running ----


def _one_wafer(
    session: Session, problem: Problem, effort: Effort, seed: int, compare: bool, quiet: bool
) -> Comparison | MappingResult:
    with shown(quiet) as (say, show):
        name = f"{problem.model.name} on {problem.wafer.name}"
        say(name)
        if compare:
            return compare_mappings(
                problem,
                effort,
                seed,
                progress=show,
                report=lambda part: say(f"{name}: {part}"),
                session=session,
            )
        return search_mappings([problem], effort, seed, progress=show, session=session)[0]


def _space(
    session: Session,
    model: Any,
    space: WaferSpace,
    training: WaferTraining,
    effort: Effort,
    seed: int,
    compare: bool,
    quiet: bool,
) -> tuple[WaferResult, Comparison | None]:
    with shown(quiet) as (say, show):
        say(f"{model.name} on {space.name}")
        found = search_wafers(model, space, training, effort, seed, progress=show, session=session)
    if not compare:
        return found, None
    with shown(quiet) as (say, show):
        name = f"{model.name} on {found.best.problem.wafer.name}"
        case = compare_mappings(
            found.best.problem,
            effort,
            seed,
            known=[found.best.best],
            progress=show,
            report=lambda part: say(f"{name}: {part}"),
            session=session,
        )
    if found.base is not None:
        case.ablations["no_architecture"] = found.base.best
    return found, case


class _Asked(NamedTuple):
    """What is asked of every case."""

    training: WaferTraining
    effort: Effort
    seed: int
    compare: bool
    quiet: bool
    to_file: Path | None
    maps: int
    """Fault maps to draw."""
    die_fault: float | None
    link_fault: float
    front: tuple[str, ...] = ()
    """Objectives of a front of wafers; none where only the fastest is asked for."""


def _studied(session: Session, problem: Problem, asked: _Asked) -> FaultStudy | None:
    """Draw fault maps of a wafer and find its throughput under each."""
    if not asked.maps:
        return None
    with shown(asked.quiet) as (say, show):
        say(f"{problem.model.name} on {problem.wafer.name}: fault maps")
        return fault_study(
            problem,
            asked.maps,
            asked.die_fault,
            asked.link_fault,
            seed=asked.seed,
            progress=show,
            session=session,
        )


def _answered(
    session: Session, pairs: list[tuple[Any, Wafer | WaferSpace]], asked: _Asked
) -> Iterator[Case]:
    """Answer each case; what is finished is in the file before the next one starts."""
    cases: list[Case] = []
    training, effort, seed, compare, quiet, to_file = asked[:6]
    plain = [Problem(m, w, training) for m, w in pairs if isinstance(w, Wafer)]
    if not session.sequential and not compare:  # all at once, so that no worker waits
        with shown(quiet) as (say, show):
            say(f"{len(plain)} mappings")
            search_mappings(plain, effort, seed, progress=show, session=session)
    for model, where in pairs:
        if isinstance(where, WaferSpace) and asked.front:
            given = (training, effort, seed, asked.front)
            cases.append(front_case(session, model, where, given, quiet, to_file))
        elif isinstance(where, WaferSpace):
            found, case = _space(session, model, where, training, effort, seed, compare, quiet)
            study = _studied(session, found.best.problem, asked)
            cases.append(Case(case or found.best, found, study))
        else:
            problem = Problem(model, where, training)
            answer = _one_wafer(session, problem, effort, seed, compare, quiet)
            cases.append(Case(answer, None, _studied(session, problem, asked)))
        yield cases[-1]
        if effort.stop is not None and effort.stop():
            return
        if to_file is not None and str(to_file) != "-" and len(cases) < len(pairs):
            text = json.dumps({"cases": [case.data() for case in cases]}, indent=2)
            write_text(to_file, text + "\n")


def wafer(
    model: Annotated[
        list[str],
        typer.Argument(
            help="Models, one or several: presets (`phaze-fast models` lists them), .yaml or"
            " .json files, or folders with a HuggingFace config.json."
        ),
    ],
    on: Annotated[
        list[str] | None,
        typer.Option(
            "--wafer",
            help="A wafer, or a space of wafers to choose from: a preset (`phaze-fast "
            "wafers` lists them) or a file; may be given several times.",
        ),
    ] = None,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Also score other systems' plans, and parts of ours."),
    ] = False,
    global_batch: Annotated[int, typer.Option(help="Sequences of one training step.")] = 512,
    seq: Annotated[
        int | None, typer.Option(help="Tokens of a sequence (default: as the model is published).")
    ] = None,
    optimizer: Annotated[
        str, typer.Option(help="The optimiser, whose state takes memory.")
    ] = "adam-bf16-grad",
    joined: Annotated[
        int, typer.Option(help="Wafers of this kind that work together over their I/O.", min=1)
    ] = 1,
    faults: Annotated[
        Path | None,
        typer.Option(help="Dead dies and links by row and column: a YAML or JSON file."),
    ] = None,
    fault_maps: Annotated[
        int,
        typer.Option(
            help="Draw so many maps of dead dies and links at random, and say the throughput"
            " expected and at worst.",
            min=0,
        ),
    ] = 0,
    die_fault: Annotated[
        float | None,
        typer.Option(help="Probability that a die is dead in them; by default by its yield."),
    ] = None,
    link_fault: Annotated[
        float, typer.Option(help="With --fault-maps: probability that a link is dead.")
    ] = 0.0,
    front: Annotated[
        str | None,
        typer.Option(
            help="Of a space: keep all wafers that no other beats in these, commas between: "
            + ", ".join(OBJECTIVES)
            + "; or all."
        ),
    ] = None,
    encoding: Annotated[
        Path | None,
        typer.Option(help="Score the mapping of this JSON file instead of searching for one."),
    ] = None,
    show: Annotated[
        bool,
        typer.Option(
            "--describe", help="Also say how each operator is split and what it communicates."
        ),
    ] = False,
    seeds: Annotated[
        int, typer.Option(help="Runs of simulated annealing for each promising layout.")
    ] = 4,
    steps: Annotated[int, typer.Option(help="Evaluations of each run.")] = 20_000,
    promising: Annotated[int, typer.Option(help="How many layouts count as promising.")] = 6,
    budget: Annotated[
        float | None, typer.Option(help="Look at no further layout after so many seconds.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of all random choices.")] = 0,
    threads: Annotated[
        int | None, typer.Option(help="At most so many threads; by default all cores.")
    ] = None,
    executor: Annotated[
        str | None,
        typer.Option(help="Where to work: threads, processes, dask://host:port, ray or mpi."),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            help="Folder to keep results in and to go on from.",
            parser=folder,
            metavar="<path>",
        ),
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(
            help="Folder of earlier results; by default the user's cache folder.",
            parser=folder,
            metavar="<path>",
        ),
    ] = None,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Neither look up earlier results nor keep these.")
    ] = False,
    report: ToFigures = None,
    parquet: Annotated[
        Path | None,
        typer.Option(help="Write the tables of all models and wafers as Parquet.", callback=target),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
    as_json: AsJson = False,
    to_file: ToFile = None,
) -> None:
    """Map a model's operators on a wafer of dies; search wafers too where a space is given."""
    training = WaferTraining(global_batch, seq, optimizer)
    effort = Effort(seeds, steps, promising, budget)
    loaded = [_transformer(load_model(name, seq)) for name in model]
    named = [wafer_of(name) for name in on or ["dram-wafer"]]
    wafers = with_faults(joined_wafers(named, joined), faults)
    objectives = objectives_of(front, wafers, compare or bool(fault_maps))
    if encoding is not None:
        if len(loaded) > 1 or len(wafers) > 1 or compare:
            raise InvalidInputError(
                "--encoding: one model and one wafer are expected with it, and no --compare"
            )
        _score(Problem(loaded[0], _single(wafers[0]), training), encoding, show, as_json, to_file)
        return
    pairs = [(each, where) for where in wafers for each in loaded]
    kept = None if no_cache else cache or default_cache()
    with (
        stopped_by_hand() as stop,
        told_where(resume),
        Session(executor, threads, resume, kept) as session,
    ):
        effort = replace(effort, stop=stop)
        faulty = (fault_maps, die_fault, link_fault)
        asked = _Asked(training, effort, seed, compare, quiet, to_file, *faulty, objectives)
        cases = Cases(list(_answered(session, pairs, asked)), session)
        for message in session.notes:
            note(message)
    with ends_interrupted(stop()):
        _deliver(cases, report, parquet, show, as_json, to_file)


def _deliver(
    cases: Cases,
    report: Path | None,
    parquet: Path | None,
    show: bool,
    as_json: bool,
    to_file: Path | None,
) -> None:
    emit(cases.data, lambda: cases.human(show), as_json, to_file)
    if report is not None:
        from phaze_fast.report.page import write_report

        write_report(cases.data(), report)
        note(f"wrote {report}")
    if parquet is not None:
        cases.to_parquet(parquet)
        note(f"wrote {parquet}")
    late = sum(case.result.unseen for case in cases.cases)
    if late:
        note(f"stopped before {late:,} layouts were examined; the bound covers them too")
    if not any(case.best.fits for case in cases.cases):
        raise InfeasibleError(cases.cases[0].best.reason)


def _single(where: Wafer | WaferSpace) -> Wafer:
    return where if isinstance(where, Wafer) else where.base


def _score(problem: Problem, path: Path, show: bool, as_json: bool, to_file: Path | None) -> None:
    """Score a mapping from a file: a list of operator mappings, or any answer of this command."""
    data = read_document(path)
    if isinstance(data, dict):
        data = data.get("ours", data)
        data = data.get("encoding", data) if isinstance(data, dict) else data
    found = evaluate(problem, Encoding.from_list(data, str(path)))

    def human() -> list[RenderableType]:
        parts = [summary(problem, found, []), *picture(problem, found)]
        return [*parts, Text(describe(problem, found.encoding))] if show else parts

    emit(lambda: {"ours": found.to_dict()}, human, as_json, to_file)
    if not found.fits:
        raise InfeasibleError(found.reason)


def add_commands(app: typer.Typer) -> None:
    """Add this file's command to the program."""
    app.command("wafer")(wafer)
