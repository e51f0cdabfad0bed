"""Hardware as validated records: chips, fabrics, clusters, areas, prices and spaces."""

from phaze_fast.hardware import presets
from phaze_fast.hardware.calibration import Calibration, CalibrationState
from phaze_fast.hardware.chip import (
    Accelerator,
    Buffer,
    Hbm,
    Links,
    TensorCore,
    VectorCore,
    chip_records,
)
from phaze_fast.hardware.cluster import Cluster
from phaze_fast.hardware.fabric import (
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
    FittedRange,
    FunctionCost,
    Tuning,
    tuning_record,
)

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
    "EnergyTable",
    "Fabric",
    "FittedRange",
    "FlatFabric",
    "FunctionCost",
    "Hbm",
    "Links",
    "MeshFabric",
    "SpaceChunk",
    "SpaceSpec",
    "TensorCore",
    "Tier",
    "TieredFabric",
    "TorusFabric",
    "Tuning",
    "VectorCore",
    "area",
    "area_batch",
    "chip_records",
    "cluster_record",
    "energy_table",
    "energy_table_at",
    "energy_table_names",
    "fabric_from_dict",
    "fabric_record",
    "power_batch",
    "presets",
    "tuning_record",
]
