"""Write docs/accuracy.md and the intervals of predictions from published runs.

``python tools/accuracy.py FOLDER`` reads the tables of training runs and the measured steps in
FOLDER (published_training_runs.csv, public_runs.csv, h200_step.csv, h200_hf.csv), learns the
intervals of predictions (phaze_fast/planning/data/intervals.yaml) and writes docs/accuracy.md and
docs/accuracy.svg.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np

from phaze_fast.calibration import (
    ErrorSummary,
    PredictedRun,
    PublishedRun,
    RunGroup,
    StepValidation,
    validate_runs,
    validate_steps,
)
from phaze_fast.calibration.validation import measured_steps
from phaze_fast.documents import to_yaml
from phaze_fast.hardware import Accelerator, Cluster, Tuning, presets
from phaze_fast.planning import NOMINAL, PlanSpec, predict
from phaze_fast.planning.plans import chip_constants, plan_groups
from phaze_fast.software import UNKNOWN, load_software

ROOT = Path(__file__).parents[1]
TABLES = ("published_training_runs.csv", "public_runs.csv")
OTHER_TABLES = ("open_runs.csv", "sailor_validation.csv", "mcore_golden.csv")
"""Tables of runs that are in no interval."""

# ---- intervals, learnt from the errors of validated runs ----

LEAST_RUNS = 18
"""A group of fewer runs has no interval of its own, but that of the larger group it is part of."""
MOST_RUNS = 160
"""Runs of one software that count for the interval of unknown software, evenly spread."""


def bounds(ratios: Sequence[float]) -> list[float]:
    """Bounds of measured over predicted seconds that cover a new run in `NOMINAL` of cases.

    The order statistics are those of conformal prediction, which allow for the small number of
    runs: of n runs the k-th smallest with k = (n + 1) (1 - NOMINAL) / 2, rounded outwards.
    """
    ordered = np.sort(np.array(ratios))
    rank = (len(ordered) + 1) * (1.0 - NOMINAL) / 2.0
    below = max(math.floor(rank), 1) - 1
    return [float(f"{ordered[below]:.4g}"), float(f"{ordered[-1 - below]:.4g}")]


def learn_ratios(rows: Iterable[PredictedRun]) -> Mapping[str, list[float]]:
    """Bounds of measured over predicted seconds, by group of plans."""
    by_group: dict[str, list[float]] = {}
    for row in rows:
        for name in plan_groups(row.plan, row.run.cluster):
            by_group.setdefault(name, []).append(row.run.time_s / row.time_s)
    return {
        name: bounds(ratios)
        for name, ratios in sorted(by_group.items())
        if len(ratios) >= LEAST_RUNS or name == "all"
    }


Hidden = Callable[[PublishedRun], PublishedRun | None]
"""Returns a run with something that is known of it hidden; None where that is not known anyway."""


def hidden_software(run: PublishedRun) -> PublishedRun:
    """Take a run as one of software of which nothing is known."""
    generic = load_software(UNKNOWN)
    return replace(run, plan=run.plan.replace(software=generic, optimizer=generic.optimizer))


def carried_over(run: PublishedRun) -> PublishedRun | None:
    """Price a run's chip with the constants of another generation, at its own rated peak."""
    chip = run.cluster.chip
    if chip is None or chip_constants(chip) or not chip.tuning.blocks:
        return None
    other = presets.chip("a100-80" if chip.name.startswith("h") else "h100")
    scale = chip.peak_flops("bf16") / other.peak_flops("bf16")
    rates = {name: value * scale for name, value in other.tuning.step_flops.items()}
    tuning = other.tuning.replace(
        sustained_flops=(other.tuning.sustained_flops or math.inf) * scale,
        step_flops=rates,
        blocks=chip.tuning.blocks,
        clock_factor=chip.tuning.clock_factor,
        formats={},
    )
    return replace(run, cluster=run.cluster.replace(chip=chip.replace(tuning=tuning)))


def not_fitted(run: PublishedRun) -> PublishedRun | None:
    """Price a run's chip as an ideal one."""
    chip = run.cluster.chip
    if chip is None or chip_constants(chip):
        return None
    return replace(run, cluster=run.cluster.replace(chip=chip.replace(tuning=Tuning())))


