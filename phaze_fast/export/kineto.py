"""Profiles of PyTorch (Kineto traces) beside a plan: where measured and predicted time differ.

A kernel belongs to the first family whose words its name holds. The predicted seconds of a family
are those of its operators on one device of the profiled stage, over all micro-batches of a step.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phaze_fast.documents import parse_json, read_text
from phaze_fast.errors import InvalidInputError, brief
from phaze_fast.export.ranks import Ranks
from phaze_fast.hardware import Cluster
from phaze_fast.models import Model
from phaze_fast.opgraph import KINDS
from phaze_fast.planning import Plan, PlanSpec
from phaze_fast.planning.prediction import evaluated
from phaze_fast.planning.times import priced
from phaze_fast.planning.training import block_mode, recompute_code

__all__ = ["FAMILIES", "Comparison", "FamilyTime", "Profile", "compare_profile", "read_profile"]

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
"""Words in the names of kernels, by family; the first that matches counts."""
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
    """What a profile says of one device."""

    steps: int
    """Steps that it covers."""
    step_s: float
    """Seconds of a step: from the first kernel to the last, over the steps, or as marked."""
    busy_s: float
    """Seconds of a step in which some kernel runs."""
    seconds: Mapping[str, float]
    """Of a step by family of kernels; kernels that run together count each."""
    kernels: Mapping[str, int]
    """How many kernels of each family a step has."""
    rank: int | None
    """Of the device in its run, where the profile says it."""


@dataclass(frozen=True)
class FamilyTime:
    """Measured and predicted seconds of a family of kernels in one step of one device."""

    family: str
    measured_s: float
    predicted_s: float
    kernels: int

    @property
    def difference_s(self) -> float:
        """Measured less predicted."""
        return self.measured_s - self.predicted_s


@dataclass(frozen=True)
class Comparison:
    """A profile beside a plan."""

    stage: int
    """Of the plan that the profiled device has."""
    measured_step_s: float
    predicted_step_s: float
    measured_idle_s: float
    """Seconds of a step in which no kernel runs."""
    predicted_idle_s: float
    """Fill, drain, waiting for slower stages."""
    families: tuple[FamilyTime, ...]
    """Largest difference first."""

    def to_dict(self) -> dict[str, Any]:
        """Give it as plain data."""
        return asdict(self)


def _family(name: str) -> str:
    word = name.lower()
    return next((family for family, words in FAMILIES.items() if re.search(words, word)), OTHER)


def _timed(event: dict[str, Any], where: str) -> dict[str, Any]:
    """Give an event whose start and length are numbers."""
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
        JSON, perhaps compressed by gzip.
    steps
        How many steps it covers; by default those that the profiler marked, or one.

    Raises
    ------
    InvalidInputError
        Where it is no such trace, or holds no kernel.
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
    number: dict[str, int] = {}
    for event in kernels:
        family = _family(str(event.get("name", "")))
        seconds[family] = seconds.get(family, 0.0) + 1e-6 * float(event["dur"]) / count
        number[family] = number.get(family, 0) + 1
    whole = max(end for _, end in spans) - spans[0][0]
    if marked and steps is None:
        own = {e["name"]: float(e["dur"]) for e in marks}
        whole = sum(own.values())
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
    """Length of what intervals, sorted by start, cover together."""
    total, until = 0.0, float("-inf")
    for start, end in spans:
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def _predicted(evaluator: Any, plan: Plan, cluster: Cluster, stage: int) -> dict[str, float]:
    """Seconds of a step by family on a device of a stage."""
    sizes = evaluator.sizes[0]
    ((_, costs, _),) = priced([sizes], cluster, {}, threads=1)
    own, found = plan.stages[stage], dict.fromkeys([*FAMILIES, OTHER], 0.0)
    code, number, at = recompute_code(own.recompute, sizes.variant_of), 0, 0
    borders = set()
    for count in own.chunks:
        borders.add(at)
        at += count

    def add(graph: Any, seconds: Any, names: frozenset[str] | None = None) -> None:
        for i, name in enumerate(graph.names):
            if names is None or name in names:
                kind = KINDS[int(graph.ops["kind"][i])]
                product = "gemm" in kind
                family = "matrix products" if product else _OF_KIND.get(kind, "element-wise")
                found[family] += float(seconds[i])

    for k, position in enumerate(own.layers):
        number = 0 if k in borders else number
        kind = sizes.graph.order[position]
        layer = sizes.graph.layers[kind]
        add(layer.forward, costs.time_s(2 * kind)[0])
        add(layer.backward, costs.time_s(2 * kind + 1)[0])
        if layer.kind not in ("embedding", "head"):
            number += 1
            again = layer.forward.recomputed(block_mode(code, number, sizes.variants))
            add(layer.forward, costs.time_s(2 * kind)[0], again)
    found = {family: plan.micro_batches * seconds for family, seconds in found.items()}
    found["optimizer"] += plan.parts_s["optimizer"]
    found["collectives"] += plan.parts_s["data_comm"] + plan.parts_s["pipeline_comm"]
    return found


def compare_profile(
    model: Model | str,
    cluster: Cluster,
    plan: Plan | PlanSpec | Mapping[str, Any],
    profile: Profile,
    stage: int | None = None,
) -> Comparison:
    """Line a profile up with a plan.

    Parameters
    ----------
    model, cluster, plan
        As for `phaze_fast.predict`.
    profile
        Of one device of a run of that plan.
    stage
        Which stage the device has; by default that of its rank, or 0.

    Raises
    ------
    InvalidInputError
        Where there is no such stage.
    """
    evaluator, times, placed = evaluated(model, cluster, plan)
    found = evaluator.plan(placed, times)
    if stage is None:
        rank = profile.rank if profile.rank is not None and profile.rank < found.devices else 0
        stage = Ranks(found).place(rank).stage
    if not 0 <= stage < found.pp:
        raise InvalidInputError(f"stage: {stage} is not accepted; expected 0 to {found.pp - 1}")
    predicted = _predicted(evaluator, found, cluster, stage)
    families = [
        FamilyTime(
            family,
            profile.seconds.get(family, 0.0),
            predicted.get(family, 0.0),
            profile.kernels.get(family, 0),
        )
        for family in (*FAMILIES, OTHER)
        if profile.seconds.get(family) or predicted.get(family)
    ]
    families.sort(key=lambda each: -abs(each.difference_s))
    waits = found.parts_s["bubble"] + found.parts_s["imbalance"]
    return Comparison(
        stage=stage,
        measured_step_s=profile.step_s,
        predicted_step_s=found.time_s,
        measured_idle_s=max(0.0, profile.step_s - profile.busy_s),
        predicted_idle_s=waits,
        families=tuple(families),
    )
