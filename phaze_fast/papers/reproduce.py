"""Published figures and this package's, under a paper's assumptions and with all cost terms.

Published figures are data with their source; a figure that is not public is shown as missing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from phaze_fast.documents import package_data
from phaze_fast.errors import check_one_of
from phaze_fast.explore import find_chips, paper_setup
from phaze_fast.hardware import ArchitectureSpace, Cluster, presets
from phaze_fast.models import load
from phaze_fast.papers.fixed_plans import BUILT, FixedChip
from phaze_fast.planning import PlanEvaluator, Training, plan
from phaze_fast.planning.times import memory_of
from phaze_fast.software import planned_model
from phaze_fast.tables import Table
from phaze_fast.threads import thread_count
from phaze_fast.wafer import Effort, Problem, compare_mappings, load_wafer

PAPERS = ("phaze", "nest", "tmac")
"""Papers whose figures are compared with this package's."""

_PUBLISHED = partial(package_data, __package__, "published.yaml")


@dataclass(frozen=True)
class Row:
    """One figure of a paper, and this package's."""

    case: str
    published: float | None
    """The paper's figure; None where its public text has none."""
    ours: float | None
    """This package's figure under the paper's assumptions; None where these are not public."""
    honest: float | None
    """This package's figure with the costs that the paper leaves out; None where nothing fits."""
    why: str
    """Why the figures differ, or what is missing."""


@dataclass(frozen=True)
class Reproduced(Table):
    """The figures of a paper, and this package's."""

    paper: str
    source: str
    measure: str
    """What the figures measure."""
    rows: tuple[Row, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def to_columns(self) -> dict[str, Any]:
        """Return the rows as columns."""
        return {name: [asdict(row)[name] for row in self.rows] for name in Row.__annotations__}

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "paper": self.paper,
            "source": self.source,
            "measure": self.measure,
            "rows": [asdict(row) for row in self.rows],
        }

    def to_latex(self) -> str:
        """Write the rows as a LaTeX table."""

        def cell(value: float | None) -> str:
            return "--" if value is None else f"{value:.2f}"

        lines = [r"\begin{tabular}{lrrr}", r"case & published & ours & honest \\", r"\hline"]
        for row in self.rows:
            cells = (row.case, cell(row.published), cell(row.ours), cell(row.honest))
            lines.append(" & ".join(text.replace("%", r"\%") for text in cells) + r" \\")
        return "\n".join([*lines, r"\end{tabular}", f"% {self.measure}; {self.source}"]) + "\n"


def _gain(name: str, chips: str, built: bool, threads: int | None) -> float | None:
    """Speed-up of the best chip and plan over the TPUv4-like chip with the hand plan.

    With `built`, over TPU v4 as it was built, with its own memory and the best plan on it.
    """
    space, (cluster, step) = ArchitectureSpace.load(chips), paper_setup()
    model = planned_model(load(name), step.software, step.seq)
    outcome = find_chips([model], space, cluster, step, threads=thread_count(threads))
    if not outcome.winners:
        return None
    if built:
        best = plan(model, cluster.replace(chip=presets.chip(BUILT)), step, top=1)
        score = best.best.time_s if best.plans else math.inf
    else:
        capacities = sorted({int(size) for size in space.chips["hbm_bytes"]})
        score = FixedChip(cluster, step, capacities).hand_plan(model).score
    return score / outcome.winners[0].time_s if math.isfinite(score) else None


def _phaze(models: Sequence[str], threads: int | None, say: Callable[[str], None]) -> list[Row]:
    rows, published = [], _PUBLISHED()["phaze"]
    for name in models or [case["model"] for case in published["cases"]]:
        say(f"{name}: the published space, and the space with every area counted")
        ours = _gain(name, "published", built=False, threads=threads)
        honest = _gain(name, "full-area", built=True, threads=threads)
        rows.append(Row(name, None, ours, honest, published["why"]))
    return rows


def _nest(models: Sequence[str], threads: int | None, say: Callable[[str], None]) -> list[Row]:
    rows, published = [], _PUBLISHED()["nest"]
    for case in published["cases"]:
        name, devices = case["model"], case["devices"]
        if models and name not in models:
            continue
        say(case["case"])
        chip = presets.chip(case["chip"])
        cluster = Cluster.from_dict({"devices": devices, "fabric": chip.usual_fabric, "chip": chip})
        step = Training(global_batch=4 * devices, micro_batch=(1, 2, 4), zero=(0, 1))
        capacity = float(memory_of(cluster.chip).capacity_bytes)
        evaluator = PlanEvaluator(load(name), cluster, step, [capacity])
        honest = None
        if evaluator.fits.any():
            times = evaluator.times(cluster, threads=threads or 1)
            even = evaluator.best_even(times)
            free = evaluator.top(times, 1, threads=threads or 1).plans
            honest = even[0].time_s / free[0].time_s if even and free else None
        gain = case["best"] / case["manual"]
        rows.append(Row(case["case"], gain, None, honest, published["why"]))
    return rows


def _tmac(models: Sequence[str], threads: int | None, say: Callable[[str], None]) -> list[Row]:
    name = models[0] if models else "bertlarge"
    say(f"{name} on dojo-tile-like: our mapping, and other systems' plans by the same evaluation")
    problem = Problem(name, load_wafer("dojo-tile-like"))
    quick = Effort(seeds=1, steps=500, promising=1, budget_s=2.0)
    table = compare_mappings(problem, quick, threads=threads, ablations=False).to_columns()
    plans = zip(table["plan"], table["variant"], strict=True)
    seconds = dict(zip(plans, table["time_s"], strict=True))
    best = seconds["ours", ""]
    rows, published = [], _PUBLISHED()["tmac"]
    for case in published["cases"]:
        pair = [seconds.get((case["system"], variant)) for variant in ("default", "tuned")]
        ours, honest = (None if t is None or best is None else t / best for t in pair)
        why = "its plan does not fit the memory of the dies; " if pair[1] is None else ""
        title = f"{case['case']}, {name}"
        rows.append(Row(title, case["speedup"], ours, honest, why + published["why"]))
    return rows


def reproduce(
    paper: str,
    models: Sequence[str] = (),
    threads: int | None = None,
    say: Callable[[str], None] | None = None,
) -> Reproduced:
    """Compare a paper's published figures with ours.

    Parameters
    ----------
    paper
        A name of `PAPERS`.
    models
        Models of the paper to compare; by default all.
    threads
        At most this many; by default all cores.
    say
        Called with a line on the progress.

    Raises
    ------
    InvalidInputError
        Where there is no such paper.

    Examples
    --------
    >>> PAPERS
    ('phaze', 'nest', 'tmac')
    """
    runs = {"phaze": _phaze, "nest": _nest, "tmac": _tmac}
    check_one_of("paper", paper, PAPERS)
    published = _PUBLISHED()[paper]
    known = dict.fromkeys(case["model"] for case in published["cases"] if "model" in case)
    for name in models if known else ():
        check_one_of("models", name, known)
    rows = runs[paper](models, threads, say or (lambda _: None))
    finite = [row for row in rows if row.honest is None or math.isfinite(row.honest)]
    return Reproduced(paper, published["source"], published["measure"], tuple(finite))
