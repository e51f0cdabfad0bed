"""The command `search`: the best chip and plan for models over a space of chips, with the proof."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from phaze_fast.cli.model_argument import load_model
from phaze_fast.cli.output import AsJson, ToFile, emit, fields, note, table, target, write_text
from phaze_fast.cli.plan_options import SoftwareName, several
from phaze_fast.cli.progress import shown_progress
from phaze_fast.cli.robust import information_tables, robust_fields
from phaze_fast.errors import InfeasibleError, InvalidInputError
from phaze_fast.hardware import ArchitectureSpace, Cluster
from phaze_fast.pipeline import compare, search
from phaze_fast.placement import Training
from phaze_fast.report.result import SearchResult
from phaze_fast.search.designs import Design, fullest_text, share_text
from phaze_fast.software import DEFAULT
from phaze_fast.threads import thread_count
from phaze_fast.units import format_bandwidth, format_bytes, format_time

__all__ = ["add_commands"]

_WIDE = 120
_STEPS = {
    "rules": "broken rules (heads, batch)",
    "memory": "no plan fits",
    "roofline": "roofline of the operators",
    "mapped": "operators mapped on the chip",
    "schedule_bound": "bound of the layer schedules",
    "scheduled": "schedules, bound of the step",
}


def default_cache() -> Path:
    """Where outcomes are kept between runs."""
    base = os.environ.get("PHAZE_FAST_CACHE") or os.environ.get("XDG_CACHE_HOME")
    root = Path(base) if base else Path.home() / ".cache"
    return root / "phaze_fast"


def _hbm(design: Design) -> str:
    hbm = design.chip.hbm
    rate = format_bandwidth(hbm.bandwidth_bytes_per_s) if hbm is not None else ""
    return f"{format_bytes(design.hbm_bytes)}, {rate}"


def _chip_cells(design: Design) -> list[str]:
    tensor, vector, chip = design.chip.tensor_core, design.chip.vector_core, design.chip
    return [
        f"{tensor.count} x {tensor.width}x{tensor.depth}",
        f"{vector.count} x {vector.lanes}",
        format_bytes(chip.buffer.capacity_bytes),
        _hbm(design),
        f"{design.area_mm2:.2f}",
    ]


def _top(found: SearchResult) -> RenderableType:
    rows = []
    for k, design in enumerate(found.top):
        plans = [f"tp {p.tp} pp {p.pp} dp {p.dp} mb {p.microbatch}" for p in design.plans.values()]
        cells = [str(k + 1), *_chip_cells(design), format_time(design.time_s)]
        energy = f"{design.energy_j:,.0f}"
        said = "; ".join(plans[:2]) + (" ..." if len(plans) > 2 else "")
        rows.append([*cells, f"{design.samples_per_s:,.1f}", energy, said, design.bottleneck])
    columns = [">", "tensor cores", "vector", "buffer>", "HBM>", "mm2>", "step>", "samples/s>"]
    columns += ["J/step>", "plan", "bottleneck"]
    watched = sys.stdout is not None and sys.stdout.isatty()
    if watched and shutil.get_terminal_size().columns < _WIDE:
        shown = [0, 1, 2, 3, 6, 9]
        columns, rows = [columns[k] for k in shown], [[row[k] for k in shown] for row in rows]
    several = "; times and rates are geometric means, joules are sums" if _several(found) else ""
    proven = "" if found.complete else "only the bound below is proven, not that these are the best"
    return table(f"The best chips{several}", columns, rows, proven)


def _several(found: SearchResult) -> bool:
    return len(found.problems) > 1


def _certificate(found: SearchResult) -> RenderableType:
    outcome = found.outcome
    proof = "proven optimal" if found.status == "optimal" else found.status
    pairs = [
        ("status", proof),
        ("points", f"{outcome.points:,} (chip, HBM, micro-batch, tensor-parallel width)"),
    ]
    for step, count in outcome.counts.items():
        if step in _STEPS and count:
            pairs.append((f"settled by {_STEPS[step]}", f"{count:,}"))
    pairs.append(("placed exactly", f"{outcome.counts['placed']:,}"))
    if outcome.counts["open"]:
        pairs.append(("still open", f"{outcome.counts['open']:,}"))
    if outcome.unproven:
        pairs.append(("layer schedules not proven", f"in {outcome.unproven:,} pairs"))
    if outcome.bound < float("inf"):
        pairs.append(("bound and gap", f"{format_time(outcome.bound)}, {outcome.gap:.3%}"))
    kept = ", kept from an earlier run" if outcome.recalled else ""
    pairs.append(("seconds", f"{outcome.seconds:.1f}{kept}"))
    return fields("The certificate", pairs)


def _best(found: SearchResult) -> RenderableType:
    best = found.best
    pairs = [("chip", str(best.chip)), ("area", f"{best.area_mm2:.2f} mm2")]
    for name, plan in best.plans.items():
        pairs.append((f"{name}", str(plan)))
        pairs.append(("", f"{share_text(plan)}; memory {fullest_text(plan, best.hbm_bytes)}"))
    return fields("The best chip and plan", pairs, best.chip.calibration.note)


def _baselines(found: SearchResult) -> RenderableType:
    rows = []
    for item in found.baselines.values():
        step = format_time(item["time_s"]) if item["time_s"] is not None else "none"
        gain = f"{item['speedup']:.2f}x" if item["speedup"] is not None else "-"
        looked = f"{item['evaluations']:,}" if item["evaluations"] else "-"
        rows.append([item["title"], step, gain, looked, item["plan_text"], item["note"]])
    columns = ["what", "step>", "ours is>", "chips>", "plan", "note"]
    return table("Baselines", columns, rows)


def _human(found: SearchResult) -> list[RenderableType]:
    parts = [_best(found), _top(found)]
    if found.outcome.objectives:
        parts.append(_front(found))
    if found.baselines:
        parts.append(_baselines(found))
    if found.sensitivity:
        parts.append(_sensitivity(found))
    if found.robust is not None:
        parts.append(robust_fields(found.robust))
    if found.information is not None:
        parts += information_tables(found.information)
    return [*parts, _certificate(found)]


def _front(found: SearchResult) -> RenderableType:
    front = found.pareto()
    shown = [
        [
            format_time(row["time_s"]),
            f"{row['area_mm2']:.2f}",
            f"{row['energy_j']:,.0f}",
            format_bytes(row["hbm_bytes"]),
            f"{row['cost_usd']:,.0f}",
            row["chip_text"].split(": ", 1)[-1].split(", HBM")[0],
        ]
        for row in front.rows[:12]
    ]
    sure = "" if front.proven else ", not proven"
    title = f"The front of {', '.join(front.objectives)}: {len(front)} points{sure}"
    caption = "" if len(front) <= 12 else f"{len(front) - 12} more with --json or --parquet"
    columns = ["step>", "mm2>", "J/step>", "HBM>", "dollars>", "chip"]
    return table(title, columns, shown, caption)


def _sensitivity(found: SearchResult) -> RenderableType:
    rows = [
        [
            f"{item['what']} x {item['factor']:g}",
            format_time(item["time_s"]) if item["time_s"] is not None else "none",
            f"{item['change']:+.1%}" if item["change"] is not None else "-",
            "same" if item["same_chip"] else item["chip_text"].split(": ", 1)[-1],
        ]
        for item in found.sensitivity
    ]
    area = found.space.spec.area
    caption = "Where an area is scaled, the limit stays."
    if area is not None and area.follows_base:
        caption = "Where an area is scaled, the limit is what the space's base chip then takes."
    columns = ["what", "step>", "change>", "best chip"]
    return table("If something were different", columns, rows, caption)


def _training(options: dict[str, Any]) -> Training:
    names = {"microbatch": "microbatch", "tp": "tensor_parallel", "pp": "pipeline"}
    names |= {"dp": "data_parallel", "cp": "context_parallel", "ep": "expert_parallel"}
    names |= {"zero": "zero"}
    data = {field: several(options[name], name) for name, field in names.items()}
    return Training.from_dict(
        {
            **{name: value for name, value in data.items() if value is not None},
            "global_batch": options["global_batch"],
            "seq": options["seq"],
            "recompute": tuple(options["recompute"].lower().split(",")),
            "schedule": tuple(options["schedule"].lower().split(",")),
            "optimizer": options["optimizer"],
            "software": options["software"] or DEFAULT,
        }
    )


def _space(name: str, hbm: str | None) -> ArchitectureSpace:
    space = ArchitectureSpace.load(name)
    if hbm is None:
        return space
    sizes = several(hbm, "hbm")
    axes = {**space.spec.axes, "hbm.capacity_bytes": tuple(float(s) * 2**30 for s in sizes or ())}
    return ArchitectureSpace(space.spec.replace(axes=axes))


def _weights(text: str | None) -> list[float] | None:
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise InvalidInputError(
            f"weights: {text!r} is not accepted; expected numbers separated by commas"
        ) from None


def search_chips(
    model: Annotated[list[str], typer.Argument(help="Model presets, or .yaml or .json files.")],
    space: Annotated[
        str, typer.Option(help="published, full-area, tpuv4-area, or a file.")
    ] = "published",
    hbm: Annotated[str | None, typer.Option(help="HBM capacities in GiB to try.")] = None,
    devices: Annotated[int, typer.Option(help="How many.")] = 1024,
    fabric: Annotated[str, typer.Option(help="A fabric preset, or a file.")] = "tpuv4-pod",
    global_batch: Annotated[int, typer.Option(help="Sequences of one step.")] = 4096,
    microbatch: Annotated[str, typer.Option(help="Sequences at once; several to try.")] = "1,2,4,8",
    tp: Annotated[str, typer.Option(help="Tensor-parallel widths to try.")] = "1,2,4,8",
    pp: Annotated[str | None, typer.Option(help="Counts of stages to try.")] = None,
    dp: Annotated[str | None, typer.Option(help="Counts of replicas to try.")] = None,
    cp: Annotated[str, typer.Option(help="Context-parallel widths to try.")] = "1",
    ep: Annotated[str, typer.Option(help="Expert-parallel widths to try.")] = "1",
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
    seq: Annotated[int | None, typer.Option(help="Tokens of a sequence.")] = None,
    optimizer: Annotated[str, typer.Option(help="Whose state is kept.")] = "adam",
    software: SoftwareName = None,
    weights: Annotated[str | None, typer.Option(help="Of several models, with commas.")] = None,
    top: Annotated[int, typer.Option(help="Chips to find and prove.")] = 10,
    pareto: Annotated[str, typer.Option(help="A front to find: time,area,energy,hbm,cost.")] = "",
    baselines: Annotated[
        str, typer.Option(help="Baselines: none, tpuv4, or all (early stop, random, Bayesian).")
    ] = "tpuv4",
    sensitivity: Annotated[
        bool, typer.Option("--sensitivity", help="Search again with each rate and area x 0.5, 2.")
    ] = False,
    uncertainty: Annotated[
        str | None,
        typer.Option(help="Constants as intervals: default, or a file; finds the robust chip."),
    ] = None,
    tolerance: Annotated[
        float, typer.Option(help="Of the least largest regret, as a fraction of its bound.")
    ] = 0.05,
    samples: Annotated[
        int, typer.Option(help="Points of the intervals to draw, for shares of wins; 0: none.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Of the samples.")] = 0,
    time_limit: Annotated[float, typer.Option(help="Seconds.")] = float("inf"),
    max_points: Annotated[
        float, typer.Option(help="Stop after the wave in which so many pairs were placed.")
    ] = float("inf"),
    threads: Annotated[
        int | None, typer.Option(help="At most so many threads; by default all cores.")
    ] = None,
    executor: Annotated[
        str | None, typer.Option(help="processes, dask://host:port, ray or mpi.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Directory to go on from, and to keep what is found in.")
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(help="Directory of earlier outcomes; by default the user's.")
    ] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Search in any case.")] = False,
    report: Annotated[
        Path | None, typer.Option(help="Write a page (HTML).", callback=target)
    ] = None,
    parquet: Annotated[
        Path | None, typer.Option(help="Write the front, or the best.", callback=target)
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
    as_json: AsJson = False,
    to_file: ToFile = None,
) -> None:
    """Find the chip and the plan that train models fastest, and prove it."""
    loaded = [load_model(name, seq) for name in model]
    step = _training(dict(locals()))
    cluster = Cluster.from_dict({"devices": devices, "fabric": fabric})
    chips, cores = _space(space, hbm), thread_count(threads)
    with shown_progress(quiet) as progress, told_where(resume), stopped_by_hand() as stop:
        found = search(
            loaded,
            chips,
            cluster,
            step,
            weights=_weights(weights),
            top=top,
            pareto=tuple(name.strip() for name in pareto.split(",") if name.strip()),
            time_limit_s=time_limit,
            max_points=max_points,
            threads=cores,
            executor=executor,
            resume=resume,
            cache=None if no_cache else cache or default_cache(),
            progress=progress,
            uncertainty=uncertainty,
            tolerance=tolerance,
            samples=samples,
            seed=seed,
            stop=stop,
        )
    for message in found.outcome.notes:
        note(message)
    if found.outcome.winners and (baselines != "none" or sensitivity):
        if (
            to_file is not None and str(to_file) != "-"
        ):  # what is proven is safe before more is done
            write_text(to_file, json.dumps(found.to_dict(), indent=2, allow_nan=False) + "\n")
        said = None if quiet else note
        found = compare(found, baselines, sensitivity, threads=cores, say=said)
    _deliver(found, report, parquet, as_json, to_file)


@contextlib.contextmanager
def stopped_by_hand() -> Iterator[Callable[[], bool]]:
    """Let Ctrl-C end a search with what it has found so far, and its bound; twice, at once."""
    asked: list[bool] = []

    def ask(*_: object) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(True)
        note("stopping with the best found so far and its bound; Ctrl-C again leaves at once")

    try:
        before = signal.signal(signal.SIGINT, ask)
    except ValueError:  # not the main thread
        yield lambda: False
        return
    try:
        yield lambda: bool(asked)
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def told_where(resume: Path | None) -> Iterator[None]:
    """Say, when a search is interrupted, where it goes on."""
    try:
        yield
    except KeyboardInterrupt:
        if resume is not None:
            note(f"what was found is in {resume}; the same command goes on from there")
        raise


def _deliver(
    found: SearchResult,
    report: Path | None,
    parquet: Path | None,
    as_json: bool,
    to_file: Path | None,
) -> None:
    def document() -> dict[str, Any]:
        made = found.to_dict()
        made["manifest"]["command"] = " ".join(["phaze-fast", *sys.argv[1:]])
        return made

    if report is not None:
        from phaze_fast.report.page import write_report

        write_report(document(), report)
        note(f"wrote {report}")
    if not found.outcome.winners:
        if as_json or to_file is not None:
            emit(document, list, True, to_file)
        raise InfeasibleError(found.reason)
    if parquet is not None:
        found.to_parquet(parquet)
        note(f"wrote {parquet}")
    emit(document, lambda: _human(found), as_json, to_file)


def add_commands(app: typer.Typer) -> None:
    """Add the command of this file."""
    app.command("search")(search_chips)
