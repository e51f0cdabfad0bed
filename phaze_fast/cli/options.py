"""Options that commands share: models, the cluster, and the file of a plan with its problem."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from phaze_fast import models
from phaze_fast.cli.output import folder, note
from phaze_fast.documents import read_document
from phaze_fast.errors import InvalidInputError, not_accepted
from phaze_fast.hardware import Cluster, presets
from phaze_fast.planning import Plan, PlanSpec, predict

T = TypeVar("T")

# ---- models, hardware and threads ----


_complete_model = {"autocompletion": lambda: list(models.names())}
_MODEL_HELP = (
    "a preset (`phaze-fast show model` lists them), a .yaml or .json file, or a folder with a "
    "HuggingFace config.json."
)
ModelName = Annotated[str, typer.Argument(help=f"The model: {_MODEL_HELP}", **_complete_model)]
_several = f"The models, one or several; each {_MODEL_HELP}"
ModelNames = Annotated[list[str], typer.Argument(metavar="MODEL", help=_several, **_complete_model)]
Threads = Annotated[
    int | None,
    typer.Option(help="At most so many threads; by default all cores.", rich_help_panel="Output"),
]
Folder = Annotated[Path | None, typer.Option(parser=folder, metavar="FOLDER")]


@dataclass(frozen=True)
class LongRun:
    """Executor, limits and stored results."""

    threads: int | None = None
    """At most so many threads; by default all cores."""
    executor: str | None = None
    """Where to work instead of in threads: processes, dask://host:port, ray or mpi."""
    resume: Folder = None
    """Folder that keeps what is found; the same command goes on from there."""
    cache: Folder = None
    """Folder of finished results, looked up before searching; by default the user's cache."""
    no_cache: bool = False
    """Neither look up finished results nor keep these."""
    quiet: bool = False
    """Show no progress."""

    @property
    def cache_folder(self) -> Path | None:
        """The folder of finished results; None where results are not stored."""
        if self.no_cache:
            return None
        if self.cache is not None:
            return self.cache
        base = os.environ.get("PHAZE_FAST_CACHE") or os.environ.get("XDG_CACHE_HOME")
        return (Path(base) if base else Path.home() / ".cache") / "phaze_fast"


@dataclass(frozen=True)
class Trained:
    """What is trained."""

    lora: Annotated[str | None, typer.Option(metavar="rank=R,targets=...")] = None
    """Train adapters of a rank on frozen weights: rank=16,targets=q,k,v,o,up,gate,down (names of
    HuggingFace modules and all-linear, the default, are accepted; experts: of routed experts);
    also dropout=P, alpha=A (no effect on time or memory) and bits=4 for frozen weights as in
    QLoRA. By default all parameters are trained, or those that a traced model says."""


def load_model(name: str, seq: int | None = None, lora: str | None = None) -> models.Model:
    """Load a model, with adapters if wanted; print the sequence length where the user set none.

    Raises
    ------
    InvalidInputError
        Where a model that is given by its graph is to get adapters.
    """
    model = models.load(name)
    if lora is not None:
        if not isinstance(model, models.TransformerModel):
            raise not_accepted(
                "--lora", lora, f"none: {name} is a graph; trace the module with its adapters"
            )
        model = model.with_lora(models.read_lora(lora))
    if seq is None and model.notes.startswith("seq "):
        note(f"{model.name}: {model.notes}; --seq sets another")
    return model


def numbers(text: str, option: str, kind: Callable[[str], T]) -> tuple[T, ...]:
    """Read numbers of a kind, int or float, separated by commas.

    Examples
    --------
    >>> numbers("1,2.5", "--weights", float)
    (1.0, 2.5)
    """
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        expected = "whole numbers" if kind is int else "numbers"
        raise not_accepted(option, text, f"{expected} separated by commas") from None


