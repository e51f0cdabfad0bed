"""Models by preset name or from a file, with their sources.

``models/data/presets.yaml`` lists the presets; those of HuggingFace models are built from the
configurations beside it by the same code that reads a user's.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from phaze_fast.documents import parse_text, read_document
from phaze_fast.errors import InvalidInputError, nearest
from phaze_fast.models.graph_model import GraphModel
from phaze_fast.models.huggingface import from_hf
from phaze_fast.models.transformer import TransformerModel

__all__ = ["Model", "load", "model_from_dict", "names"]

Model = TransformerModel | GraphModel
"""What is trained: a transformer by its fields, or any model by its graph."""

_MEGATRON_GPT: dict[str, Any] = {"dropout": True, "fused_qkv": True}
_MEGATRON_BERT: dict[str, Any] = {
    "dropout": True,
    "fused_qkv": True,
    "causal": False,
    "head": "mlm",
    "token_types": 2,
}


@cache
def _index() -> dict[str, dict[str, Any]]:
    text = (resources.files(__package__) / "data" / "presets.yaml").read_text("utf-8")
    found: dict[str, dict[str, Any]] = parse_text(text, "presets.yaml")
    return found


def names() -> tuple[str, ...]:
    """Names of the models that come with the package, the PHAZE paper's eight first.

    Examples
    --------
    >>> names()[:3]
    ('bertlarge', 'megatronbert', 'opt')
    """
    return tuple(_index())


@cache  # records are frozen, so one of each is enough
def _preset(name: str) -> TransformerModel:
    entry = _index()[name]
    known = {
        "name": name,
        "seq": entry["seq"],
        "published_parameters": entry.get("parameters"),
        "published_digits": entry.get("digits"),
        "sources": tuple(entry["sources"]),
        "notes": entry.get("notes", ""),
    }
    if "hf" in entry:
        folder = resources.files(__package__) / "data" / "hf"
        config = json.loads((folder / f"{entry['hf']}.json").read_text("utf-8"))
        model = from_hf(config)
        assert isinstance(model, TransformerModel)  # presets are of architectures with a record
        return model.replace(**known)
    kind = "megatron_gpt" if "megatron_gpt" in entry else "megatron_bert"
    layers, hidden, heads = entry[kind]
    return TransformerModel.from_dict(
        {
            "layers": layers,
            "hidden": hidden,
            "heads": heads,
            "ffn": 4 * hidden,
            "vocab": entry["vocab"],
            "max_positions": entry["seq"],
            **(_MEGATRON_GPT if kind == "megatron_gpt" else _MEGATRON_BERT),
            **known,
        },
        name,
    )


def model_from_dict(data: object, source: str = "model") -> Model:
    """Read a model from plain data: a graph, a HuggingFace configuration or a transformer's fields.

    Examples
    --------
    >>> model_from_dict(load("llama2-7b").to_dict()).parameters()
    6738415616
    """
    if isinstance(data, dict) and "model_type" in data:
        return from_hf(data)
    if isinstance(data, dict) and ("format" in data or "order" in data):
        return GraphModel.from_dict(data, source)
    return TransformerModel.from_dict(data, source)


def load(name_or_path: str | Path) -> Model:
    """Load a model by preset name, or from a YAML or JSON file.

    A JSON file with a ``model_type``, or a folder with a ``config.json``, is read as a HuggingFace
    configuration; one with a ``format`` as a graph, such as ``phaze-fast trace`` writes. Upper and
    lower case of a preset's name are the same.

    Raises
    ------
    InvalidInputError
        Where there is no such preset or file, or it does not describe a model.

    Examples
    --------
    >>> load("gpt3-175b").hidden
    12288
    """
    text = str(name_or_path)
    if text.lower() in _index():
        return _preset(text.lower())
    if Path(text).is_dir():
        return from_hf(text)
    if isinstance(name_or_path, Path) or text.endswith((".yaml", ".yml", ".json")) or "/" in text:
        data = read_document(text)
        if isinstance(data, dict) and "model_type" in data:
            return from_hf(text)
        return model_from_dict(data, text)
    raise InvalidInputError(
        f"model: {text!r} is neither a preset nor a .yaml or .json file; {nearest(text, names())}"
    )
