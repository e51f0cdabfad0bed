"""An outside optimiser on a space of chips: an Optuna study that asks the explorer for times."""

import importlib.util
import sys

import phaze_fast as pf
from phaze_fast.explore import Explorer
from phaze_fast.hardware import AreaLimit, SpaceSpec

if importlib.util.find_spec("optuna") is None:
    print("Optuna is not installed; to run this: pip install 'phaze-fast[opt]'")
    sys.exit(0)

import optuna

SPACE = pf.ArchitectureSpace(
    SpaceSpec(
        name="small",
        base=pf.presets.chip("phaze-tpuv4"),
        axes={
            "tensor_core.count": (4, 8, 16, 32, 64),
            "tensor_core.width": (32, 64, 128),
            "tensor_core.depth": (32, 64, 128),
            "buffer.capacity_bytes": tuple(mib * 2**20 for mib in (16, 32, 64)),
        },
        ties={"vector_core.lanes": "tensor_core.width"},
        area=AreaLimit(max_mm2=280.0),
    )
)
explorer = Explorer(
    pf.models.load("bertlarge"),
    SPACE,
    pf.Cluster(devices=8, fabric="tpuv4-pod"),
    pf.Training(global_batch=64, micro_batch=1, tp=(1, 2), schedule="1f1b"),
)


def seconds(trial: optuna.Trial) -> float:
    """Of a step on the suggested chip; a chip that the space leaves out is pruned."""
    values = {
        field: trial.suggest_categorical(field, list(axis))
        for field, axis in SPACE.spec.axes.items()
    }
    point = explorer.find(values)
    if point is None:
        raise optuna.TrialPruned
    known = {told.point.index: told for told in explorer.told}
    told = known[point.index] if point.index in known else explorer.evaluate([point])[0]
    return told.score


optuna.logging.set_verbosity(optuna.logging.WARNING)
study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))
study.optimize(seconds, n_trials=20)
print(f"Optuna: {study.best_value:.4f} s after {len(explorer.told)} of {len(SPACE)} chips")

while not explorer.done:  # the lowest bounds first, until none is below the best
    explorer.evaluate(explorer.ask(8))
best = explorer.best
assert best is not None
assert best.score <= study.best_value
print(f"proven: {best.score:.4f} s after {len(explorer.told)} chips, by {best.point.values}")
print(f"front of time and area: {len(explorer.front)} chips")
