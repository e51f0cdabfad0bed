"""Hardware as validated records: chips, fabrics, clusters, wafers, areas, prices and spaces."""

from phaze_fast.hardware import presets
from phaze_fast.hardware.chip import (
    Accelerator,
    Buffer,
    Hbm,
    Links,
    TensorCore,
    VectorCore,
    chip_records,
)
from phaze_fast.hardware.die import Die, WaferRules
from phaze_fast.hardware.fabric import (
    Cluster,
    Fabric,
    FlatFabric,
    MeshFabric,
    Tier,
    TieredFabric,
    TorusFabric,
    cluster_record,
    fabric_from_dict,
    fabric_record,
)
from phaze_fast.hardware.faults import FaultMap, load_faults, sample_faults
from phaze_fast.hardware.silicon import (
    EVERY_AREA,
    FULL_AREA,
    PUBLISHED_AREA,
    Area,
    AreaTerms,
    EnergyTable,
    area,
    area_batch,
    energy_table,
    energy_table_at,
    energy_table_names,
    power_batch,
)
from phaze_fast.hardware.space import ArchitectureSpace, SpaceChunk
from phaze_fast.hardware.space_spec import AreaLimit, SpaceSpec
from phaze_fast.hardware.tuning import (
    AttentionTuning,
    Calibration,
    CalibrationState,
    FittedRange,
    FunctionCost,
    Tuning,
    tuning_record,
)
from phaze_fast.hardware.wafer import MemoryTier, OffWafer, Wafer, WaferIo, WaferSwitch
from phaze_fast.hardware.wafer_rules import broken_rules
from phaze_fast.hardware.wafer_space import WaferSpace
from phaze_fast.hardware.wafer_totals import WaferTotals, wafer_totals

__all__ = [
    "EVERY_AREA",
    "FULL_AREA",
    "PUBLISHED_AREA",
    "Accelerator",
    "ArchitectureSpace",
    "Area",
    "AreaLimit",
    "AreaTerms",
    "AttentionTuning",
    "Buffer",
    "Calibration",
    "CalibrationState",
    "Cluster",
    "Die",
    "EnergyTable",
    "Fabric",
    "FaultMap",
    "FittedRange",
    "FlatFabric",
    "FunctionCost",
    "Hbm",
    "Links",
    "MemoryTier",
    "MeshFabric",
    "OffWafer",
    "SpaceChunk",
    "SpaceSpec",
    "TensorCore",
    "Tier",
    "TieredFabric",
    "TorusFabric",
    "Tuning",
    "VectorCore",
    "Wafer",
    "WaferIo",
    "WaferRules",
    "WaferSpace",
    "WaferSwitch",
    "WaferTotals",
    "area",
    "area_batch",
    "broken_rules",
    "chip_records",
    "cluster_record",
    "energy_table",
    "energy_table_at",
    "energy_table_names",
    "fabric_from_dict",
    "fabric_record",
    "load_faults",
    "power_batch",
    "presets",
    "sample_faults",
    "tuning_record",
    "wafer_totals",
]
