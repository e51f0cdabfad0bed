"""The command `place`: placement problems from a file, and the best plan of each."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from phaze_fast.cli.output import JsonPath, Output, note, show, table, write_text
from phaze_fast.errors import InfeasibleError, InvalidInputError, check_one_of
from phaze_fast.papers import (
    PRICED_REPLICAS,
    TIME_UNITS,
    ProblemRecord,
    is_nest,
    nest,
    nest_from_dict,
    problem_from_dict,
    published,
    read_records,
    solve_nest,
    solve_published,
)
from phaze_fast.threads import thread_count
from phaze_fast.units import format_bytes

Answer = dict[str, Any]


@dataclass(frozen=True)
class _Form:
    """How problems of one form are read, solved and shown."""

    name: str
    read: Callable[[Any, str], Any]
    solve: Callable[[list[Any]], list[Answer]]
    degrees: tuple[str, str]
    """Fields of an answer with the tensor width and the replicas."""
    fullest: Callable[[Answer], float]
    unplanned: Callable[[str, str, str], Answer]
    """Builds the answer for a problem without a plan, from its name, status and reason."""


def _phaze(threads: int) -> _Form:
    return _Form(
        name="phaze",
        read=problem_from_dict,
        solve=lambda problems: solve_published(problems, threads),
        degrees=("tensorParallelDegree", "dataParallelDegree"),
        fullest=lambda answer: max(answer["memory"]["stage_bytes"]),
        unplanned=published.unplanned,
    )


def _nest(threads: int, time_unit: str, replicas: str) -> _Form:
    return _Form(
        name="nest",
        read=lambda data, name: nest_from_dict(data, name, time_unit),
        solve=lambda problems: solve_nest(problems, threads, replicas),
        degrees=("t", "d"),
        fullest=lambda answer: max(stage["memoryBytes"] for stage in answer["stages"]),
        unplanned=nest.unplanned,
    )


def _solved(form: _Form, problems: list[Any]) -> list[Answer | InvalidInputError]:
    """Solve all problems at once; where one is refused, solve them one by one."""
    try:
        return list(form.solve(problems))
    except InvalidInputError as error:
        if len(problems) == 1:
            return [error]
    return [_solved(form, [problem])[0] for problem in problems]


def _answers(form: _Form, records: list[ProblemRecord]) -> tuple[list[Answer], list[str]]:
    """Answer every record in order; also list the refused records with reasons."""
    problems, found = [], dict[int, Answer | InvalidInputError]()
    for k, record in enumerate(records):
        try:
            if record.error:
                raise InvalidInputError(record.error)
            problems.append(form.read(record.data, record.name))
        except InvalidInputError as error:
            found[k] = error
    read = [k for k in range(len(records)) if k not in found]
    found |= zip(read, _solved(form, problems), strict=True)
    answers, refused = [], []
    for k, record in enumerate(records):
        answer = found[k]
        if isinstance(answer, InvalidInputError):
            refused.append(f"{record.where}: {answer}")
            answer = form.unplanned(record.name, "invalid", str(answer))
        answers.append(answer)
    return answers, refused


def _row(form: _Form, answer: Answer) -> list[str]:
    milliseconds = f"{1e3 * answer['solve_s']:.2f}"
    if answer["status"] != "optimal":
        return [answer["name"], answer["status"], *("-" * 5), milliseconds]
    widths = (str(answer[field]) for field in form.degrees)
    first = [answer["name"], answer["status"], f"{answer['finalTimePerBatch']:.8g}"]
    fullest = format_bytes(form.fullest(answer))
    return [*first, str(len(answer["stages"])), *widths, fullest, milliseconds]


def _named(nodes: list[Any]) -> str:
    return f"{nodes[0]} to {nodes[-1]}" if len(nodes) > 1 else str(nodes[0])


def _phaze_stages(answer: Answer) -> RenderableType:
    rows = []
    terms = answer["memory"]["stage_terms"]
    for k, (stage, bytes_by_term) in enumerate(zip(answer["stages"], terms, strict=True)):
        nodes, total = stage["nodes"], sum(bytes_by_term.values())
        sizes = [bytes_by_term[term] for term in ("weights", "activations", "stash")]
        sizes.append(answer["memory"]["limit_bytes"] - total)
        placed = [str(k), _named(nodes), str(len(nodes)), str(stage["devicesForStage"])]
        rows.append([*placed, *map(format_bytes, sizes)])
    columns = ["stage>", "layers", "count>", "devices>", "weights>", "activations>", "stash>"]
    return table("", [*columns, "free>"], rows)


def _nest_stages(answer: Answer) -> RenderableType:
    rows = []
    for k, stage in enumerate(answer["stages"]):
        first, count = stage["firstDevice"], stage["devicesForStage"]
        tiers = ["-" if stage[end] is None else str(stage[end]) for end in ("tierIn", "tierOut")]
        devices = f"{first} to {first + count - 1}" if count > 1 else str(first)
        placed = [str(k), _named(stage["nodes"]), str(len(stage["nodes"])), devices, *tiers]
        rows.append([*placed, f"{stage['load']:.6g}", format_bytes(stage["memoryBytes"])])
    columns = ["stage>", "layers", "count>", "devices", "tier in>", "tier out>", "load>", "memory>"]
    return table("", columns, rows)


def _tables(form: _Form, answers: list[Answer], many: bool) -> list[RenderableType]:
    headings = ["problem", "status", "time>", "stages>", "t>", "d>", "fullest>", "ms>"]
    parts: list[RenderableType] = [table("", headings, [_row(form, answer) for answer in answers])]
    if len(answers) == 1 and answers[0]["status"] == "optimal":
        stages = _nest_stages if form.name == "nest" else _phaze_stages
        parts.append(stages(answers[0]))
    unsolved = [answer for answer in answers if many and answer["status"] == "infeasible"]
    return [*parts, *(f"{answer['name']}: {answer['reason']}" for answer in unsolved)]


@dataclass(frozen=True)
class Placing:
    """How to place."""

    objective: str | None = None
    """phaze or nest; by default as the first problem is written."""
    time_unit: str | None = None
    """nest: unit of the layers' latencies (s, ms, us); answers are in s."""
    replicas: str | None = None
    """nest: price messages in the first replica, as NEST does, or in all."""
    threads: int | None = None
    """At most so many threads; by default all cores."""


