"""The energy of a step of a plan, by what it is spent on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from phaze_fast.cost.machines import energy_table_for, machines
from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware import Cluster
from phaze_fast.models import Model
from phaze_fast.planning.plan_spec import PlanSpec
from phaze_fast.planning.plans import Plan
from phaze_fast.planning.prediction import evaluated
from phaze_fast.planning.times import LayerSet, operator_costs

_EVENTS = {
    "products": ("mac_j",),
    "control": ("core_cycle_j",),
    "vector": ("vector_op_j",),
    "sram": ("local_byte_j", "buffer_byte_j"),
    "die_to_die": ("die_byte_j",),
    "stacked": ("stacked_byte_j",),
    "hbm": ("hbm_byte_j",),
}
"""Tiers whose energy is that of events on the chip, and their constants in the energy table."""

_NO_EVENTS = dict.fromkeys((name for names in _EVENTS.values() for name in names), 0.0)


def energy_by_tier(model: Model | str, cluster: Cluster, plan: Plan | PlanSpec) -> dict[str, float]:
    """Divide the joules of a step among compute, memories, network, leakage and clock.

    The joules add up to `Plan.energy_j`. Where the chip's rated power limits it, all tiers are
    lowered by the same factor.

    Parameters
    ----------
    model, cluster
        What is trained, and on which devices.
    plan
        The plan, as for `predict`.

    Examples
    --------
    >>> import phaze_fast as pf
    >>> pod = pf.Cluster(devices=64, fabric="tpuv4-pod", chip="tpuv4")
    >>> best = pf.plan("bert-large", pod, pf.Training(global_batch=512, micro_batch=8)).best
    >>> tiers = energy_by_tier("bert-large", pod, best)
    >>> abs(sum(tiers.values()) / best.energy_j - 1.0) < 1e-9
    True
    """
    if cluster.chip is None:
        raise InvalidInputError("cluster: has no chip; expected one, such as h100")
    spec = PlanSpec.of(plan).replace(idle=True)
    evaluator, times, placed = evaluated(model, cluster, spec)
    sizes, chip = evaluator.sizes[placed.layout], cluster.chip
    table = energy_table_for(chip)
    row = times.at(slice(placed.layout, placed.layout + 1))
    none = replace(
        row,
        forward_j=np.zeros_like(row.forward_j),
        backward_j=np.zeros_like(row.backward_j),
        static_w=np.zeros(1),
        limit_w=np.full(1, np.inf),
    )
    moved_j = evaluator.with_prices(network_byte_j=0.0).energies_j([placed], none, [0])[0]
    besides_j = evaluator.energies_j([placed], none, [0])[0]
    tiers = {}
    for tier, names in _EVENTS.items():
        kept = {name: getattr(table, name) for name in names}
        costs = operator_costs([sizes], chip, cluster, 1, energy=table.replace(**_NO_EVENTS | kept))
        layers = LayerSet([sizes], costs, np.ones(1))
        passes = np.zeros((len(costs.graphs), 1))  # joules do not depend on their seconds
        parts = layers.timed(passes, passes == 0.0)
        spent = replace(none, forward_j=parts.forward_j, backward_j=parts.backward_j)
        tiers[tier] = float(evaluator.energies_j([placed], spent, [0])[0] - besides_j)
    tiers["hbm"] += float(moved_j)
    tiers["network"] = float(besides_j - moved_j)
    idle = machines(chip).idle_w
    device_s = evaluator.plan(placed, times).time_s * spec.devices
    tiers |= {name: float(watts[0]) * device_s for name, watts in idle.items()}
    share = min(1.0, float(row.limit_w[0]) * device_s / sum(tiers.values()))
    return {tier: joules * share for tier, joules in tiers.items()}
