"""Profiles of PyTorch (Kineto traces) against a plan: where measured and predicted time differ.

A kernel belongs to the first family whose pattern its name matches. The predicted seconds of a
family are those of its operators on one device of the profiled stage, in all micro-batches.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phaze_fast.documents import parse_json, read_text
from phaze_fast.errors import InvalidInputError, brief
from phaze_fast.export.ranks import Ranks, stage_layers
from phaze_fast.hardware import Cluster
from phaze_fast.models import Model
from phaze_fast.opgraph import KINDS, OpGraph
from phaze_fast.planning import Plan, PlanSpec
from phaze_fast.planning.prediction import evaluated
from phaze_fast.planning.sizes import StrategySizes
from phaze_fast.planning.times import priced

FAMILIES: Mapping[str, str] = {
    "collectives": r"nccl|rccl|allreduce|all_gather|reduce_scatter|sendrecv",
    "attention": r"flash|fmha|attention|sdpa",
    "optimizer": r"adam|multi_tensor|foreach|sgd|lamb",
    "matrix products": r"gemm|cutlass|nvjet|xmma|cublas|splitk|matmul|_mm_|wgmma",
    "norms": r"norm|rms",
    "softmax and loss": r"softmax|cross_entropy|nll|logsumexp",
    "embedding": r"embedding|index_select|gather_kernel|indexing",
    "copies": r"memcpy|memset|copy_kernel|direct_copy|cat_array",
    "element-wise": r"elementwise|vectorized|triton|reduce_kernel|gelu|silu|dropout|rotary|rope",
}
"""Patterns of kernel names by family; a kernel belongs to the first family that matches."""
OTHER = "other"

_OF_KIND = {
    "collective": "collectives",
    "attention": "attention",
    "attention-backward": "attention",
    "norm": "norms",
    "norm-backward": "norms",
    "embedding": "embedding",
    "embedding-backward": "embedding",
    "cross-entropy": "softmax and loss",
    "cross-entropy-backward": "softmax and loss",
    "softmax": "softmax and loss",
    "softmax-backward": "softmax and loss",
}
_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")

_LONGEST_US = 1e18


@dataclass(frozen=True)
class Profile:
    """Times of one device in a profile."""

    steps: int
    """Number of steps in the profile."""
    step_s: float
    """Mean seconds of a step, as the profiler marked it, or first to last kernel over `steps`."""
    busy_s: float
    """Seconds of a step in which some kernel runs."""
    seconds: Mapping[str, float]
    """Seconds of a step by family of kernels; those of kernels that run together are added up."""
    kernels: Mapping[str, int]
    """Number of kernels of each family in a step."""
    rank: int | None
    """Rank of the device; None where the profile does not give it."""


@dataclass(frozen=True)
class FamilyTime:
    """Measured and predicted seconds of a family of kernels in one step of one device."""

    family: str
    measured_s: float
    predicted_s: float
    kernels: int

    @property
    def difference_s(self) -> float:
        """Measured less predicted seconds."""
        return self.measured_s - self.predicted_s


@dataclass(frozen=True)
class Comparison:
    """A profile compared with a plan."""

    stage: int
    """Stage of the plan that the profiled device runs."""
    measured_step_s: float
    predicted_step_s: float
    measured_idle_s: float
    """Seconds of a step in which no kernel runs."""
    predicted_idle_s: float
    """Predicted seconds of fill and drain of the pipeline and of waiting for slower stages."""
    families: tuple[FamilyTime, ...]
    """Times by family of kernels, the family with the largest difference first."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


def _family(name: str) -> str:
    word = name.lower()
    return next((family for family, words in FAMILIES.items() if re.search(words, word)), OTHER)


