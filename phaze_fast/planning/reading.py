"""Plans in words and numbers: what the plan kernel gives, put into `Plan` and `Stage`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np

from phaze_fast import _core
from phaze_fast.memory import INSTANTS, SCHEDULES, TERMS
from phaze_fast.opgraph import OpGraph
from phaze_fast.planning.plans import PARTS, Plan, Stage
from phaze_fast.planning.recompute import block_mode, recompute_code, recompute_text
from phaze_fast.planning.sizes import StrategySizes
from phaze_fast.planning.throughput import step_throughput
from phaze_fast.planning.training import RANK_ORDERS, Training
from phaze_fast.records import FrozenDict

__all__ = ["read_plan", "read_stages"]

Array = np.ndarray[Any, Any]

_TENSOR_UNITS = (0, 2)  # operators on tensor cores, alone or with vector cores


def _flops(graph: OpGraph, names: frozenset[str]) -> float:
    """FLOPs of some matrix operators of a graph; attention counts in full."""
    counted = np.isin(graph.ops["unit"], _TENSOR_UNITS)
    counted &= np.array([name in names for name in graph.names], dtype=bool)
    return float(graph.ops["flops"][counted].sum())


@lru_cache(maxsize=512)
def _recomputed_flops(sizes: StrategySizes, mode: str) -> dict[str, float]:
    """FLOPs that one layer of each kind computes again, for a micro-batch on a device."""
    return {
        layer.kind: 0.0
        if layer.kind in ("embedding", "head")
        else _flops(layer.forward, layer.forward.recomputed(mode))
        for layer in sizes.graph.layers
    }


def _stage_flops(sizes: StrategySizes, stage: Stage) -> float:
    """FLOPs that a stage computes again, for a micro-batch on a device."""
    code = recompute_code(stage.recompute, sizes.variant_of)
    found, positions = 0.0, iter(stage.layers)
    for count in stage.chunks:
        number = 0
        for i in islice(positions, count):
            kind = sizes.graph.layers[sizes.graph.order[i]].kind
            if kind not in ("embedding", "head"):
                number += 1
                mode = block_mode(code, number, sizes.variants)
                found += _recomputed_flops(sizes, mode)[kind]
    return found


def read_stages(
    sizes: StrategySizes,
    layout: Any,
    cuts: Sequence[int],
    variants: Sequence[int],
    estimates: Array,
) -> tuple[Stage, ...]:
    """Put the stages of a plan into words and numbers, first to last."""
    count, graph = int(layout["pp"]), sizes.graph
    loads, memory = estimates["load_s"].tolist(), estimates["memory"].tolist()
    instants = estimates["instant"].tolist()
    each = int(layout["vpp"])
    places = _core.pipeline_chain(int(layout["schedule"]), count, each).tolist()
    stages = []
    for k in range(count):
        runs = [range(cuts[c], cuts[c + 1]) for c in places[k * each : (k + 1) * each]]
        layers = [i for run in runs for i in run]
        kinds: dict[str, int] = {}
        for i in layers:
            name = graph.layers[graph.order[i]].kind
            kinds[name] = kinds.get(name, 0) + 1
        stages.append(
            Stage(
                layers=tuple(layers),
                chunks=tuple(len(run) for run in runs),
                kinds=FrozenDict(kinds),
                recompute=recompute_text(variants[k], sizes.variants),
                load_s=loads[k],
                memory=FrozenDict(zip(TERMS, memory[k], strict=True)),
                instant=INSTANTS[instants[k]],
            )
        )
    return tuple(stages)


def read_plan(
    sizes: StrategySizes,
    layout: Any,
    what: tuple[Any, tuple[Stage, ...]],
    proven: bool,
    limit_bytes: float,
    training: Training,
    devices: int,
    peak_flops: float,
) -> Plan:
    """Put a plan into words and numbers.

    Parameters
    ----------
    sizes, layout
        Its strategy and layout.
    what
        The kernel's estimate of it, and its stages.
    proven
        Whether the times of its layers are of proven schedules.
    limit_bytes
        Of a device for the model.
    training
        The step.
    devices
        All of the cluster, idle ones included.
    peak_flops
        FLOP/s of one device.
    """
    estimate, stages = what
    strategy, model = sizes.strategy, sizes.graph.model
    rounds, replicas = int(layout["micro_batches"]), int(layout["dp"])
    twice = SCHEDULES[int(layout["schedule"])] == "dualpipe"  # half of the micro-batches each way
    again = sum(_stage_flops(sizes, stage) for stage in stages) / (1 + twice)
    time_s = float(estimate["time_s"])
    sequences = replicas * rounds * strategy.micro_batch
    speed = step_throughput(
        model,
        sequences,
        time_s,
        devices,
        peak_flops,
        training.seq,
        recomputed_flops=again * sizes.inner * replicas * rounds,
    )
    return Plan(
        tp=strategy.tp,
        pp=int(layout["pp"]),
        dp=replicas,
        cp=strategy.cp,
        cp_kind=strategy.cp_kind,
        ep=strategy.ep,
        etp=strategy.etp,
        expert_imbalance=strategy.expert_imbalance,
        expert_overlap=strategy.expert_overlap,
        zero=int(layout["zero"]),
        shard=int(layout["shard"]) or replicas,
        micro_batch=strategy.micro_batch,
        micro_batches=rounds,
        schedule=SCHEDULES[int(layout["schedule"])],
        vpp=int(layout["vpp"]),
        rank_order=RANK_ORDERS[int(layout["rank_order"])],
        sequence_parallel=training.sequence_parallel,
        seq=training.seq or model.seq,
        optimizer=training.optimizer,
        precision=training.precision.name,
        software=training.software.name,
        reserved_bytes=float(training.reserved_bytes),
        layers_proven=proven,
        time_s=time_s,
        interval_s=(time_s, time_s),
        parts_s=FrozenDict({name: float(estimate["parts"][f"{name}_s"]) for name in PARTS}),
        memory_bytes=float(estimate["memory_bytes"]),
        limit_bytes=limit_bytes,
        energy_j=float(estimate["energy_j"]),
        samples_per_s=sequences / time_s,
        tokens_per_s=speed.tokens_per_s,
        tokens_per_s_per_device=speed.tokens_per_s_per_device,
        tflops_per_device=speed.tflops_per_device,
        mfu=speed.mfu,
        mfu_causal=speed.mfu_causal,
        hfu=speed.hfu,
        stages=stages,
    )
