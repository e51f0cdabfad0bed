"""Plans on a fixed chip, the baselines of a search: hand plans, Megatron-style plans, the best."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from phaze_fast.documents import package_data
from phaze_fast.errors import InvalidInputError
from phaze_fast.explore import SearchProblem, Winner, geometric_mean
from phaze_fast.hardware import Accelerator, Cluster, Tuning, presets
from phaze_fast.models import Model
from phaze_fast.planning import Plan, PlanEvaluator, Training, plan, usable_bytes
from phaze_fast.threads import thread_count
from phaze_fast.units import format_bytes


@cache
def hand_plans() -> Mapping[str, tuple[int, int, int]]:
    """Stages, replicas and tensor-parallel width by model: the plans of the public PHAZE code.

    Examples
    --------
    >>> hand_plans()["gpt3-175b"]
    (32, 8, 4)
    """
    data = package_data(__package__, "published.yaml")
    plans = {name: tuple(widths) for name, widths in data["hand_plans"].items()}
    return plans | {name: plans[like] for name, like in data["same_models"].items()}


BUILT = "tpuv4"
"""TPU v4 as built, with its own HBM; the paper's TPUv4-like chip has one ALU per vector lane."""

_MEGATRON_WIDTHS = (1, 2, 4, 8)


def as_searched(chip: Accelerator, problem: SearchProblem) -> Accelerator:
    """Return a chip with the tuning of the searched chips, if it has none of its own."""
    return chip.replace(tuning=problem.like.tuning) if chip.tuning == Tuning() else chip


@dataclass(frozen=True)
class Baseline:
    """The best chip or plan of another method, with the same cost model."""

    key: str
    """Short name, such as ``early_stop``."""
    title: str
    """Title in tables."""
    score: float
    """Seconds of a step, for several models a weighted geometric mean; infinite if none fits."""
    evaluations: int
    """Number of chips that the method evaluated."""
    seconds: float
    """Wall time of the method."""
    group: int | None = None
    """Position of the chip that the method chose, among the chip groups."""
    winner: Winner | None = None
    """The chosen chip with its HBM and plans."""
    history: tuple[tuple[int, float, float], ...] = ()
    """Evaluations, seconds and best score after each batch."""
    note: str = ""
    """Where the method stopped, where a plan had to be changed, or why nothing fits."""
    plan: Plan | None = None
    """The plan, for a method that plans on a fixed chip."""
    chip: Accelerator | None = None
    """The fixed chip, with the smallest HBM that the plan fits."""

    @classmethod
    def of_plan(
        cls,
        began: float,
        key: str,
        title: str,
        score: float,
        note: str,
        plan: Plan | None,
        chip: Accelerator | None,
    ) -> Baseline:
        """Describe a plan on a fixed chip, the search for which started at time `began`."""
        spent = time.monotonic() - began
        history = ((1, spent, score),)
        return cls(key, title, score, 1, spent, history=history, note=note, plan=plan, chip=chip)

    def best_by(self, evaluations: float = math.inf, seconds: float = math.inf) -> float:
        """Best score after so many evaluations and seconds at most.

        One run with large limits therefore suffices for both equal evaluations and equal time.

        Examples
        --------
        >>> course = ((8, 1.0, 5.0), (16, 2.0, 3.0))
        >>> run = Baseline("random", "random search", 3.0, 16, 2.0, history=course)
        >>> run.best_by(evaluations=10), run.best_by(seconds=2.5), run.best_by(seconds=0.5)
        (5.0, 3.0, inf)
        """
        known = [s for n, spent, s in self.history if n <= evaluations and spent <= seconds]
        return min(known, default=math.inf)


def _with_hbm(chip: Accelerator, capacity_bytes: int) -> Accelerator:
    if chip.hbm is None:
        raise InvalidInputError(f"chip: {chip.name} has no hbm to place into")
    return chip.replace(hbm=chip.hbm.replace(capacity_bytes=capacity_bytes))


