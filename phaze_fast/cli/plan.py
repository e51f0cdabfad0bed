"""The command `plan`: the best parallel plans of a model on given hardware."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType

from phaze_fast.cli.budget import Budget, BudgetAnswer
from phaze_fast.cli.interrupts import ends_interrupted, stop_on_interrupt
from phaze_fast.cli.option_groups import RecordOptions
from phaze_fast.cli.options import (
    Hardware,
    ModelName,
    Trained,
    load_model,
    numbers,
    one_for_each,
    problem_of,
)
from phaze_fast.cli.output import (
    PageOutput,
    fields,
    is_narrow,
    progress_bar,
    table,
    typed,
    unanswered,
)
from phaze_fast.errors import InfeasibleError, InvalidInputError, check_one_of
from phaze_fast.hardware import Accelerator, Cluster, presets
from phaze_fast.models import Model
from phaze_fast.planning import Plan, Plans, Training, WhyNot, plan, read_asked
from phaze_fast.planning import why_not as why_not_fastest
from phaze_fast.planning.energy import energy_by_tier
from phaze_fast.planning.frameworks import FRAMEWORKS
from phaze_fast.planning.throughput import MFU_CONVENTION
from phaze_fast.units import format_bytes, format_time

_SHOWN = 6


# ---- tables ----


def _schedule(plan: Plan) -> str:
    return plan.schedule if plan.vpp == 1 else f"{plan.schedule} x{plan.vpp}"


def _zero(plan: Plan) -> str:
    return f"{plan.zero} of {plan.shard}" if plan.hybrid else str(plan.zero)


def _row(plan: Plan, cluster_devices: int, images: bool) -> list[str]:
    context = f"{plan.cp} {plan.cp_kind}" if plan.cp > 1 else "1"
    experts = str(plan.ep) if plan.etp is None else f"{plan.ep} etp {plan.etp}"
    widths = [*map(str, (plan.tp, plan.pp, plan.dp)), context, experts, _zero(plan)]
    rate = f"{plan.samples_per_s if images else plan.tokens_per_s:,.0f}"
    return [
        *(*widths, str(plan.micro_batch), _schedule(plan), plan.recompute),
        *(format_time(plan.time_s), format_bytes(plan.memory_bytes), rate, f"{plan.mfu:.1%}"),
        str(cluster_devices - plan.devices),
    ]


def _short_row(plan: Plan) -> list[str]:
    """Describe a plan in few columns, for terminals of 80."""
    widths = {"tp": plan.tp, "pp": plan.pp, "dp": plan.dp}
    widths |= {name: width for name, width in (("cp", plan.cp), ("ep", plan.ep)) if width > 1}
    shown = " ".join(f"{name}{width}" for name, width in widths.items())
    order = f"{_schedule(plan)}, recompute {plan.recompute}"
    text = f"{shown} zero{_zero(plan)} micro{plan.micro_batch}, {order}"
    return [text, format_time(plan.time_s), format_bytes(plan.memory_bytes), f"{plan.mfu:.1%}"]


_COLUMNS = ["tp>", "pp>", "dp>", "cp>", "ep>", "zero>", "micro>", "schedule", "recompute", "step>"]
_COLUMNS += ["memory>", "tokens/s>", "MFU>", "idle>"]
_SHORT_COLUMNS = ["plan", "step>", "memory>", "MFU>"]


def _plans_table(title: str, result: Plans, plans: Sequence[Plan], caption: str = "") -> Group:
    if is_narrow():
        return table(title, _SHORT_COLUMNS, [_short_row(plan) for plan in plans], caption)
    images = result.model.sample == "image"
    rows = [_row(plan, result.cluster.devices, images) for plan in plans]
    columns = ["images/s>" if images and name == "tokens/s>" else name for name in _COLUMNS]
    return table(title, columns, rows, caption)


def time_table(title: str, plan: Plan) -> Group:
    """Lay out where a step's time goes."""
    parts = [
        (name, f"{format_time(seconds)} ({seconds / plan.time_s:.1%})")
        for name, seconds in plan.parts_s.items()
        if seconds > 1e-6 * plan.time_s
    ]
    return fields(title, parts)


def energy_table(title: str, model: Model, cluster: Cluster, plan: Plan) -> Group:
    """Lay out where a step's energy goes."""
    tiers = energy_by_tier(model, cluster, plan)
    total = f"{plan.energy_j:,.0f} J a step, {plan.device_w:,.0f} W a device"
    parts = [
        (name.replace("_", " "), f"{joules:,.0f} J ({joules / plan.energy_j:.1%})")
        for name, joules in tiers.items()
        if joules > 1e-6 * plan.energy_j
    ]
    return fields(f"{title}: {total}", parts)


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
        left = format_bytes(free) if free >= 0 else f"-{format_bytes(-free)}"
        layers = ", ".join(f"{n} {kind}" for kind, n in stage.kinds.items())
        first = [str(k), layers, stage.recompute, format_time(stage.load_s)]
        rows.append([*first, *map(format_bytes, memory), left])
    return table(title, columns, rows)


