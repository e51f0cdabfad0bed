"""The best plan of each of many chips, exactly: arrays in, arrays out."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from phaze_fast.errors import InvalidInputError, InvalidTypeError
from phaze_fast.explore.candidates import Answer
from phaze_fast.explore.chip_groups import ChipGroups
from phaze_fast.explore.per_chip import PerChipSearch
from phaze_fast.explore.problem import Problem, problems_of
from phaze_fast.hardware import Accelerator, ArchitectureSpace, Cluster, area_batch, chip_records
from phaze_fast.hardware.presets import chip as preset_chip
from phaze_fast.memory import SCHEDULES
from phaze_fast.models import Model, load
from phaze_fast.planning import PlanEvaluator, Training
from phaze_fast.planning.recompute import recompute_text
from phaze_fast.runs.executors import Workers
from phaze_fast.software import planned_model
from phaze_fast.tables import Table
from phaze_fast.threads import thread_count

__all__ = ["Evaluations", "evaluate_batch"]

Array = np.ndarray[Any, Any]

Chips = ArchitectureSpace | Array | Sequence[Accelerator] | Accelerator


@dataclass(frozen=True, eq=False)
class Evaluations(Table):
    """The best plan of each chip; arrays of one length, in the order of the chips.

    Where nothing fits, `feasible` is false, times and joules are infinite and counts zero.
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
        """Say on how many of the chips some plan fits."""
        return f"The best plan of each chip, of which {self.feasible.sum():,} have one"

    def to_columns(self) -> dict[str, Any]:
        """Give the arrays by name, as `to_dict` does."""
        return dict(self.to_dict())

    def to_dict(self) -> dict[str, Array]:
        """Give the arrays by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def _groups(chips: Chips) -> list[tuple[Array, ChipGroups]]:
    """Chips by what they share: their positions, and their groups.

    Raises
    ------
    InvalidInputError
        Where a chip is malformed.
    """
    if isinstance(chips, ArchitectureSpace):
        return [(np.arange(len(chips)), ChipGroups.of(chips))] if len(chips) else []
    if isinstance(chips, np.ndarray):
        like = preset_chip("phaze-tpuv4")  # neutral: no tuning, no launch latency
        return [_shared(np.arange(len(chips)), chips, like)] if len(chips) else []
    listed = [chips] if isinstance(chips, Accelerator) else list(chips)
    shared: dict[Any, list[int]] = {}
    for k, chip in enumerate(listed):
        if not isinstance(chip, Accelerator):
            raise InvalidTypeError(
                f"chips[{k}]: {type(chip).__name__} is not accepted; expected an Accelerator"
            )
        key = (chip.tuning, chip.launch_latency_s, tuple(sorted(chip.tensor_core.rates.items())))
        shared.setdefault(key, []).append(k)
    found = []
    for at in shared.values():
        records = chip_records([listed[k] for k in at])
        found.append(_shared(np.array(at), records, listed[at[0]]))
    return found


def _shared(at: Array, records: Array, like: Accelerator) -> tuple[Array, ChipGroups]:
    area_mm2 = area_batch(records)["total_mm2"]
    bad = np.flatnonzero(~np.isfinite(area_mm2))
    if len(bad):
        raise InvalidInputError(f"chips[{int(at[bad[0]])}]: malformed")
    return at, ChipGroups.of_records(records, area_mm2, like)


_COUNTS = ("tp", "pp", "dp", "cp", "ep", "zero", "micro_batch", "devices")


def _blank(count: int) -> dict[str, Array]:
    columns: dict[str, Array] = {name: np.zeros(count, dtype=np.int64) for name in _COUNTS}
    columns["feasible"] = np.zeros(count, dtype=bool)
    for name in ("time_s", "energy_j"):
        columns[name] = np.full(count, np.inf)
    for name in ("samples_per_s", "area_mm2"):
        columns[name] = np.zeros(count)
    for name in ("schedule", "recompute"):
        columns[name] = np.full(count, "", dtype="<U128")
    return columns


def _fill(columns: dict[str, Array], at: int, evaluator: PlanEvaluator, answer: Any) -> None:
    sizes, placed = evaluator.sizes[answer.strategy], answer.placed
    strategy, layout = sizes.strategy, evaluator.layouts[placed.layout]
    names = {recompute_text(code, sizes.variants) for code in placed.variants}
    stages, replicas = int(layout["stages"]), int(layout["dp"])
    values = {
        "feasible": True,
        "time_s": placed.time_s,
        "samples_per_s": evaluator.training.global_batch / placed.time_s,
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
        "recompute": names.pop() if len(names) == 1 else "mixed",
    }
    for name, value in values.items():
        columns[name][at] = value


def _best_plans(
    problems: list[Problem], groups: ChipGroups, threads: int, executor: Executor | str | None
) -> dict[tuple[int, int], Answer]:
    """Find the best plan of each chip group with each capacity that has one."""
    with Workers(executor, threads) as others:
        workers = others if executor is not None else None
        search = PerChipSearch(problems, groups, top=len(groups), threads=threads, workers=workers)
        search.run()
    return search.chosen[0]


def evaluate_batch(
    model: Model | str,
    chips: Chips,
    cluster: Cluster,
    training: Training,
    threads: int | None = None,
    executor: Executor | str | None = None,
) -> Evaluations:
    """Find the best plan of a model on each of many chips: the backend's entry point.

    Parameters
    ----------
    model
        What is trained, or its name.
    chips
        A space, an array of records (``_core.CHIP_DTYPE``, such as `ArchitectureSpace.chips`), or
        accelerators.
    cluster
        Devices and fabric; its chip, if any, is of no account.
    training
        The step, and what is fixed or free.
    threads
        At most this many, by default all cores; the answer does not depend on it.
    executor
        Where the work is done instead: any executor, or a name that `phaze_fast.sweep` takes.

    Returns
    -------
    Evaluations
        The same plans as `phaze_fast.plan` gives for each chip, to the last bit.

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
    >>> found = evaluate_batch(pf.models.load("bert-large"), space, cluster, step)
    >>> found.feasible.tolist(), found.dp.tolist()
    ([True, True, True, True], [8, 8, 8, 8])
    """
    model = load(model) if isinstance(model, str) else model
    if not isinstance(model, Model) or not isinstance(training, Training):
        raise InvalidTypeError(
            f"model, training: {type(model).__name__} and {type(training).__name__} are not "
            "accepted; expected a TransformerModel (models.load) and a Training"
        )
    model = planned_model(model, training.software)
    groups, workers = _groups(chips), thread_count(threads)
    columns = _blank(sum(len(at) for at, _ in groups))
    for at, own in groups:
        columns["area_mm2"][at] = own.area_mm2[own.of_chip[:, 0]]
        problems = problems_of([model], own, cluster, training)
        answers = _best_plans(problems, own, workers, executor)
        for k, (group, c) in enumerate(own.of_chip.tolist()):
            if (group, c) in answers:
                answer = answers[group, c]
                problem, s = problems[0].of(answer.strategy)
                _fill(columns, int(at[k]), problem.evaluator, answer._replace(strategy=s))
    for column in columns.values():
        column.setflags(write=False)
    return Evaluations(**columns)
