"""Whole training steps measured on one device, against predictions.

Two kinds of file: steps of blocks written by hand (model, layers, seq, mbs, accum, recompute,
step_ms, peak_bytes, params) and steps of HuggingFace models (model, seq, mbs, recompute, mode,
step_ms, peak_bytes), whose architectures are in a file of configurations beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phaze_fast.calibration.published import RowRefusedError
from phaze_fast.calibration.statistics import ErrorSummary, summarise
from phaze_fast.calibration.validation import csv_rows
from phaze_fast.cost.validation import measured_model
from phaze_fast.documents import read_document
from phaze_fast.errors import InvalidInputError, PhazeError, nearest
from phaze_fast.hardware import Accelerator, Cluster, FlatFabric
from phaze_fast.models import Model, from_hf
from phaze_fast.planning import Plan, predict
from phaze_fast.software import load_software

__all__ = ["MeasuredStep", "StepValidation", "is_step_table", "measured_steps", "validate_steps"]

_HAND_WRITTEN = frozenset(
    ["model", "layers", "seq", "mbs", "accum", "recompute", "step_ms", "peak_bytes", "params"]
)
_HUGGINGFACE = frozenset(["model", "seq", "mbs", "recompute", "mode", "step_ms", "peak_bytes"])
_HEADS = {"bertlarge": 30522, "gpt2xl": 50257, "opt1.3b": 50272, "llama2-7b": 32000}
"""Vocabularies of the measured steps; no positions, an untied head."""
# Non-reentrant checkpoints of PyTorch stop at the last tensor that the backward pass needs.
_MODES = {"False": "none", "True": "needed", "none": "none", "full": "needed"}


@dataclass(frozen=True)
class StepValidation:
    """Predictions against steps measured on one device."""

    chip: str
    kind: str
    labels: tuple[str, ...]
    measured: Mapping[str, tuple[float, ...]]
    """By column: ``step_ms`` in milliseconds, ``peak_bytes`` in bytes."""
    predicted: Mapping[str, tuple[float, ...]]
    refused: tuple[str, ...]
    """One line for each row that is not accepted."""

    @property
    def columns(self) -> dict[str, ErrorSummary]:
        """Errors by column."""
        return {name: summarise(self.measured[name], self.predicted[name]) for name in _COLUMNS}

    def worst(self, count: int = 5) -> list[tuple[str, str, float, float, float]]:
        """(row, column, measured, predicted, error) of the largest errors, largest first."""
        found = [
            (label, column, y, x, x / y - 1.0)
            for column in _COLUMNS
            for label, y, x in zip(
                self.labels, self.measured[column], self.predicted[column], strict=True
            )
        ]
        return sorted(found, key=lambda row: -abs(row[4]))[:count]

    def to_dict(self) -> dict[str, Any]:
        """Give it as plain data."""
        return {
            "chip": self.chip,
            "kind": self.kind,
            "columns": {name: error.to_dict() for name, error in self.columns.items()},
            "refused": list(self.refused),
        }


_COLUMNS = ("step_ms", "peak_bytes")


def is_step_table(header: frozenset[str]) -> bool:
    """Tell a table of measured steps by its columns."""
    return header >= _HAND_WRITTEN or header >= _HUGGINGFACE


def _configurations(path: Path, given: Path | None) -> Mapping[str, Any]:
    beside = path.with_name(f"{path.stem}_configs.json")
    file = beside if given is None else given
    if given is None and not beside.exists():
        raise InvalidInputError(
            f"{path}: its models are described in {beside.name}, which is missing; put it beside "
            "the file or give --configs"
        )
    found = read_document(file)
    if not isinstance(found, Mapping):
        raise InvalidInputError(f"{file}: expected configurations by name")
    return found


def _huggingface(name: str, known: Mapping[str, Any]) -> Model:
    if name not in known:
        raise InvalidInputError(f"model: {name!r} is unknown; {nearest(name, known)}")
    config = dict(known[name])
    config["model_type"] = str(config.pop("architecture", "")).lower()
    return from_hf(config).replace(name=name)


def _number(cells: Mapping[str, str], column: str) -> float:
    try:
        value = float(cells.get(column) or "")
    except ValueError:
        value = 0.0
    if not 0 < value < 1e18:
        raise InvalidInputError(
            f"{column}: {cells.get(column)!r} is not accepted; expected a number greater than 0"
        )
    return value


def _plan_of(cells: Mapping[str, str], seq: int, software: str) -> dict[str, Any]:
    said = (cells.get("recompute") or "").strip()
    if said not in _MODES:
        raise InvalidInputError(f"recompute: {said!r} is not accepted; {nearest(said, _MODES)}")
    rounds = int(_number(cells, "accum")) if "accum" in cells else 1
    rows = int(_number(cells, "mbs"))
    return {
        "micro_batch": rows,
        "global_batch": rows * rounds,
        "recompute": _MODES[said],
        "seq": seq,
        "software": software,
        "optimizer": load_software(software).optimizer,
    }


@dataclass(frozen=True)
class MeasuredStep:
    """One row of a file of measured steps, as what `predict` takes."""

    line: int
    """Of the file."""
    label: str
    model: Model
    cluster: Cluster
    plan: dict[str, Any]
    measured: tuple[float, ...]
    """By column, in the order of the file's kind: milliseconds and bytes."""

    @property
    def source(self) -> str:
        """The model's name, which steps are told apart by."""
        return self.model.name

    @property
    def time_s(self) -> float:
        """Measured seconds."""
        return self.measured[0] / 1e3