def _chip(plans: Plans) -> Accelerator:
    chip = plans.cluster.chip
    assert chip is not None, "a plan has a chip"  # `plan` refuses a cluster without a chip
    return chip


def _tables(
    result: Plans, budget: BudgetAnswer | None, why_not: WhyNot | None
) -> list[RenderableType]:
    chip = _chip(result)
    title = f"{result.model.name} on {result.cluster.devices} x {chip.name}"
    notes = [f"MFU of the fastest: {result.best.mfu_convention}", chip.calibration.note]
    parts: list[RenderableType] = [
        _plans_table(title, result, result.plans, "\n".join(filter(None, notes))),
        *([f"Why not {why_not}\n"] if why_not is not None else []),
        *([budget.table()] if budget is not None else []),
        time_table("Where the fastest step's time goes", result.best),
        energy_table("Its energy", result.model, result.cluster, result.best),
        stage_table("The fastest, stage by stage", result.best),
    ]
    # The front is not computed after an interrupted search.
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
    if any(result.excluded):
        widths, layouts = result.excluded
        parts.append(
            f"Not examined: {widths:,} strategies, and {layouts:,} layouts of the others, whose "
            "work alone takes longer than all of these plans.\n"
        )
    if not result.complete:
        least = format_time(result.bound_s)
        parts.append(
            f"Stopped early: no plan takes less than {least} (gap {result.gap:.2%}), and the plans "
            "after the first may not be the next fastest."
        )
    if (free := result.free) is not None:
        parts.append(
            f"Without the limits of {result.framework}, the fastest takes "
            f"{format_time(free.time_s)} ({free}): its files cost "
            f"{result.best.time_s / free.time_s - 1.0:.2%}.\n"
        )
    claim = "Optimal" if result.status == "optimal" else "The best found"
    return [*parts, f"{claim} among: {result.space}."]


def _document(plans: Plans, budget: BudgetAnswer | None, why_not: WhyNot | None) -> dict[str, Any]:
    """Return all results as plain data; without the front if the search was interrupted."""
    free = None if plans.free is None else plans.free.to_dict()  # fastest without framework limits
    return {
        "status": plans.status,
        "bound_s": plans.bound_s,
        "gap": plans.gap,
        "space": plans.space,
        **({} if plans.framework is None else {"framework": plans.framework, "free": free}),
        **problem_of(plans.model, plans.cluster),
        "calibration": _chip(plans).calibration.to_dict(),
        **({} if budget is None else {"budget": budget.to_dict()}),
        **({} if why_not is None else {"why_not": why_not.to_dict()}),
        "plans": [plan.to_dict() for plan in plans.plans],
        "front": [plan.to_dict() for plan in (plans.front if plans.complete else ())],
        "tried": plans.tried,
        "excluded": list(plans.excluded),
        "rejected": plans.rejected,
    }


# ---- several clusters side by side ----


@dataclass(frozen=True)
class Clusters:
    """The cluster, or several to compare."""

    chip: Annotated[str, typer.Option(autocompletion=lambda: list(presets.chip_names()))]
    """The chip: a preset (`phaze-fast show chip` lists them) or a file; several, separated by
    commas, are compared."""
    devices: str
    """Devices of the cluster; one number for all chips or one for each."""
    fabric: Annotated[
        str | None, typer.Option(autocompletion=lambda: list(presets.fabric_names()))
    ] = None
    """The interconnect: a preset (`phaze-fast show interconnect` lists them) or a file, for all
    chips or one for each; by default the chip's usual one."""

    def each(self) -> list[Cluster]:
        """Look up the clusters, in the order in which they were typed."""
        chips = [word.strip() for word in self.chip.split(",")]
        counts = one_for_each(self.devices, len(chips), "--devices")
        fabrics = one_for_each(self.fabric or "", len(chips), "--fabric")
        return [
            Hardware(chip, numbers(count, "--devices", int)[0], fabric or None).cluster()
            for chip, count, fabric in zip(chips, counts, fabrics, strict=True)
        ]


@dataclass(frozen=True)
class _Compared:
    """The plans of one of several clusters, and what a token budget takes on this cluster."""

    plans: Plans
    budget: BudgetAnswer | None

    def row(self) -> list[str]:
        """Describe the fastest plan of the cluster, or why there is none, in one line."""
        cluster = self.plans.cluster
        where = [_chip(self.plans).name, f"{cluster.devices:,}", cluster.fabric.name]
        if not self.plans.plans:
            reason = f"infeasible: {self.plans.infeasible}"
            return [*where, reason, *([""] * (len(self.columns()) - 4))]
        best = self.plans.best
        short, time, memory, mfu = _short_row(best)
        rate = best.samples_per_s if self.plans.model.sample == "image" else best.tokens_per_s
        short = short.replace("+", " + ")  # so that the plan's text wraps in a narrow column
        row = [*where, short, time, memory, f"{rate:,.0f}", mfu]
        if self.budget is not None:
            run = self.budget.run
            row += [f"{run.days:,.1f}", f"{run.device_hours:,.0f}", f"{run.energy_kwh / 1e3:,.1f}"]
            row += [f"{run.usd:,.0f}"] if run.usd > 0 else ["-"]
        return row

    def document(self) -> dict[str, Any]:
        """Return as plain data what the command answers for this cluster alone."""
        if self.plans.plans:
            return _document(self.plans, self.budget, None)
        why = unanswered(self.plans.infeasible, plans=[], rejected=self.plans.rejected)
        return {**problem_of(self.plans.model, self.plans.cluster), **why}

    def columns(self) -> list[str]:
        """Name the columns of `row`."""
        rate = "images/s>" if self.plans.model.sample == "image" else "tokens/s>"
        columns = ["chip", "devices>", "interconnect", "fastest plan", "step>", "memory>", rate]
        columns.append("MFU>")
        if self.budget is not None:
            columns += ["days>", "device-hours>", "MWh>", "dollars>"]
        return columns


