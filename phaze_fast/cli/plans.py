"""The command `plan`: the best parallel plans of a model on given hardware."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich import progress as bars
from rich.console import Console, Group, RenderableType

from phaze_fast.cli.budget import Budget, BudgetAnswer
from phaze_fast.cli.interrupts import ends_interrupted, stopped_by_hand
from phaze_fast.cli.model_argument import load_model
from phaze_fast.cli.option_groups import with_groups
from phaze_fast.cli.output import (
    AsJson,
    ToFile,
    ToPage,
    emit,
    fields,
    is_narrow,
    is_watched,
    note,
    table,
    typed,
)
from phaze_fast.cli.plan_files import problem_of
from phaze_fast.cli.plan_options import Hardware, ModelName, Step, several
from phaze_fast.cli.sharing_options import SharingTried
from phaze_fast.hardware import Accelerator, Cluster
from phaze_fast.models import Model
from phaze_fast.planning import Plan, Plans, Training, WhyNot, plan, read_asked
from phaze_fast.planning import why_not as why_not_fastest
from phaze_fast.units import format_bytes, format_time

__all__ = ["add_commands", "stage_rows"]

_SHOWN = 6


def _schedule(plan: Plan) -> str:
    return plan.schedule if plan.vpp == 1 else f"{plan.schedule} x{plan.vpp}"


def _zero(plan: Plan) -> str:
    return f"{plan.zero} of {plan.shard}" if plan.hybrid else str(plan.zero)


def _cp(plan: Plan) -> str:
    return f"{plan.cp} {plan.cp_kind}" if plan.cp > 1 else "1"


def _row(found: Plans, each: Plan) -> list[str]:
    return [
        str(each.tp),
        str(each.pp),
        str(each.dp),
        _cp(each),
        str(each.ep) if each.etp is None else f"{each.ep} etp {each.etp}",
        _zero(each),
        str(each.micro_batch),
        _schedule(each),
        each.recompute,
        format_time(each.time_s),
        format_bytes(each.memory_bytes),
        f"{each.tokens_per_s:,.0f}",
        f"{each.mfu:.1%}",
        str(found.cluster.devices - each.devices),
    ]


def _short_row(each: Plan) -> list[str]:
    """Give a plan in few columns, for terminals of 80."""
    widths = {"tp": each.tp, "pp": each.pp, "dp": each.dp}
    widths |= {name: width for name, width in (("cp", each.cp), ("ep", each.ep)) if width > 1}
    said = " ".join(f"{name}{width}" for name, width in widths.items())
    how = f"{_schedule(each)}, recompute {each.recompute}"
    return [
        f"{said} zero{_zero(each)} micro{each.micro_batch}, {how}",
        format_time(each.time_s),
        format_bytes(each.memory_bytes),
        f"{each.mfu:.1%}",
    ]


_COLUMNS = ["tp>", "pp>", "dp>", "cp>", "ep>", "zero>", "micro>", "schedule", "recompute", "step>"]
_COLUMNS += ["memory>", "tokens/s>", "MFU>", "idle>"]
_SHORT_COLUMNS = ["plan", "step>", "memory>", "MFU>"]


def _plans_table(title: str, found: Plans, plans: Sequence[Plan], caption: str = "") -> Group:
    if is_narrow():
        return table(title, _SHORT_COLUMNS, [_short_row(each) for each in plans], caption)
    return table(title, _COLUMNS, [_row(found, each) for each in plans], caption)


def stage_rows(plan: Plan) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of a plan's stages, fewer columns on a narrow terminal."""
    if is_narrow():
        return _SHORT_STAGES, [_short_stage(k, plan) for k in range(plan.pp)]
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


_SHORT_STAGES = ["stage>", "layers", "recompute", "micro-batch>", "memory>", "free>"]


