"""Write the page and the intervals that rest on published runs.

``python bench/accuracy.py FOLDER`` reads the tables of training runs and the measured steps in
FOLDER (published_training_runs.csv, public_runs.csv, h200_step.csv, h200_hf.csv), learns the
intervals of predictions (phaze_fast/planning/data/intervals.yaml) and writes docs/accuracy.md and
docs/accuracy.svg.
"""

import sys
from pathlib import Path

import numpy as np

from phaze_fast.calibration import validate_runs, validate_steps
from phaze_fast.calibration.accuracy_page import page, scatter
from phaze_fast.calibration.held_out import held_out, of_chip, of_peak, of_software
from phaze_fast.calibration.intervals import learn_ratios
from phaze_fast.calibration.steps import measured_steps
from phaze_fast.documents import to_yaml
from phaze_fast.hardware import presets
from phaze_fast.planning import intervals, predict
from phaze_fast.software import load_software

ROOT = Path(__file__).parents[1]
TABLES = ("published_training_runs.csv", "public_runs.csv")


HOST_S = [k * 1e-6 for k in (30, 40, 45, 50, 55, 60, 70)]
RECOMPUTE_HOST_S = [k * 1e-6 for k in (0, 400, 700, 1000, 1300, 1600)]


def without_each_model(folder, chip):
    """Fit both host times of eager HuggingFace steps with one model after another left out."""
    steps, _, _ = measured_steps(folder / "h200_hf.csv", chip)
    pairs = [(a, b) for a in HOST_S for b in RECOMPUTE_HOST_S]
    used = load_software("huggingface-eager")
    errors = np.zeros((len(pairs), len(steps)))
    for k, (host, again) in enumerate(pairs):
        changed = used.replace(host_s=host, recompute_host_s=again)
        for i, step in enumerate(steps):
            plan = predict(step.model, step.cluster, {**step.plan, "software": changed})
            errors[k, i] = plan.time_s / step.time_s - 1.0
    names = np.array([step.source for step in steps])
    unseen, chosen = np.zeros(len(steps)), {}
    for name in dict.fromkeys(names):
        at = int(np.abs(errors[:, names != name]).mean(axis=1).argmin())
        chosen[name], unseen[names == name] = pairs[at], errors[at, names == name]
    return unseen, chosen, dict(zip((s.label for s in steps), unseen, strict=True))


def fitted(runs):
    """Fit each constant of whole runs with part after part left out."""

    def some(software, chip, source=""):
        named = [r for r in runs if r.software.startswith(software) and r.chip.startswith(chip)]
        return [r for r in named if source in r.source and r.precision == "bf16"]

    old = [r for r in some("megatron-lm", "a100") if not r.source.startswith("vTrain")]
    tpus = [r for r in runs if r.software == "maxtext" and r.model.moe is None]
    node = some("megatron-lm-2021", "a100", "single")[::3]
    gathered = [r for r in some("deepspeed", "a100") if r.plan.zero == 3]
    hopper = [r for r in runs if r.chip == "h100" and r.precision == "bf16" and r.model.moe is None]
    nemo = [r for r in runs if r.chip == "h100" and r.software == "nemo" and r.model.moe is None]
    launched = ("nemo", "megatron-bridge")  # experts one by one
    experts = [r for r in runs if r.model.moe is not None and r.software in launched]
    experts = [r for r in experts if "Megatron-Bridge" in r.source]
    return [
        held_out("A100, step_flops", old, [k * 1e12 for k in range(222, 263, 4)], of_chip),
        held_out("H100, step_flops", hopper, [k * 1e13 for k in range(58, 75, 2)], of_chip),
        held_out("B200, step_flops", some("megatron-core", "b200"),
                 [k * 1e12 for k in range(900, 1051, 25)], of_chip),
        held_out("megatron-lm-2021, host_s (every third run)", node,
                 [k * 1e-6 for k in range(46, 83, 4)], of_software("host_s")),
        held_out("nemo, hidden_tensor", nemo,
                 [k / 20 for k in range(0, 21, 2)], of_software("hidden_tensor")),
        held_out("nemo and megatron-bridge, expert_launch_s", experts,
                 [k * 1e-6 for k in range(0, 161, 20)], of_software("expert_launch_s"),
                 by="model"),
        held_out("TPUs, step_flops as a share of the peak", tpus,
                 [k / 100 for k in range(70, 101, 4)], of_peak, by="chip"),
        held_out("maxtext, overlap_slowdown", tpus,
                 [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 10.0, 100.0], of_software("overlap_slowdown"),
                 by="chip"),
        held_out("deepspeed, network_share", gathered, [k / 1000 for k in range(80, 121, 4)],
                 of_software("network_share"), by="model"),
        held_out("deepspeed, overlap_slowdown", gathered, [1.0, 1.3, 1.5, 1.7, 2.0, 2.5],
                 of_software("overlap_slowdown"), by="model"),
    ]  # fmt: skip


def main(folder: Path) -> None:
    """Learn, validate again with what was learnt, and write."""
    first = [row for name in TABLES for row in validate_runs(folder / name).all_rows.rows]
    table = ROOT / "phaze_fast/planning/data/intervals.yaml"
    note = (
        "# Measured over predicted seconds of a step: between these in four of five cases.\n"
        "# Learnt from published runs by bench/accuracy.py; phaze_fast/planning/intervals.py\n"
        "# says how a plan's group is found.\n"
    )
    table.write_text(note + to_yaml({"ratios": dict(learn_ratios(first))}), "utf-8")
    intervals._table.cache_clear()
    runs = [validate_runs(folder / name) for name in TABLES]
    chip = presets.chip("h200")
    steps = [validate_steps(folder / f"{name}.csv", chip) for name in ("h200_step", "h200_hf")]
    constants = fitted([row.run for found in runs for row in found.all_rows.rows])
    unseen, _, _ = without_each_model(folder, chip)
    text = page(runs, steps, constants) + (
        "\nBoth host times of the eager HuggingFace steps, fitted with one model after another "
        "left out:\n"
        f"{np.abs(unseen).mean():.1%} on the steps of the model that was left out (bias "
        f"{unseen.mean():+.1%}, at most {np.abs(unseen).max():.1%}).\n"
    )
    (ROOT / "docs/accuracy.md").write_text(text, "utf-8")
    (ROOT / "docs/accuracy.svg").write_text(scatter(runs), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
