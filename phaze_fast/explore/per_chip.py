"""The exact best plan on every chip of a batch, rather than the best chip."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from phaze_fast.errors import InvalidInputError, check_type
from phaze_fast.explore.best_first import BestFirstSearch
from phaze_fast.explore.candidates import Answer, run_elsewhere
from phaze_fast.explore.chip_groups import ChipGroups
from phaze_fast.explore.problem import BestPlans, SearchProblem, problems_of
from phaze_fast.explore.result import Winner
from phaze_fast.hardware import Accelerator, ArchitectureSpace, Cluster, area_batch, chip_records
from phaze_fast.hardware.presets import chip as preset_chip
from phaze_fast.memory import SCHEDULES
from phaze_fast.models import Model
from phaze_fast.planning import Placed, Training, checked_model
from phaze_fast.planning.training import recompute_text
from phaze_fast.runs.executors import Workers
from phaze_fast.tables import Array, Table
from phaze_fast.threads import thread_count

_AT_ONCE, _CHIPS_OF_A_TASK = 1024, 128
"""Most chip groups whose operators are priced at once, here and in another process."""
_PRICES_AT_ONCE = 2**23
"""Most prices of operators of all strategies at once, to limit memory."""


def _tasks_of(problem: SearchProblem, groups: ChipGroups, size: int) -> Iterator[tuple[int, Array]]:
    """Divide chip groups with strategies by their variant, and into pieces of `size` or less."""
    for variant, evaluator in enumerate(problem.evaluators):
        if not len(evaluator):
            continue
        mine = np.arange(len(groups))
        if problem.variants:
            mine = np.flatnonzero(groups.variant == variant)
        layers = [layer for own in evaluator.sizes for layer in own.graph.layers]
        operators = sum(len(layer.forward) + len(layer.backward) for layer in layers)
        count = min(size, 1 + _PRICES_AT_ONCE // operators)
        for k in range(0, len(mine), count):
            yield variant, mine[k : k + count]


def _best_plans(
    problem: SearchProblem, variant: int, groups: ChipGroups, threads: int = 1
) -> BestPlans:
    """Find the best plans of chip groups of one variant."""
    exists = groups.chip >= 0
    largest = exists.shape[1] - 1 - np.argmax(exists[:, ::-1], axis=1)
    below_s = np.where(exists, np.inf, -np.inf)
    return problem.best_plans(variant, groups.records, largest, below_s, threads)


def _all_best_plans(
    problem: SearchProblem, groups: ChipGroups, threads: int, workers: Workers | None = None
) -> Iterator[tuple[int, Array, BestPlans]]:
    """Find the best plan of a model on every chip group with every capacity.

    Yields
    ------
    tuple
        The variant, the positions of some groups, and their plans.
    """
    if workers is None:
        for variant, at in _tasks_of(problem, groups, _AT_ONCE):
            yield variant, at, _best_plans(problem, variant, groups.take(at), threads)
        return
    pieces = list(_tasks_of(problem, groups, _CHIPS_OF_A_TASK))
    tasks = [(_best_plans, (problem, variant, groups.take(at))) for variant, at in pieces]
    for number, plans in run_elsewhere(tasks, workers):
        yield *pieces[number], plans


def _answers(problem: SearchProblem, groups: ChipGroups, threads: int) -> Iterator[Answer]:
    """Find the best plan of a model on every chip group with every capacity."""
    first = {v: s for s, (v, _) in reversed(list(enumerate(problem.strategies)))}
    for variant, at, found in _all_best_plans(problem, groups, threads):
        layouts = problem.evaluators[variant].layouts
        joules, count = found.joules.tolist(), len(groups.capacities)
        for row, placed in enumerate(Placed.from_records(found.placed, found.borders)):
            if placed.layout < 0:
                continue
            strategy = first[variant] + int(layouts["strategy"][placed.layout])
            group = int(at[row // count])
            yield Answer(group, row % count, strategy, placed, joules[row], found.times, row)


# ---- one by one or in batches ----


class ExactEvaluator:
    """Exact scores of chip groups, each computed once.

    It scores the chips of other search methods and of external optimisers.

    Parameters
    ----------
    problems
        Search problems, one for each model.
    groups
        The chips.
    weights
        Weights of the models in the geometric mean of their times; by default equal.
    threads
        At most this many; the scores do not depend on it.
    """

    def __init__(
        self,
        problems: Sequence[SearchProblem],
        groups: ChipGroups,
        weights: Sequence[float] = (),
        threads: int = 1,
    ) -> None:
        self.problems, self.groups, self.weights = list(problems), groups, tuple(weights)
        self.threads = threads
        self._winners: dict[int, Winner | None] = {}

    @property
    def evaluations(self) -> int:
        """Chip groups that were evaluated so far."""
        return len(self._winners)

    def winners(self, groups: Sequence[int] | Array) -> list[Winner | None]:
        """Best capacity, strategies and plans of each group; none where nothing fits."""
        wanted = [int(g) for g in groups]
        new = np.array([g for g in dict.fromkeys(wanted) if g not in self._winners], dtype=np.int64)
        if len(new):
            chosen = self.groups.take(new)
            search = BestFirstSearch(self.problems, chosen, weights=self.weights, top=len(new))
            for i, problem in enumerate(self.problems):
                for answer in _answers(problem, chosen, self.threads):
                    search.take(i, answer)
            self._winners |= dict.fromkeys(new.tolist())
            for winner in search.winners():
                group = int(new[winner.group])
                self._winners[group] = replace(winner, group=group)
        return [self._winners[g] for g in wanted]

    def scores(self, groups: Sequence[int] | Array) -> Array:
        """Best score of each group; infinite where nothing fits."""
        return np.array([np.inf if w is None else w.score for w in self.winners(groups)])


Chips = ArchitectureSpace | Array | Sequence[Accelerator] | Accelerator


@dataclass(frozen=True, eq=False)
class Evaluations(Table):
    """The best plan of each chip; arrays of one length, in the order of the chips.

    Where no plan fits, `feasible` is false, times and joules are infinite and counts zero.
    """

    feasible: Array
    time_s: Array
    """Seconds of a step."""
    samples_per_s: Array
    energy_j: Array
    """Joules of a step, all devices together."""
    area_mm2: Array
    tp: Array
    pp: Array
    dp: Array
    cp: Array
    ep: Array
    zero: Array
    micro_batch: Array
    devices: Array
    schedule: Array
    recompute: Array

    def __len__(self) -> int:
        return len(self.time_s)

    def headline(self) -> str:
        """Describe on how many of the chips a plan fits."""
        return f"The best plan of each chip, of which {self.feasible.sum():,} have one"

    def to_columns(self) -> dict[str, Any]:
        """Return the arrays by name, as `to_dict` does."""
        return dict(self.to_dict())

    def to_dict(self) -> dict[str, Array]:
        """Return the arrays by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def _grouped(chips: Chips) -> list[tuple[Array, ChipGroups]]:
    """Group chips that share tuning, launch latency and rates: their positions, and the groups.

    Raises
    ------
    InvalidInputError
        Where a chip is malformed.
    """
    if isinstance(chips, ArchitectureSpace):
        return [(np.arange(len(chips)), ChipGroups.of(chips))] if len(chips) else []
    if isinstance(chips, np.ndarray):
        like = preset_chip("phaze-tpuv4")  # a chip without tuning and launch latency
        return [_checked_groups(np.arange(len(chips)), chips, like)] if len(chips) else []
    listed = [chips] if isinstance(chips, Accelerator) else list(chips)
    shared: dict[Any, list[int]] = {}
    for k, chip in enumerate(listed):
        check_type(f"chips[{k}]", chip, Accelerator, "an Accelerator")
        key = (chip.tuning, chip.launch_latency_s, tuple(sorted(chip.tensor_core.rates.items())))
        shared.setdefault(key, []).append(k)
    return [
        _checked_groups(np.array(at), chip_records([listed[k] for k in at]), listed[at[0]])
        for at in shared.values()
    ]


