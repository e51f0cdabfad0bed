"""The command `search`: the best chip and plan for models over a space of chips, with the proof."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from rich.console import RenderableType

from phaze_fast.cli.interrupts import ends_interrupted, say_where_to_resume, stop_on_interrupt
from phaze_fast.cli.option_groups import RecordOptions
from phaze_fast.cli.options import LongRun, ModelNames, Trained, load_model, numbers
from phaze_fast.cli.output import (
    TableOutput,
    fields,
    is_narrow,
    is_watched,
    note,
    progress_bar,
    table,
    typed,
    write_text,
)
from phaze_fast.errors import InfeasibleError, InvalidInputError, UndecidedError
from phaze_fast.explore import Design, Portfolio, Progress, fullest_text, share_text
from phaze_fast.hardware import ArchitectureSpace, Cluster, sustained_rates
from phaze_fast.papers.comparison import read_baselines
from phaze_fast.pipeline import compare, search
from phaze_fast.planning import Training
from phaze_fast.planning.layouts import space_text
from phaze_fast.planning.throughput import MFU_CONVENTION
from phaze_fast.report import report_page
from phaze_fast.report.result import SearchResult
from phaze_fast.robust import Information, RobustResult
from phaze_fast.tables import picked
from phaze_fast.threads import thread_count
from phaze_fast.units import format_bandwidth, format_bytes, format_time, parse_quantity

# ---- progress ----

_EVERY_S = 1.0


def _progress_text(progress: Progress) -> str:
    placed = f"{progress.scheduled:,} scheduled, {progress.placed:,} placed"
    if not math.isfinite(progress.incumbent) or progress.bound <= 0:
        return placed
    gap = max(0.0, progress.incumbent / progress.bound - 1.0)
    return f"{placed}; best {format_time(progress.incumbent)}, gap {gap:.2%}"


_FIGURES = ("seconds", "bounded", "scheduled", "placed", "open", "incumbent", "bound")


@contextlib.contextmanager
def _shown_progress(quiet: bool) -> Iterator[Callable[[Progress], None] | None]:
    """Yield the progress callback of a search: a bar on a terminal, else lines of JSON."""
    if quiet or sys.stderr is None:  # standard error was closed
        yield None
        return
    if is_watched(sys.stderr):
        with progress_bar("points settled") as update:
            points = 0

            def show(progress: Progress) -> None:
                nonlocal points
                points = max(points, progress.open)
                text = _progress_text(progress)
                update(completed=points - progress.open, total=points, text=text)

            yield show
        return
    last = [-math.inf]

    def write(progress: Progress) -> None:
        now = time.monotonic()
        if now - last[0] >= _EVERY_S or progress.open == 0:
            last[0] = now
            values = picked(progress, *_FIGURES).items()
            finite = {k: v if math.isfinite(v) else None for k, v in values}
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(json.dumps({"progress": finite}) + "\n")
                sys.stderr.flush()

    yield write


# ---- tables ----

_STEPS = {
    "rules": "broken rules (heads, batch)",
    "memory": "no plan fits",
    "roofline": "roofline of the operators",
    "work": "work of all operators",
    "mapped": "operators mapped on the chip",
    "schedule_bound": "bound of the layer schedules",
    "scheduled": "schedules, bound of the step",
}


def _chip_cells(design: Design) -> list[str]:
    chip, memory = design.chip, "none"
    if chip.hbm is not None:
        rate = format_bandwidth(chip.hbm.bandwidth_bytes_per_s)
        memory = f"{format_bytes(design.hbm_bytes)}, {rate}"
    cores = [chip.arrays, f"{chip.vector_core.count} x {chip.vector_core.lanes}"]
    return [*cores, format_bytes(chip.buffer.capacity_bytes), memory, f"{design.area_mm2:.2f}"]


def _top(result: SearchResult) -> RenderableType:
    rows = []
    for k, design in enumerate(result.top):
        plans = [f"tp {p.tp} pp {p.pp} dp {p.dp} mb {p.micro_batch}" for p in design.plans.values()]
        said = "; ".join(plans[:2]) + (" ..." if len(plans) > 2 else "")
        rates = [f"{design.samples_per_s:,.1f}", f"{design.energy_j:,.0f}"]
        cells = [str(k + 1), *_chip_cells(design), format_time(design.time_s)]
        rows.append([*cells, *rates, said, design.bottleneck])
    columns = [">", "tensor cores", "vector", "buffer>", "HBM>", "mm2>", "step>", "samples/s>"]
    columns += ["J/step>", "plan", "bottleneck"]
    if is_narrow():
        shown = [0, 1, 2, 3, 6, 9]
        columns, rows = [columns[k] for k in shown], [[row[k] for k in shown] for row in rows]
    several = "; times and rates are geometric means, joules are sums"
    several = several if len(result.problems) > 1 else ""
    caption = "only the bound below is proven, not that these are the best"
    return table(f"The best chips{several}", columns, rows, "" if result.complete else caption)


def _certificate(result: SearchResult) -> RenderableType:
    outcome = result.outcome
    proof = "proven optimal" if result.status == "optimal" else result.status
    pairs = [
        ("status", proof),
        ("points", f"{outcome.points:,} (chip, HBM, micro-batch, tensor-parallel width)"),
        *(("plans", space_text(p.model, p.cluster, p.training)) for p in result.problems[:1]),
    ]
    for step, count in outcome.counts.items():
        if step in _STEPS and count:
            pairs.append((f"settled by {_STEPS[step]}", f"{count:,}"))
    pairs.append(("placed exactly", f"{outcome.counts['placed']:,}"))
    if outcome.counts["open"]:
        pairs.append(("still open", f"{outcome.counts['open']:,}"))
    if outcome.unproven:
        pairs.append(("schedule or plan not proven", f"in {outcome.unproven:,} pairs"))
    if outcome.bound < float("inf"):
        pairs.append(("bound and gap", f"{result.amount(outcome.bound)}, {outcome.gap:.3%}"))
    recalled = ", kept from an earlier run" if outcome.recalled else ""
    pairs.append(("seconds", f"{outcome.seconds:.1f}{recalled}"))
    return fields("The certificate", pairs)


def _best(result: SearchResult) -> RenderableType:
    best = result.best
    pairs = [("chip", str(best.chip)), ("area", f"{best.area_mm2:.2f} mm2")]
    if result.objective != "time":
        pairs.append((f"least {result.objective}", result.amount(best.value)))
    for name, plan in best.plans.items():
        pairs.append((f"{name}", str(plan)))
        pairs.append(("", f"{share_text(plan)}; memory {fullest_text(plan, best.hbm_bytes)}"))
    return fields("The best chip and plan", pairs, best.chip.calibration.note)


def _baselines(result: SearchResult) -> RenderableType:
    rows = []
    for item in result.baselines.values():
        step = format_time(item["time_s"]) if item["time_s"] is not None else "none"
        gain = f"{item['speedup']:.2f}x" if item["speedup"] is not None else "-"
        mfu = f"{item['mfu']:.1%}" if item["mfu"] is not None else "-"
        looked = f"{item['evaluations']:,}" if item["evaluations"] else "-"
        rows.append([item["title"], step, gain, mfu, looked, item["plan_text"], item["note"]])
    columns = ["what", "step>", "ours is>", "MFU>", "chips>", "plan", "note"]
    return table("Baselines", columns, rows, MFU_CONVENTION)


def _gain(result: SearchResult) -> RenderableType:
    rows = [
        [item["cause"], format_time(item["time_s"]), f"{item['gain']:.2f}x"] for item in result.gain
    ]
    rows.append(["all", "", f"{math.prod(item['gain'] for item in result.gain):.2f}x"])
    caption = "one after another, each on top of those before"
    return table("The gain over TPU v4 as built", ["cause", "step>", "gain>"], rows, caption)


def _tables(result: SearchResult) -> list[RenderableType]:
    """Return the best chips, the front, the baselines and the proof."""
    parts = [_best(result), _top(result)]
    parts += [_front(result)] if result.outcome.objectives else []
    parts += [_baselines(result)] if result.baselines else []
    parts += [_gain(result)] if result.gain else []
    parts += [_sensitivity(result)] if result.sensitivity else []
    parts += [_portfolio_fields(result.portfolio)] if result.portfolio is not None else []
    parts += [_robust_fields(result.robust)] if result.robust is not None else []
    parts += _information_tables(result.information) if result.information is not None else []
    return [*parts, _certificate(result)]


def _front(result: SearchResult) -> RenderableType:
    front, shown = result.pareto(), []
    for row in front.rows[:12]:
        chip = row["chip_text"].split(": ", 1)[-1].split(", HBM")[0]
        figures = [f"{row['area_mm2']:.2f}", f"{row['energy_j']:,.0f}"]
        figures += [format_bytes(row["hbm_bytes"]), f"{row['cost_usd']:,.0f}"]
        shown.append([format_time(row["time_s"]), *figures, chip])
    sure = "" if front.proven else ", not proven"
    title = f"The front of {', '.join(front.objectives)}: {len(front)} points{sure}"
    caption = "" if len(front) <= 12 else f"{len(front) - 12} more with --json or --parquet"
    columns = ["step>", "mm2>", "J/step>", "HBM>", "dollars>", "chip"]
    return table(title, columns, shown, caption)


def _sensitivity(result: SearchResult) -> RenderableType:
    rows = []
    for item in result.sensitivity:
        step = format_time(item["time_s"]) if item["time_s"] is not None else "none"
        change = f"{item['change']:+.1%}" if item["change"] is not None else "-"
        chip = "same" if item["same_chip"] else item["chip_text"].split(": ", 1)[-1]
        rows.append([f"{item['what']} x {item['factor']:g}", step, change, chip])
    area = result.space.spec.area
    caption = "Where an area is scaled, the limit stays."
    if area is not None and area.follows_base:
        caption = "Where an area is scaled, the limit is what the space's base chip then takes."
    columns = ["what", "step>", "change>", "best chip"]
    return table("If something were different", columns, rows, caption)


def _portfolio_fields(portfolio: Portfolio) -> RenderableType:
    """Show the best two chips and the models of each."""
    pairs = [
        (", ".join(names), str(chip))
        for chip, names in zip(portfolio.chips, portfolio.models, strict=True)
    ]
    proof = "proven" if portfolio.proven else f"not proven, no pair below {portfolio.bound:.6g}"
    pairs += [
        ("one chip for all", f"{portfolio.single}, {portfolio.gain - 1.0:+.2%}"),
        ("status", proof),
        ("seconds", f"{portfolio.seconds:.1f}"),
    ]
    return fields("The best two chips, each model on its better one", pairs)


def _robust_fields(robust: RobustResult) -> RenderableType:
    """Show the chip of least largest regret and the nominal winner."""
    proof = "proven" if robust.proven else "not proven"
    nominal = robust.nominal
    cost = robust.time_s / robust.nominal_s - 1.0
    regret = f"at most {robust.max_regret:.3f}, {robust.attained:.3f} attained; no chip's is below "
    regret += f"{robust.bound:.3f} ({proof} within {robust.tolerance:.1%})"
    of_nominal = f"at most {nominal.bound:.3f}, {nominal.attained:.3f} attained"
    pairs = [
        ("constants", f"{len(robust.uncertainty.constants)} intervals"),
        ("robust chip", str(robust.chip)),
        ("largest regret", regret),
        ("nominal step", f"{format_time(robust.time_s)}, {cost:+.2%} against the nominal winner"),
        ("nominal winner", f"largest regret {of_nominal}"),
        ("beaten most by", str(robust.rival)),
        ("possible winners", f"{robust.possible_winners:,} chips are not ruled out"),
        ("seconds", f"{robust.seconds:.1f}"),
    ]
    return fields("The chip of least largest regret over the intervals", pairs)


def _information_tables(information: Information) -> list[RenderableType]:
    """Show which constants decide, and how often each chip is the best."""
    left = [[name, f"{count:,}"] for name, count in information.known.items()]
    wins = [[f"{row['share']:.1%}", row["chip_text"]] for row in information.shares[:10]]
    sampled = f"{information.samples} samples, seed {information.seed}"
    possible = f"{information.possible_winners:,}"
    title = f"Possible winners left of {possible}, were a constant known"
    caption = "each constant uniform over its interval, all independent"
    return [
        table(title, ["constant", "left>"], left),
        table(f"How often each chip is the best: {sampled}", ["share>", "chip"], wins, caption),
    ]


# ---- the command ----


@dataclass(frozen=True)
class Chips:
    """Chips and cluster."""

    space: str = "published"
    """The chips to choose from: published (the PHAZE paper's space), full-area (the same with
    network and HBM PHYs counted), every-term (with every area, a power cap, a package, and HBM,
    links and dies as axes), tpuv4-area (chips as large as a TPUv4), or a .yaml or .json file."""
    hbm: str | None = None
    """HBM of a chip to try: sizes such as 80GiB, or numbers of GiB, separated by commas."""
    sustained: str | None = None
    """Shares of their peaks that the chips and TPU v4 reach: tpu (as published runs of TPUs do) or
    a .yaml or .json file; by default those of the space, which for the PHAZE paper's are all."""
    devices: int = 1024
    """Devices of the cluster."""
    fabric: str = "tpuv4-pod"
    """The interconnect: a preset (`phaze-fast show interconnect` lists them) or a file."""


