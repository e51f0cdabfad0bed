"""The command `calibrate`: constants of a chip or fabric from measurements of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.console import RenderableType

from phaze_fast.calibration import (
    Calibrated,
    benchmark_script,
    calibrate_chip,
    calibrate_fabric,
    is_collective_table,
)
from phaze_fast.cli.output import AsJson, emit, note, table
from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware import presets

__all__ = ["add_commands"]


def _parts(found: Calibrated) -> list[RenderableType]:
    constants = [
        [c.name, f"{c.before:.4g}", f"{c.value:.4g}", f"{c.low:.4g} to {c.high:.4g}", c.note]
        for c in found.constants
    ]
    errors = [
        [kind, f"{e['rows']:.0f}", f"{e['before']:.1%}", f"{e['fitted']:.1%}", f"{e['unseen']:.1%}"]
        for kind, e in found.errors.items()
    ]
    headings = ["constant", "before>", "fitted>", "90% interval", "note"]
    title = "mean absolute errors; unseen: of rows left out of the fit, five folds"
    return [
        table(f"constants of the {found.what}", headings, constants),
        table(title, ["rows of", "rows>", "before>", "fitted>", "unseen>"], errors),
    ]


def _written(path: Path, text: str) -> None:
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise InvalidInputError(f"{path}: cannot be written: {error.strerror}") from None


def _calibrated(files: list[Path], chip: str, fabric: str, name: str) -> Calibrated:
    for file in files:
        if not file.is_file():
            raise InvalidInputError(f"{file}: cannot be read: there is no such file")
    collective = [is_collective_table(file) for file in files]
    if any(collective) != all(collective):
        raise InvalidInputError(
            "MEASUREMENTS: operators and collectives are not accepted together; "
            "expected one call for the chip and one for the fabric"
        )
    if collective[0]:
        if not fabric:
            raise InvalidInputError("--fabric: is missing; expected the fabric to begin from")
        return calibrate_fabric(files, presets.fabric(fabric), name)
    if not chip:
        raise InvalidInputError("--chip: is missing; expected the chip to begin from")
    return calibrate_chip(files, presets.chip(chip), name)


def calibrate(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="MEASUREMENTS...",
            help="Files of measured operators, or of measured collectives, of one machine.",
        ),
    ] = None,
    chip: Annotated[
        str, typer.Option(help="For operators: the chip to begin from, a preset or a file.")
    ] = "",
    fabric: Annotated[
        str, typer.Option(help="For collectives: the fabric to begin from, a preset or a file.")
    ] = "",
    name: Annotated[str, typer.Option(help="What to call the result.")] = "",
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the chip or fabric here, as YAML.")
    ] = None,
    emit_benchmark: Annotated[
        Path | None,
        typer.Option(help="Write a script that measures your own GPU, and do nothing else."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Fit the constants of a chip or fabric to measurements of it.

    Example: phaze-fast calibrate products.csv attention.csv --chip h200 --name mine -o mine.yaml
    """
    if emit_benchmark is not None:
        _written(emit_benchmark, benchmark_script())
        note(f"{emit_benchmark}: run it with PyTorch on the machine; it writes files for calibrate")
        return
    if not files:
        raise InvalidInputError("MEASUREMENTS: is missing; expected files, or --emit-benchmark")
    found = _calibrated(files, chip, fabric, name)
    for pair in found.collinear:
        note(
            f"{pair[0]} and {pair[1]}: these measurements cannot separate the two; only their "
            "combination is fitted"
        )
    left = [c.name for c in found.constants if c.note.startswith("no row")]
    if left:
        note(
            f"no row depends on {', '.join(left)}: the starting chip's value is kept, which is an "
            "extrapolation"
        )
    if output is not None:
        _written(output, yaml.safe_dump(found.document, sort_keys=False, allow_unicode=True))
    emit(found.to_dict, lambda: _parts(found), as_json, None)


def add_commands(app: typer.Typer) -> None:
    """Add the command of this file."""
    app.command("calibrate")(calibrate)
