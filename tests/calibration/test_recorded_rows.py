"""Recorded readings of rows of tables of runs: what each changed cell changes in the run, or the
refusal; and what each network in words says.

`PYTHONPATH=tests/cases python tests/calibration/test_recorded_rows.py` writes the record anew; a commit
that changes it says why.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recorded import assert_as_recorded, plain, recorded_rows, write_record

from phaze_fast.calibration.published import read_run
from phaze_fast.errors import PhazeError
from phaze_fast.export.request import flattened
from phaze_fast.software import load_software

GOLDEN = Path(__file__).parents[1] / "golden"
FILE = GOLDEN / "recorded_rows.json"
ROW = {
    "model": "llama-mine", "layers": "32", "hidden": "4096", "heads": "32", "kv_heads": "8",
    "ffn": "14336", "vocab": "128256", "seq": "4096", "gpu": "H100", "n_gpus": "16",
    "network": "8-GPU nodes, 3.2 Tb/s EFA per node", "tp": "4", "pp": "1", "dp": "", "zero": "1",
    "micro_batch": "2", "global_batch": "64", "recompute": "none", "precision": "bf16",
    "framework": "megatron-lm", "status": "ok", "iter_time_s": "3.0", "memory_bytes": "4e10",
}  # fmt: skip


def edits() -> list[str]:
    """Changed cells ``column=cell;column=cell``, where ``~`` stands for a blank."""
    return (GOLDEN / "edits_of_rows.txt").read_text("utf-8").split()


def changed(edit: str) -> dict[str, str]:
    """The row with the cells of an edit."""
    cells = dict(ROW)
    last = ""
    for part in edit.split(";"):
        name, equals, cell = part.partition("=")
        if not equals:  # a semicolon inside a cell
            cells[last] += f";{part}"
            continue
        last, text = name, cell.replace("~", " ")
        cells[name] = text.replace(",", ";") if name in ("arguments", "stages") else text
    return cells


def reading(cells: dict[str, str]) -> dict[str, Any]:
    """A run by parts, or why the row is refused."""
    try:
        run = read_run(2, cells)
    except PhazeError as error:
        return {type(error).__name__: str(error)}
    software, fabric = run.plan.software, run.cluster.fabric
    usual = load_software(software.name).to_dict()
    own = {name: value for name, value in software.to_dict().items() if value != usual.get(name)}
    plan = run.plan.to_dict() | {"software": own, "precision": run.plan.precision.name}
    found = flattened({"model": run.model.to_dict(), "plan": plan})
    tiers = [[tier.size, tier.bandwidth_bytes_per_s] for tier in getattr(fabric, "tiers", ())]
    found |= {"cluster": [run.cluster.devices, fabric.name, run.chip, *tiers]}
    named = ("software", "precision", "time_s", "memory_bytes", "evaluated", "status", "assumed")
    found |= {name: getattr(run, name) for name in (*named, "reports", "source")}
    chip = run.cluster.chip
    return plain({**found, "clock_factor": None if chip is None else chip.tuning.clock_factor})


def found() -> dict[str, Any]:
    first = reading(ROW)
    rows: dict[str, Any] = {"as it stands": first}
    for edit in edits():
        now = reading(changed(edit))
        rows[edit] = {name: value for name, value in now.items() if value != first.get(name)}
        gone = sorted(set(first) - set(now))
        if len(now) > 1 and gone:
            rows[edit]["gone"] = gone
    return rows


def test_rows_are_read_as_was_recorded() -> None:
    assert_as_recorded(found(), recorded_rows(FILE)[0])


if __name__ == "__main__":
    write_record(FILE, [found()])
