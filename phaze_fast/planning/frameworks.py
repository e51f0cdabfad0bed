"""What each training framework can express of a plan, for written files and for `plan`.

``data/frameworks.yaml`` lists the values of single fields; the rules that join several fields are
here, once: for one plan, and for arrays of layouts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np

from phaze_fast.documents import package_data
from phaze_fast.errors import InvalidInputError, check_one_of, not_accepted
from phaze_fast.memory import SCHEDULES
from phaze_fast.models import Model, TransformerModel
from phaze_fast.opgraph import Strategy, canonical_recompute, recompute_order
from phaze_fast.planning.training import RANK_ORDERS, RECOMPUTE, Training
from phaze_fast.software import DEFAULT, load_software
from phaze_fast.tables import Array

FRAMEWORKS = ("megatron", "bridge", "deepspeed", "torchtitan", "maxtext")
"""Training frameworks that plans are written for."""


class _Layouts:
    """Layouts of one strategy: its widths, and columns of ``_core.LAYOUT_DTYPE``."""

    def __init__(self, strategy: Strategy, rows: Array) -> None:
        self.strategy = strategy
        self.pp, self.dp, self.vpp, self.zero, self.schedule, self.micro_batches, order = (
            rows[name].astype(np.int64)
            for name in ("pp", "dp", "vpp", "zero", "schedule", "micro_batches", "rank_order")
        )
        self._stages_first = order == RANK_ORDERS.index("stages-inside")
        self.sharing = np.where(rows["shard"] > 0, rows["shard"], self.dp)
        """Replicas that shard state among themselves."""
        self.hybrid = (rows["shard"] > 0) & (rows["shard"] < self.dp)
        """Whether state is sharded inside groups of replicas and copied between groups."""

    @property
    def stages_inside(self) -> Array:
        """Whether the ranks of a pipeline are adjacent and those of its replicas are not."""
        inside: Array = self._stages_first & (self.dp > 1) & (self.pp > 1)
        return inside

    @property
    def replicated(self) -> Array:
        """Whether several devices have the same weights, or the same experts."""
        replicas = self.dp * self.strategy.cp
        copies = self.strategy.tp * replicas // self.strategy.expert_devices
        several: Array = (replicas > 1) | (copies > 1)
        return several

    @property
    def chunks_alone(self) -> Array:
        """Whether there is only one stage, with several chunks."""
        alone: Array = (self.vpp > 1) & (self.pp == 1)
        return alone


@cache
def framework_table(name: str) -> Mapping[str, Any]:
    """Look up the values of single fields that a framework can express.

    Examples
    --------
    >>> framework_table("torchtitan")["recompute"]["always"]
    ['none', 'full']
    """
    check_one_of("framework", name, FRAMEWORKS)
    table: Mapping[str, Any] = package_data(__package__, "frameworks.yaml")[name]
    return table


# ---- rules that join fields: names of cases, and where each applies ----


def _megatron(at: _Layouts) -> dict[str, Any]:
    known = np.isin(at.schedule, _codes("megatron")) | (at.pp * at.vpp == 1)
    return {
        "schedule": ~known,
        "chunks": ~known & (at.vpp > 1),
        "rounds": known & (at.vpp > 1) & (at.micro_batches % at.pp > 0),
        "rank_order": at.stages_inside & (at.zero >= 2),
        "offload": at.strategy.offload_optimizer & (at.zero != 1) & at.replicated,
    }


def _torchtitan(at: _Layouts) -> dict[str, Any]:
    tp, cp, alone = at.strategy.tp, at.strategy.cp, at.strategy.tp * at.pp * at.strategy.cp == 1
    return {
        "zero_1": (at.zero == 1) & (at.dp * cp > 1),
        "zero_0": (at.zero == 0) & (at.dp > 1) & ~alone,
        "zero_0_cp": (at.zero == 0) & (at.dp == 1) & (cp > 1),
        "cp_kind": cp > 1 and at.strategy.cp_kind not in framework_table("torchtitan")["cp_kinds"],
        "etp": at.strategy.etp not in ((None, 1, tp) if at.strategy.ep > 1 else (None, tp)),
        "dispatcher": at.strategy.dispatcher != "all-to-all",
        "schedule": ~np.isin(at.schedule, _codes("torchtitan")) & (at.pp > 1),
        "vpp": at.chunks_alone,
        "sequence_parallel": tp > 1 and not at.strategy.sequence_parallel,
        "offload": at.strategy.offload_optimizer,
        "rank_order": at.stages_inside,
    }


def _maxtext(at: _Layouts) -> dict[str, Any]:
    strategy, piped = at.strategy, at.pp > 1
    return {
        "schedule": piped & (at.schedule != SCHEDULES.index("gpipe")),
        "stages": piped,
        "vpp": at.chunks_alone,
        "cp_kind": strategy.cp > 1 and strategy.cp_kind != "all-gather",
        "etp": strategy.etp not in (None, strategy.tp),
        "ep": at.sharing % strategy.ep != 0,
        "shard": at.hybrid & ((at.zero == 1) | (at.sharing == 1)),
        "zero_2": at.zero == 2,
        "offload": strategy.offload_optimizer,
        "rank_order": at.stages_inside,
        "zero": (strategy.cp * strategy.ep > 1) & (at.zero < 2),
    }


def _deepspeed(at: _Layouts) -> dict[str, Any]:
    strategy = at.strategy
    return {
        "pp": at.pp > 1,
        "vpp": at.chunks_alone,
        "cp": strategy.cp > 1,
        "ep": strategy.ep > 1,
        "etp": strategy.etp not in (None, strategy.tp),
        "sequence_parallel": strategy.tp > 1 and strategy.sequence_parallel,
        "rank_order": at.stages_inside,
        "shard": at.hybrid & (at.zero < 3),
        "offload": strategy.offload_optimizer & (at.zero == 0),
    }


_RULES: Mapping[str, Callable[[_Layouts], dict[str, Any]]] = {
    "megatron": _megatron,
    "bridge": _megatron,
    "torchtitan": _torchtitan,
    "maxtext": _maxtext,
    "deepspeed": _deepspeed,
}


def _codes(name: str) -> list[int]:
    return [SCHEDULES.index(schedule) for schedule in framework_table(name)["schedules"]]


def inexpressible(name: str, strategy: Strategy, rows: Array) -> dict[str, Array]:
    """Name the cases in which a framework cannot express layouts, and mark where each applies.

    Parameters
    ----------
    name
        A name of `FRAMEWORKS`.
    strategy
        The widths of the layouts.
    rows
        The layouts, dtype ``_core.LAYOUT_DTYPE``.
    """
    cases = _RULES[name](_Layouts(strategy, rows))
    return {case: np.broadcast_to(applies, len(rows)) for case, applies in cases.items()}


# ---- the space of a search ----


def recompute_modes(name: str, model: Model) -> tuple[str, ...]:
    """List what all blocks may recompute in a framework, least first.

    Examples
    --------
    >>> from phaze_fast import models
    >>> recompute_modes("megatron", models.load("llama2-7b"))
    ('none', 'norms', 'attention', 'norms+attention', 'full')
    """
    modes = framework_table(name)["recompute"]
    listed = list(modes["always"])
    if isinstance(model, TransformerModel):
        listed += modes.get(model.attention, [])
        if model.moe is not None and model.moe_layers == model.layers and model.gated:
            listed += modes.get("experts", [])
    return tuple(sorted({canonical_recompute(mode) for mode in listed}, key=recompute_order))


def framework_precisions(name: str, model: Model) -> tuple[str, ...]:
    """List the number formats of a model's products that a framework can express, by name.

    Examples
    --------
    >>> from phaze_fast import models
    >>> framework_precisions("torchtitan", models.load("llama2-7b"))
    ('bf16', 'fp8-rowwise', 'fp8-tensorwise')
    """
    table = framework_table(name)
    dense = not isinstance(model, TransformerModel) or model.moe is None
    return (*table["precisions"], *(table.get("dense_precisions", ()) if dense else ()))


def framework_training(name: str, model: Model, training: Training) -> Training:
    """Restrict a step to the values of single fields that a framework can express.

    Raises
    ------
    InvalidInputError
        Where a field is fixed to what the framework cannot express.
    """
    table, given = framework_table(name), training.model_fields_set
    plain: dict[str, Any] = {"software": load_software(DEFAULT), "expert_overlap": 0.0}
    plain |= {"expert_imbalance": None, "overlap_experts": None}
    if name == "deepspeed" and training.seq != getattr(model, "seq", None):
        plain["seq"] = None
    for field, value in plain.items():
        if getattr(training, field) != value:
            shown = getattr(getattr(training, field), "name", getattr(training, field))
            raise not_accepted(field, shown, f"the default: files of {name} do not give it")
    for field, word, accepted in (
        ("optimizer", training.optimizer_name, table["optimizers"]),
        ("precision", training.precision.name, framework_precisions(name, model)),
    ):
        if word not in accepted:
            raise not_accepted(field, word, f"one of {', '.join(accepted)} for {name}")
    modes, offloading = recompute_modes(name, model), table["recompute"].get("offload", ())
    if "activations" in training.offload:
        if not offloading:
            why = f"optimizer: {name} offloads no blocks of all stages alike"
            raise not_accepted("offload", "activations", why)
        modes = (*modes, *offloading)
    known = {**table, "recompute": modes}
    if training.recompute != ("auto",):
        modes = tuple(mode for mode in training.recompute if mode in modes)
    zero = table["zero"] if "zero" not in given else set(training.zero) & set(table["zero"])
    schedules = [word for word in training.schedule if word in table["schedules"]]
    for field, values in (("recompute", modes), ("zero", zero), ("schedule", schedules)):
        if not values:
            given_text = ", ".join(map(str, getattr(training, field)))
            accepted = known["schedules" if field == "schedule" else field]
            raise InvalidInputError(
                f"{field}: {name} can express none of the values to try, {given_text}; expected "
                f"{', '.join(map(str, accepted))}"
            )
    shared = name in ("torchtitan", "deepspeed") and "sequence_parallel" not in given
    return training.replace(
        recompute=modes,
        recompute_some=False,
        zero=tuple(zero),
        schedule=tuple(schedules),
        sequence_parallel=name == "torchtitan" if shared else training.sequence_parallel,
    )


def free_training(training: Training, restricted: Training) -> Training:
    """Return a step that allows all that a restricted one does, and what a framework lacks."""
    modes = {*training.recompute_modes, *restricted.recompute}
    if training.recompute == ("auto",):
        modes |= set(RECOMPUTE)
    return training.replace(
        recompute=tuple(modes),
        zero=tuple({*training.zero, *restricted.zero}),
        sequence_parallel=restricted.sequence_parallel,
    )


def expressible(
    name: str, strategies: list[Strategy], layouts: Array, rejected: Counter[str]
) -> Array:
    """Mark the layouts that a framework can express; count the others by reason."""
    allowed: Array = np.ones(len(layouts), dtype=bool)
    for number, strategy in enumerate(strategies):
        rows = np.flatnonzero(layouts["strategy"] == number)
        for case, applies in inexpressible(name, strategy, layouts[rows]).items():
            rule = framework_table(name)["rules"][case]
            rejected[f"{name}: {rule}"] += int((applies & allowed[rows]).sum())
            allowed[rows] &= ~applies
    return allowed