@dataclass(frozen=True)
class Goal:
    """What to find."""

    objective: str = "time"
    """What the best chips have least of: time, energy (most samples per joule), cost (per dollar of
    devices), area (per mm2), tokens (dollars for a trillion tokens)."""
    weights: str | None = None
    """How much each of several models counts, separated by commas; by default all alike."""
    top: int = 10
    """How many of the best chips to find and prove."""
    pareto: str = ""
    """Also find the Pareto front over some of: time, area, energy (of a step), hbm, cost (of all
    chips), separated by commas."""
    portfolio: bool = False
    """Also find the best two chips for several models, each on its better one."""


@dataclass(frozen=True)
class Doubts:
    """Baselines and uncertainty."""

    baselines: str = "tpuv4"
    """What to compare with, separated by commas: tpuv4 (three plans on the TPUv4-like chip of the
    PHAZE paper, and TPU v4 as built, with the gain over it by cause), all (also the paper's early
    stop, random and Bayesian search), none, or chips of your own: presets or files, with the best
    plan on each."""
    sensitivity: bool = False
    """Search again with each bandwidth and each area halved and doubled, and show how the best chip
    changes."""
    uncertainty: str | None = None
    """Take the constants of the cost model as intervals (default, or a file of them) and also find
    the chip that loses least in the worst case."""
    tolerance: float = 0.05
    """With --uncertainty: how far from proven the answer may be, as a fraction."""
    samples: int = 0
    """With --uncertainty: draw so many points of the intervals and count how often each chip wins;
    0 draws none."""
    seed: int = 0
    """Seed of these samples."""


