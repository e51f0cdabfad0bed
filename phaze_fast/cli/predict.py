"""The command `predict`: what a given parallel plan takes, in seconds and bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from phaze_fast.cli.budget import Budget, BudgetAnswer
from phaze_fast.cli.model_argument import load_model
from phaze_fast.cli.option_groups import with_groups
from phaze_fast.cli.output import AsJson, ToFile, ToPage, emit, fields, note, table, typed
from phaze_fast.cli.plan_files import problem_of
from phaze_fast.cli.plan_options import Hardware, ModelName, Step, several
from phaze_fast.cli.plans import stage_rows
from phaze_fast.cli.sharing_options import Sharing
from phaze_fast.documents import read_document
from phaze_fast.export import is_framework_file, read_plan
from phaze_fast.hardware import Calibration, presets
from phaze_fast.models import Model
from phaze_fast.planning import Plan, PlanSpec, predict
from phaze_fast.units import format_bytes, format_time

__all__ = ["add_commands"]


def _document(
    plan: Plan, problem: dict[str, Any], calibration: Calibration, budget: BudgetAnswer | None
) -> dict[str, Any]:
    data = plan.to_dict()
    top = (
        "time_s",
        "interval_s",
        "samples_per_s",
        "tokens_per_s",
        "mfu",
        "hfu",
        "memory_bytes",
        "memory",
        "peak",
    )
    return {
        **{name: data[name] for name in top},
        "over_bytes": data["over_bytes"],
        "limit_bytes": data["limit_bytes"],
        "parts_s": data["parts_s"],
        "energy_j": data["energy_j"],
        "stages": data["stages"],
        "calibration": calibration.to_dict(),
        **({} if budget is None else {"budget": budget.to_dict()}),
        **problem,
        "plan": data,
    }


def _human(
    plan: Plan, title: str, calibration: Calibration, budget: BudgetAnswer | None
) -> list[RenderableType]:
    fits = f"{format_bytes(plan.limit_bytes - plan.memory_bytes)} free"
    if plan.over_bytes:
        fits = f"{format_bytes(plan.over_bytes)} ({plan.over_bytes:,.0f} bytes) OVER"
    between = " and ".join(format_time(seconds) for seconds in plan.interval_s)
    rows = [
        ("step", f"{format_time(plan.time_s)}, measured four times of five between {between}"),
        ("samples/s", f"{plan.samples_per_s:,.2f}"),
        ("tokens/s", f"{plan.tokens_per_s:,.0f}"),
        ("MFU, HFU", f"{plan.mfu:.1%}, {plan.hfu:.1%}"),
        ("memory", f"{format_bytes(plan.memory_bytes)} of the fullest device, {fits}"),
        ("held most", f"{plan.peak['instant']}; beside weights and optimiser, {plan.peak['term']}"),
        ("energy", f"{plan.energy_j:,.0f} J a step"),
    ]
    parts = [
        (name, f"{format_time(seconds)} ({seconds / plan.time_s:.1%})")
        for name, seconds in plan.parts_s.items()
        if seconds > 1e-6 * plan.time_s
    ]
    columns, stages = stage_rows(plan)
    return [
        fields(title, rows, calibration.note),
        *([budget.table()] if budget is not None else []),
        fields("Where the step's time goes", parts),
        table("Stage by stage", columns, stages),
    ]


def _given(plan: Path | None, options: dict[str, Any], model: Model, devices: int) -> PlanSpec:
    """Read the plan from a file, or from the options; an option overrides the file's field."""
    said = {name: value for name, value in options.items() if value is not None}
    if plan is None:
        return PlanSpec.from_dict({"global_batch": 512, **said})
    if is_framework_file(plan):
        read = read_plan(plan, model, devices)
        for line in read.notes:
            note(line)
        spec = read.spec
    else:
        spec = PlanSpec.of(read_document(plan))
    return spec.replace(**said) if said else spec


def _by_stage(recompute: str | None) -> str | tuple[str, ...] | None:
    """Read what all stages recompute, or what each does."""
    if recompute is None or "," not in recompute:
        return recompute and recompute.lower()
    return tuple(recompute.lower().split(","))