def hidden_ratios(
    runs: Iterable[PublishedRun], hidden: Hidden, by: Callable[[PublishedRun], str]
) -> Mapping[str, list[float]]:
    """Measured over predicted seconds by group, all predicted with something hidden."""
    dense: dict[str, list[PublishedRun]] = {}
    for run in runs:
        if run.precision == "bf16" and run.model.moe is None:
            dense.setdefault(by(run), []).append(run)
    found: dict[str, list[float]] = {}
    for name, some in dense.items():
        for run in filter(None, map(hidden, some[:: -(-len(some) // MOST_RUNS)])):
            row = PredictedRun(run, predict(run.model, run.cluster, run.plan))
            found.setdefault(name, []).append(run.time_s / row.time_s)
    return found


def group_quantiles(by_group: Mapping[str, Sequence[float]]) -> tuple[float, float]:
    """Quantiles of ratios outside of which `NOMINAL` leaves a run; each group counts once."""
    pairs = sorted((ratio, 1.0 / len(some)) for some in by_group.values() for ratio in some)
    share = np.cumsum([weight for _, weight in pairs]) / len(by_group)
    tail = (1.0 - NOMINAL) / 2.0
    low = pairs[max(int(np.searchsorted(share, tail)) - 1, 0)][0]
    high = pairs[min(int(np.searchsorted(share, 1.0 - tail)) + 1, len(pairs) - 1)][0]
    return low, high


def unseen_coverage(by_group: Mapping[str, Sequence[float]], wider: float) -> float:
    """Share of runs, each group counted once, inside the bounds learnt from the other groups.

    The bounds are `wider` times as far from one another, as a ratio, at either end.
    """
    covered = []
    for name, ratios in by_group.items():
        low, high = group_quantiles({k: v for k, v in by_group.items() if k != name})
        inside = [low / wider <= ratio <= high * wider for ratio in ratios]
        covered.append(float(np.mean(inside)))
    return float(np.mean(covered))


def unseen_bounds(by_group: Mapping[str, Sequence[float]]) -> list[float]:
    """Bounds that cover the runs of a group that is left out in `NOMINAL` of cases.

    They hold the prediction itself too.
    """
    steps = (1.0 + 0.005 * k for k in range(200))
    enough = (w for w in steps if unseen_coverage(by_group, w) >= NOMINAL)
    wider, (low, high) = next(enough, 2.0), group_quantiles(by_group)
    return [min(float(f"{low / wider:.4g}"), 1.0), float(f"{high * wider:.4g}")]


def left_out_whole(runs: Sequence[PublishedRun]) -> Mapping[str, Mapping[str, list[float]]]:
    """Measured over predicted seconds by group, by what is hidden: a group of `plan_groups`."""

    def both(hidden: Hidden) -> Hidden:
        return lambda run: None if (one := hidden(run)) is None else hidden_software(one)

    def pair(run: PublishedRun) -> str:
        return f"{run.chip}, {run.software}"

    found = {UNKNOWN: hidden_ratios(runs, hidden_software, lambda run: run.software)}
    for name, hidden in (("chip carried over", carried_over), ("chip not fitted", not_fitted)):
        found[name] = hidden_ratios(runs, hidden, lambda run: run.chip)
        found[f"{UNKNOWN}, {name}"] = hidden_ratios(runs, both(hidden), pair)
    return found


def bounds_of_unseen(ratios: Mapping[str, Mapping[str, list[float]]]) -> dict[str, list[float]]:
    """Bounds by what is hidden; where two things are, no narrower than where either is."""
    own = {name: unseen_bounds(by_group) for name, by_group in ratios.items()}
    parts = {name: [own[name], *(own[part] for part in name.split(", "))] for name in own}
    return {
        name: [min(low for low, _ in some), max(high for _, high in some)]
        for name, some in parts.items()
    }


def held_out_coverage(
    rows: Sequence[PredictedRun], unseen: Mapping[str, list[float]], folds: int = 5
) -> Mapping[str, float]:
    """Share of the steps of each source inside intervals that were learnt from other runs.

    Every fifth run is left out in turn; `unseen` has the intervals of what is not known.
    """
    inside: dict[str, list[bool]] = {}
    for fold in range(folds):
        others = (row for k, row in enumerate(rows) if k % folds != fold)
        known = {**learn_ratios(others), **unseen}
        for row in rows[fold::folds]:
            names = plan_groups(row.plan, row.run.cluster)
            low, high = next(known[name] for name in names if name in known)
            ratio = row.run.time_s / row.time_s
            inside.setdefault(row.run.source, []).append(low <= ratio <= high)
    return {source: sum(hits) / len(hits) for source, hits in inside.items()}


# ---- constants of whole runs, and errors on runs outside the fit ----

Changed = Callable[[PublishedRun, float], tuple[Cluster, PlanSpec]]
"""Returns a run's cluster and plan with a constant at some value."""


def of_chip(run: PublishedRun, value: float) -> tuple[Cluster, PlanSpec]:
    """Set the bf16 rate of a running job on the run's chip."""
    chip = run.cluster.chip
    assert chip is not None
    tuning = chip.tuning.replace(step_flops={**chip.tuning.step_flops, "bf16": value})
    return run.cluster.replace(chip=chip.replace(tuning=tuning)), run.plan


def of_peak(run: PublishedRun, value: float) -> tuple[Cluster, PlanSpec]:
    """Set that rate as a share of the chip's peak."""
    assert run.cluster.chip is not None
    return of_chip(run, value * run.cluster.chip.peak_flops("bf16"))


def of_software(field: str) -> Changed:
    """Set a field of the run's software profile."""

    def changed(run: PublishedRun, value: float) -> tuple[Cluster, PlanSpec]:
        return run.cluster, run.plan.replace(software=run.plan.software.replace(**{field: value}))

    return changed


def held_out(
    name: str,
    runs: Sequence[PublishedRun],
    values: Sequence[float],
    changed: Changed,
    by: str = "source",
    folds: int = 5,
) -> list[str]:
    """Fit one constant on all of some runs, and with one part after another left out.

    Runs of several sources (chips, models) are left out source by source, runs of one in five
    parts. What a model's name has in brackets does not make it another.

    Returns
    -------
    list of str
        Name, runs, best value, range of values with a part left out, mean absolute error of the fit
        on all runs, that of each part by the fit on the others, and what the parts are.
    """
    size = np.abs(
        [[PredictedRun(r, predict(r.model, *changed(r, v))).error for r in runs] for v in values]
    )
    names = [r.model.name.split(" (")[0] if by == "model" else str(getattr(r, by)) for r in runs]
    kinds = sorted(set(names))
    part = np.array([kinds.index(n) if len(kinds) > 1 else k % folds for k, n in enumerate(names)])
    chosen, unseen = [], np.zeros(len(runs))
    for out in sorted(set(part.tolist())):
        at = int(np.argmin(size[:, part != out].mean(axis=1)))
        chosen.append(float(values[at]))
        unseen[part == out] = size[at, part == out]
    at = int(np.argmin(size.mean(axis=1)))
    return [
        name,
        str(len(runs)),
        f"{values[at]:.4g}",
        f"{min(chosen):.4g} to {max(chosen):.4g}",
        percent(float(size[at].mean())),
        percent(float(unseen.mean())),
        f"{by}s" if len(kinds) > 1 else "five parts",
    ]


def fitted(runs: Sequence[PublishedRun]) -> list[list[str]]:
    """Fit each constant of whole runs with one part after another left out."""

    def some(software: str, chip: str, source: str = "") -> list[PublishedRun]:
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


HOST_S = [k * 1e-6 for k in (30, 40, 45, 50, 55, 60, 70)]
RECOMPUTE_HOST_S = [k * 1e-6 for k in (0, 400, 700, 1000, 1300, 1600)]


def without_each_model(file: Path, chip: Accelerator) -> np.ndarray:
    """Errors of eager HuggingFace steps, both host times fitted without the step's model."""
    steps, _, _ = measured_steps(file, chip)
    software = load_software("huggingface-eager")
    errors = []
    for host_s in HOST_S:
        for recompute_s in RECOMPUTE_HOST_S:
            changed = software.replace(host_s=host_s, recompute_host_s=recompute_s)
            plans = [predict(s.model, s.cluster, {**s.plan, "software": changed}) for s in steps]
            errors.append([p.time_s / s.time_s - 1.0 for p, s in zip(plans, steps, strict=True)])
    table, names = np.array(errors), np.array([step.model.name for step in steps])
    unseen = np.zeros(len(steps))
    for name in dict.fromkeys(names):
        best = int(np.abs(table[:, names != name]).mean(axis=1).argmin())
        unseen[names == name] = table[best, names == name]
    return unseen


# ---- the page ----

THREE_RUNS = """\
Calibrated on a few random runs of a cluster whose software is hidden (`study calibrate`), errors
on the other runs, in the median over 16 draws (`python tools/few_runs.py TABLE.csv ...`):

| cluster | runs | mean | median | in interval | pick-regret |
|---|--:|--:|--:|--:|--:|
| nanotron, H100s on EFA | 3 | 11.6% | 7.9% | 80% | 3.1% |
| nanotron, H100s on EFA | 5 | 11.5% | 8.4% | 77% | 4.8% |
| vTrain's cluster of A100s | 3 | 11.0% | 8.6% | 84% | 3.4% |
| vTrain's cluster of A100s | 5 | 10.8% | 8.6% | 78% | 3.4% |
| BLOOM, one day | 3 | 8.3% | 4.9% | 100% | 4.1% |
| BLOOM, one day | 5 | 9.2% | 6.3% | 100% | 2.4% |

Five runs are hardly better than three, because what is left is not in the numbers. With constants
chosen on all 296 of nanotron's steps 8.7% are left in the mean and 3.9% in the median: 38 steps
take 1.25 to 2.8 times as long as predicted, the other 258 are 4.7% off. Of the 38, 23 follow one
rule: where stages lie on several nodes, a layer takes no less than about 10, 15 and 23 ms for a
micro-batch with tensor-parallel width 2, 4 and 8, whatever the model, the micro-batch and the
number of stages; on one node, or without stages, it takes as little as 4.5 ms. With that rule,
read off these rows, they are 6.3% off. Its cause was not found, so it is not in the model. Of the
others, one layout was run twice, and one run took 1.7 times as long as the other. Fitted to all 45
of vTrain's runs the model is 9.7% off on the same 45. Priors and the habits compared were chosen
on these three clusters, so others may be worse.

"""

LEFT_OUT = """\
Software and chips left out whole, each group counted once (bf16, no experts): intervals are the
quantiles of the other groups, widened until they hold 80% of the runs of the group left out
(where software and chip are hidden, no narrower than where either is). A chip *carried over* has
the constants of another generation at its own rated peak, one *not fitted* none.
"""

BENCHMARK = """\
## Scoring another model

Anyone's predictions are scored on the same rows by one command:

```sh
phaze-fast study validate RUNS.csv --against THEIRS.csv
```

`THEIRS.csv` has a line for each run that the other model predicts, with the columns `row` (the
line of the run in `RUNS.csv`; the header is line 1), `step_s`, `memory_bytes` or `memory_gib`,
and `fits` (yes or no); what it does not predict stays empty. Both models are scored on the rows
that both predict: errors of the seconds, pick-regret, error of the bytes, and how many of the
runs that ran, and of those that ran out of memory, are said to fit. `--json` writes the same
scores. `--software generic` hides what we know of the software.
"""

OTHER_SOURCES = """\
## Sources in no interval

The constants of nanotron's profile were chosen on its own rows, one speed and the reserved memory
of Megatron-DeepSpeed's on BLOOM's, and the bytes of Megatron-core's tests were looked at; the
others are predicted as found. Megatron-core's tests are toy models, often deterministic: their
seconds are mostly the host's. Twelve of BLOOM's rows have heads whose width is no multiple of 8
(108 and 150) and take a quarter longer than predicted; the others are 6% off. Sailor says neither
software nor number format, so bf16, fused attention and sequence parallelism are assumed; with
explicit attention and dropout, and without the last, its steps are 48% and its bytes 36% too
small instead of 61% and 76%: the rest is what fp32 would take. Neuron's chip has no fitted
constant. Four of MaxText's runs (128B on v5e) keep queries, keys and values in the host's memory,
which is not known of TPUs, and are said not to fit. Two of nanotron's runs, which took 2.2 and 2.8
times as long as predicted, make up 12.5 of the 15.8% of pick-regret.
"""

OTHERS = """\
## Other models on such rows

Figures of others are as published or as measured on the same rows with their own programs; ours
are those of the table above.

| model | rows | mean absolute error |
|---|---|---|
| Calculon | 8 of Korthikanti et al. 2022 | 3.65% (8.9% at most) |
| Calculon | Narayanan et al. 2021, table 2 | 10.3% |
| Calculon | vTrain's runs | 15 to 39% |
| vTrain, with profiled kernels | its single-node runs | 8.4% |
| vTrain, with profiled kernels | its cluster runs | 14.7% |
| SimuMax, with measured efficiencies | its B200 runs | 5.6% (memory 0.5%) |
| llm-analysis | several of these | 7.9 to 60% |
| LLMCompass | operators | 10.4% |
"""

METHOD = """\
## What is fitted, and on what

- Operators and collectives: measured in isolation, chip by chip ([cost](cost.md)).
- One rate per chip and number format for products in a job that runs for hours
  (`tuning.step_flops`): under the power limit they are slower than an isolated product.
- One host time per operator for each software (and one for recomputation), the speed of attention
  kernels and product libraries of a software's year relative to today's, how often an unfused loss
  moves its logits (`loss_passes`), the share of the network's bandwidth that DeepSpeed's gathers
  reach (`network_share`), the share of tensor-parallel collectives that user buffers overlap
  (`hidden_tensor`), the seconds to launch one expert (`expert_launch_s`), and the slow-down of
  layers that overlap with transfers of weights and gradients on TPUs and in DeepSpeed
  (`overlap_slowdown`), and the host's seconds to copy slices of gathered weights in nanotron
  (`slice_host_s`).
  These were chosen using all runs; the last table shows which of them were also checked on runs
  outside the fit.
- Everything else about software (what overlaps, what is fused, bytes of gradients, padding) is read
  from its code and stored in `phaze_fast/software/data` with its sources.

No constant belongs to a row or a model. Two are based on a single source, as their profiles state:
bandwidth and cost of gathers in DeepSpeed of 2021, and how much slower products were in an H100's
first year.
The noise floor is high: the same plan differs by 6 to 7% between versions of one container, so mean
errors below about 4% are not meaningful.
"""


def percent(value: float | None, signed: bool = False) -> str:
    if value is None:
        return "-"
    return f"{100 * value:+.1f}%" if signed else f"{100 * value:.1f}%"


def cells(error: ErrorSummary) -> list[str]:
    sizes = (error.mean_abs_err, error.median_abs_err, error.p90_abs_err, error.max_abs_err)
    return [str(error.rows), *(percent(size) for size in sizes), percent(error.bias, signed=True)]


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(headings) + " |", "|---" + "|--:" * (len(headings) - 1) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def source_row(group: RunGroup, covered: Mapping[str, float]) -> list[str]:
    left_out = str(sum(group.unsupported.values()))
    if group.time is None:
        return [group.name, "0", *["-"] * 5, left_out, "-", "-"]
    regret = "-" if group.regret is None else percent(float(group.regret["mean"]))
    return [group.name, *cells(group.time), left_out, regret, percent(covered.get(group.name))]


def headline(rows: Sequence[PredictedRun], covered: Mapping[str, float]) -> str:
    """The result in one sentence."""
    errors = sorted(abs(row.error) for row in rows)
    mean, median = sum(errors) / len(errors), errors[len(errors) // 2]
    inside = sum(covered[row.run.source] for row in rows)
    return (
        f"On {len(rows):,} published training runs the seconds of a step are {100 * mean:.1f}% off "
        f"in the mean and {100 * median:.1f}% in the median; {100 * inside / len(rows):.0f}% of "
        "them lie in the 80% interval learnt from other runs."
    )


def worst_row(row: PredictedRun) -> list[str]:
    """One of the largest errors, and what most of the predicted step is spent on."""
    plan = row.plan
    parts = sorted(plan.parts_s.items(), key=lambda item: -item[1])[:2]
    spent = ", ".join(f"{name} {100 * s / plan.time_s:.0f}%" for name, s in parts)
    used = plan.memory_bytes / max(plan.limit_bytes, 1.0)
    return [
        row.run.source.split(" (")[0],
        row.run.label,
        f"{row.run.time_s:.4g} s",
        f"{row.time_s:.4g} s",
        percent(row.error, signed=True),
        spent + (f"; {100 * used:.0f}% of memory in use" if used > 0.85 else ""),
    ]


SIZES = ["rows", "mean", "median", "p90", "max", "bias"]


def splits(groups: Sequence[RunGroup], hidden: Sequence[RunGroup]) -> str:
    """The table of errors by what is known; `hidden` are the groups with all software hidden."""

    def carried(row: PredictedRun) -> bool:
        return chip_constants(row.run.cluster.chip) != ""

    def row(name: str, rows: Iterable[PredictedRun]) -> list[str]:
        group = RunGroup(name, tuple(rows), {})
        assert group.time is not None
        regret = None if group.regret is None else float(group.regret["mean"])
        memory = None if group.memory is None else group.memory.mean_abs_err
        ran = group.fits.get("ok", (0, 0))
        fit = ran[1] / ran[0] if ran[0] else None
        told = [percent(group.coverage), percent(regret), percent(memory), percent(fit)]
        return [name, *cells(group.time), *told]

    every = [one for group in groups for one in group.rows]
    unknown = [one for group in hidden for one in group.rows]
    return hidden_once(every, unknown) + table(
        ["what is known", *SIZES, "in interval", "pick-regret", "bytes", "ran, said to fit"],
        [
            row("chip and software", (one for one in every if not carried(one))),
            row("software; constants of another chip, or none", filter(carried, every)),
            row("chip; software hidden (`generic`)", unknown),
        ],
    )


def hidden_once(known: Sequence[PredictedRun], unknown: Sequence[PredictedRun]) -> str:
    """Say the error on runs whose software is hidden, each software counted once."""
    own = {(one.run.source, one.run.line): one.run.software for one in known}
    by_software: dict[str, list[PredictedRun]] = {}
    for one in unknown:
        by_software.setdefault(own[one.run.source, one.run.line], []).append(one)
    groups = [RunGroup(name, tuple(rows), {}) for name, rows in by_software.items()]
    error = np.mean([np.abs([row.error for row in group.rows]).mean() for group in groups])
    inside = np.mean([group.coverage for group in groups])
    return (
        f"With {len(groups)} profiles hidden and each counted once, the mean is {error:.1%}, and "
        f"{inside:.0%} of the runs\nlie in the interval.\n\n"
    )


def left_out_table(ratios: Mapping[str, Mapping[str, list[float]]]) -> str:
    """The table of errors on software and chips that are left out whole."""
    rows, bounds_by_name = [], bounds_of_unseen(ratios)
    for name, by_group in ratios.items():
        error = np.mean([np.abs(1.0 / np.array(some) - 1.0).mean() for some in by_group.values()])
        low, high = bounds_by_name[name]
        told = (percent(float(error)), percent(unseen_coverage(by_group, 1.0)))
        rows.append([name, str(len(by_group)), *told, f"{low:.2f} to {high:.2f}"])
    columns = ["left out", "groups", "mean", "in quantiles of the others", "interval, x predicted"]
    return table(columns, rows)


def other_sources(folder: Path) -> str:
    """The table of sources whose rows are in neither fit nor intervals, but as it says."""
    rows = []
    for name in OTHER_TABLES:
        said, hidden = validate_runs(folder / name), validate_runs(folder / name, software=UNKNOWN)
        unknown = {group.name: group for group in hidden.groups}
        for group in said.groups:
            if group.time is None:
                continue
            as_unknown = unknown[group.name]
            assert as_unknown.time is not None
            shares = [group.fits.get(s, (0, 0)) for s in ("ok", "crashed_or_oom")]
            memory = None if group.memory is None else group.memory.mean_abs_err
            rows.append(
                [
                    group.name,
                    *cells(group.time)[:3],
                    percent(group.coverage),
                    percent(None if group.regret is None else float(group.regret["mean"])),
                    percent(memory),
                    *(percent(fit / n if n else None) for n, fit in shares),
                    percent(as_unknown.time.mean_abs_err),
                    percent(as_unknown.coverage),
                ]
            )
    columns = ["source", "rows", "mean", "median", "in interval", "pick-regret", "bytes"]
    columns += ["ran, said to fit", "crashed, said to fit", "as generic", "in its interval"]
    return table(columns, rows)


def page(
    groups: Sequence[RunGroup],
    hidden: Sequence[RunGroup],
    refused: int,
    steps: Sequence[StepValidation],
    constants: Sequence[Sequence[str]],
    unseen: Mapping[str, Mapping[str, list[float]]],
    others: str,
) -> str:
    """The page as Markdown."""
    rows = [row for group in groups for row in group.rows]
    covered = held_out_coverage(rows, bounds_of_unseen(unseen))
    reasons: Counter[str] = Counter()
    for group in groups:
        reasons.update(group.unsupported)
    total = sum(reasons.values())
    parts = [
        "# How far off is it?\n",
        "<!-- Written by tools/accuracy.py from published runs; do not edit. -->\n",
        headline(rows, covered) + "\n",
        "Errors are relative, without sign but for the bias (positive: predicted too long).",
        "Pick-regret is the time lost by running the plan that is predicted to be fastest,",
        "where rows share model, devices and batch. Intervals are tested on runs that were",
        "not used to learn them, a fifth at a time. `phaze-fast study validate RUNS.csv` prints",
        "the same for any table with these columns, with the intervals of the package. Where",
        "the seconds of a row contain its share of evaluations (Google's MLPerf runs), the",
        "forward passes of the evaluations are added to the prediction.\n",
        "## By what is known\n",
        splits(groups, hidden),
        LEFT_OUT,
        left_out_table(unseen),
        THREE_RUNS,
        BENCHMARK,
        OTHER_SOURCES,
        others,
        "## Seconds of a step, by source\n",
        table(
            ["source", *SIZES, "left out", "pick-regret", "in interval"],
            [source_row(group, covered) for group in groups],
        ),
        "![Predicted against measured seconds of a step](accuracy.svg)\n",
        "## Bytes of a device\n",
        table(["source", *SIZES], [[g.name, *cells(g.memory)] for g in groups if g.memory]),
        "## Steps measured on one H200\n",
        table(
            ["steps on one device", *SIZES],
            [
                [f"{found.chip}, {found.kind}: {column}", *cells(error)]
                for found in steps
                for column, error in found.columns.items()
            ],
        ),
        "## The worst rows\n",
        table(
            ["source", "run", "measured", "predicted", "error", "predicted step is mostly"],
            [worst_row(row) for row in sorted(rows, key=lambda row: -abs(row.error))[:12]],
        ),
        "## Rows that are left out\n",
        f"{total} of {total + len(rows) + refused} rows need what is not modelled:\n",
        table(["why", "rows"], [[reason, str(n)] for reason, n in reasons.most_common()]),
        OTHERS,
        METHOD,
        "## Constants fitted on whole runs, and runs outside the fit\n",
        "Each constant is the best value of a grid, with all others fixed. For the error outside",
        "the fit, one part of the runs after another is left out and then predicted.\n",
        table(
            [
                *("constant", "runs", "best", "with a part left out", "error in the fit"),
                *("error outside", "parts"),
            ],
            constants,
        ),
    ]
    return "\n".join(parts)


SIDE, EDGE = 640, 60
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")


def scatter(groups: Sequence[RunGroup]) -> str:
    """Predicted against measured seconds on logarithmic axes, as SVG."""
    groups = [group for group in groups if group.rows]
    seconds = [s for g in groups for r in g.rows for s in (r.run.time_s, r.time_s)]
    low, high = math.floor(math.log10(min(seconds))), math.ceil(math.log10(max(seconds)))
    scale = (SIDE - 2 * EDGE) / (high - low)

    def at(value: float) -> float:
        return round(EDGE + scale * (math.log10(value) - low), 1)

    marks = []
    for power in range(low, high + 1):
        x, text = at(10.0**power), f"{10.0**power:g} s"
        y = round(SIDE - x, 1)
        marks.append(f'<text x="{x}" y="{SIDE - EDGE + 18}" text-anchor="middle">{text}</text>')
        marks.append(f'<text x="{EDGE - 8}" y="{y + 4}" text-anchor="end">{text}</text>')
    first, last = at(10.0**low), at(10.0**high)
    marks.append(
        f'<line x1="{first}" y1="{round(SIDE - first, 1)}" x2="{last}" '
        f'y2="{round(SIDE - last, 1)}" stroke="#888"/>'
    )
    for k, group in enumerate(groups):
        colour, y = COLOURS[k % len(COLOURS)], EDGE + 16 * k
        dots = "".join(
            f'<circle cx="{at(r.run.time_s)}" cy="{round(SIDE - at(r.time_s), 1)}" r="2.5"/>'
            for r in group.rows
        )
        marks.append(f'<g fill="{colour}" fill-opacity="0.6">{dots}</g>')
        marks.append(f'<circle cx="{EDGE + 10}" cy="{y - 4}" r="4" fill="{colour}"/>')
        marks.append(f'<text x="{EDGE + 20}" y="{y}">{escape(group.name)}</text>')
    middle = SIDE // 2
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SIDE} {SIDE}" '
        'font-family="sans-serif" font-size="11">'
        f'<rect width="{SIDE}" height="{SIDE}" fill="#fff"/>{"".join(marks)}'
        f'<text x="{middle}" y="{SIDE - 12}" text-anchor="middle">measured</text>'
        f'<text x="14" y="{middle}" transform="rotate(-90 14 {middle})" '
        'text-anchor="middle">predicted</text></svg>\n'
    )


def main(folder: Path) -> None:
    """Learn the intervals, validate with them, and write."""
    validations = [validate_runs(folder / name) for name in TABLES]
    rows = [row for found in validations for row in found.all_rows.rows]
    note = (
        "# Measured over predicted seconds of a step: between these in four of five cases.\n"
        "# Learnt from published runs by tools/accuracy.py; phaze_fast/planning/plans.py\n"
        "# says how a plan's group is found.\n"
    )
    file = ROOT / "phaze_fast/planning/data/intervals.yaml"
    hidden_from = left_out_whole([row.run for row in rows])
    ratios = {**learn_ratios(rows), **bounds_of_unseen(hidden_from)}
    file.write_text(note + to_yaml({"ratios": dict(sorted(ratios.items()))}), "utf-8")
    chip = presets.chip("h200")
    steps = [validate_steps(folder / f"{name}.csv", chip) for name in ("h200_step", "h200_hf")]
    unseen = without_each_model(folder / "h200_hf.csv", chip)
    groups = [group for found in validations for group in found.groups]
    refused = sum(len(found.refused) for found in validations)
    hidden = [g for name in TABLES for g in validate_runs(folder / name, software=UNKNOWN).groups]
    constants, others = fitted([row.run for row in rows]), other_sources(folder)
    text = page(groups, hidden, refused, steps, constants, hidden_from, others) + (
        "\nBoth host times of the eager HuggingFace steps, fitted with one model after another "
        "left out:\n"
        f"{np.abs(unseen).mean():.1%} on the steps of the model that was left out (bias "
        f"{unseen.mean():+.1%}, at most {np.abs(unseen).max():.1%}).\n"
    )
    (ROOT / "docs/accuracy.md").write_text(text, "utf-8")
    (ROOT / "docs/accuracy.svg").write_text(scatter(groups), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
