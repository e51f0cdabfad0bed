"""Recorded files of frameworks: the text, what it leaves out, and the plan that is read back.

`PYTHONPATH=tests/cases python tests/export/test_recorded_files.py` writes the record anew; a commit
that changes it says why.
"""

from __future__ import annotations

import random
import tempfile
import zlib
from pathlib import Path
from typing import Any

import pytest
from export_cases import SUFFIX, random_plan
from recorded import assert_as_recorded, plain, recorded_rows, write_record

import phaze_fast as pf
from phaze_fast.errors import PhazeError
from phaze_fast.export import export_plan, read_plan

FILE = Path(__file__).parents[1] / "golden" / "recorded_files.json"
FRAMEWORKS = ("megatron", "bridge", "deepspeed", "torchtitan", "maxtext")
MODELS = sorted(
    name for name in pf.models.names() if isinstance(pf.models.load(name), pf.TransformerModel)
)


RANDOM = 40
"""Plans of the few models of `random_plan`, with all kinds of pipelines."""


def asked(number: int) -> tuple[pf.TransformerModel, pf.PlanSpec]:
    """A model under a random plan."""
    rng = random.Random(9300 + number)
    model, _, plan = random_plan(rng)
    spec = pf.PlanSpec.of(plan)
    if number >= len(MODELS):
        return model, spec
    model = pf.models.load(MODELS[number])
    spec = spec.replace(
        stages=None, recompute=rng.choice(("none", "full", "selective")), pp=1, vpp=1,
        schedule="1f1b", cp=1, cp_kind="all-gather", seq=None, ep=1, etp=None, idle=True,
    )  # fmt: skip
    if model.moe is not None:
        spec = spec.replace(ep=rng.choice((1, spec.dp)), etp=rng.choice((None, 1)))
    pp = rng.choice((1, 1, 2))
    if model.layers % pp == 0 and not model.encoder_layers:
        spec = spec.replace(pp=pp, schedule=rng.choice(("1f1b", "gpipe")))
    return model, spec


def written(number: int) -> list[dict[str, Any]]:
    """What each framework's file says of a plan."""
    model, spec = asked(number)
    rows = []
    for framework in FRAMEWORKS:
        row: dict[str, Any] = {"model": model.name, "framework": framework}
        try:
            made = export_plan(spec, model, framework)
            row["text"] = zlib.crc32(made.text.encode())
            row["unexpressed"] = [str(line) for line in made.unexpressed]
            row["plan"] = back(made.text, framework, model, spec.devices)
        except PhazeError as error:
            row["refused"] = str(error)
        rows.append(plain(row))
    return rows


def back(text: str, framework: str, model: Any, devices: int) -> dict[str, Any]:
    """The plan that is read from a file, and what its reader says."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"plan{SUFFIX.get(framework, '.sh')}"
        path.write_text(text)
        read = read_plan(path, model, devices)
    spec = read.spec.to_dict()
    spec |= {
        name: read.spec.to_dict()[name]["name"]
        for name in ("precision", "software")
        if name in spec
    }
    return {"spec": spec, "notes": [note.replace(folder, "") for note in read.notes]}


@pytest.mark.parametrize("first", range(10))
def test_files_are_what_was_recorded(first: int) -> None:
    for number in range(first, len(MODELS) + RANDOM, 10):
        assert_as_recorded(written(number), recorded_rows(FILE)[number], str(number))


if __name__ == "__main__":
    write_record(FILE, [written(number) for number in range(len(MODELS) + RANDOM)])
