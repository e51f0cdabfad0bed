"""The exact best plan on every chip of a batch, rather than the best chip.

The limit of a chip is its own best plan so far, which prunes most of its other candidates. The most
promising candidate of a chip is therefore placed before the others: the one with the least product
of its lower bound and the factor by which plans of its strategy exceeded their bounds on earlier
chips. The factor decides the order only; a candidate is pruned only where its bound exceeds the
chip's best plan.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np

from phaze_fast.errors import InvalidInputError, check_type
from phaze_fast.explore.best_first import BestFirstSearch, run_together
from phaze_fast.explore.bounds import STEPS
from phaze_fast.explore.candidates import PLACED, SCHEDULED, Answer
from phaze_fast.explore.chip_groups import ChipGroups
from phaze_fast.explore.problem import SearchProblem, problems_of
from phaze_fast.explore.result import Budget, Winner
from phaze_fast.hardware import Accelerator, ArchitectureSpace, Cluster, area_batch, chip_records
from phaze_fast.hardware.presets import chip as preset_chip
from phaze_fast.memory import SCHEDULES
from phaze_fast.models import Model
from phaze_fast.planning import Training, checked_model
from phaze_fast.planning.training import recompute_text
from phaze_fast.runs.executors import Workers
from phaze_fast.tables import Array, Table
from phaze_fast.threads import thread_count

_BLOCK = 1024
"""Chip groups whose candidates are priced at once."""
_FIRST_BLOCK = 64
_ROUNDS = (1, 1, 1, 2**30)
"""Most candidates of a chip group and model that are scheduled and placed in each round."""
_PIECE = 128
"""Chip groups of a strategy that one of several threads schedules and places at once."""
_LEADING = 3
"""Number of candidates of a chip group whose schedules are bounded to choose the first to place."""
_MAPPED, _SCHEDULE_BOUND = (STEPS.index(name) + 1 for name in ("mapped", "schedule_bound"))


class PerChipSearch(BestFirstSearch):
    """The best plan of every model on every chip group with every capacity."""

    every = True

    def run(self, budget: Budget | None = None) -> bool:
        """Search; return whether it was completed. Only the time limit of a budget is used."""
        count, most_s = len(self.groups), (budget or Budget()).time_limit_s
        self._begin()
        self._excess = [np.ones(len(problem)) for problem in self.problems]
        everything = np.arange(count)
        first = everything[:: max(1, count // _FIRST_BLOCK)]
        rest = np.setdiff1d(everything, first)
        blocks = [first, *(rest[k : k + _BLOCK] for k in range(0, len(rest), _BLOCK))]
        for groups in blocks:
            if time.monotonic() - self._began > most_s:
                self._note_progress(count, 0.0)
                return False
            self._settle(groups)
        self._alive = everything[:0]
        self._note_progress(0, np.inf)
        return True

    def _settle(self, groups: Array) -> None:
        """Find the best plans of some chip groups."""
        tasks = []
        for table in self.tables:
            for s in range(len(table.problem)):
                possible = groups[np.isfinite(table.least[s, groups])]
                if len(possible):
                    tasks.append(partial(table.bound, s, possible, _MAPPED))
        run_together(tasks, self.tables[0].threads)
        self._bound_leaders(groups)
        before = [table.least[:, groups] for table in self.tables]
        for most in _ROUNDS:
            self._finish(self._most_promising(groups, most))
        for table, least, excess in zip(self.tables, before, self._excess, strict=True):
            table.forget_prices()
            done = table.level[:, groups] == PLACED
            for s in np.flatnonzero(done.any(axis=1)).tolist():
                ratios = table.least[s, groups[done[s]]] / least[s, done[s]]
                ratios = ratios[np.isfinite(ratios)]
                excess[s] = np.quantile(ratios, 0.1) if len(ratios) else excess[s]

    def _bound_leaders(self, groups: Array) -> None:
        """Compute schedule bounds until the most promising candidate of each group has one."""
        while True:
            leading = self._most_promising(groups, 1)
            if not (self._levels(leading) == _MAPPED).any():
                return
            ahead = self._most_promising(groups, _LEADING)
            wanted = _by_strategy(ahead[:, self._levels(ahead) == _MAPPED])
            tasks = [partial(self.tables[i].bound, s, at, _SCHEDULE_BOUND) for i, s, at in wanted]
            run_together(tasks, self.tables[0].threads)

    def _most_promising(self, groups: Array, most: int) -> Array:
        """Return open candidates of chip groups, at most `most` of each group and model."""
        self._alive = groups
        waiting, _, _ = self._open()
        i, s, group = waiting
        key = np.zeros(len(i))
        for k, table in enumerate(self.tables):
            own = i == k
            key[own] = table.least[s[own], group[own]] * self._excess[k][s[own]]
        return waiting[:, _first_of_each(i.astype(np.int64) * len(self.groups) + group, key, most)]

    def _finish(self, candidates: Array) -> None:
        """Schedule and place candidates, except those that are pruned before."""
        threads = self.tables[0].threads
        pieces = [
            (i, s, at[k : k + size])
            for i, s, at in _by_strategy(candidates)
            for size in (len(at) if threads == 1 else _PIECE,)
            for k in range(0, len(at), size)
        ]
        pieces.sort(key=lambda piece: -len(piece[2]))  # the longest first, for load balance
        answers: list[list[Answer]] = [[] for _ in pieces]

        def finish(number: int, threads: int) -> None:
            i, s, at = pieces[number]
            table = self.tables[i]
            table.schedule(s, at, self._below_s(i, s, at).max(axis=1), threads, planned=True)
            ready = at[table.level[s, at] == SCHEDULED]
            answers[number] = list(table.place(s, ready, self._below_s(i, s, ready), threads))
            self.placed += len(ready)

        run_together([partial(finish, number) for number in range(len(pieces))], threads)
        for (i, _, _), of_piece in zip(pieces, answers, strict=True):
            for answer in of_piece:
                self._take(i, answer)


def _by_strategy(candidates: Array) -> Iterator[tuple[int, int, Array]]:
    """Group candidates: model, strategy and their chip groups."""
    for i, s in np.unique(candidates[:2], axis=1).T.tolist():
        yield i, s, candidates[2, (candidates[0] == i) & (candidates[1] == s)].astype(np.int64)


def _first_of_each(owner: Array, key: Array, most: int) -> Array:
    """Return the positions of the smallest keys of each owner, at most `most` of each."""
    order = np.lexsort((np.arange(len(key)), key, owner))
    _, begins, counts = np.unique(owner[order], return_index=True, return_counts=True)
    rank = np.arange(len(key)) - np.repeat(begins, counts)
    first: Array = np.sort(order[rank < most])
    return first


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
            search = PerChipSearch(
                self.problems,
                self.groups.take(new),
                weights=self.weights,
                top=len(new),
                threads=self.threads,
            )
            search.run()
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


def _row(problem: SearchProblem, answer: Answer) -> dict[str, Any]:
    """Describe a plan by the columns of `Evaluations`."""
    evaluator, k = problem.of(answer.strategy)
    sizes, placed = evaluator.sizes[k], answer.placed
    strategy, layout = sizes.strategy, evaluator.layouts[placed.layout]
    recomputed = {recompute_text(code, sizes.variants) for code in placed.variants}
    stages, replicas = int(layout["pp"]), int(layout["dp"])
    return {
        "feasible": True,
        "time_s": placed.time_s,
        "samples_per_s": problem.training.global_batch / placed.time_s,
        "energy_j": answer.energy_j,
        "tp": strategy.tp,
        "pp": stages,
        "dp": replicas,
        "cp": strategy.cp,
        "ep": strategy.ep,
        "zero": int(layout["zero"]),
        "micro_batch": strategy.micro_batch,
        "devices": sizes.inner * stages * replicas,
        "schedule": SCHEDULES[int(layout["schedule"])],
        "recompute": recomputed.pop() if len(recomputed) == 1 else "mixed",
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
        columns["area_mm2"][at] = groups.area_mm2[groups.of_chip[:, 0]]
        (problem,) = problems_of([model], groups, cluster, training)
        with Workers(executor, workers) as others:
            search = PerChipSearch(
                [problem],
                groups,
                top=len(groups),
                threads=workers,
                workers=others if executor is not None else None,
            )
            search.run()
        for position, (group, c) in zip(at.tolist(), groups.of_chip.tolist(), strict=True):
            answer = search.chosen[0].get((group, c))
            if answer is not None:
                for name, value in _row(problem, answer).items():
                    columns[name][position] = value
    for column in columns.values():
        column.setflags(write=False)
    return Evaluations(**columns)