def uniform_plans(
    model: Model,
    cluster: Cluster,
    training: Training,
    modes: Sequence[str],
    zeros: Sequence[int],
    even: bool = False,
) -> tuple[list[Plan], str]:
    """List the best plan for each recompute mode and ZeRO stage, equal in all pipeline stages.

    Parameters
    ----------
    model, cluster, training
        As `phaze_fast.plan` takes them.
    modes, zeros
        Recompute modes and ZeRO stages.
    even
        Whether all stages have the same number of blocks.

    Returns
    -------
    tuple
        The plans that fit, and the reason if none does.
    """
    limit, plans = usable_bytes(cluster, training), []
    reason = (
        f"does not fit into {format_bytes(limit)} of a device with ZeRO 0 or 1 and any "
        "micro-batch given"
    )
    for mode, zero in itertools.product(modes, zeros):
        uniform = training.replace(recompute=(mode,), zero=(zero,))
        capacity = limit + float(training.reserved_bytes)
        evaluator = PlanEvaluator(model, cluster, uniform, [capacity])
        if not len(evaluator):
            reason = "; ".join(evaluator.rejected)
        elif evaluator.fits.any():
            times = evaluator.times(cluster)
            if even:
                best = evaluator.best_even(times, threads=thread_count(None))
            else:
                best = evaluator.top(times, 1).plans[:1]
            plans += [evaluator.plan(placed, times) for placed in best]
    return plans, reason


