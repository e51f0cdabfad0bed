"""Recorded readings of edited files, what each change of an option changes in the plan, or the refusal;
and what files say of models.

`PYTHONPATH=tests/cases python tests/export/test_recorded_edits.py` writes the record anew; a commit
that changes it says why.
"""

from __future__ import annotations

import json
import tomllib
import zlib
from pathlib import Path
from typing import Any

import pytest
from export_cases import SUFFIX
from golden_files import hf_entries
from recorded import assert_as_recorded, plain, recorded_rows, write_record

import phaze_fast as pf
from phaze_fast.errors import PhazeError
from phaze_fast.export import FORMATS, export_plan, flag_names, read_plan
from phaze_fast.export.request import flattened, options_of, settings_of
from phaze_fast.models import from_hf

FILE = Path(__file__).parents[1] / "golden" / "recorded_edits.json"
PLANS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama2-7b", {"tp": 2, "pp": 2, "dp": 4, "zero": 1, "global_batch": 32, "recompute": "full"}),
    ("mixtral-8x7b", {"tp": 2, "ep": 2, "etp": 1, "dp": 8, "zero": 3, "global_batch": 16,
                      "shard": 4, "recompute": "none", "precision": "fp8-rowwise"}),
    ("gpt2-small", {"pp": 4, "vpp": 3, "schedule": "interleaved", "dp": 2, "global_batch": 16,
                    "recompute": "norms", "optimizer": "adam-bf16-grad"}),
)  # fmt: skip
EDITS = (FILE.parent / "edits_of_files.txt").read_text("utf-8").split()
"""Changed options ``key=value,key=value``, by the keys of the frameworks' names."""


def settings_in(text: str, framework: str) -> dict[str, Any]:
    """The settings of a file by name."""
    if framework in SUFFIX:
        return flattened(tomllib.loads(text) if framework == "torchtitan" else json.loads(text))
    options = {
        name: " ".join(word for word in words if "=" not in word)
        for name, words in options_of(text).items()
    }
    return options | settings_of(text)


def written(settings: dict[str, Any], framework: str) -> str:
    """A file with these settings."""
    if framework == "torchtitan":
        return "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items())
    if framework == "deepspeed":
        nested: dict[str, Any] = {}
        for name, value in settings.items():
            *path, last = name.split(".")
            inside = nested
            for part in path:
                inside = inside.setdefault(part, {})
            inside[last] = value
        return json.dumps(nested)
    own = [f"{k} {v}" if k.startswith("--") else f"'{k}={v}'" for k, v in settings.items()]
    program = "MaxText.train " if framework == "maxtext" else ""
    return f"torchrun {program}" + " ".join(own).replace("|", "\\|").replace("*", "\\*")


def edited(settings: dict[str, Any], edit: str, framework: str) -> dict[str, Any]:
    """The settings with those of an edit, by the names of the framework; an empty one is left out."""
    changed, names = dict(settings), flag_names(framework)
    for key, _, word in (part.partition("=") for part in edit.split(",")):
        name = key[1:] if key[0] == "@" else names.names.get(key)
        if name is None:
            continue
        changed.pop(name, None)
        if framework in SUFFIX and word:
            try:
                changed[name] = json.loads(word)
            except ValueError:
                changed[name] = word
        elif word:
            several = key in ("cp_sizes", "recompute_modules")
            joint = "," if framework == "bridge" else " "
            text = word.replace("core_attn", "core.attn").replace("moe_act", "moe.act")
            text = text.replace("_", joint).replace(".", "_") if several else word
            plain_flag = text == "true" and name.startswith("--")
            changed[name] = "" if plain_flag else text
    return changed


