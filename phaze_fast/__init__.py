"""Accelerator, operator schedule and device placement for training, searched together.

Names load on first use, so that importing the package stays light::

    import phaze_fast as pf

    space = pf.ArchitectureSpace.tpuv4_area()
    cluster = pf.Cluster(devices=1024, fabric=pf.presets.fabric("tpuv4-pod"))
    print(pf.collective(cluster, "all-reduce", 2**30, ranks=1024))
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phaze_fast import (
        calibration,
        cost,
        errors,
        export,
        hardware,
        memory,
        models,
        opgraph,
        papers,
        planning,
        runs,
        schedule,
        software,
        units,
        wafer,
    )
    from phaze_fast.calibration import validate_runs
    from phaze_fast.cost import (
        CacheInfo,
        CollectiveCost,
        CollectiveTimes,
        Costs,
        OperatorCost,
        Validation,
        array_cycles,
        collective,
        collective_batch,
        cost_cache_clear,
        cost_cache_info,
        estimate_costs,
        gemm,
        validate,
    )
    from phaze_fast.errors import (
        InfeasibleError,
        InvalidInputError,
        InvalidTypeError,
        PhazeError,
    )
    from phaze_fast.explore import Evaluations, Explorer, evaluate_batch
    from phaze_fast.hardware import (
        FULL_AREA,
        PUBLISHED_AREA,
        Accelerator,
        ArchitectureSpace,
        Area,
        AreaTerms,
        Buffer,
        Cluster,
        EnergyTable,
        FlatFabric,
        Hbm,
        MeshFabric,
        SpaceSpec,
        TensorCore,
        Tier,
        TieredFabric,
        TorusFabric,
        Tuning,
        VectorCore,
        area,
        area_batch,
        power_batch,
        presets,
    )
    from phaze_fast.models import TransformerModel
    from phaze_fast.opgraph import Strategy, build_op_graphs, layer_graph
    from phaze_fast.papers import (
        LayerTable,
        PipelineProblem,
        Placement,
        PublishedProblem,
        place,
        place_batch,
    )
    from phaze_fast.pipeline import compare, search
    from phaze_fast.planning import (
        Plan,
        Plans,
        PlanSpec,
        Predictions,
        Training,
        plan,
        predict,
        predict_batch,
        why_not,
    )
    from phaze_fast.report.result import SearchResult
    from phaze_fast.runs.store import ScheduleCache
    from phaze_fast.runs.sweep import Point, SweepTable, sweep
    from phaze_fast.schedule import LayerTimes, schedule_layers
    from phaze_fast.wafer import Wafer, WaferSpace, search_wafers

    __version__: str

_HOME = {
    "phaze_fast": (
        "calibration",
        "cost",
        "errors",
        "export",
        "hardware",
        "memory",
        "models",
        "opgraph",
        "papers",
        "planning",
        "runs",
        "schedule",
        "software",
        "units",
        "wafer",
    ),
    "phaze_fast.calibration": ("validate_runs",),
    "phaze_fast.cost": (
        "CacheInfo",
        "CollectiveCost",
        "CollectiveTimes",
        "Costs",
        "OperatorCost",
        "Validation",
        "array_cycles",
        "collective",
        "collective_batch",
        "cost_cache_clear",
        "cost_cache_info",
        "estimate_costs",
        "gemm",
        "validate",
    ),
    "phaze_fast.errors": (
        "InfeasibleError",
        "InvalidInputError",
        "InvalidTypeError",
        "PhazeError",
    ),
    "phaze_fast.hardware": (
        "FULL_AREA",
        "PUBLISHED_AREA",
        "Accelerator",
        "ArchitectureSpace",
        "Area",
        "AreaTerms",
        "Buffer",
        "Cluster",
        "EnergyTable",
        "FlatFabric",
        "Hbm",
        "MeshFabric",
        "SpaceSpec",
        "TensorCore",
        "Tier",
        "TieredFabric",
        "TorusFabric",
        "Tuning",
        "VectorCore",
        "area",
        "area_batch",
        "power_batch",
        "presets",
    ),
    "phaze_fast.models": ("TransformerModel",),
    "phaze_fast.opgraph": ("Strategy", "build_op_graphs", "layer_graph"),
    "phaze_fast.explore": ("Evaluations", "Explorer", "evaluate_batch"),
    "phaze_fast.wafer": ("Wafer", "WaferSpace", "search_wafers"),
    "phaze_fast.runs.store": ("ScheduleCache",),
    "phaze_fast.runs.sweep": ("Point", "SweepTable", "sweep"),
    "phaze_fast.pipeline": ("compare",),
    "phaze_fast.papers": (
        "LayerTable",
        "PipelineProblem",
        "Placement",
        "PublishedProblem",
        "place",
        "place_batch",
    ),
    "phaze_fast.planning": (
        "Plan",
        "PlanSpec",
        "Plans",
        "Predictions",
        "Training",
        "plan",
        "predict",
        "predict_batch",
        "why_not",
    ),
    "phaze_fast.report.result": ("SearchResult",),
    "phaze_fast.schedule": ("LayerTimes", "schedule_layers"),
}
_WHERE = {name: home for home, names in _HOME.items() for name in names}

__all__ = [
    "FULL_AREA",
    "PUBLISHED_AREA",
    "Accelerator",
    "ArchitectureSpace",
    "Area",
    "AreaTerms",
    "Buffer",
    "CacheInfo",
    "Cluster",
    "CollectiveCost",
    "CollectiveTimes",
    "Costs",
    "EnergyTable",
    "Evaluations",
    "Explorer",
    "FlatFabric",
    "Hbm",
    "InfeasibleError",
    "InvalidInputError",
    "InvalidTypeError",
    "LayerTable",
    "LayerTimes",
    "MeshFabric",
    "OperatorCost",
    "PhazeError",
    "PipelineProblem",
    "Placement",
    "Plan",
    "PlanSpec",
    "Plans",
    "Point",
    "Predictions",
    "PublishedProblem",
    "ScheduleCache",
    "SearchResult",
    "SpaceSpec",
    "Strategy",
    "SweepTable",
    "TensorCore",
    "Tier",
    "TieredFabric",
    "TorusFabric",
    "Training",
    "TransformerModel",
    "Tuning",
    "Validation",
    "VectorCore",
    "Wafer",
    "WaferSpace",
    "__version__",
    "area",
    "area_batch",
    "array_cycles",
    "build_op_graphs",
    "calibration",
    "collective",
    "collective_batch",
    "compare",
    "cost",
    "cost_cache_clear",
    "cost_cache_info",
    "errors",
    "estimate_costs",
    "evaluate_batch",
    "export",
    "gemm",
    "hardware",
    "layer_graph",
    "memory",
    "models",
    "opgraph",
    "papers",
    "place",
    "place_batch",
    "plan",
    "planning",
    "power_batch",
    "predict",
    "predict_batch",
    "presets",
    "runs",
    "schedule",
    "schedule_layers",
    "search",
    "search_wafers",
    "software",
    "sweep",
    "units",
    "validate",
    "validate_runs",
    "wafer",
    "why_not",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("phaze-fast")
    if name not in _WHERE:
        raise AttributeError(f"module 'phaze_fast' has no attribute {name!r}")
    home = _WHERE[name]
    value = (
        import_module(f"phaze_fast.{name}")
        if home == "phaze_fast"
        else getattr(import_module(home), name)
    )
    globals()[name] = value
    return value


class _Package(ModuleType):
    """The package's own type: `search` is the function, although a package has that name as well.

    Python sets a package's attribute when it imports a subpackage; that must not hide the function.
    """

    @property
    def search(self) -> Any:
        return import_module("phaze_fast.pipeline").search

    @search.setter
    def search(self, _: object) -> None:
        """Leave the function where it is."""


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return list(__all__)
