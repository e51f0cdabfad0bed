"""The command `plan`: the best parallel plans of a model on given hardware."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from rich.console import Group, RenderableType

from phaze_fast.cli.budget import Budget, BudgetAnswer
from phaze_fast.cli.interrupts import ends_interrupted, stop_on_interrupt
from phaze_fast.cli.option_groups import RecordOptions
from phaze_fast.cli.options import Hardware, ModelName, load_model, problem_of
from phaze_fast.cli.output import (
    PageOutput,
    fields,
    is_narrow,
    progress_bar,
    table,
    typed,
)
from phaze_fast.hardware import Accelerator
from phaze_fast.planning import Plan, Plans, Training, WhyNot, plan, read_asked
from phaze_fast.planning import why_not as why_not_fastest
from phaze_fast.report.plan_page import plan_page
from phaze_fast.units import format_bytes, format_time

_SHOWN = 6


# ---- tables ----


def _schedule(plan: Plan) -> str:
    return plan.schedule if plan.vpp == 1 else f"{plan.schedule} x{plan.vpp}"


def _zero(plan: Plan) -> str:
    return f"{plan.zero} of {plan.shard}" if plan.hybrid else str(plan.zero)


def _row(plan: Plan, cluster_devices: int) -> list[str]:
    return [
        str(plan.tp),
        str(plan.pp),
        str(plan.dp),
        f"{plan.cp} {plan.cp_kind}" if plan.cp > 1 else "1",
        str(plan.ep) if plan.etp is None else f"{plan.ep} etp {plan.etp}",
        _zero(plan),
        str(plan.micro_batch),
        _schedule(plan),
        plan.recompute,
        format_time(plan.time_s),
        format_bytes(plan.memory_bytes),
        f"{plan.tokens_per_s:,.0f}",
        f"{plan.mfu:.1%}",
        str(cluster_devices - plan.devices),
    ]


def _short_row(plan: Plan) -> list[str]:
    """Describe a plan in few columns, for terminals of 80."""
    widths = {"tp": plan.tp, "pp": plan.pp, "dp": plan.dp}
    widths |= {name: width for name, width in (("cp", plan.cp), ("ep", plan.ep)) if width > 1}
    shown = " ".join(f"{name}{width}" for name, width in widths.items())
    order = f"{_schedule(plan)}, recompute {plan.recompute}"
    return [
        f"{shown} zero{_zero(plan)} micro{plan.micro_batch}, {order}",
        format_time(plan.time_s),
        format_bytes(plan.memory_bytes),
        f"{plan.mfu:.1%}",
    ]


_COLUMNS = ["tp>", "pp>", "dp>", "cp>", "ep>", "zero>", "micro>", "schedule", "recompute", "step>"]
_COLUMNS += ["memory>", "tokens/s>", "MFU>", "idle>"]
_SHORT_COLUMNS = ["plan", "step>", "memory>", "MFU>"]


def _plans_table(title: str, result: Plans, plans: Sequence[Plan], caption: str = "") -> Group:
    if is_narrow():
        return table(title, _SHORT_COLUMNS, [_short_row(plan) for plan in plans], caption)
    rows = [_row(plan, result.cluster.devices) for plan in plans]
    return table(title, _COLUMNS, rows, caption)


def time_table(title: str, plan: Plan) -> Group:
    """Lay out where a step's time goes."""
    parts = [
        (name, f"{format_time(seconds)} ({seconds / plan.time_s:.1%})")
        for name, seconds in plan.parts_s.items()
        if seconds > 1e-6 * plan.time_s
    ]
    return fields(title, parts)


def stage_table(title: str, plan: Plan) -> Group:
    """Lay out a plan's stages, in fewer columns on a narrow terminal."""
    columns = ["stage>", "layers", "recompute", "micro-batch>", "memory>", "free>"]
    if not is_narrow():
        columns[3:5] = ["per micro-batch>", "state>", "activations>", "other>"]
    rows = []
    for k, stage in enumerate(plan.stages):
        memory = [stage.memory_bytes]
        if not is_narrow():
            state = sum(stage.memory[t] for t in ("weights", "gradients", "optimizer"))
            activations = stage.memory["activations"]
            memory = [state, activations, stage.memory_bytes - state - activations]
        free = plan.limit_bytes - stage.memory_bytes
        rows.append(
            [
                str(k),
                ", ".join(f"{n} {kind}" for kind, n in stage.kinds.items()),
                stage.recompute,
                format_time(stage.load_s),
                *map(format_bytes, memory),
                format_bytes(free) if free >= 0 else f"-{format_bytes(-free)}",
            ]
        )
    return table(title, columns, rows)


def _chip(plans: Plans) -> Accelerator:
    chip = plans.cluster.chip
    assert chip is not None, "a plan has a chip"  # `plan` has refused a cluster without one
    return chip