def reading(
    settings: dict[str, Any], framework: str, model: str, path: Path, devices: int | None = 16
) -> dict[str, Any]:
    """The plan of a file on some devices, or why there is none."""
    file = path / f"run{SUFFIX.get(framework, '.sh')}"
    file.write_text(written(settings, framework))
    try:
        read = read_plan(file, model, devices)
    except PhazeError as error:
        return {"refused": str(error).replace(str(path), "")}
    found = read.spec.to_dict()
    found |= {name: found.get(name, {"name": ""})["name"] for name in ("precision", "software")}
    return {**found, "notes": [note.replace(str(path), "") for note in read.notes]}


CHANGES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("gpt2-small", {"head": "classifier", "classes": 10}), ("gpt2-small", {"qkv_bias": False}),
    ("gpt2-small", {"out_bias": False, "ffn_bias": False}), ("gpt2-small", {"activation": "relu"}),
    ("gpt2-small", {"norm_bias": False}), ("gpt2-small", {"kv_heads": 4, "window": 64}),
    ("llama2-7b", {"activation": "gelu"}), ("llama2-7b", {"gated": False, "activation": "relu"}),
    ("llama2-7b", {"window": 64, "full_attention_layers": (1, 5)}), ("llama2-7b", {"dropout": True}),
    ("llama2-7b", {"window": 64, "full_attention_layers": tuple(range(3, 32, 4))}),
    ("llama2-7b", {"qkv_bias": True}), ("llama2-7b", {"mtp_layers": 1, "qk_norm": "head"}),
    ("llama2-7b", {"kv_heads": 32, "tied_embeddings": True}), ("llama2-7b", {"positions": "none"}),
)  # fmt: skip


def exported_models() -> dict[str, Any]:
    """What files say of models: the families of HuggingFace, and single fields changed."""
    models = {entry["name"]: from_hf(entry["config"]) for entry in hf_entries()}
    for name, fields in CHANGES:
        models[f"{name} {fields}"] = pf.models.load(name).replace(**fields)
    rows: dict[str, Any] = {}
    for name, model in models.items():
        rows[name] = {}
        for framework in FORMATS if isinstance(model, pf.TransformerModel) else ():
            plan = {"dp": 4, "global_batch": 8, "recompute": "none", "zero": 3, "seq": 512}
            made = export_plan(plan, model, framework)
            rows[name][framework] = [zlib.crc32(made.text.encode())]
            rows[name][framework] += [one.what.partition(": ")[2] for one in made.unexpressed]
    return rows


def found(framework: str, path: Path) -> list[Any]:
    """By plan: what is read from its file, and what each edit changes in that."""
    rows: list[Any] = []
    alike = {"bridge": PLANS[1:2], "deepspeed": PLANS[:1]}  # bridge shares Megatron-LM's terms
    alike |= {"torchtitan": PLANS[1:], "maxtext": PLANS[1:]}
    for model, plan in alike.get(framework, PLANS):
        settings = settings_in(export_plan(plan, model, framework).text, framework)
        first = reading(settings, framework, model, path)
        rows.append({"as written": first})
        for edit in EDITS:
            other = edited(settings, edit, framework)
            given = dict(part.partition("=")[::2] for part in edit.split(","))
            if other == settings and "devices" not in given:
                continue
            devices = int(given.get("devices", "16") or 0) or None
            now = reading(other, framework, model, path, devices)
            changes = {name: value for name, value in now.items() if value != first.get(name)}
            gone = [] if "refused" in now else sorted(set(first) - set(now))
            rows[-1][edit] = {**changes, **({"gone": gone} if gone else {})}
    return plain(rows)


def test_models_are_written_as_was_recorded() -> None:
    assert_as_recorded(exported_models(), recorded_rows(FILE)[-1])


@pytest.mark.parametrize("number", range(len(FORMATS)), ids=FORMATS)
def test_edited_files_are_read_as_was_recorded(number: int, tmp_path: Path) -> None:
    now = found(FORMATS[number], tmp_path)
    assert_as_recorded(now, recorded_rows(FILE)[number])


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        write_record(
            FILE, [*(found(framework, Path(folder)) for framework in FORMATS), exported_models()]
        )