class FixedChip:
    """Plans of models on one chip, each a baseline of a search.

    Times do not depend on the HBM capacity, so plans are found with the largest, and the baseline's
    chip has the smallest that its plan fits. The score of a baseline is infinite where nothing
    fits; its note then says why.

    Parameters
    ----------
    cluster
        Devices and fabric.
    training
        Batch, micro-batches, optimiser, reserved memory, and which plans `our_plan` may find.
    capacities
        Bytes of HBM to choose from.
    chip
        The chip; by default the TPUv4-like chip of the PHAZE paper.

    Examples
    --------
    >>> from phaze_fast import models
    >>> pod = Cluster(devices=64, fabric="tpuv4-pod")
    >>> fixed = FixedChip(pod, Training(global_batch=256, micro_batch=1), [32 * 2**30])
    >>> baseline = fixed.hand_plan(models.load("bertlarge"))
    >>> baseline.plan.pp, baseline.plan.dp, baseline.plan.tp
    (8, 8, 1)
    >>> baseline.note
    '8 replicas instead of 128: 64 devices and a batch of 256 allow no more'
    >>> fixed.our_plan(models.load("bertlarge")).score <= baseline.score
    True
    """

    def __init__(
        self,
        cluster: Cluster,
        training: Training,
        capacities: Sequence[int],
        chip: Accelerator | None = None,
    ) -> None:
        if not len(capacities):
            raise InvalidInputError("capacities: none is not accepted; expected bytes of HBM")
        self._capacities = sorted(int(c) for c in capacities)
        self._chip = presets.chip("phaze-tpuv4") if chip is None else chip
        largest = _with_hbm(self._chip, self._capacities[-1])
        self._cluster, self._training = cluster.replace(chip=largest), training

    def _baseline(
        self, began: float, key: str, title: str, plans: Sequence[Plan], note: str
    ) -> Baseline:
        """Describe the fastest of `plans`, the search for which started at time `began`."""
        plan = min(plans, key=lambda p: (p.time_s, p.memory_bytes, p.tp, p.pp, p.dp), default=None)
        chip, score = self._cluster.chip, math.inf
        if plan is not None:
            score, least = plan.time_s, plan.memory_bytes + self._training.reserved_bytes
            fitting = (c for c in self._capacities if c >= least)
            chip = _with_hbm(self._chip, next(fitting, self._capacities[-1]))
        return Baseline.of_plan(began, key, f"{self._chip.name}, {title}", score, note, plan, chip)

    def _replicas(self, wanted: int, stage_devices: int) -> int:
        """Largest number of replicas up to `wanted` that batch and devices allow; 0: none."""
        most, training = min(wanted, self._cluster.devices // stage_devices), self._training
        sizes, batch = training.micro_batch, training.global_batch
        fitting = (d for d in range(most, 0, -1) if any(batch % (b * d) == 0 for b in sizes))
        return next(fitting, 0)

    def hand_plan(self, model: Model) -> Baseline:
        """Find the published hand plan of a model, with the fastest micro-batch and recomputation.

        Stages, replicas and width are those of `hand_plans`; cuts are the best (the public code's
        are not), the schedule is 1F1B, all stages recompute everything or nothing, and ZeRO is 0
        where that fits, else 1. The note lists changes of the published plan.
        """
        began, key, title = time.monotonic(), "hand_plan", "published hand plan"
        devices, training = self._cluster.devices, self._training
        if model.name not in hand_plans():
            note = f"no hand plan is published for {model.name}"
            return self._baseline(began, key, title, [], note)
        p, wanted, t = hand_plans()[model.name]
        if p * t > devices:
            note = f"{p} stages of width {t} are more than {devices} devices"
            return self._baseline(began, key, title, [], note)
        d, notes = self._replicas(wanted, p * t), []
        if 0 < d < wanted:
            notes.append(
                f"{d} replicas instead of {wanted}: {devices} devices and a batch of "
                f"{training.global_batch} allow no more"
            )
        own = training.replace(pp=(p,), dp=(max(d, 1),), tp=(t,), schedule=("1f1b",))
        plans, reason = uniform_plans(model, self._cluster, own, ("none", "full"), (0,))
        if not plans:
            plans, reason = uniform_plans(model, self._cluster, own, ("none", "full"), (1,))
            notes.append("without ZeRO it does not fit; with stage 1" if plans else reason)
        return self._baseline(began, key, title, plans, "; ".join(notes))

    def megatron_plan(self, model: Model) -> Baseline:
        """Find the best Megatron-style plan.

        All stages have the same number of blocks (the first also the embedding, the last the head),
        tensor-parallel widths are 1, 2, 4 and 8, all stages recompute the same (nothing, attention
        or everything), optimiser state is replicated or sharded (ZeRO 0 or 1), and the schedule is
        1F1B or interleaved. Each such plan is evaluated exactly.

        References
        ----------
        Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using
        Megatron-LM, SC 2021; Korthikanti et al., Reducing Activation Recomputation in Large
        Transformer Models, MLSys 2023.
        """
        began, blocks = time.monotonic(), model.blocks
        own = self._training.replace(
            pp=tuple(p for p in range(1, blocks + 1) if blocks % p == 0),
            tp=_MEGATRON_WIDTHS,
            schedule=("1f1b", "interleaved"),
        )
        modes = ("none", "selective", "full")
        plans, reason = uniform_plans(model, self._cluster, own, modes, (0, 1), even=True)
        title, note = "best Megatron-style plan", "" if plans else reason
        return self._baseline(began, "megatron_plan", title, plans, note)

    def our_plan(self, model: Model) -> Baseline:
        """Find the best plan that the training step allows."""
        began = time.monotonic()
        best = plan(model, self._cluster, self._training, top=1)
        return self._baseline(began, "our_plan", "our plan", best.plans[:1], best.shortfall)


def given_chip(
    problems: Sequence[SearchProblem], weights: Sequence[float], chip: Accelerator
) -> Baseline:
    """Find the best plans on a chip of the user's own, with the HBM that it has.

    Parameters
    ----------
    problems
        A model on the devices and the fabric that were searched, or several.
    weights
        Weights of several models in the geometric mean of their times.
    chip
        Any chip with HBM; it need not be one of the space.

    Returns
    -------
    Baseline
        The score is infinite where no plan of some model fits; the note then says why.
    """
    if chip.hbm is None:
        raise InvalidInputError(f"baselines: {chip.name} has no HBM to place layers in")
    began, notes = time.monotonic(), []
    plans: list[Plan] = []
    chip = as_searched(chip, problems[0])
    for problem in problems:
        cluster = problem.cluster.replace(chip=chip)
        best = plan(problem.model, cluster, problem.training, top=1)
        plans += best.plans[:1]
        if not best.plans:
            notes.append(f"{problem.model.name}: {best.shortfall}")
        elif len(problems) > 1:
            notes.append(f"{problem.model.name}: {best.best}")
    complete = len(plans) == len(problems)
    score = geometric_mean([p.time_s for p in plans], tuple(weights)) if complete else math.inf
    own = plans[0] if len(problems) == 1 and complete else None
    title = f"{chip.name}, the best plan on it"
    return Baseline.of_plan(began, f"chip {chip.name}", title, score, "; ".join(notes), own, chip)
