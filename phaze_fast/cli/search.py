"""The command `search`: the best chip and plan for models over a space of chips, with the proof."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from phaze_fast.baselines.comparison import read_baselines
from phaze_fast.cli.interrupts import ends_interrupted, stopped_by_hand, told_where
from phaze_fast.cli.model_argument import load_model
from phaze_fast.cli.output import AsJson, ToFile, emit, folder, note, target, write_text
from phaze_fast.cli.plan_options import PrecisionName, SoftwareName, several
from phaze_fast.cli.progress import shown_progress
from phaze_fast.cli.search_tables import search_tables
from phaze_fast.errors import InfeasibleError, InvalidInputError
from phaze_fast.hardware import ArchitectureSpace, Cluster
from phaze_fast.pipeline import compare, search
from phaze_fast.placement import Training
from phaze_fast.report.result import SearchResult
from phaze_fast.software import BF16, DEFAULT
from phaze_fast.threads import thread_count

__all__ = ["add_commands"]


def default_cache() -> Path:
    """Where outcomes are kept between runs."""
    base = os.environ.get("PHAZE_FAST_CACHE") or os.environ.get("XDG_CACHE_HOME")
    root = Path(base) if base else Path.home() / ".cache"
    return root / "phaze_fast"


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
            "precision": options["precision"] or BF16,
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
            help="1f1b, gpipe, interleaved, zb-h1, zb-h2, zb-v, dualpipe, dualpipe-v; several to "
            "try."
        ),
    ] = "1f1b,interleaved",
    seq: Annotated[int | None, typer.Option(help="Tokens of a sequence.")] = None,
    optimizer: Annotated[str, typer.Option(help="Whose state is kept.")] = "adam",
    precision: PrecisionName = None,
    software: SoftwareName = None,
    weights: Annotated[str | None, typer.Option(help="Of several models, with commas.")] = None,
    top: Annotated[int, typer.Option(help="Chips to find and prove.")] = 10,
    pareto: Annotated[str, typer.Option(help="A front to find: time,area,energy,hbm,cost.")] = "",
    baselines: Annotated[
        str,
        typer.Option(
            help="What to compare with, divided by commas: tpuv4 (three plans on the TPUv4-like "
            "chip of the PHAZE paper), all (also its early stop, random and Bayesian search), "
            "none, or chips of your own: presets (see `phaze-fast chips`) or files, with the best "
            "plan on each."
        ),
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
        Path | None,
        typer.Option(
            help="Directory to go on from, and to keep what is found in.",
            parser=folder,
            metavar="<path>",
        ),
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(
            help="Directory of earlier outcomes; by default the user's.",
            parser=folder,
            metavar="<path>",
        ),
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
    read_baselines(baselines)  # refused before anything is searched
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
    stopped = stop()
    if found.outcome.winners and not stopped and (baselines.lower() != "none" or sensitivity):
        if (
            to_file is not None and str(to_file) != "-"
        ):  # what is proven is safe before more is done
            write_text(to_file, json.dumps(found.to_dict(), indent=2, allow_nan=False) + "\n")
        said = None if quiet else note
        found = compare(found, baselines, sensitivity, threads=cores, say=said)
    with ends_interrupted(stopped):
        _deliver(found, report, parquet, as_json, to_file)


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
    emit(document, lambda: search_tables(found), as_json, to_file)


def add_commands(app: typer.Typer) -> None:
    """Add the command of this file."""
    app.command("search")(search_chips)