def one_for_each(text: str, count: int, option: str) -> list[str]:
    """Split an option that has one value for several clusters, or one for each.

    Examples
    --------
    >>> one_for_each("8", 2, "--devices"), one_for_each("8,16", 2, "--devices")
    (['8', '8'], ['8', '16'])
    """
    values = [word.strip() for word in text.split(",")]
    if len(values) not in (1, count):
        expected = f"one value, or {count} separated by commas" if count > 1 else "one value"
        raise not_accepted(option, text, expected)
    return values * (count // len(values))


@dataclass(frozen=True)
class Hardware:
    """The cluster."""

    chip: Annotated[str, typer.Option(autocompletion=lambda: list(presets.chip_names()))]
    """The chip: a preset (`phaze-fast show chip` lists them) or a file."""
    devices: int
    """Devices of the cluster."""
    fabric: Annotated[
        str | None, typer.Option(autocompletion=lambda: list(presets.fabric_names()))
    ] = None
    """The interconnect: a preset (`phaze-fast show interconnect` lists them) or a file; by default
    the chip's usual one."""

    def cluster(self) -> Cluster:
        """Look up chip and interconnect; by default the usual interconnect of the chip."""
        chip = presets.chip(self.chip)
        fabric = self.fabric or chip.usual_fabric
        if not fabric:
            raise InvalidInputError(
                f"--fabric: missing, and {chip.name} has no usual interconnect; accepted: "
                f"{', '.join(presets.fabric_names())}, or a file"
            )
        return Cluster.from_dict({"devices": self.devices, "fabric": fabric, "chip": self.chip})


# ---- plans as files: what `plan --json` and `predict --json` write, with their problem ----

PlanFile = Annotated[
    Path,
    typer.Argument(
        help="A plan: what `plan --json` or `predict --json` wrote (of several plans the first), "
        "or a file of a training framework."
    ),
]


def problem_of(model: models.Model, cluster: Cluster) -> dict[str, Any]:
    """Return the problem as plain data, so that a plan's file is self-contained."""
    return {"model": model.to_dict(), "cluster": cluster.to_dict()}


@dataclass(frozen=True)
class StoredPlan:
    """A plan from a file, with the problem it solves."""

    model: models.Model
    cluster: Cluster
    spec: PlanSpec
    notes: tuple[str, ...] = ()
    """What had to be assumed in reading a framework's file."""

    def predicted(self) -> Plan:
        """Predict the plan's time and memory."""
        return predict(self.model, self.cluster, self.spec)


@dataclass(frozen=True)
class PlanProblem:
    """The problem of the plan, where its file does not have it."""

    model: str | None = None
    """The model: a preset or a file."""
    chip: str | None = None
    """The chip: a preset or a file."""
    devices: int | None = None
    """Devices of the cluster."""
    fabric: str | None = None
    """The interconnect; by default the file's, or the chip's usual one."""

    def read(self, path: Path) -> StoredPlan:
        """Read a plan and its problem; options override the file.

        Raises
        ------
        InvalidInputError
            Where neither the file nor an option gives a required field.
        """
        from phaze_fast.export import is_framework_file, read_plan  # only where a file is read

        is_framework = is_framework_file(path)
        document = {} if is_framework else _plan_document(path)
        model = self._model(document, path)
        cluster = self._cluster(document, path)
        if is_framework:
            plan = read_plan(path, model, cluster.devices)
            return StoredPlan(model, cluster, plan.spec, tuple(plan.notes))
        return StoredPlan(model, cluster, PlanSpec.of(document, str(path)))

    def _model(self, document: Mapping[str, Any], path: Path) -> models.Model:
        if self.model is not None:
            return models.load(self.model)
        inside = document.get("model")
        if isinstance(inside, Mapping):
            return models.model_from_dict(dict(inside), f"{path}: model")
        if isinstance(inside, str):
            return models.load(inside)
        raise InvalidInputError(f"--model: missing; {path} does not say which model its plan is of")

    def _cluster(self, document: Mapping[str, Any], path: Path) -> Cluster:
        inside = document.get("cluster")
        known: dict[str, Any] = dict(inside) if isinstance(inside, Mapping) else {}
        if self.chip is not None:
            known["chip"] = self.chip
            known["fabric"] = self.fabric or presets.chip(self.chip).usual_fabric
        if self.fabric is not None:
            known["fabric"] = self.fabric
        if self.devices is not None:
            known["devices"] = self.devices
        for name in ("chip", "devices", "fabric"):
            if known.get(name) is None:
                raise InvalidInputError(f"--{name}: missing; {path} does not say it")
        return Cluster.from_dict(known, "" if self.chip or self.devices else f"{path}: cluster")


def _plan_document(path: Path) -> Mapping[str, Any]:
    document = read_document(path)
    if not isinstance(document, Mapping):
        raise InvalidInputError(f"{path}: expected a plan, a mapping of keys to values")
    if document.get("status") == "infeasible":
        raise InvalidInputError(f"{path}: holds no plan: {document.get('reason')}")
    return document
