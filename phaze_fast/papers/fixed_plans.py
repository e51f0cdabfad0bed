"""Plans that people use, on the TPUv4-like chip or another.

The published hand plan, the best plan of Megatron-LM's kind, and the best of all: what a search
over chips has to beat before any chip is new.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from phaze_fast.errors import InvalidInputError
from phaze_fast.explore import SearchProblem, Winner, geometric_mean
from phaze_fast.hardware import Accelerator, Cluster, presets
from phaze_fast.models import Model
from phaze_fast.planning import Plan, PlanEvaluator, Training, plan
from phaze_fast.planning.planner import room
from phaze_fast.units import format_bytes

__all__ = ["HAND_PLANS", "Baseline", "given_chip", "hand_plan", "megatron_plan", "our_plan"]

_PUBLISHED = {
    "opt": (12, 85, 1),
    "bertlarge": (8, 128, 1),
    "gpt2": (32, 32, 1),
    "megatronbert": (8, 128, 1),
    "megatrongpt2-54": (8, 32, 4),
    "megatrongpt2-72": (8, 16, 8),
    "megatrongpt3": (32, 8, 4),
    "llama2": (8, 128, 1),
}
_SAME = {
    "bert-large": "bertlarge",
    "gpt2-xl": "gpt2",
    "opt-1.3b": "opt",
    "llama2-7b": "llama2",
    "gpt3-175b": "megatrongpt3",
}
HAND_PLANS: Mapping[str, tuple[int, int, int]] = MappingProxyType(
    {**_PUBLISHED, **{name: _PUBLISHED[like] for name, like in _SAME.items()}}
)
"""Stages, replicas and tensor-parallel width by model, for 1,024 devices: the fixed plans of the
public PHAZE code (Wang et al., ICML 2024; ``Solver/baseline_configs.py``)."""

_MEGATRON_WIDTHS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Baseline:
    """What another method found, with the same cost model."""

    key: str
    """Short name, such as ``early_stop``."""
    title: str
    """What it is, in words."""
    score: float
    """Seconds of a step, for several models their weighted geometric mean; infinite: none fits."""
    evaluations: int
    """Chips that it evaluated."""
    seconds: float
    """Wall time that it took."""
    group: int | None = None
    """Position among the chip groups, where it chose one."""
    winner: Winner | None = None
    """That chip with its HBM and plans."""
    history: tuple[tuple[int, float, float], ...] = ()
    """Evaluations, seconds and best score after each batch."""
    note: str = ""
    """What it stopped at, or had to give way on, or why nothing fits."""
    plan: Plan | None = None
    """The plan, where the chip was given."""
    chip: Accelerator | None = None
    """The chip that was given, with the smallest HBM that the plan fits."""

    @property
    def plan_text(self) -> str:
        """The plan in one line; empty where there is none."""
        return "" if self.plan is None else str(self.plan)

    def best_by(self, evaluations: float = math.inf, seconds: float = math.inf) -> float:
        """Give the best score after so many evaluations and seconds at most.

        One run with generous limits so answers at equal evaluations and at equal time.

        Examples
        --------
        >>> course = ((8, 1.0, 5.0), (16, 2.0, 3.0))
        >>> found = Baseline("random", "random search", 3.0, 16, 2.0, history=course)
        >>> found.best_by(evaluations=10), found.best_by(seconds=2.5), found.best_by(seconds=0.5)
        (5.0, 3.0, inf)
        """
        known = [s for n, spent, s in self.history if n <= evaluations and spent <= seconds]
        return min(known, default=math.inf)


def _with_hbm(chip: Accelerator, capacity_bytes: int) -> Accelerator:
    if chip.hbm is None:
        raise InvalidInputError(f"chip: {chip.name} has no hbm to place into")
    return chip.model_copy(
        update={"hbm": chip.hbm.model_copy(update={"capacity_bytes": capacity_bytes})}
    )


class _Bench:
    """One chip on a cluster; times do not depend on HBM, so that the largest decides."""

    def __init__(
        self,
        cluster: Cluster,
        training: Training,
        capacities: Sequence[int],
        chip: Accelerator | None,
    ) -> None:
        if not len(capacities):
            raise InvalidInputError("capacities: none is not accepted; expected bytes of HBM")
        self.began = time.monotonic()
        self.capacities = sorted(int(c) for c in capacities)
        self.chip = presets.chip("phaze-tpuv4") if chip is None else chip
        largest = _with_hbm(self.chip, self.capacities[-1])
        self.cluster, self.training = cluster.model_copy(update={"chip": largest}), training

    def baseline(self, key: str, title: str, found: Plan | None, note: str) -> Baseline:
        chip = self.cluster.chip
        if found is not None:
            least = found.memory_bytes + self.training.reserved_bytes
            chip = _with_hbm(
                self.chip, next((c for c in self.capacities if c >= least), self.capacities[-1])
            )
        score = math.inf if found is None else found.time_s
        spent = time.monotonic() - self.began
        return Baseline(
            key=key,
            title=f"{self.chip.name}, {title}",
            score=score,
            evaluations=1,
            seconds=spent,
            history=((1, spent, score),),
            note=note,
            plan=found,
            chip=chip,
        )


class _Uniform:
    """Plans in which all stages recompute alike, and, where asked, hold as many blocks."""

    def __init__(
        self, model: Model, cluster: Cluster, training: Training, modes: Sequence[str]
    ) -> None:
        self.model, self.cluster, self.training, self.modes = model, cluster, training, modes
        self.rejected: dict[str, int] = {}

    @property
    def why(self) -> str:
        """Say why there is no plan, where there is none."""
        if self.rejected:
            return "; ".join(self.rejected)
        most = format_bytes(room(self.cluster, self.training))
        return f"does not fit into {most} of a device with ZeRO 0 or 1 and any micro-batch given"

    def _of_mode(self, mode: str, even: bool, zero: int) -> Plan | None:
        """Find the best plan of one way to recompute and one ZeRO stage."""
        capacity = room(self.cluster, self.training) + float(self.training.reserved_bytes)
        own = self.training.model_copy(update={"recompute": (mode,), "zero": (zero,)})
        evaluator = PlanEvaluator(self.model, self.cluster, own, [capacity])
        if not len(evaluator):
            self.rejected = dict(evaluator.rejected)
            return None
        if not evaluator.fits.any():
            return None
        times = evaluator.times(self.cluster)
        best = evaluator.best_even(times, 0) if even else evaluator.top(times, 1)[:1]
        return evaluator.plan(best[0], times) if best else None

    def plans(self, even: bool, zeros: Sequence[int]) -> list[Plan]:
        """List the best plan of each way to recompute and ZeRO stage, where it fits."""
        made = [self._of_mode(mode, even, zero) for mode in self.modes for zero in zeros]
        return [plan for plan in made if plan is not None]


def _fastest(plans: Iterable[Plan]) -> Plan | None:
    return min(plans, key=lambda p: (p.time_s, p.memory_bytes, p.tp, p.pp, p.dp), default=None)


def _replicas(wanted: int, stage_devices: int, cluster: Cluster, training: Training) -> int:
    """Give the next smaller count of replicas that the batch and the devices allow; 0: none."""
    most, batch = min(wanted, cluster.devices // stage_devices), training.global_batch
    fitting = (
        d for d in range(most, 0, -1) if any(batch % (b * d) == 0 for b in training.micro_batch)
    )
    return next(fitting, 0)


def hand_plan(
    model: Model,
    cluster: Cluster,
    training: Training,
    capacities: Sequence[int],
    chip: Accelerator | None = None,
) -> Baseline:
    """Give the published fixed plan of a model, as fast as micro-batch and recomputation make it.

    Stages, replicas and width are those of `HAND_PLANS`; cuts are the best (the public code's are
    not), the schedule is 1F1B, all stages recompute everything or nothing, and there is no ZeRO
    unless nothing fits without. The note says where the plan had to give way.

    Parameters
    ----------
    model
        One that `HAND_PLANS` names.
    cluster
        Devices and fabric.
    training
        Batch, micro-batches, optimiser, reserved memory; what the plan fixes is not looked at.
    capacities
        Bytes of HBM to choose from.
    chip
        By default the TPUv4-like chip of the PHAZE paper.

    Returns
    -------
    Baseline
        Its score is infinite where nothing fits; the note then says why.

    Examples
    --------
    >>> from phaze_fast import models
    >>> pod = Cluster(devices=64, fabric="tpuv4-pod")
    >>> step = Training(global_batch=256, micro_batch=1)
    >>> found = hand_plan(models.load("bertlarge"), pod, step, [32 * 2**30])
    >>> found.plan.pp, found.plan.dp, found.plan.tp
    (8, 8, 1)
    >>> found.note
    '8 replicas instead of 128: 64 devices and a batch of 256 allow no more'
    """
    key, title = "hand_plan", "published hand plan"
    bench = _Bench(cluster, training, capacities, chip)
    if model.name not in HAND_PLANS:
        return bench.baseline(key, title, None, f"no hand plan is published for {model.name}")
    p, wanted, t = HAND_PLANS[model.name]
    d = _replicas(wanted, p * t, cluster, training)
    if p * t > cluster.devices:
        note = f"{p} stages of width {t} are more than {cluster.devices} devices"
        return bench.baseline(key, title, None, note)
    notes = []
    if 0 < d < wanted:
        notes.append(
            f"{d} replicas instead of {wanted}: {cluster.devices} devices and a batch of "
            f"{training.global_batch} allow no more"
        )
    fixed = {
        "pp": (p,),
        "dp": (max(d, 1),),
        "tp": (t,),
    }
    own = training.model_copy(update={**fixed, "schedule": ("1f1b",)})
    uniform = _Uniform(model, bench.cluster, own, ("none", "full"))
    best = _fastest(uniform.plans(False, (0,)))
    if best is None:
        best = _fastest(uniform.plans(False, (1,)))
        notes.append("without ZeRO it does not fit; with stage 1" if best else uniform.why)
    return bench.baseline(key, title, best, "; ".join(notes))


def megatron_plan(
    model: Model,
    cluster: Cluster,
    training: Training,
    capacities: Sequence[int],
    chip: Accelerator | None = None,
) -> Baseline:
    """Give the best plan of Megatron-LM's kind.

    Every stage has as many blocks as any other (the first has the embedding as well, the last the
    head), tensor-parallel widths are 1, 2, 4 and 8, all stages recompute alike (nothing, attention
    or everything), optimiser state is whole or shared (ZeRO 0 or 1), and the schedule is 1F1B or
    interleaved. Each such plan is evaluated exactly. Parameters and result are as in `hand_plan`.

    References
    ----------
    Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM, SC 2021; Korthikanti et al., Reducing Activation Recomputation in Large Transformer
    Models, MLSys 2023.

    Examples
    --------
    >>> from phaze_fast import models
    >>> pod = Cluster(devices=16, fabric="tpuv4-pod")
    >>> step = Training(global_batch=32, micro_batch=1)
    >>> found = megatron_plan(models.load("bertlarge"), pod, step, [32 * 2**30])
    >>> 24 % found.plan.pp, found.plan.recompute
    (0, 'none')
    """
    bench = _Bench(cluster, training, capacities, chip)
    blocks = model.blocks
    free = {
        "pp": tuple(p for p in range(1, blocks + 1) if blocks % p == 0),
        "tp": _MEGATRON_WIDTHS,
        "schedule": ("1f1b", "interleaved"),
    }
    own = training.model_copy(update=free)
    uniform = _Uniform(model, bench.cluster, own, ("none", "selective", "full"))
    found = _fastest(uniform.plans(True, (0, 1)))
    return bench.baseline(
        "megatron_plan", "best Megatron-style plan", found, "" if found else uniform.why
    )


def our_plan(
    model: Model,
    cluster: Cluster,
    training: Training,
    capacities: Sequence[int],
    chip: Accelerator | None = None,
) -> Baseline:
    """Give the best plan of all that `training` leaves free. Parameters as in `hand_plan`.

    Examples
    --------
    >>> from phaze_fast import models
    >>> pod = Cluster(devices=16, fabric="tpuv4-pod")
    >>> step = Training(global_batch=32, micro_batch=1)
    >>> asked = (models.load("bertlarge"), pod, step, [32 * 2**30])
    >>> our_plan(*asked).score <= megatron_plan(*asked).score
    True
    """
    bench = _Bench(cluster, training, capacities, chip)
    found = plan(model, bench.cluster, training, top=1)
    best = found.plans[0] if found.plans else None
    return bench.baseline("our_plan", "our plan", best, found.shortfall)


def given_chip(
    problems: Sequence[SearchProblem], weights: Sequence[float], chip: Accelerator
) -> Baseline:
    """Give the best plans on a chip of the user's own, with the HBM that it has.

    Parameters
    ----------
    problems
        A model on the devices and the fabric that were searched, or several.
    weights
        Of several models in the geometric mean of their times.
    chip
        Any chip with HBM; it need not be one of the space.

    Returns
    -------
    Baseline
        Its score is infinite where some model fits no plan; the note then says why.
    """
    if chip.hbm is None:
        raise InvalidInputError(f"baselines: {chip.name} has no HBM to place layers in")
    began, plans, notes = time.monotonic(), [], []
    for problem in problems:
        cluster = problem.cluster.replace(chip=chip)
        found = plan(problem.model, cluster, problem.training, top=1)
        if not found.plans:
            notes.append(f"{problem.model.name}: {found.shortfall}")
            continue
        plans.append(found.best)
        if len(problems) > 1:
            notes.append(f"{problem.model.name}: {found.best}")
    whole = len(plans) == len(problems)
    score = geometric_mean([p.time_s for p in plans], tuple(weights)) if whole else math.inf
    spent = time.monotonic() - began
    return Baseline(
        key=f"chip {chip.name}",
        title=f"{chip.name}, the best plan on it",
        score=score,
        evaluations=1,
        seconds=spent,
        history=((1, spent, score),),
        note="; ".join(notes),
        plan=plans[0] if len(problems) == 1 and whole else None,
        chip=chip,
    )
