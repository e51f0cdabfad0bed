"""Models by preset name or from a file, with their sources.

``models/data/presets.yaml`` lists the presets; those of HuggingFace models are built from the
configurations in ``models/data/hf`` by the code that reads a user's configuration.
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

from phaze_fast.documents import Presets, package_data, read_document
from phaze_fast.models.graph_model import GraphModel
from phaze_fast.models.huggingface import from_hf
from phaze_fast.models.transformer import TransformerModel

Model = TransformerModel | GraphModel
"""A model to train: a transformer given by its fields, or any model given by its graph."""

_MEGATRON_GPT: dict[str, Any] = {
    "dropout": True,
    "fused_qkv": True,
    "module": {"family": "gpt2", "dropouts": ["resid_pdrop", "embd_pdrop", "attn_pdrop"]},
}
_MEGATRON_BERT: dict[str, Any] = {
    **_MEGATRON_GPT,
    "module": {
        "family": "megatron-bert",
        "dropouts": ["hidden_dropout_prob", "attention_probs_dropout_prob"],
    },
    "causal": False,
    "head": "mlm",
    "token_types": 2,
}


class _ModelPresets(Presets[Model]):
    """The presets of ``presets.yaml``; some refer to a HuggingFace configuration."""

    @cached_property
    def _entries(self) -> dict[str, dict[str, Any]]:
        entries: dict[str, dict[str, Any]] = package_data(__package__, "presets.yaml")
        return entries

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def preset(self, name: str) -> Model:
        self.check(name)
        entry = self._entries[name]
        about = {
            "name": name,
            "seq": entry["seq"],
            "published_parameters": entry.get("parameters"),
            "published_digits": entry.get("digits"),
            "sources": tuple(entry["sources"]),
            "notes": entry.get("notes", ""),
        }
        if "hf" in entry:
            config = json.loads(self.file(f"hf/{entry['hf']}.json").read_text("utf-8"))
            return from_hf(config).replace(**about)
        if "fields" in entry:
            return TransformerModel.from_dict({**entry["fields"], **about}, name)
        kind = "megatron_gpt" if "megatron_gpt" in entry else "megatron_bert"
        layers, hidden, heads = entry[kind]
        sizes = {"layers": layers, "hidden": hidden, "heads": heads, "ffn": 4 * hidden}
        sizes |= {"vocab": entry["vocab"], "max_positions": entry["seq"]}
        fixed = _MEGATRON_GPT if kind == "megatron_gpt" else _MEGATRON_BERT
        return TransformerModel.from_dict({**sizes, **fixed, **about}, name)

    def load(self, name_or_path: str | Path) -> Model:
        text = str(name_or_path)
        if text.lower() not in self.names and Path(text).is_dir():
            return from_hf(text)
        hub = text.count("/") == 1 and not text.endswith((".yaml", ".yml", ".json"))
        if hub and not isinstance(name_or_path, Path) and not Path(text).exists():
            self.check(text)  # a name on the HuggingFace hub
        return super().load(name_or_path)

    def from_file(self, path: str | Path) -> Model:
        data = read_document(path)
        if isinstance(data, dict) and "model_type" in data:
            return from_hf(str(path))
        return model_from_dict(data, str(path))


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
    configuration; one with a ``format`` as a graph, such as ``phaze-fast trace`` writes. Preset
    names are case-insensitive.

    Raises
    ------
    InvalidInputError
        Where there is no such preset or file, or it does not describe a model.

    Examples
    --------
    >>> load("gpt3-175b").hidden
    12288
    """
    return _MODELS.load(name_or_path)


_MODELS = _ModelPresets("model", "phaze_fast.models/data", model_from_dict)


def names() -> tuple[str, ...]:
    """Names of the models that come with the package, the PHAZE paper's eight first.

    Examples
    --------
    >>> names()[:3]
    ('bertlarge', 'megatronbert', 'opt')
    """
    return _MODELS.names