def _timed(event: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a trace event after checking that its start and duration are numbers."""
    for key in ("ts", "dur"):
        value = event.get(key)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not -_LONGEST_US <= value <= _LONGEST_US:  # type: ignore[operator]
            raise InvalidInputError(
                f"{where}.{key}: {brief(value)} is not accepted; expected a number of microseconds"
            )
    return event


def read_profile(path: str | Path, steps: int | None = None) -> Profile:
    """Read a trace of PyTorch's profiler, as ``export_chrome_trace`` writes it.

    Parameters
    ----------
    path
        The trace: JSON, optionally compressed by gzip.
    steps
        Number of steps; by default those that the profiler marked, or one.

    Raises
    ------
    InvalidInputError
        Where the file is not a trace of this kind, or has no GPU kernel.
    """
    data = _trace(path)
    events = [
        _timed(event, f"{path}: traceEvents.{at}")
        for at, event in enumerate(data["traceEvents"])
        if isinstance(event, dict) and event.get("ph") == "X" and "dur" in event
    ]
    marks = [e for e in events if str(e.get("name", "")).startswith("ProfilerStep#")]
    kernels = [e for e in events if str(e.get("cat", "")).lower() in _KERNELS]
    if not kernels:
        raise InvalidInputError(f"{path}: holds no kernel of a GPU")
    marked = len({e["name"] for e in marks})
    count = steps or marked or 1
    spans = sorted((float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in kernels)
    seconds: dict[str, float] = {}
    number: Counter[str] = Counter()
    for event in kernels:
        family = _family(str(event.get("name", "")))
        seconds[family] = seconds.get(family, 0.0) + 1e-6 * float(event["dur"]) / count
        number[family] += 1
    whole = max(end for _, end in spans) - spans[0][0]
    if marked and steps is None:
        whole = sum({e["name"]: float(e["dur"]) for e in marks}.values())
    info = data.get("distributedInfo")
    rank = info.get("rank") if isinstance(info, dict) else None
    return Profile(
        steps=count,
        step_s=1e-6 * whole / count,
        busy_s=1e-6 * _union(spans) / count,
        seconds=seconds,
        kernels={family: round(n / count) for family, n in number.items()},
        rank=rank if isinstance(rank, int) else None,
    )


def _trace(path: str | Path) -> Mapping[str, Any]:
    text = read_text(path, compressed=str(path).endswith(".gz"))
    try:
        data = parse_json(text)
    except InvalidInputError as error:
        raise InvalidInputError(f"{path}: {error}") from None
    if isinstance(data, list):
        data = {"traceEvents": data}
    if not isinstance(data, dict) or not isinstance(data.get("traceEvents"), list):
        raise InvalidInputError(f"{path}: traceEvents: missing; expected a trace of a profiler")
    return data


def _union(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals, sorted by start."""
    total, until = 0.0, float("-inf")
    for start, end in spans:
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def _predicted(sizes: StrategySizes, plan: Plan, cluster: Cluster, stage: int) -> dict[str, float]:
    """Return the predicted seconds of a step by family of kernels on a device of a stage."""
    ((_, layers),) = priced([sizes], cluster)
    costs = layers.only([sizes]).costs
    seconds_of = dict.fromkeys([*FAMILIES, OTHER], 0.0)

    def add(graph: OpGraph, seconds: Any, names: Container[str]) -> None:
        for i, name in enumerate(graph.names):
            if name in names:
                kind = KINDS[int(graph.ops["kind"][i])]
                product = "gemm" in kind
                family = "matrix products" if product else _OF_KIND.get(kind, "element-wise")
                seconds_of[family] += float(seconds[i])

    for chunk in stage_layers(plan, sizes, stage):
        for kind, mode in chunk:
            layer = sizes.graph.layers[kind]
            forward_s, backward_s = costs.time_s(2 * kind)[0], costs.time_s(2 * kind + 1)[0]
            add(layer.forward, forward_s, layer.forward.names)
            add(layer.backward, backward_s, layer.backward.names)
            add(layer.forward, forward_s, layer.forward.recomputed(mode))
    seconds_of = {family: plan.micro_batches * s for family, s in seconds_of.items()}
    seconds_of["optimizer"] += plan.parts_s["optimizer"]
    seconds_of["collectives"] += plan.parts_s["data_comm"] + plan.parts_s["pipeline_comm"]
    return seconds_of


def compare_profile(
    model: Model | str,
    cluster: Cluster,
    plan: Plan | PlanSpec | Mapping[str, Any],
    profile: Profile,
    stage: int | None = None,
) -> Comparison:
    """Compare a profile with a plan.

    Parameters
    ----------
    model, cluster, plan
        As for `phaze_fast.predict`.
    profile
        Profile of one device of a run of that plan.
    stage
        Stage of the device; by default that of the profile's rank, or of rank 0.

    Raises
    ------
    InvalidInputError
        Where there is no such stage.
    """
    evaluator, times, placed = evaluated(model, cluster, plan)
    timed = evaluator.plan(placed, times)
    if stage is None:
        rank = profile.rank if profile.rank is not None and profile.rank < timed.devices else 0
        stage = Ranks(timed).place(rank).stage
    if not 0 <= stage < timed.pp:
        raise InvalidInputError(f"stage: {stage} is not accepted; expected 0 to {timed.pp - 1}")
    predicted = _predicted(evaluator.sizes[0], timed, cluster, stage)
    families = [
        FamilyTime(
            family,
            profile.seconds.get(family, 0.0),
            predicted[family],
            profile.kernels.get(family, 0),
        )
        for family in (*FAMILIES, OTHER)
        if profile.seconds.get(family) or predicted[family]
    ]
    families.sort(key=lambda family: -abs(family.difference_s))
    return Comparison(
        stage=stage,
        measured_step_s=profile.step_s,
        predicted_step_s=timed.time_s,
        measured_idle_s=max(0.0, profile.step_s - profile.busy_s),
        predicted_idle_s=timed.parts_s["bubble"] + timed.parts_s["imbalance"],
        families=tuple(families),
    )