def measured_steps(
    path: Path | str, chip: Accelerator, configs: Path | None = None
) -> tuple[list[MeasuredStep], list[str], bool]:
    """Read a file of measured steps; see `validate_steps`.

    Returns
    -------
    steps, refused, by_hand
        Rows that are accepted, a line for each that is not, and whether the models were written by
        hand.
    """
    path = Path(path)
    header, rows = csv_rows(path)
    by_hand = frozenset(header) >= _HAND_WRITTEN
    known = {} if by_hand else _configurations(path, configs)
    cluster = Cluster(devices=1, fabric=_ALONE, chip=chip)
    steps, refused = [], []
    for line, cells in rows:
        try:
            name, seq = (cells.get("model") or "").strip(), int(_number(cells, "seq"))
            model: Model
            if by_hand:
                layers = int(_number(cells, "layers"))
                model = measured_model(name, seq, layers, _HEADS.get(name, 50257))
            else:
                model = _huggingface(name, known)
            seen = tuple(_number(cells, column) for column in _COLUMNS)
            spec = _plan_of(cells, seq, "pytorch-eager" if by_hand else "huggingface-eager")
        except PhazeError as error:
            refused.append(str(RowRefusedError(f"row {line}: {str(error).splitlines()[0]}")))
            continue
        label = f"{name} {seq}x{cells['mbs']} {spec['recompute']}"
        steps.append(MeasuredStep(line, label, model, cluster, spec, seen))
    return steps, refused, by_hand


def validate_steps(
    path: Path | str, chip: Accelerator, configs: Path | None = None
) -> StepValidation:
    """Predict every row of a file of measured steps on a chip.

    Parameters
    ----------
    path
        CSV of one of the two kinds.
    chip
        What they were measured on.
    configs
        Configurations of HuggingFace models by the names in the file; by default the file
        ``NAME_configs.json`` beside ``NAME.csv``.

    Raises
    ------
    InvalidInputError
        Where the file or its configurations are not accepted. A row that is not accepted is listed
        in `refused`.
    """
    given, refused, by_hand = measured_steps(path, chip, configs)
    labels, plans, measured = [], [], []
    for step in given:
        try:
            plans.append(predict(step.model, step.cluster, step.plan))
        except PhazeError as error:
            refused.append(f"row {step.line}: {str(error).splitlines()[0]}")
            continue
        measured.append(step.measured)
        labels.append(step.label)
    if not labels:
        raise InvalidInputError(f"{path}: no row is accepted: {(refused or ['it has none'])[0]}")
    return StepValidation(
        chip=chip.name,
        kind="steps" if by_hand else "huggingface steps",
        labels=tuple(labels),
        measured={c: tuple(row[k] for row in measured) for k, c in enumerate(_COLUMNS)},
        predicted={c: tuple(_value(plan, c) for plan in plans) for c in _COLUMNS},
        refused=tuple(refused),
    )


def _value(plan: Plan, column: str) -> float:
    return 1e3 * plan.time_s if column == "step_ms" else plan.allocated_bytes


_ALONE = FlatFabric(name="one device", bandwidth_bytes_per_s=1e9)
