"""Plans as files of training frameworks, and such files as plans, recognised by their content."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from phaze_fast.documents import parse_json, parse_text, read_text
from phaze_fast.errors import InvalidInputError, check_one_of
from phaze_fast.export.deepspeed import read_deepspeed, write_deepspeed
from phaze_fast.export.maxtext import read_maxtext, write_maxtext
from phaze_fast.export.megatron import read_bridge, read_megatron, write_bridge, write_megatron
from phaze_fast.export.request import (
    FORMATS,
    Exported,
    ReadPlan,
    Request,
    Unexpressed,
    flag_names,
)
from phaze_fast.export.torchtitan import read_torchtitan, write_torchtitan
from phaze_fast.models import GraphModel, Model, TransformerModel, load, recognised
from phaze_fast.planning import Plan, PlanSpec

_Writer = Callable[[Request], tuple[str, list[Unexpressed]]]
_Reader = Callable[..., tuple[dict[str, Any], list[str]]]
_WRITERS_AND_READERS: Mapping[str, tuple[_Writer, _Reader]] = {
    "megatron": (write_megatron, read_megatron),
    "bridge": (write_bridge, read_bridge),
    "deepspeed": (write_deepspeed, read_deepspeed),
    "torchtitan": (write_torchtitan, read_torchtitan),
    "maxtext": (write_maxtext, read_maxtext),
}
_DEEPSPEED_KEYS = {"train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization"}


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
        A plan with its stages, as an object or as plain data.
    model
        The model to train, or its name.
    to
        A name of `FORMATS`.
    node_devices
        Devices per node, for the launch command.

    Returns
    -------
    Exported
        The file, and the parts of the plan that it cannot express.

    Raises
    ------
    InvalidInputError
        Where there is no such format, or the plan does not give its stages.

    Examples
    --------
    >>> plan = {"tp": 4, "pp": 2, "dp": 2, "global_batch": 64, "recompute": "full"}
    >>> exported = export_plan(plan, "llama2-7b", "megatron")
    >>> exported.complete, "--tensor-model-parallel-size 4" in exported.text
    (True, True)
    """
    check_one_of("to", to, FORMATS)
    if node_devices < 1:
        raise InvalidInputError(f"node_devices: {node_devices} is not accepted; expected 1 or more")
    text, missing = _WRITERS_AND_READERS[to][0](Request.of(plan, _transformer(model), node_devices))
    return Exported(to, text, tuple(missing))


def _transformer(model: Model | str) -> TransformerModel:
    loaded = load(model) if isinstance(model, str) else model
    if isinstance(loaded, GraphModel):
        loaded = recognised(loaded) or loaded
    if not isinstance(loaded, TransformerModel):
        raise InvalidInputError(
            f"model: {loaded.name} is a graph and not accepted; expected a transformer, by whose "
            "fields training frameworks are configured"
        )
    return loaded


def _contents(text: str, source: str) -> tuple[str | None, Any]:
    """Return a file's format (None: not of a framework) and the data for the format's reader."""
    bridge_tp = flag_names("bridge")["tp"]
    if source.endswith(".toml"):
        return "torchtitan", text
    if text.lstrip().startswith("{"):
        data = parse_json(text)
        return "deepspeed" if isinstance(data, dict) and _DEEPSPEED_KEYS & set(data) else None, data
    if f"{bridge_tp}=" in text:
        return "bridge", text
    if ("ici_" in text and "_parallelism=" in text) or "MaxText.train" in text:
        return "maxtext", text
    if flag_names("megatron")["tp"] in text or "pretrain_" in text:
        return "megatron", text
    if source.endswith((".yaml", ".yml")):
        data = parse_text(text, source)
        model = data.get("model") if isinstance(data, dict) else None
        known = isinstance(model, dict) and bridge_tp.split(".")[-1] in model
        return "bridge" if known else None, data
    return None, text


def is_framework_file(path: str | Path) -> bool:
    """Whether a file is one of a training framework, and not a plan of this package."""
    return _contents(read_text(path), str(path))[0] is not None


def read_plan(path: str | Path, model: Model | str, devices: int | None = None) -> ReadPlan:
    """Read a file of a training framework as a plan.

    Parameters
    ----------
    path
        A shell command that runs Megatron-LM, Megatron Bridge or MaxText, a configuration of
        DeepSpeed (JSON) or of torchtitan (TOML).
    model
        The model to train, or its name.
    devices
        Devices of the cluster; required where the file does not give their number.

    Returns
    -------
    ReadPlan
        The plan, and the settings of the file that a prediction does not use.

    Raises
    ------
    InvalidInputError
        Where the file is not one of a framework, or has settings that a plan cannot express.
    """
    source, transformer = str(path), _transformer(model)
    format_, contents = _contents(read_text(path), source)
    if format_ is None:
        raise InvalidInputError(
            f"{source}: no file of a training framework; expected one of {', '.join(FORMATS)}"
        )
    try:
        fields, notes = _WRITERS_AND_READERS[format_][1](contents, transformer, devices)
    except InvalidInputError as error:
        raise InvalidInputError(f"{source}: {error}") from None
    spec = PlanSpec.from_dict(fields, source)
    return ReadPlan(spec, tuple(f"{source}: {note}" for note in notes))
