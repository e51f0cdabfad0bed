"""Plans as files: what `plan --json` and `predict --json` write, with the problem they are of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from phaze_fast import models
from phaze_fast.documents import read_document
from phaze_fast.errors import InvalidInputError
from phaze_fast.export import is_framework_file, read_plan
from phaze_fast.hardware import Cluster, presets
from phaze_fast.models import Model
from phaze_fast.planning import Plan, PlanSpec, predict

__all__ = ["GivenPlan", "PlanFile", "PlanProblem", "problem_of"]

PlanFile = Annotated[
    Path,
    typer.Argument(
        help="A plan: what `plan --json` or `predict --json` wrote (of several plans the first), "
        "or a file of a training framework."
    ),
]


def problem_of(model: Model, cluster: Cluster) -> dict[str, Any]:
    """Give the problem as plain data, so that a plan's file needs nothing else to be read."""
    return {"model": model.to_dict(), "cluster": cluster.to_dict()}


@dataclass(frozen=True)
class GivenPlan:
    """A plan with the problem it is of."""

    model: Model
    cluster: Cluster
    spec: PlanSpec
    document: Mapping[str, Any]
    """What the file holds; empty where it is one of a training framework."""
    notes: tuple[str, ...] = ()

    def predicted(self) -> Plan:
        """Time the plan."""
        return predict(self.model, self.cluster, self.spec)


@dataclass(frozen=True)
class PlanProblem:
    """The problem that a plan is of, where its file does not say it."""

    model: Annotated[
        str | None,
        typer.Option(help="The model, where the file does not say it: a preset or a file."),
    ] = None
    chip: Annotated[str | None, typer.Option(help="The chip, where the file does not say it.")] = (
        None
    )
    devices: Annotated[
        int | None, typer.Option(help="Devices of the cluster, where the file does not say it.")
    ] = None
    fabric: Annotated[
        str | None, typer.Option(help="The fabric; by default the file's, or the chip's usual one.")
    ] = None

    def read(self, path: Path) -> GivenPlan:
        """Read a plan and its problem; options override the file.

        Raises
        ------
        InvalidInputError
            Where neither says what is needed.
        """
        foreign = is_framework_file(path)
        document = {} if foreign else _mapping(path)
        model = self._model(document, path)
        cluster = self._cluster(document, path)
        if foreign:
            read = read_plan(path, model, cluster.devices)
            return GivenPlan(model, cluster, read.spec, {}, read.notes)
        return GivenPlan(model, cluster, PlanSpec.of(document), document)

    def _model(self, document: Mapping[str, Any], path: Path) -> Model:
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


def _mapping(path: Path) -> Mapping[str, Any]:
    document = read_document(path)
    if not isinstance(document, Mapping):
        raise InvalidInputError(f"{path}: expected a plan, a mapping of keys to values")
    if document.get("status") == "infeasible":
        raise InvalidInputError(f"{path}: holds no plan: {document.get('reason')}")
    return document
