"""The command `plan`: the best parallel plans of a model on given hardware."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from phaze_fast import models
from phaze_fast.cli.budget import Budget, BudgetAnswer
from phaze_fast.cli.option_groups import with_groups
from phaze_fast.cli.output import AsJson, ToFile, emit, fields, table
from phaze_fast.cli.plan_files import problem_of
from phaze_fast.cli.plan_options import Hardware, ModelName, Step, several
from phaze_fast.hardware import Accelerator, Cluster
from phaze_fast.models import TransformerModel
from phaze_fast.placement import Plan, Plans, Training, WhyNot, infeasible, plan, read_asked
from phaze_fast.placement import why_not as why_not_fastest
from phaze_fast.units import format_bytes, format_time

__all__ = ["add_commands", "stage_rows"]

_SHOWN = 6


def _row(found: Plans, each: Plan) -> list[str]:
    schedule = each.schedule if each.virtual == 1 else f"{each.schedule} x{each.virtual}"
    return [
        str(each.tp),
        str(each.pp),
        str(each.dp),
        str(each.cp),
        str(each.ep),
        str(each.zero),
        str(each.microbatch),
        schedule,
        each.recompute,
        format_time(each.time_s),
        format_bytes(each.memory_bytes),
        f"{each.tokens_per_s:,.0f}",
        f"{each.mfu:.1%}",
        str(found.cluster.devices - each.devices),
    ]


_COLUMNS = ["tp>", "pp>", "dp>", "cp>", "ep>", "zero>", "micro>", "schedule", "recompute", "step>"]
_COLUMNS += ["memory>", "tokens/s>", "MFU>", "idle>"]


def stage_rows(plan: Plan) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of a plan's stages."""
    rows = []
    for k, stage in enumerate(plan.stages):
        state = sum(stage.memory[t] for t in ("weights", "gradients", "optimizer"))
        rows.append(
            [
                str(k),
                ", ".join(f"{n} {kind}" for kind, n in stage.kinds.items()),
                stage.recompute,
                format_time(stage.load_s),
                format_bytes(state),
                format_bytes(stage.memory["activations"]),
                format_bytes(stage.memory_bytes - state - stage.memory["activations"]),
                _free(plan.limit_bytes - stage.memory_bytes),
            ]
        )
    columns = ["stage>", "layers", "recompute", "per micro-batch>", "state>", "activations>"]
    return [*columns, "other>", "free>"], rows


def _free(bytes_: float) -> str:
    return format_bytes(bytes_) if bytes_ >= 0 else f"-{format_bytes(-bytes_)}"


def _chip(found: Plans) -> Accelerator:
    chip = found.cluster.chip
    assert chip is not None, "a plan has a chip"  # `plan` has refused a cluster without one
    return chip


def _human(
    found: Plans, budget: BudgetAnswer | None, answer_why: WhyNot | None
) -> list[RenderableType]:
    chip = _chip(found)
    title = f"{found.model.name} on {found.cluster.devices} x {chip.name}"
    rows = [_row(found, each) for each in found.plans]
    parts: list[RenderableType] = [
        table(title, _COLUMNS, rows, chip.calibration.note),
        *([f"Why not {answer_why}\n"] if answer_why is not None else []),
        *([budget.table()] if budget is not None else []),
        fields(
            "Where the fastest step's time goes",
            [
                (name, f"{format_time(seconds)} ({seconds / found.best.time_s:.1%})")
                for name, seconds in found.best.parts_s.items()
                if seconds > 1e-6 * found.best.time_s
            ],
        ),
        table("The fastest, stage by stage", *stage_rows(found.best)),
    ]
    smaller = [p for p in found.front[1:] if p not in found.plans][:_SHOWN]
    if smaller:
        rows = [_row(found, each) for each in smaller]
        parts.append(table("Slower, but smaller", _COLUMNS, rows))
    if found.rejected:
        left = list(found.rejected.items())
        rows = [[why, str(count)] for why, count in left[:_SHOWN]]
        more = len(left) - len(rows)
        caption = f"and {more} more reasons; --json lists all" if more > 0 else ""
        parts.append(table("Left out", ["why", "layouts>"], rows, caption))
    parts.append(f"Optimal among: {found.space}.")
    return parts


