"""Pages about plans: the fastest one with timeline and memory, a prediction, two plans compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phaze_fast.hardware import Cluster
from phaze_fast.models import Model
from phaze_fast.planning import NOMINAL, Plan, Timeline, timeline
from phaze_fast.report.drawings import memory_lanes, timeline_lanes
from phaze_fast.report.explain import difference, explain_plan
from phaze_fast.report.render import render
from phaze_fast.report.text import plan_text

_MAX_RUNNERS_UP = 12
_ZOOM = 2.5
"""Steps with more micro-batches per chunk of the pipeline get a second timeline of their start."""
_INSTANTS = {
    "loss": "at the loss",
    "backward": "in a backward pass",
    "first layer backward": "in the first layer's backward pass",
    "step": "in the optimiser's step",
}
_NAMED_TERMS = ("weights", "gradients", "optimizer", "activations")


def _timelines(step: Timeline) -> list[dict[str, Any]]:
    """Draw the step; where its passes are too narrow to see, also draw its start enlarged."""
    plan = step.plan
    if plan.micro_batches <= _ZOOM * plan.pp * plan.vpp or plan.pp == 1:
        return [timeline_lanes(step)]
    until_s = plan.time_s * _ZOOM * plan.pp * plan.vpp / plan.micro_batches
    return [timeline_lanes(step), timeline_lanes(step, until_s)]


def _largest_loss(best: Plan, other: Plan) -> tuple[str, float]:
    """Find the part in which a plan loses most against the best, and the seconds it loses."""
    names = dict.fromkeys([*best.parts_s, *other.parts_s])
    losses = {n: other.parts_s.get(n, 0.0) - best.parts_s.get(n, 0.0) for n in names}
    return max(losses.items(), key=lambda item: item[1])


def plan_page(
    model: Model,
    cluster: Cluster,
    plans: Sequence[Plan],
    command: str = "",
    proven: bool = True,
) -> str:
    """Render plans as one page of HTML that works offline.

    Parameters
    ----------
    model, cluster
        The model to train and the cluster.
    plans
        Fastest first; the first in full, the others in a table. A single plan is a prediction.
    command
        The command that found them.
    proven
        Whether the first is proven to be the fastest.

    Returns
    -------
    str
        The page; a few hundred kilobytes.

    Examples
    --------
    >>> import phaze_fast as pf
    >>> cluster = pf.Cluster(devices=8, fabric="dgx-h100", chip="h100")
    >>> model = pf.models.load("llama2-7b")
    >>> spec = {"pp": 2, "dp": 4, "global_batch": 32, "recompute": "full"}
    >>> page = plan_page(model, cluster, [pf.predict(model, cluster, spec)])
    >>> "<h2>Timeline</h2>" in page
    True
    """
    best, several = plans[0], len(plans) > 1
    step = timeline(model, cluster, best)
    verdict = "Predicted" if best.over_bytes == 0 else "Predicted; it does not fit"
    if several:
        verdict = "The fastest plan, proven" if proven else "The fastest plan found"
    chip = cluster.chip.name if cluster.chip is not None else "chips"
    return render(
        "plan",
        f"{model.name} on {cluster.devices} x {chip}",
        "plan" if several else "prediction",
        plan=best,
        plan_text=plan_text(best.to_dict()),
        verdict=verdict,
        calibration=cluster.chip.calibration.note if cluster.chip is not None else "",
        confidence=NOMINAL,
        timelines=_timelines(step),
        busy_share=sum(step.busy_s(k) for k in range(best.pp)) / best.pp / best.time_s,
        memory=memory_lanes(step),
        instants=_INSTANTS,
        named_terms=_NAMED_TERMS,
        explanation=explain_plan(model, cluster, best),
        runners_up=[
            (plan_text(plan.to_dict()), plan, *_largest_loss(best, plan))
            for plan in plans[: _MAX_RUNNERS_UP if several else 0]
        ],
        hardware=f"{cluster.devices:,} x {chip} on {cluster.fabric.name}",
        command=command,
    )


def compare_page(one: Timeline, other: Timeline, names: Sequence[str], command: str = "") -> str:
    """Render two plans side by side.

    Parameters
    ----------
    one, other
        Steps of the plans.
    names
        Names of the plans.
    command
        The command that compared them.
    """
    return render(
        "compare",
        f"{names[0]} and {names[1]}",
        "comparison",
        names=list(names),
        steps=[
            {"name": name, "plan": step.plan, "lanes": timeline_lanes(step)}
            | {"text": plan_text(step.plan.to_dict())}
            for name, step in zip(names, (one, other), strict=True)
        ],
        difference=difference(one.plan, other.plan),
        command=command,
    )