def _tables(
    result: Plans, budget: BudgetAnswer | None, why_not: WhyNot | None
) -> list[RenderableType]:
    chip = _chip(result)
    title = f"{result.model.name} on {result.cluster.devices} x {chip.name}"
    parts: list[RenderableType] = [
        _plans_table(title, result, result.plans, chip.calibration.note),
        *([f"Why not {why_not}\n"] if why_not is not None else []),
        *([budget.table()] if budget is not None else []),
        time_table("Where the fastest step's time goes", result.best),
        stage_table("The fastest, stage by stage", result.best),
    ]
    # A search that was stopped does not go on for the front.
    front = result.front[1:] if result.complete else ()
    smaller = [plan for plan in front if plan not in result.plans][:_SHOWN]
    if smaller:
        parts.append(_plans_table("Slower, but smaller", result, smaller))
    if result.rejected:
        reasons = list(result.rejected.items())
        rows = [[why, str(count)] for why, count in reasons[:_SHOWN]]
        more = len(reasons) - len(rows)
        caption = f"and {more} more reasons; --json lists all" if more > 0 else ""
        parts.append(table("Rejected", ["why", "layouts>"], rows, caption))
    if not result.complete:
        least = format_time(result.bound_s)
        parts.append(
            f"Stopped early: no plan takes less than {least} (gap {result.gap:.2%}), and the plans "
            "after the first may not be the next fastest."
        )
    claim = "Optimal" if result.status == "optimal" else "The best found"
    return [*parts, f"{claim} among: {result.space}."]


def _document(plans: Plans, budget: BudgetAnswer | None, why_not: WhyNot | None) -> dict[str, Any]:
    """Return everything as plain data; of a search that was stopped no front."""
    return {
        "status": plans.status,
        "bound_s": plans.bound_s,
        "gap": plans.gap,
        "space": plans.space,
        **problem_of(plans.model, plans.cluster),
        "calibration": _chip(plans).calibration.to_dict(),
        **({} if budget is None else {"budget": budget.to_dict()}),
        **({} if why_not is None else {"why_not": why_not.to_dict()}),
        "plans": [plan.to_dict() for plan in plans.plans],
        "front": [plan.to_dict() for plan in (plans.front if plans.complete else ())],
        "tried": plans.tried,
        "rejected": plans.rejected,
    }


# ---- the command ----


def _with_progress(find: Callable[..., Plans]) -> tuple[Plans, bool]:
    """Find plans with a progress bar; also return whether Ctrl-C ended the search."""
    with (
        stop_on_interrupt() as stop,
        progress_bar("strategies scheduled (time so far, time left)") as update,
    ):
        plans = find(progress=lambda done, total: update(completed=done, total=total), stop=stop)
        return plans, stop() and not plans.complete


@dataclass(frozen=True)
class Listing:
    """What to list."""

    top: int = 10
    """How many plans to list."""
    why_not: str | None = None
    """Fields of a plan you have in mind, such as tp=8,pp=4: what it would take, and where it loses
    against the fastest."""
    threads: int | None = None
    """At most so many threads; by default all cores."""


def plan_model(
    model: ModelName,
    where: Hardware,
    step: Annotated[
        dict[str, Any], RecordOptions(Training, skip=("tied", "uncut"), global_batch=512)
    ],
    budget: Budget,
    listing: Listing,
    output: PageOutput,
) -> None:
    """Find the fastest parallel plans on given hardware, proven.

    Every combination of widths, micro-batch, stages, ZeRO and schedule that the options allow is
    settled. Options that take several values take them separated by commas.

    Example: phaze-fast plan llama2-7b --chip h100 --devices 64 --global-batch 256 -o plan.json
    """
    budget.check(where.devices)
    fixed = None if listing.why_not is None else read_asked(listing.why_not)
    training = Training.from_dict(step)
    cluster = where.cluster()
    loaded = load_model(model, training.seq)
    plans, stopped = _with_progress(
        lambda **hooks: plan(
            loaded, cluster, training, top=listing.top, threads=listing.threads, **hooks
        )
    )
    if not plans.plans:
        output.infeasible(plans.infeasible, plans=[], rejected=plans.rejected)
    proven = plans.status == "optimal"
    output.write_page(lambda: plan_page(plans.model, cluster, plans.plans, typed(), proven))
    run = budget.answer(
        tokens_per_step=training.global_batch * plans.best.seq,
        step_s=plans.best.time_s,
        devices=cluster.devices,
        chip=_chip(plans),
        step_j=plans.best.energy_j,
    )
    compared = None if fixed is None else why_not_fastest(plans, fixed, listing.threads)
    with ends_interrupted(stopped):
        output.emit(lambda: _document(plans, run, compared), lambda: _tables(plans, run, compared))