def _budget_of(budget: Budget, plans: Plans, training: Training) -> BudgetAnswer | None:
    """Compute what the token budget takes with the fastest plan, if there is one."""
    if not plans.plans:
        return None
    best = plans.best
    return budget.answer(
        tokens_per_step=training.global_batch * best.seq,
        step_s=best.time_s,
        devices=plans.cluster.devices,
        step_j=best.energy_j,
    )


def _compare(compared: Sequence[_Compared], output: PageOutput) -> None:
    """Print one line for each cluster, in the order in which they were typed."""
    possible = [one for one in compared if one.plans.plans]
    if not possible:
        reasons = (f"{_chip(one.plans).name}: {one.plans.infeasible}" for one in compared)
        output.infeasible(InfeasibleError("; ".join(reasons)), clusters=[])
    notes = {_chip(one.plans).calibration.note for one in possible} | {MFU_CONVENTION}
    widest = max((one.columns() for one in compared), key=len)
    rows = [[cell for cell, _ in zip_longest(one.row(), widest, fillvalue="")] for one in compared]
    proven = all(one.plans.status == "optimal" for one in possible)
    claim = "Each optimal" if proven else "Each the best found"
    tables: list[RenderableType] = [
        table(
            *(compared[0].plans.model.name, widest, rows, "\n".join(sorted(filter(None, notes))))
        ),
        f"{claim} among: {possible[0].plans.space}.",
    ]
    output.emit(lambda: {"clusters": [one.document() for one in compared]}, lambda: tables)


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
    framework: Annotated[str | None, typer.Option("--for")] = None
    """Only plans that files of a framework can express (megatron, bridge, deepspeed, torchtitan or
    maxtext), and what the freedom it lacks would be worth; export writes the file."""
    why_not: str | None = None
    """Fields of a plan you have in mind, such as tp=8,pp=4: what it would take, and where it loses
    against the fastest."""
    headroom: str = "3%"
    """Memory of each device that stays free, a share of it or bytes: allocators fragment, and
    measured peaks are above predicted ones."""
    threads: int | None = None
    """At most so many threads; by default all cores."""


def plan_model(
    model: ModelName,
    where: Clusters,
    trained: Trained,
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

    Several chips, separated by commas, are compared by their fastest plans.

    Example: phaze-fast plan llama2-7b --chip h100 --devices 64 --global-batch 256 -o plan.json
    """
    clusters = where.each()
    budgets = budget.each(len(clusters))
    for one, cluster in zip(budgets, clusters, strict=True):
        one.check(cluster.devices)
    fixed = None if listing.why_not is None else read_asked(listing.why_not)
    framework = None if listing.framework is None else listing.framework.lower()
    if framework is not None:
        check_one_of("--for", framework, FRAMEWORKS)
    training = Training.from_dict(step)
    loaded = load_model(model, training.seq, trained.lora)
    if len(clusters) > 1:
        for option, value in (("--why-not", fixed), ("--report", output.report)):
            if value is not None:
                raise InvalidInputError(f"{option}: works with one chip; {where.chip} is several")

    def find(cluster: Cluster) -> Callable[..., Plans]:
        return lambda **hooks: plan(
            loaded, cluster, training, listing.top, listing.threads,
            framework=framework, headroom=listing.headroom, **hooks,
        )  # fmt: skip

    compared, stopped = [], False
    for one, cluster in zip(budgets, clusters, strict=True):
        plans, stopped = _with_progress(find(cluster))
        compared.append(_Compared(plans, _budget_of(one, plans, training)))
        if stopped:
            break
    if len(clusters) > 1:
        with ends_interrupted(stopped):
            _compare(compared, output)
        return
    if not plans.plans:
        output.infeasible(plans.infeasible, plans=[], rejected=plans.rejected)
    proven = plans.status == "optimal"

    def page() -> str:
        from phaze_fast.report.plan_page import plan_page  # loads much that only pages need

        return plan_page(plans.model, plans.cluster, plans.plans, typed(), proven)

    output.write_page(page)
    run = compared[0].budget
    asked = None if fixed is None else why_not_fastest(plans, fixed, listing.threads)
    with ends_interrupted(stopped):
        output.emit(lambda: _document(plans, run, asked), lambda: _tables(plans, run, asked))