@dataclass(frozen=True)
class SearchRun(LongRun):
    """Executor, limits and stored results."""

    time_limit_s: float = math.inf
    """Stop after so many seconds, with the best found and its bound."""
    max_points: float = math.inf
    """Stop once so many candidates (a chip under a strategy) were placed exactly, with the best
    found and its bound."""


def _hbm_bytes(text: str) -> float:
    """Read a size with a unit; a plain number is in GiB."""
    try:
        return float(text) * 2**30
    except ValueError:
        try:
            return parse_quantity(text.strip(), "bytes")
        except InvalidInputError as error:
            raise InvalidInputError(f"--hbm: {error}") from None


def _space(name: str, hbm: str | None, sustained: str | None) -> ArchitectureSpace:
    space = ArchitectureSpace.load(name)
    if sustained is not None:
        space = ArchitectureSpace(space.spec.replace(sustained=sustained_rates(sustained)))
    if hbm is None:
        return space
    axes = {**space.spec.axes, "hbm.capacity_bytes": tuple(_hbm_bytes(p) for p in hbm.split(","))}
    return ArchitectureSpace(space.spec.replace(axes=axes))


def search_chips(
    model: ModelNames,
    trained: Trained,
    step: Annotated[
        dict[str, Any],
        RecordOptions(
            Training,
            skip=("tied", "uncut"),
            global_batch=4096,
            tp=(1, 2, 4, 8),
            cp=(1,),
            ep=(1,),
        ),
    ],
    where: Chips,
    goal: Goal,
    doubts: Doubts,
    run: SearchRun,
    output: TableOutput,
) -> None:
    """Find the chip and plan that train models fastest, proven.

    Example: phaze-fast search gpt3-175b --space published --report page.html
    """
    read_baselines(doubts.baselines)  # refuses unknown names before the search
    training = Training.from_dict(step)
    loaded = [load_model(name, training.seq, trained.lora) for name in model]
    cluster = Cluster.from_dict({"devices": where.devices, "fabric": where.fabric})
    chips, threads = _space(where.space, where.hbm, where.sustained), thread_count(run.threads)
    with (
        _shown_progress(run.quiet) as progress,
        say_where_to_resume(run.resume),
        stop_on_interrupt() as stop,
    ):
        result = search(
            loaded,
            chips,
            cluster,
            training,
            weights=None if goal.weights is None else numbers(goal.weights, "--weights", float),
            pareto=tuple(name.strip() for name in goal.pareto.split(",") if name.strip()),
            threads=threads,
            cache=run.cache_folder,
            progress=progress,
            stop=stop,
            **picked(goal, "top", "objective", "portfolio"),
            **picked(run, "time_limit_s", "max_points", "executor", "resume"),
            **picked(doubts, "uncertainty", "tolerance", "samples", "seed"),
        )
    for message in result.outcome.notes:
        note(message)
    stopped = stop()
    compares = doubts.baselines.lower() != "none" or doubts.sensitivity
    if result.outcome.winners and not stopped and compares and goal.objective == "time":
        if output.path is not None:  # store the proven result before the comparison
            text = json.dumps(result.to_dict(), indent=2, allow_nan=False)
            write_text(output.path, text + "\n")
        say = None if run.quiet else note
        result = compare(result, doubts.baselines, doubts.sensitivity, threads=threads, say=say)
    with ends_interrupted(stopped):
        _deliver(result, output)


def _deliver(result: SearchResult, output: TableOutput) -> None:
    def document() -> dict[str, Any]:
        data = result.to_dict()
        data["manifest"]["command"] = typed()
        return data

    output.write_page(lambda: report_page(document()))
    if not result.outcome.winners:
        if output.wants_document:
            output.write(document())
        error = UndecidedError if result.status == "unknown" else InfeasibleError
        raise error(result.reason)
    if output.parquet is not None:
        result.to_parquet(output.parquet)
        note(f"wrote {output.parquet}")
    output.emit(document, lambda: _tables(result))