@with_groups
def predict_plan(
    model: ModelName,
    where: Hardware,
    step: Step,
    sharing: Sharing,
    budget: Budget,
    plan: Annotated[
        Path | None,
        typer.Option(
            help="A plan: JSON or YAML as `plan --json` writes it, or a file of Megatron-LM, "
            "Megatron Bridge, DeepSpeed, torchtitan or MaxText."
        ),
    ] = None,
    tp: Annotated[
        int | None, typer.Option(help="Devices that share each layer (default 1).")
    ] = None,
    pp: Annotated[int | None, typer.Option(help="Pipeline stages (default 1).")] = None,
    dp: Annotated[int | None, typer.Option(help="Replicas of the model (default 1).")] = None,
    cp: Annotated[
        int | None, typer.Option(help="Devices that share each sequence (default 1).")
    ] = None,
    ep: Annotated[
        int | None, typer.Option(help="Devices that share the experts (default 1).")
    ] = None,
    zero: Annotated[int | None, typer.Option(help="ZeRO stage, 0 to 3 (default 0).")] = None,
    micro_batch: Annotated[
        int | None, typer.Option(help="Sequences a device works on at once (default 1).")
    ] = None,
    global_batch: Annotated[
        int | None, typer.Option(help="Sequences of one step (default 512).")
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            help="1f1b, gpipe, interleaved, zb-h1, zb-h2, zb-v, dualpipe or dualpipe-v (default "
            "1f1b)."
        ),
    ] = None,
    vpp: Annotated[int | None, typer.Option(help="Chunks per stage where interleaved.")] = None,
    recompute: Annotated[
        str | None,
        typer.Option(
            help="auto (what fits and is fastest, the default), none, selective, needed, full, or "
            "sets joined by +: norms, activations, gated-product, up-projection, "
            "output-projection, alternate-products, attention; "
            "full:3/norms: the first 3 blocks of a chunk; one for each stage, divided by commas."
        ),
    ] = None,
    stages: Annotated[
        str | None,
        typer.Option(help="Layers of each stage, such as 13,12,12,13; by default even."),
    ] = None,
    rank_order: Annotated[
        str | None,
        typer.Option(
            help="Which ranks lie side by side: replicas-inside (replicas of a stage, the "
            "default) or stages-inside (stages of a replica)."
        ),
    ] = None,
    report: ToPage = None,
    as_json: AsJson = False,
    to_file: ToFile = None,
) -> None:
    """Predict what a given plan takes; it is never refused for memory.

    Example: phaze-fast predict llama2-7b --chip h100 --devices 16 --tp 4 --pp 2 --dp 2
    --global-batch 64
    """
    budget.check(where.devices)
    loaded = load_model(model, step.seq)
    spec = _given(
        plan,
        {
            **step.given(),
            **sharing.given(),
            "tp": tp,
            "pp": pp,
            "dp": dp,
            "cp": cp,
            "ep": ep,
            "zero": zero,
            "micro_batch": micro_batch,
            "global_batch": global_batch,
            "schedule": schedule and schedule.lower(),
            "vpp": vpp,
            "recompute": _by_stage(recompute),
            "stages": several(stages, "--stages"),
            "rank_order": rank_order and rank_order.lower(),
        },
        loaded,
        where.devices,
    )
    cluster = where.cluster()
    predicted = predict(loaded, cluster, spec)
    chip = presets.chip(where.chip)
    budgeted = budget.answer(
        tokens_per_step=spec.global_batch * predicted.seq,
        step_s=predicted.time_s,
        devices=cluster.devices,
        chip=chip,
        step_j=predicted.energy_j,
    )
    if report is not None:
        from phaze_fast.report.plan_page import plan_page, write_page

        write_page(plan_page(loaded, cluster, [predicted], typed()), report)
        note(f"wrote {report}")
    title = f"{loaded.name} on {cluster.devices} x {chip.name}: {predicted}"
    emit(
        lambda: _document(predicted, problem_of(loaded, cluster), chip.calibration, budgeted),
        lambda: _human(predicted, title, chip.calibration, budgeted),
        as_json,
        to_file,
    )


def add_commands(app: typer.Typer) -> None:
    """Add the command of this file."""
    app.command("predict")(predict_plan)