def _checked_groups(at: Array, records: Array, like: Accelerator) -> tuple[Array, ChipGroups]:
    area_mm2 = area_batch(records)["total_mm2"]
    bad = np.flatnonzero(~np.isfinite(area_mm2))
    if len(bad):
        raise InvalidInputError(f"chips[{int(at[bad[0]])}]: malformed")
    return at, ChipGroups.of_records(records, area_mm2, like)


_COUNTS = ("tp", "pp", "dp", "cp", "ep", "zero", "micro_batch", "devices")


def _infeasible_rows(count: int) -> dict[str, Array]:
    columns: dict[str, Array] = {name: np.zeros(count, dtype=np.int64) for name in _COUNTS}
    columns["feasible"] = np.zeros(count, dtype=bool)
    for name in ("time_s", "energy_j"):
        columns[name] = np.full(count, np.inf)
    for name in ("samples_per_s", "area_mm2"):
        columns[name] = np.zeros(count)
    for name in ("schedule", "recompute"):
        columns[name] = np.full(count, "", dtype="<U128")
    return columns


def _columns(problem: SearchProblem, variant: int, found: BestPlans, rows: Array) -> dict[str, Any]:
    """Describe plans by the columns of `Evaluations`; `rows` are those that there are."""
    evaluator, placed = problem.evaluators[variant], found.placed[rows]
    layouts = evaluator.layouts[placed["layout"]]
    sizes = [evaluator.sizes[s] for s in layouts["strategy"].tolist()]
    widths = {
        name: np.array([getattr(own.strategy, name) for own in sizes], dtype=np.int64)
        for name in ("tp", "cp", "ep", "micro_batch")
    }
    pp, dp = layouts["pp"].astype(np.int64), layouts["dp"]
    inner = np.array([own.inner for own in sizes], dtype=np.int64)
    recompute = []
    for own, at, count in zip(sizes, placed["variants_at"], placed["variants"], strict=True):
        codes = np.unique(found.borders[at : at + count]).tolist()
        texts = {recompute_text(code, own.variants) for code in codes}
        recompute.append(texts.pop() if len(texts) == 1 else "mixed")
    return widths | {
        "feasible": True,
        "time_s": placed["time_s"],
        "samples_per_s": problem.training.global_batch / placed["time_s"],
        "energy_j": found.joules[rows],
        "pp": pp,
        "dp": dp,
        "zero": layouts["zero"],
        "devices": inner * pp * dp,
        "schedule": np.array(SCHEDULES)[layouts["schedule"]],
        "recompute": recompute,
    }