def _choose(records: list[ProblemRecord], how: Placing) -> _Form:
    """Choose the form of a file: --objective, or that of its first readable problem."""
    workers = thread_count(how.threads)
    for option, value, accepted in (
        ("--objective", how.objective, ("phaze", "nest")),
        ("--time-unit", how.time_unit, tuple(TIME_UNITS)),
        ("--replicas", how.replicas, PRICED_REPLICAS),
    ):
        if value is not None:
            check_one_of(option, value, accepted)
    objective = how.objective
    if objective is None:
        readable = [record.data for record in records if not record.error]
        objective = "nest" if readable and is_nest(readable[0]) else "phaze"
    if objective == "nest":
        return _nest(workers, how.time_unit or "s", how.replicas or "first")
    for option, value in (("--time-unit", how.time_unit), ("--replicas", how.replicas)):
        if value is not None:
            raise InvalidInputError(
                f"{option}: {value!r} is not accepted with the objective phaze; it is for nest"
            )
    return _phaze(workers)


@dataclass(frozen=True)
class PlacementOutput(Output):
    """Output."""

    as_json: Annotated[bool, typer.Option("--json")] = False
    """Print the answers as JSON instead of a table."""
    to_file: JsonPath = None
    """Where answers go, in the same form."""


def place_file(
    file: Annotated[
        Path,
        typer.Argument(
            help="A problem in the form of the public PHAZE or NEST program, or .jsonl with many."
        ),
    ],
    output: PlacementOutput,
    how: Placing,
) -> None:
    """Solve placement problems of PHAZE or NEST, proven.

    Example: phaze-fast place problems.jsonl
    """
    many = file.suffix == ".jsonl"
    records = list(read_records(file))
    form = _choose(records, how)
    answers, refused = _answers(form, records)
    if refused and not many:
        raise InvalidInputError(refused[0])
    document = answers if many else answers[0]
    if output.to_file is not None:
        if many:
            text = "".join(json.dumps(answer, allow_nan=False) + "\n" for answer in answers)
        else:
            text = json.dumps(document, indent=2, allow_nan=False) + "\n"
        write_text(output.to_file, text)
        note(f"wrote {output.to_file}")
    if output.as_json:
        Output().write(document)
    elif output.to_file is None:
        show(_tables(form, answers, many))
    if refused:
        more = f" ({len(refused)} of {len(records)} lines are refused)" if len(refused) > 1 else ""
        raise InvalidInputError(refused[0] + more)
    if not many and answers[0]["status"] != "optimal":
        raise InfeasibleError(answers[0]["reason"])
