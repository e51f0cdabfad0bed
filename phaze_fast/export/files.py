"""Plans to files of training frameworks, and back; a file's format is seen from what is in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from phaze_fast.documents import parse_json, parse_text, read_text
from phaze_fast.errors import InvalidInputError, nearest
from phaze_fast.export.bridge import read_bridge, write_bridge
from phaze_fast.export.deepspeed import read_deepspeed, write_deepspeed
from phaze_fast.export.maxtext import read_maxtext, write_maxtext
from phaze_fast.export.megatron import read_megatron, write_megatron
from phaze_fast.export.names import FORMATS, flag_names
from phaze_fast.export.request import Exported, ReadPlan, Request
from phaze_fast.export.torchtitan import read_torchtitan, write_torchtitan
from phaze_fast.models import GraphModel, Model, TransformerModel, load, recognised
from phaze_fast.planning import Plan, PlanSpec

__all__ = ["export_plan", "is_framework_file", "read_plan"]

_WRITERS: Mapping[str, Callable[[Request], Exported]] = MappingProxyType(
    {
        "megatron": write_megatron,
        "bridge": write_bridge,
        "deepspeed": write_deepspeed,
        "torchtitan": write_torchtitan,
        "maxtext": write_maxtext,
    }
)
_DEEPSPEED = ("train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization")


def export_plan(
    plan: Plan | PlanSpec | Mapping[str, Any],
    model: Model | str,
    to: str,
    node_devices: int = 8,
) -> Exported:
    """Write a plan as a file that a training framework runs.

    Parameters
    ----------
    plan
        A plan that was found or predicted, or one as plain data, with its stages.
    model
        What is trained, or its name.
    to
        A name of `FORMATS`.
    node_devices
        Devices of a node, for the command that starts one process each.

    Returns
    -------
    Exported
        The file, and what of the plan it cannot say.

    Raises
    ------
    InvalidInputError
        Where there is no such format, or the plan does not spell out its stages.

    Examples
    --------
    >>> plan = {"tp": 4, "pp": 2, "dp": 2, "global_batch": 64, "recompute": "full"}
    >>> found = export_plan(plan, "llama2-7b", "megatron")
    >>> found.complete, "--tensor-model-parallel-size 4" in found.text
    (True, True)
    """
    if to not in FORMATS:
        raise InvalidInputError(f"to: {to!r} is not accepted; {nearest(to, FORMATS)}")
    if node_devices < 1:
        raise InvalidInputError(f"node_devices: {node_devices} is not accepted; expected 1 or more")
    known = _transformer(model)
    return _WRITERS[to](Request.of(plan, known, node_devices))


def _transformer(model: Model | str) -> TransformerModel:
    given = load(model) if isinstance(model, str) else model
    known = recognised(given) or given if isinstance(given, GraphModel) else given
    if not isinstance(known, TransformerModel):
        raise InvalidInputError(
            f"model: {known.name} is a graph and not accepted; expected a transformer, by whose "
            "fields training frameworks are configured"
        )
    return known


def _format(text: str, source: str) -> str | None:
    """Tell whose file a text is; None where it is none of a training framework."""
    if source.endswith(".toml"):
        return "torchtitan"
    if text.lstrip().startswith("{"):
        data = parse_json(text)
        return "deepspeed" if isinstance(data, dict) and _some(data, _DEEPSPEED) else None
    if flag_names("bridge")["tp"] + "=" in text:
        return "bridge"
    if ("ici_" in text and "_parallelism=" in text) or "MaxText.train" in text:
        return "maxtext"
    if flag_names("megatron")["tp"] in text or "pretrain_" in text:
        return "megatron"
    if source.endswith((".yaml", ".yml")):
        data = parse_text(text, source)
        inner = data.get("model") if isinstance(data, dict) else None
        names = flag_names("bridge")["tp"].split(".")[-1]
        return "bridge" if isinstance(inner, dict) and names in inner else None
    return None


def _some(data: Mapping[str, Any], names: tuple[str, ...]) -> bool:
    return any(name in data for name in names)


def is_framework_file(path: str | Path) -> bool:
    """Whether a file is one of a training framework, and not a plan of this package."""
    return _format(read_text(path), str(path)) is not None


def read_plan(path: str | Path, model: Model | str, devices: int | None = None) -> ReadPlan:
    """Read a file of a training framework as a plan.

    Parameters
    ----------
    path
        A shell command that runs Megatron-LM, Megatron Bridge or MaxText, a configuration of
        DeepSpeed (JSON) or of torchtitan (TOML).
    model
        What is trained, or its name.
    devices
        Of the cluster; needed where the file does not say how many there are.

    Returns
    -------
    ReadPlan
        The plan, and what the file says that a prediction does not look at.

    Raises
    ------
    InvalidInputError
        Where the file is none of these, or says what a plan cannot.
    """
    text, source = read_text(path), str(path)
    known = _transformer(model)
    format_ = _format(text, source)
    if format_ is None:
        raise InvalidInputError(
            f"{source}: no file of a training framework; expected one of {', '.join(FORMATS)}"
        )
    if format_ == "deepspeed":
        return read_deepspeed(parse_json(text), source, known, devices)
    if format_ == "bridge" and source.endswith((".yaml", ".yml")):
        return read_bridge(parse_text(text, source), source, known, devices)
    readers = {
        "megatron": read_megatron,
        "bridge": read_bridge,
        "torchtitan": read_torchtitan,
        "maxtext": read_maxtext,
    }
    return readers[format_](text, source, known, devices)
