"""The command `search`: the best chip and plan for models over a space of chips, with the proof."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from phaze_fast.cli.interrupts import ends_interrupted, stopped_by_hand, told_where
from phaze_fast.cli.model_argument import load_model
from phaze_fast.cli.output import AsJson, ToFigures, ToFile, emit, folder, note, target, write_text
from phaze_fast.cli.plan_options import PrecisionName, SoftwareName, several
from phaze_fast.cli.progress import shown_progress
from phaze_fast.cli.search_tables import search_tables
from phaze_fast.errors import InfeasibleError, InvalidInputError
from phaze_fast.hardware import ArchitectureSpace, Cluster
from phaze_fast.papers.comparison import read_baselines
from phaze_fast.pipeline import compare, search
from phaze_fast.planning import Training
from phaze_fast.report.result import SearchResult
from phaze_fast.software import BF16, DEFAULT
from phaze_fast.threads import thread_count
from phaze_fast.units import parse_quantity

__all__ = ["add_commands"]


def default_cache() -> Path:
    """Where outcomes are kept between runs."""
    base = os.environ.get("PHAZE_FAST_CACHE") or os.environ.get("XDG_CACHE_HOME")
    root = Path(base) if base else Path.home() / ".cache"
    return root / "phaze_fast"


def _training(options: dict[str, Any]) -> Training:
    names = ("micro_batch", "tp", "pp", "dp", "cp", "ep", "zero")
    data = {name: several(options[name], name) for name in names}
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


def _hbm_bytes(text: str) -> float:
    """Read a size with its unit, or a number of GiB."""
    try:
        return float(text) * 2**30
    except ValueError:
        try:
            return parse_quantity(text.strip(), "bytes")
        except InvalidInputError as error:
            raise InvalidInputError(f"hbm: {error}") from None


def _space(name: str, hbm: str | None) -> ArchitectureSpace:
    space = ArchitectureSpace.load(name)
    if hbm is None:
        return space
    axes = {**space.spec.axes, "hbm.capacity_bytes": tuple(_hbm_bytes(p) for p in hbm.split(","))}
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
    model: Annotated[
        list[str],
        typer.Argument(
            help="Models, one or several: presets (`phaze-fast models` lists them), .yaml or"
            " .json files, or folders with a HuggingFace config.json."
        ),
    ],
    space: Annotated[
        str,
        typer.Option(
            help="The chips to choose from: published (the PHAZE paper's space), full-area "
            "(the same with network and HBM PHYs counted), every-term (with every area, a power "
            "cap, a package, and HBM, links and dies as axes), tpuv4-area (chips as large as a "
            "TPUv4), or a .yaml or .json file."
        ),
    ] = "published",
    hbm: Annotated[
        str | None,
        typer.Option(
            help="HBM of a chip to try: sizes such as 80GiB, or numbers of GiB, divided by commas."
        ),
    ] = None,
    devices: Annotated[int, typer.Option(help="How many devices the cluster has.")] = 1024,
    fabric: Annotated[
        str,
        typer.Option(
            help="How the devices are wired: a preset (`phaze-fast fabrics` lists them) or a file."
        ),
    ] = "tpuv4-pod",
    global_batch: Annotated[
        int, typer.Option(help="Sequences of one training step, over all replicas.")
    ] = 4096,
    micro_batch: Annotated[
        str,
        typer.Option(
            help="Sequences a device works on at once; several to try, divided by commas."
        ),
    ] = "1,2,4,8",
    tp: Annotated[
        str,
        typer.Option(help="Devices that share each layer (tensor parallelism); several to try."),
    ] = "1,2,4,8",
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
        str,
        typer.Option(
            help="Devices that share each sequence (context parallelism); several to try."
        ),
    ] = "1",
    ep: Annotated[
        str,
        typer.Option(
            help="Devices that share the experts of a layer (expert parallelism); several to try."
        ),
    ] = "1",
    zero: Annotated[
        str,
        typer.Option(
            help="What replicas share: 0 nothing, 1 optimiser state, 2 gradients too, 3 "
            "weights too; several to try."
        ),
    ] = "0,1",
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
    seq: Annotated[
        int | None, typer.Option(help="Tokens of a sequence (default: as the model is published).")
    ] = None,
    optimizer: Annotated[
        str,
        typer.Option(
            help="The optimiser, whose state takes memory: adam, adam-bf16-grad, adam-fp32, "
            "sgd and others."
        ),
    ] = "adam",
    precision: PrecisionName = None,
    software: SoftwareName = None,
    weights: Annotated[
        str | None,
        typer.Option(
            help="How much each of several models counts, divided by commas; by default all alike."
        ),
    ] = None,
    top: Annotated[int, typer.Option(help="How many of the best chips to find and prove.")] = 10,
    pareto: Annotated[
        str,
        typer.Option(
            help="Also find the Pareto front over some of: time, area, energy (of a step), "
            "hbm, cost (of all chips), divided by commas."
        ),
    ] = "",
    objective: Annotated[
        str,
        typer.Option(
            help="What the best chips have least of: time, energy (most samples per joule), cost "
            "(per dollar of devices), area (per mm2), tokens (dollars for a trillion tokens)."
        ),
    ] = "time",
    portfolio: Annotated[
        bool,
        typer.Option(
            "--portfolio",
            help="Also find the best two chips for several models, each on its better one.",
        ),
    ] = False,
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
        bool,
        typer.Option(
            "--sensitivity",
            help="Search again with each bandwidth and each area halved and doubled, and say"
            " how the best chip changes.",
        ),
    ] = False,
    uncertainty: Annotated[
        str | None,
        typer.Option(
            help="Take the constants of the cost model as intervals (default, or a file of "
            "them) and also find the chip that loses least in the worst case."
        ),
    ] = None,
    tolerance: Annotated[
        float,
        typer.Option(
            help="With --uncertainty: how far from proven the answer may be, as a fraction."
        ),
    ] = 0.05,
    samples: Annotated[
        int,
        typer.Option(
            help="With --uncertainty: draw so many points of the intervals and say how often"
            " each chip wins; 0 draws none."
        ),
    ] = 0,
    seed: Annotated[int, typer.Option(help="Seed of these samples.")] = 0,
    time_limit: Annotated[
        float, typer.Option(help="Stop after so many seconds, with the best found and its bound.")
    ] = float("inf"),
    max_points: Annotated[
        float,
        typer.Option(
            help="Stop once so many candidates (a chip under a strategy) were placed "
            "exactly, with the best found and its bound."
        ),
    ] = float("inf"),
    threads: Annotated[
        int | None, typer.Option(help="At most so many threads; by default all cores.")
    ] = None,
    executor: Annotated[
        str | None,
        typer.Option(
            help="Where to work instead of in threads: processes, dask://host:port, ray or mpi."
        ),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            help="Folder that keeps what is found; the same command goes on from there.",
            parser=folder,
            metavar="<path>",
        ),
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(
            help="Folder of finished searches, looked up before searching; by default the "
            "user's cache folder.",
            parser=folder,
            metavar="<path>",
        ),
    ] = None,
    no_cache: Annotated[
        bool,
        typer.Option("--no-cache", help="Neither look up finished searches nor keep this one."),
    ] = False,
    report: ToFigures = None,
    parquet: Annotated[
        Path | None,
        typer.Option(
            help="Write the Pareto front, or the best chips, as Parquet.", callback=target
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
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
            objective=objective,
            portfolio=portfolio,
            uncertainty=uncertainty,
            tolerance=tolerance,
            samples=samples,
            seed=seed,
            stop=stop,
        )
    for message in found.outcome.notes:
        note(message)
    stopped = stop()
    others = objective == "time" and (baselines.lower() != "none" or sensitivity)
    if found.outcome.winners and not stopped and others:
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
