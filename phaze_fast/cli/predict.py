"""The command `predict`: time and memory of a given parallel plan."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.console import RenderableType

from phaze_fast.cli.budget import Budget, BudgetAnswer
from phaze_fast.cli.option_groups import RecordOptions
from phaze_fast.cli.options import Hardware, ModelName, Trained, load_model, problem_of
from phaze_fast.cli.output import PageOutput, fields, note, typed
from phaze_fast.cli.plan import energy_table, stage_table, time_table
from phaze_fast.documents import read_document
from phaze_fast.export import is_framework_file, read_plan
from phaze_fast.hardware import Calibration, Cluster, presets
from phaze_fast.models import Model
from phaze_fast.planning import Plan, PlanSpec, predict
from phaze_fast.report.plan_page import plan_page
from phaze_fast.units import format_bytes, format_time

_TOP = (
    *("time_s", "interval_s", "samples_per_s", "tokens_per_s", "mfu", "hfu", "memory_bytes"),
    *("mfu_convention", "memory", "device_memory", "peak", "over_bytes", "limit_bytes"),
    *("parts_s", "energy_j", "stages"),
)


def _document(
    plan: Plan, problem: dict[str, Any], calibration: Calibration, budget: BudgetAnswer | None
) -> dict[str, Any]:
    data = plan.to_dict()
    return {
        **{name: data[name] for name in _TOP},
        "calibration": calibration.to_dict(),
        **({} if budget is None else {"budget": budget.to_dict()}),
        **problem,
        "plan": data,
    }


def _tables(
    plan: Plan, model: Model, cluster: Cluster, title: str, budget: BudgetAnswer | None
) -> list[RenderableType]:
    fits = f"{format_bytes(plan.limit_bytes - plan.memory_bytes)} free"
    if plan.over_bytes:
        fits = f"{format_bytes(plan.over_bytes)} ({plan.over_bytes:,.0f} bytes) OVER"
    low, high = (format_time(seconds) for seconds in plan.interval_s)
    speeds = [("images/s", f"{plan.samples_per_s:,.2f}")]
    if model.sample != "image":
        speeds = [("samples/s", f"{plan.samples_per_s:,.2f}")]
        speeds.append(("tokens/s", f"{plan.tokens_per_s:,.0f}"))
    rows = [
        ("step", f"{format_time(plan.time_s)} (80% interval {low} to {high})"),
        *speeds,
        ("MFU, HFU", f"{plan.mfu:.1%}, {plan.hfu:.1%}: {plan.mfu_convention}"),
        ("memory", f"{format_bytes(plan.memory_bytes)} of the fullest device, {fits}"),
        ("as reported", plan.memory_as_reported),
        ("peak memory", f"{plan.peak['instant']}; most besides weights and optimiser: "
         f"{plan.peak['term']}"),
        *([("at the peak", plan.fullest.holders)] if plan.fullest.holders else []),
        ("energy", f"{plan.energy_j:,.0f} J a step, {plan.device_w:,.0f} W a device"),
    ]  # fmt: skip
    return [
        fields(title, rows, "" if cluster.chip is None else cluster.chip.calibration.note),
        *([budget.table()] if budget is not None else []),
        time_table("Where the step's time goes", plan),
        energy_table("Its energy", model, cluster, plan),
        stage_table("Stage by stage", plan),
    ]


def _spec(plan: Path | None, typed: dict[str, Any], model: Model, devices: int) -> PlanSpec:
    """Read the plan from a file, or from the options; an option overrides the file's field."""
    if plan is None:
        widths = (typed.get(name) for name in ("tp", "pp", "cp"))
        inside = math.prod(width for width in widths if isinstance(width, int) and width > 0)
        replicas = max(1, devices // inside)
        return PlanSpec.from_dict({"global_batch": 512, "dp": replicas, **typed})
    if is_framework_file(plan):
        read = read_plan(plan, model, devices)
        for line in read.notes:
            note(line)
        spec = read.spec
    else:
        spec = PlanSpec.of(read_document(plan), str(plan))
    changed, dropped = spec.overridden(typed)
    for line in dropped:
        note(line)
    return changed


@dataclass(frozen=True)
class PlanSource:
    """The plan."""

    plan: Path | None = None
    """A plan: JSON or YAML as `plan --json` writes it, or a file of Megatron-LM, Megatron Bridge,
    DeepSpeed, torchtitan or MaxText; the options below override its fields."""


def predict_plan(
    model: ModelName,
    where: Hardware,
    trained: Trained,
    source: PlanSource,
    fields_typed: Annotated[dict[str, Any], RecordOptions(PlanSpec, global_batch=None, dp=None)],
    budget: Budget,
    output: PageOutput,
) -> None:
    """Predict the time and memory of a given plan.

    A plan is never refused for memory: the answer says by how much it does not fit. By default
    --dp is the number of devices divided by tp x pp x cp.

    Example: phaze-fast predict llama2-7b --chip h100 --devices 16 --tp 4 --pp 2 --dp 2
    --global-batch 64
    """
    (budget,) = budget.each(1)
    budget.check(where.devices)
    seq = fields_typed.get("seq")
    loaded = load_model(model, seq if isinstance(seq, int) else None, trained.lora)
    spec = _spec(source.plan, fields_typed, loaded, where.devices)
    cluster = where.cluster()
    predicted = predict(loaded, cluster, spec)
    if spec.devices < cluster.devices:
        note(f"{cluster.devices - spec.devices} of {cluster.devices} devices stay idle")
    chip = presets.chip(where.chip)
    run = budget.answer(
        tokens_per_step=spec.global_batch * predicted.seq,
        step_s=predicted.time_s,
        devices=cluster.devices,
        step_j=predicted.energy_j,
    )
    output.write_page(lambda: plan_page(loaded, cluster, [predicted], typed()))
    title = (
        f"{loaded.name} on {cluster.devices} x {chip.name}: {predicted.described(loaded.sample)}"
    )
    output.emit(
        lambda: _document(predicted, problem_of(loaded, cluster), chip.calibration, run),
        lambda: _tables(predicted, loaded, cluster, title, run),
    )