def _planned(
    model: TransformerModel, cluster: Cluster, training: Training, top: int, threads: int | None
) -> Plans:
    """Find the plans, with a bar that shows how far it is."""
    with Progress(
        TextColumn("placing"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        transient=True,
        disable=not sys.stderr.isatty(),
        console=_stderr(),
    ) as bar:
        task = bar.add_task("placing", total=None)
        return plan(
            model,
            cluster,
            training,
            top=top,
            threads=threads,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )


@with_groups
def plan_model(
    model: ModelName,
    where: Hardware,
    step: Step,
    budget: Budget,
    global_batch: Annotated[int, typer.Option(help="Sequences of one step.")] = 512,
    microbatch: Annotated[str, typer.Option(help="Sequences at once; several to try.")] = "1,2,4,8",
    tp: Annotated[str | None, typer.Option(help="Tensor-parallel widths to try.")] = None,
    pp: Annotated[str | None, typer.Option(help="Counts of stages to try.")] = None,
    dp: Annotated[str | None, typer.Option(help="Counts of replicas to try.")] = None,
    cp: Annotated[
        str | None,
        typer.Option(help="Context-parallel widths to try; by default 1, more on long sequences."),
    ] = None,
    ep: Annotated[
        str | None,
        typer.Option(help="Expert-parallel widths to try; by default 1, more with experts."),
    ] = None,
    zero: Annotated[str, typer.Option(help="ZeRO stages to try.")] = "0,1",
    recompute: Annotated[
        str,
        typer.Option(
            help="auto, none, selective, full, or sets joined by +: norms, activations, "
            "gated-product, up-projection, attention; of several each stage has what is fastest."
        ),
    ] = "auto",
    schedule: Annotated[
        str,
        typer.Option(
            help="1f1b, gpipe, interleaved, zb-h1, zb-h2, zb-v, dualpipe-v; several to try."
        ),
    ] = "1f1b,interleaved",
    virtual: Annotated[str, typer.Option(help="Chunks per stage where interleaved.")] = "2,4",
    rank_order: Annotated[
        str, typer.Option(help="auto, replicas-inside or stages-inside.")
    ] = "auto",
    top: Annotated[int, typer.Option(help="Plans to list.")] = 10,
    why_not: Annotated[
        str | None,
        typer.Option(
            help="Fields of a plan you have in mind, such as tp=8,pp=4: what it would give, and "
            "where it loses against the fastest."
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="At most so many threads; by default all cores.")
    ] = None,
    as_json: AsJson = False,
    to_file: ToFile = None,
) -> None:
    """Find the best parallel plans of a model on given hardware."""
    budget.check(where.devices)
    asked = None if why_not is None else read_asked(why_not)
    training = Training.from_dict(
        {
            **step.given(),
            "global_batch": global_batch,
            "microbatch": several(microbatch, "microbatch"),
            "tensor_parallel": several(tp, "tp"),
            "pipeline": several(pp, "pp"),
            "data_parallel": several(dp, "dp"),
            "context_parallel": several(cp, "cp"),
            "expert_parallel": several(ep, "ep"),
            "zero": several(zero, "zero"),
            "recompute": tuple(recompute.split(",")),
            "schedule": tuple(schedule.split(",")),
            "virtual": several(virtual, "virtual"),
            "rank_order": rank_order,
        }
    )
    cluster = where.cluster()
    found = _planned(models.load(model), cluster, training, top, threads)
    if not found.plans:
        error = infeasible(found)
        if as_json or to_file is not None:
            answer = {"status": "infeasible", "reason": str(error), "plans": []}
            emit(lambda: {**answer, "rejected": found.rejected}, list, True, to_file)
        raise error
    best = found.best
    budgeted = budget.answer(
        tokens_per_step=training.global_batch * best.seq,
        step_s=best.time_s,
        devices=cluster.devices,
        chip=_chip(found),
        step_j=best.energy_j,
    )
    answer_why = None if asked is None else why_not_fastest(found, asked, threads)
    emit(
        lambda: {
            "status": "optimal",
            "space": found.space,
            **problem_of(found.model, found.cluster),
            "calibration": _chip(found).calibration.to_dict(),
            **({} if budgeted is None else {"budget": budgeted.to_dict()}),
            **({} if answer_why is None else {"why_not": answer_why.to_dict()}),
            "plans": [each.to_dict() for each in found.plans],
            "front": [each.to_dict() for each in found.front],
            "tried": found.tried,
            "rejected": found.rejected,
        },
        lambda: _human(found, budgeted, answer_why),
        as_json,
        to_file,
    )


def _stderr() -> Any:
    from rich.console import Console

    return Console(stderr=True)


def add_commands(app: typer.Typer) -> None:
    """Add the command of this file."""
    app.command("plan")(plan_model)
