"""Compiled kernels of phaze_fast; call them through the packages, not directly."""

from typing import Any, Final

import numpy as np

_Array = np.ndarray[Any, Any]

CHIP_DTYPE: Final[np.dtype[Any]]
AREA_DTYPE: Final[np.dtype[Any]]
ENERGY_DTYPE: Final[np.dtype[Any]]
FABRIC_DTYPE: Final[np.dtype[Any]]
OPERATOR_DTYPE: Final[np.dtype[Any]]
TUNING_DTYPE: Final[np.dtype[Any]]
COST_DTYPE: Final[np.dtype[Any]]
DATAFLOWS: Final[tuple[str, ...]]
LIMITS: Final[tuple[str, ...]]
ORDERS: Final[tuple[str, ...]]
FUNCTIONS: Final[tuple[str, ...]]
MAX_TILES: Final[int]
MAX_LAYER_OPS: Final[int]
MAX_LAYER_MODES: Final[int]
PROVED_BY: Final[tuple[str, ...]]
MAX_LEVELS: Final[int]
COLLECTIVE_OPS: Final[tuple[str, ...]]
ALGORITHMS: Final[tuple[str, ...]]
STATUS_SENTENCES: Final[tuple[str, ...]]

class ChipGrid:
    def __init__(
        self,
        base: _Array,
        axes: list[tuple[int, list[float]]],
        ties: list[tuple[int, int]],
        derive_tensor_local: bool,
        derive_vector_local: bool,
    ) -> None: ...
    @property
    def size(self) -> int: ...
    def filter(
        self,
        begin: int,
        end: int,
        terms: tuple[float, float],
        area_mm2: tuple[float, float],
        keep_small_single_core: bool,
        energy_table: _Array,
        max_power_w: float,
    ) -> tuple[_Array, _Array, _Array]: ...
    def pick(self, index: _Array, terms: tuple[float, float]) -> tuple[_Array, _Array, _Array]: ...

def chip_area(
    chips: _Array, network_mm2_per_port_byte: float, hbm_mm2_per_stack: float, threads: int
) -> _Array: ...
def chip_area_total(
    chips: _Array, network_mm2_per_port_byte: float, hbm_mm2_per_stack: float, threads: int
) -> _Array: ...
def peak_power(chips: _Array, energy_table: _Array, area_mm2: _Array, threads: int) -> _Array: ...
def collective_batch(
    fabrics: _Array,
    fabric: _Array,
    op: _Array,
    payload_bytes: _Array,
    ranks: _Array,
    stride: _Array,
    threads: int,
) -> tuple[_Array, _Array, _Array]: ...
def collective_with(
    fabrics: _Array, op: int, payload_bytes: float, ranks: int, stride: int, algorithm: int
) -> tuple[float, int, int]: ...
def collective_bound(
    fabrics: _Array, op: int, payload_bytes: float, ranks: int, stride: int
) -> float: ...
def op_times(
    ops: _Array,
    chips: _Array,
    tuning_of: _Array,
    tunings: _Array,
    precision: tuple[float, float, float, float],
    one_core: bool,
    threads: int,
) -> _Array: ...
def op_bounds(
    ops: _Array,
    chips: _Array,
    tuning_of: _Array,
    tunings: _Array,
    precision: tuple[float, float, float, float],
    one_core: bool,
    threads: int,
) -> _Array: ...
def op_costs(
    ops: _Array,
    chips: _Array,
    tuning_of: _Array,
    tunings: _Array,
    precision: tuple[float, float, float, float],
    one_core: bool,
    energy_table: _Array,
    static_w: _Array,
    threads: int,
) -> _Array: ...
def array_cycles(
    m: _Array,
    k: _Array,
    n: _Array,
    rows: _Array,
    cols: _Array,
    dataflow: _Array,
    overlapped: bool,
    threads: int,
) -> tuple[_Array, _Array]: ...

_Layers = tuple[_Array, _Array, _Array, _Array, _Array, _Array, _Array, _Array, _Array]

def schedule_layers(
    layers: _Layers,
    overlap: bool,
    max_nodes: int,
    max_seconds: float,
    threads: int,
    canonical: bool = ...,
) -> tuple[_Array, _Array, _Array, _Array, _Array, _Array, _Array]: ...
def canonical_layers(layers: _Layers, overlap: bool) -> list[bytes]: ...
def replay_layers(
    layers: _Layers, overlap: bool, start: _Array, mode: _Array
) -> tuple[_Array, _Array, _Array, _Array]: ...

MAX_PLACED_LAYERS: int
MAX_VARIANTS: int

_Table = tuple[_Array, ...]
_Plan = tuple[float, float, float, int, int, int, _Array, _Array]

def place_published(
    tables: list[_Table],
    ptr: _Array,
    memory_bytes: _Array,
    devices: _Array,
    microbatches: _Array,
    width: _Array,
    recompute: _Array,
    stages: _Array,
    replicas: _Array,
    threads: int,
) -> list[tuple[int, int, _Plan]]: ...
def place_pipeline(
    tables: list[_Table],
    memory_bytes: _Array,
    piped_bytes: _Array,
    bucket_s: _Array,
    microbatches: _Array,
    first_stages: _Array,
    last_stages: _Array,
    kind: _Array,
    best_only: bool,
    threads: int,
) -> list[tuple[int, list[_Plan]]]: ...
def interleaved_step(
    forward_s: _Array, backward_s: _Array, stages: int, microbatches: int
) -> float: ...