def evaluate_batch(
    model: Model | str,
    chips: Chips,
    cluster: Cluster,
    training: Training,
    threads: int | None = None,
    executor: Executor | str | None = None,
) -> Evaluations:
    """Find the best plan of a model on each of many chips.

    Parameters
    ----------
    model
        What is trained, or its name.
    chips
        A space, an array of records (``_core.CHIP_DTYPE``, such as `ArchitectureSpace.chips`), or
        accelerators.
    cluster
        Devices and fabric; its chip, if any, is ignored.
    training
        The training step, and which options of plans are fixed or free.
    threads
        At most this many, by default all cores; the answer does not depend on it.
    executor
        Runs the work in place of threads: any executor, or a name that `phaze_fast.sweep` takes.

    Returns
    -------
    Evaluations
        The same plans as `phaze_fast.plan` finds for each chip, to the last bit.

    Raises
    ------
    InvalidInputError
        Where a chip is malformed.

    Examples
    --------
    >>> import phaze_fast as pf
    >>> space = pf.ArchitectureSpace.published()[50_000:50_004]
    >>> cluster = pf.Cluster(devices=8, fabric="tpuv4-pod")
    >>> step = pf.Training(global_batch=64, micro_batch=2)
    >>> best = evaluate_batch(pf.models.load("bert-large"), space, cluster, step)
    >>> best.feasible.tolist(), best.dp.tolist()
    ([True, True, True, True], [8, 8, 8, 8])
    """
    check_type("training", training, Training, "a Training")
    model = checked_model(model, training.software, training.seq)
    grouped, workers = _grouped(chips), thread_count(threads)
    columns = _infeasible_rows(sum(len(at) for at, _ in grouped))
    for at, groups in grouped:
        (problem,) = problems_of([model], groups, cluster, training)
        grid = _infeasible_rows(groups.chip.size)
        with Workers(executor, workers) as others:
            pool = None if executor is None else others
            for variant, some, found in _all_best_plans(problem, groups, workers, pool):
                rows = np.flatnonzero(found.placed["layout"] >= 0)
                cells = np.arange(groups.chip.size).reshape(groups.chip.shape)[some].ravel()[rows]
                for name, values in _columns(problem, variant, found, rows).items():
                    grid[name][cells] = values
        chosen = np.ravel_multi_index(tuple(groups.of_chip.T), groups.chip.shape)
        for name, values in grid.items():
            columns[name][at] = values[chosen]
        columns["area_mm2"][at] = groups.area_mm2[groups.of_chip[:, 0]]
    for column in columns.values():
        column.setflags(write=False)
    return Evaluations(**columns)