def _short_stage(k: int, plan: Plan) -> list[str]:
    stage = plan.stages[k]
    return [
        str(k),
        ", ".join(f"{n} {kind}" for kind, n in stage.kinds.items()),
        stage.recompute,
        format_time(stage.load_s),
        format_bytes(stage.memory_bytes),
        _free(plan.limit_bytes - stage.memory_bytes),
    ]


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
    parts: list[RenderableType] = [
        _plans_table(title, found, found.plans, chip.calibration.note),
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
    # A search that was stopped does not go on for the front.
    smaller = [p for p in (found.front[1:] if found.complete else ()) if p not in found.plans][
        :_SHOWN
    ]
    if smaller:
        parts.append(_plans_table("Slower, but smaller", found, smaller))
    if found.rejected:
        left = list(found.rejected.items())
        rows = [[why, str(count)] for why, count in left[:_SHOWN]]
        more = len(left) - len(rows)
        caption = f"and {more} more reasons; --json lists all" if more > 0 else ""
        parts.append(table("Left out", ["why", "layouts>"], rows, caption))
    if not found.complete:
        least = format_time(found.bound_s)
        parts.append(
            f"Stopped early: no plan takes less than {least} (gap {found.gap:.2%}), and the plans "
            "after the first may not be the next fastest."
        )
    said = "Optimal" if found.status == "optimal" else "The best found"
    parts.append(f"{said} among: {found.space}.")
    return parts


def _document(
    found: Plans, budget: BudgetAnswer | None, answer_why: WhyNot | None
) -> dict[str, Any]:
    """Give everything as plain data; of a search that was stopped no front."""
    return {
        "status": found.status,
        "bound_s": found.bound_s,
        "gap": found.gap,
        "space": found.space,
        **problem_of(found.model, found.cluster),
        "calibration": _chip(found).calibration.to_dict(),
        **({} if budget is None else {"budget": budget.to_dict()}),
        **({} if answer_why is None else {"why_not": answer_why.to_dict()}),
        "plans": [each.to_dict() for each in found.plans],
        "front": [each.to_dict() for each in (found.front if found.complete else ())],
        "tried": found.tried,
        "rejected": found.rejected,
    }


def _planned(
    model: Model, cluster: Cluster, training: Training, top: int, threads: int | None
) -> tuple[Plans, bool]:
    """Find the plans, with a bar that shows how far it is; and say whether Ctrl-C ended it."""
    watched = is_watched(sys.stderr)
    with (
        stopped_by_hand() as stop,
        bars.Progress(
            bars.TextColumn("strategies scheduled (time so far, time left)"),
            bars.BarColumn(),
            bars.MofNCompleteColumn(),
            bars.TimeElapsedColumn(),
            bars.TimeRemainingColumn(),
            transient=True,
            disable=not watched,
            console=Console(stderr=True, quiet=not watched),
        ) as bar,
    ):
        task = bar.add_task("plan", total=None)
        found = plan(
            model,
            cluster,
            training,
            top=top,
            threads=threads,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
            stop=stop,
        )
        return found, stop() and not found.complete


@with_groups
def plan_model(
    model: ModelName,
    where: Hardware,
    step: Step,
    sharing: SharingTried,
    budget: Budget,
    global_batch: Annotated[
        int, typer.Option(help="Sequences of one training step, over all replicas.")
    ] = 512,
    micro_batch: Annotated[
        str, typer.Option(help="Sequences a device works on at once; several to try.")
    ] = "1,2,4,8",
    tp: Annotated[
        str | None,
        typer.Option(
            help="Devices that share each layer (tensor parallelism); several to try. By default "
            "powers of two up to a node."
        ),
    ] = None,
    pp: Annotated[
        str | None, typer.Option(help="Pipeline stages; several to try. By default all counts.")
    ] = None,
    dp: Annotated[
        str | None,
        typer.Option(
            help="Replicas of the model (data parallelism); several to try. By default all counts."
        ),
    ] = None,
    cp: Annotated[
        str | None,
        typer.Option(
            help="Devices that share each sequence (context parallelism); several to try. By "
            "default 1, more on long sequences."
        ),
    ] = None,
    ep: Annotated[
        str | None,
        typer.Option(
            help="Devices that share the experts of a layer (expert parallelism); several to try. "
            "By default 1, more with experts."
        ),
    ] = None,
    zero: Annotated[
        str | None,
        typer.Option(
            help="What replicas share: 0 nothing, 1 optimiser state, 2 gradients too, 3 weights "
            "too; several to try. By default 0 and 1, and where nothing fits 2 and 3."
        ),
    ] = None,
    recompute: Annotated[
        str,
        typer.Option(
            help="auto, none, selective, needed, full, or sets joined by +: norms, activations, "
            "gated-product, up-projection, output-projection, alternate-products, attention; of "
            "several each stage has what is fastest."
        ),
    ] = "auto",
    schedule: Annotated[
        str,
        typer.Option(
            help="1f1b, gpipe, interleaved, zb-h1, zb-h2, zb-v, dualpipe, dualpipe-v; several to "
            "try."
        ),
    ] = "1f1b,interleaved",
    vpp: Annotated[
        str,
        typer.Option(
            help="Chunks of the model on a device where the schedule is interleaved; several to "
            "try."
        ),
    ] = "2,4",
    rank_order: Annotated[
        str,
        typer.Option(
            help="Which ranks lie side by side: replicas-inside (replicas of a stage), "
            "stages-inside (stages of a replica), or auto (both are tried)."
        ),
    ] = "auto",
    top: Annotated[int, typer.Option(help="How many plans to list.")] = 10,
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
    report: ToPage = None,
    as_json: AsJson = False,
    to_file: ToFile = None,
) -> None:
    """Find the fastest parallel plans of a model on given hardware, and prove that they are.

    Every combination of widths, micro-batch, stages, ZeRO and schedule that the options allow is
    settled. Options that take several values take them divided by commas.

    Example: phaze-fast plan llama2-7b --chip h100 --devices 64 --global-batch 256 -o plan.json
    """
    budget.check(where.devices)
    asked = None if why_not is None else read_asked(why_not)
    training = Training.from_dict(
        {
            **step.given(),
            **sharing.given(),
            "global_batch": global_batch,
            "micro_batch": several(micro_batch, "micro_batch"),
            "tp": several(tp, "tp"),
            "pp": several(pp, "pp"),
            "dp": several(dp, "dp"),
            "cp": several(cp, "cp"),
            "ep": several(ep, "ep"),
            **({} if zero is None else {"zero": several(zero, "zero")}),
            "recompute": tuple(recompute.lower().split(",")),
            "schedule": tuple(schedule.lower().split(",")),
            "vpp": several(vpp, "vpp"),
            "rank_order": rank_order.lower(),
        }
    )
    cluster = where.cluster()
    found, stopped = _planned(load_model(model, training.seq), cluster, training, top, threads)
    if not found.plans:
        error = found.infeasible
        if as_json or to_file is not None:
            answer = {"status": "infeasible", "reason": str(error), "plans": []}
            emit(lambda: {**answer, "rejected": found.rejected}, list, True, to_file)
        raise error
    if report is not None:
        from phaze_fast.report.plan_page import plan_page, write_page

        proven = found.status == "optimal"
        page = plan_page(found.model, found.cluster, found.plans, typed(), proven)
        write_page(page, report)
        note(f"wrote {report}")
    best = found.best
    budgeted = budget.answer(
        tokens_per_step=training.global_batch * best.seq,
        step_s=best.time_s,
        devices=cluster.devices,
        chip=_chip(found),
        step_j=best.energy_j,
    )
    answer_why = None if asked is None else why_not_fastest(found, asked, threads)
    with ends_interrupted(stopped):
        emit(
            lambda: _document(found, budgeted, answer_why),
            lambda: _human(found, budgeted, answer_why),
            as_json,
            to_file,
        )


def add_commands(app: typer.Typer) -> None:
    """Add the command of this file."""
    app.command("plan")(plan_model)
