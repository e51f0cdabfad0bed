"""Compiled kernels of phaze_fast; call them through the packages, not directly."""

import enum
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

_Array = np.ndarray[Any, Any]

CHIP_DTYPE: Final[np.dtype[Any]]
AREA_DTYPE: Final[np.dtype[Any]]
ENERGY_DTYPE: Final[np.dtype[Any]]
FABRIC_DTYPE: Final[np.dtype[Any]]
FUSED_GROUP_DTYPE: Final[np.dtype[Any]]
OPERATOR_DTYPE: Final[np.dtype[Any]]
TUNING_DTYPE: Final[np.dtype[Any]]
DATAFLOWS: Final[tuple[str, ...]]
LIMITS: Final[tuple[str, ...]]
ORDERS: Final[tuple[str, ...]]
FUNCTIONS: Final[tuple[str, ...]]
FIRST_CONVOLUTION: Final[int]
MAX_TILES: Final[int]
MAX_EPILOGUES: Final[int]
MAX_LAYER_OPS: Final[int]
MAX_LAYER_MODES: Final[int]
PROVED_BY: Final[tuple[str, ...]]
MAX_PROTOCOLS: Final[int]
MAX_LEVELS: Final[int]
COLLECTIVE_OPS: Final[tuple[str, ...]]
ALGORITHMS: Final[tuple[str, ...]]
STATUS_SENTENCES: Final[tuple[str, ...]]
PIPELINE_SCHEDULES: Final[tuple[str, ...]]
PIPELINE_SENTENCES: Final[tuple[str, ...]]
HAS_TWO_CHUNKS: Final[tuple[bool, ...]]

MESH_ALGORITHMS: Final[tuple[str, ...]]
MESH_RUN_DTYPE: Final[np.dtype[Any]]
OP_MAPPING_DTYPE: Final[np.dtype[Any]]
MAP_OP_DTYPE: Final[np.dtype[Any]]
MAP_EDGE_DTYPE: Final[np.dtype[Any]]
MAP_RULES_DTYPE: Final[np.dtype[Any]]
MAP_SCORE_DTYPE: Final[np.dtype[Any]]
ROLES: Final[tuple[str, ...]]
WEIGHT_MODES: Final[tuple[str, ...]]
OUTPUTS: Final[tuple[str, ...]]
EDGE_KINDS: Final[tuple[str, ...]]
MAX_SLOTS: Final[int]
MAX_MAP_STAGES: Final[int]
RUNS_PER_AXIS: Final[int]

class Status(enum.IntEnum):
    OK = 0
    NOT_FINITE = 1
    NEGATIVE = 2
    BAD_RANKS = 3
    BAD_STRIDE = 4
    GROUP_TOO_LARGE = 5
    BAD_OPERATION = 6
    BAD_FABRIC = 7
    NOT_APPLICABLE = 8
    BAD_CHIP = 9
    BAD_SHAPE = 10
    TOO_LARGE = 11
    BAD_TUNING = 12
    TOO_MANY_OPS = 13
    BAD_MODE = 14
    BAD_EDGE = 15
    NO_MAPPING = 16
    BAD_LAYERS = 17
    TOO_MANY_CUTS = 18
    BAD_RULES = 19

class PipelineStatus(enum.IntEnum):
    OK = 0
    BAD_SCHEDULE = 1
    BAD_SIZES = 2
    ONE_CHUNK = 3
    TWO_CHUNKS = 4
    ODD_STAGES = 5
    ODD_MICRO_BATCHES = 6
    FEW_MICRO_BATCHES = 7
    TOO_LARGE = 8

class PlanStatus(enum.IntEnum):
    OK = 0
    OVER_MEMORY = 1
    NO_PLAN = 2
    BAD_DEVICES = 3
    BAD_BATCH = 4
    TOO_MANY_STAGES = 5
    BAD_SCHEDULE = 6
    FEW_ROUNDS = 7
    BAD_EXPERTS = 8
    BAD_STRATEGY = 9
    BROKEN_TIE = 10
    BAD_SHARD = 11

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
        terms: Sequence[float],
        area_mm2: tuple[float, float],
        keep_small_single_core: bool,
        energy_table: _Array,
        max_power_w: float,
    ) -> tuple[_Array, _Array, _Array]: ...
    def pick(self, index: _Array, terms: Sequence[float]) -> tuple[_Array, _Array, _Array]: ...

def chip_area(chips: _Array, terms: Sequence[float], threads: int) -> _Array: ...
def chip_area_total(chips: _Array, terms: Sequence[float], threads: int) -> _Array: ...
def peak_power(chips: _Array, energy_table: _Array, area_mm2: _Array, threads: int) -> _Array: ...
def collective_batch(
    fabrics: _Array,
    fabric: _Array,
    op: _Array,
    payload_bytes: _Array,
    ranks: _Array,
    stride: _Array,
    threads: int,
    outer_ranks: _Array | None = None,
    outer_stride: _Array | None = None,
) -> tuple[_Array, _Array, _Array]: ...
def message_batch(
    fabric: _Array, payload_bytes: _Array, source: _Array, target: _Array
) -> tuple[_Array, _Array, _Array]: ...
def collective_with(
    fabrics: _Array,
    op: int,
    payload_bytes: float,
    ranks: int,
    stride: int,
    algorithm: int,
    outer_ranks: int = 1,
    outer_stride: int = 0,
) -> tuple[float, int, int]: ...
def collective_bound(
    fabrics: _Array,
    op: int,
    payload_bytes: float,
    ranks: int,
    stride: int,
    outer_ranks: int = 1,
    outer_stride: int = 0,
) -> float: ...
def op_times(
    ops: _Array,
    chips: _Array,
    tuning_of: _Array,
    tunings: _Array,
    precision: tuple[float, ...],
    one_core: bool,
    threads: int,
) -> _Array: ...
def op_bounds(
    ops: _Array,
    chips: _Array,
    tuning_of: _Array,
    tunings: _Array,
    precision: tuple[float, ...],
    one_core: bool,
    threads: int,
) -> _Array: ...
def group_traffic(
    groups: _Array, capacities: _Array, rules: tuple[float, float, float, float]
) -> _Array: ...
def product_bytes(
    m: int, k: int, n: int, capacities: _Array, rules: tuple[float, float, float, float]
) -> _Array: ...
def op_hbm_bytes(
    ops: _Array,
    capacities: _Array,
    precision: tuple[float, ...],
    exact: bool,
) -> _Array: ...
def path_bounds(
    formats: Sequence[tuple[_Array, _Array, tuple[float, ...]]],
    chips: _Array,
    tuning_of: _Array,
    graphs: tuple[_Array, _Array, _Array, _Array, _Array, _Array, _Array],
    shared: tuple[_Array, bool] | None,
    threads: int,
) -> _Array: ...
def energy_bounds(
    ops: _Array,
    chips: _Array,
    tuning_of: _Array,
    tunings: _Array,
    precision: tuple[float, ...],
    energy_table: _Array,
    count: _Array,
    threads: int,
) -> _Array: ...
def op_costs(
    ops: _Array,
    chips: _Array,
    tuning_of: _Array,
    tunings: _Array,
    precision: tuple[float, ...],
    one_core: bool,
    energy_table: _Array,
    static_w: _Array,
    threads: int,
) -> _Array: ...
def op_figures(
    ops: _Array,
    chips: _Array,
    tuning_of: _Array,
    tunings: _Array,
    precision: tuple[float, ...],
    energy_table: _Array,
    threads: int,
) -> tuple[_Array, _Array, _Array, _Array]: ...
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
    enough_s: _Array | None = ...,
) -> tuple[_Array, _Array, _Array, _Array, _Array, _Array, _Array]: ...
def schedule_on_chips(
    graph: tuple[_Array, _Array, _Array],
    one_core_s: _Array,
    all_cores_s: _Array,
    cores: _Array,
    overlap: bool,
    max_nodes: int,
    max_seconds: float,
    threads: int,
    enough_s: _Array | None = ...,
    only_decide: bool = ...,
) -> tuple[_Array, _Array, _Array, _Array, _Array, _Array, _Array]: ...
def canonical_layers(layers: _Layers, overlap: bool) -> list[bytes]: ...
def replay_layers(
    layers: _Layers, overlap: bool, start: _Array, mode: _Array
) -> tuple[_Array, _Array, _Array, _Array]: ...

MAX_PLACED_LAYERS: int
MAX_VARIANTS: int

class TablePlan(NamedTuple):
    time_s: float
    max_load_s: float
    stages: int
    replicas: int
    devices: int
    stage_of: _Array

class PublishedAnswer(NamedTuple):
    status: Status
    table: int
    plan: TablePlan

def place_published(
    tables: list[dict[str, _Array]],
    ptr: _Array,
    memory_bytes: _Array,
    devices: _Array,
    micro_batches: _Array,
    width: _Array,
    recompute: _Array,
    threads: int,
) -> list[PublishedAnswer]: ...

class PipelineStep(NamedTuple):
    step_s: float
    longest_device_s: float
    bound_s: float
    start_s: _Array
    end_s: _Array
    busy_s: _Array

def pipeline_step(
    schedule: int,
    stages: int,
    chunks: int,
    micro_batches: int,
    forward_s: _Array,
    backward_s: _Array,
    weight_grad_s: _Array,
    overlap: float,
    full: bool,
) -> PipelineStep: ...

PASS_KINDS: tuple[str, ...]

def pipeline_events(
    schedule: int,
    stages: int,
    chunks: int,
    micro_batches: int,
    forward_s: _Array,
    backward_s: _Array,
    weight_grad_s: _Array,
    overlap: float,
) -> _Array: ...
def pipeline_peak(
    schedule: int,
    stages: int,
    chunks: int,
    micro_batches: int,
    chunk_bytes: _Array,
    kept_for_weight_grad: float,
) -> _Array: ...
def pipeline_in_flight(schedule: int, stages: int, chunks: int, micro_batches: int) -> _Array: ...
def pipeline_chain(schedule: int, stages: int, chunks: int) -> _Array: ...
def check_pipeline(
    schedule: int, stages: int, chunks: int, micro_batches: int
) -> PipelineStatus: ...
def takes_chunks(schedule: int, chunks: int) -> bool: ...
def check_pipelines(
    schedule: int, stages: _Array, chunks: int, micro_batches: _Array
) -> _Array: ...

MAX_NEST_LAYERS: int
MAX_NEST_LEVELS: int
MAX_NEST_DEVICES: int
MAX_NEST_REPLICATED: int

class NestAnswer(NamedTuple):
    status: Status
    width: int
    time_s: float
    load_s: float
    replicas: int
    begins: _Array
    needed_bytes: float
    needed_stages: int
    needed_width: int
    seconds: float

def place_nest(
    networks: dict[str, _Array],
    layers: dict[str, _Array],
    edges: dict[str, _Array],
    stage_devices: _Array,
    width_ptr: _Array,
    memory_bytes: _Array,
    states: _Array,
    micro_batches: _Array,
    recompute: _Array,
    all_replicas: bool,
    threads: int,
) -> list[NestAnswer]: ...
def mesh_collective(
    op: int,
    algorithm: int,
    payload_bytes: float,
    runs: Sequence[Sequence[int]],
    links: tuple[float, float, float, int],
) -> tuple[float, int]: ...
def mesh_loads(
    columns: int,
    rows: int,
    dead: _Array,
    dead_links: _Array,
    source: _Array,
    target: _Array,
    payload_bytes: _Array,
) -> _Array: ...
def mesh_collective_loads(
    columns: int, rows: int, links: tuple[float, float, float, int], collectives: list[Any]
) -> _Array: ...

class Mapping:
    def __init__(
        self,
        *,
        slots: _Array,
        ops: _Array,
        edges: _Array,
        rules: _Array,
        divisors: _Array,
        column: _Array,
        forward_s: _Array,
        backward_s: _Array,
        stash_bytes: _Array,
        live_bytes: _Array,
        parameters: _Array,
        weight_grad_s: _Array,
        blocks: _Array,
        boundary_s: _Array,
        chain: _Array,
        cross_stage_s: _Array | None = None,
    ) -> None: ...
    def assign(self, op_mappings: _Array) -> None: ...
    def change(self, op: int, op_mapping: _Array) -> None: ...
    def op_mappings(self) -> _Array: ...
    def choices(self, op: int) -> _Array: ...
    def legal(self, op: int, op_mapping: _Array) -> bool: ...
    def score(self, outputs: _Array | None = None) -> _Array: ...
    def stages(self, outputs: _Array | None = None) -> tuple[_Array, _Array]: ...
    def anneal(self, seed: int, steps: int, start: float) -> tuple[_Array, _Array, int]: ...
    def descend(self, rounds: int) -> tuple[_Array, _Array, int]: ...
    def mapping_count(self) -> float: ...
    def exhaust(self) -> tuple[_Array, _Array, int]: ...
    def least_memory(self, off_wafer: float = 0.0) -> tuple[float, float, _Array]: ...
    def relaxation(self) -> Relaxation: ...

class Relaxation:
    def bound(
        self, theta: float, price: float, phi: float = 0.0, enough: float = ...
    ) -> tuple[float, _Array]: ...

PLACED_DTYPE: np.dtype[np.void]
LAYER_KIND_DTYPE: np.dtype[np.void]
STRATEGY_DTYPE: np.dtype[np.void]
LAYOUT_DTYPE: np.dtype[np.void]
TRAINING_DTYPE: np.dtype[np.void]
ESTIMATE_DTYPE: np.dtype[np.void]
PLAN_STATUS_SENTENCES: tuple[str, ...]
MEMORY_RULE: dict[str, int]
WIDTHS: tuple[str, ...]

class LayoutGrid:
    def __init__(
        self,
        devices: int,
        node_devices: int,
        global_batch: int,
        blocks: int,
        layers: int,
        widths: _Array,
        most_stages: int,
        single_schedule: int,
        rank_order: int,
        dp: _Array,
        pp: _Array,
        schedules: _Array,
        chunks: _Array,
        zero: _Array,
        shards: _Array,
    ) -> None: ...
    def __len__(self) -> int: ...
    @property
    def replicas(self) -> _Array: ...
    @property
    def rejected(self) -> list[tuple[int, int, int, int]]: ...
    def shares(self) -> _Array: ...

def list_layouts(
    grids: list[LayoutGrid], work_s: _Array, factor: float, most_s: float
) -> _Array: ...
def layouts_fit(
    layouts: _Array,
    strategies: _Array,
    sizes: _Array,
    order: _Array,
    training: _Array,
    memory_limits: _Array,
) -> _Array: ...
def check_widths(widths: Sequence[_Array], devices: int, global_batch: int) -> _Array: ...
def distinct_rows(columns: Sequence[_Array]) -> tuple[_Array, _Array]: ...
def distinct_words(words: _Array) -> tuple[_Array, _Array]: ...

class EstimatedPlan(NamedTuple):
    estimate: _Array
    stages: _Array

class PlanPasses(NamedTuple):
    forward_s: _Array
    backward_s: _Array
    weight_grad_s: _Array
    step_s: float

class EvenPartition(NamedTuple):
    status: PlanStatus
    cuts: _Array
    variants: _Array

class PlacedPlans(NamedTuple):
    placed: _Array
    borders: _Array

class RankedPlans(NamedTuple):
    placed: _Array
    borders: _Array
    solved: int
    empty: int
    open_s: float

class SolvedLayout(NamedTuple):
    bound_s: float
    placed: _Array
    borders: _Array

class PlansOnChips(NamedTuple):
    placed: _Array
    borders: _Array
    times: dict[str, _Array]
    joules: _Array

class LayersOnChips:
    def __init__(self, graphs: object, costs: object) -> None: ...
    def __len__(self) -> int: ...
    def map(self, chips: _Array, threads: int) -> dict[str, _Array]: ...
    def bound(self, chips: _Array, threads: int) -> dict[str, _Array]: ...
    def time(self, chips: _Array, makespan_s: _Array) -> dict[str, _Array]: ...
    def roots(self, chip: int, threads: int) -> tuple[_Array, _Array]: ...
    def schedule(
        self, chips: _Array, max_nodes: int, threads: int
    ) -> tuple[dict[str, _Array], dict[str, _Array]]: ...

class PlanSpace:
    def __init__(
        self,
        fabric: _Array,
        devices: int,
        training: _Array,
        kinds: int,
        order: _Array,
        edges: _Array,
        tied: _Array,
        strategies: _Array,
        sizes: _Array,
        layouts: _Array,
        memory_limits: _Array,
        fits: _Array,
        some_blocks: bool = ...,
    ) -> None: ...
    def __len__(self) -> int: ...
    def estimate_even(
        self,
        times: object,
        layout: _Array,
        variant: _Array,
        usable_bytes: float,
        free: object,
        status: _Array,
        threads: int,
    ) -> tuple[_Array, _Array]: ...
    def estimate(
        self,
        times: object,
        layout: int,
        cuts: _Array,
        variants: _Array,
        usable_bytes: float,
        free: Sequence[object] = (),
    ) -> EstimatedPlan: ...
    def passes(self, times: object, layout: int, cuts: _Array, variants: _Array) -> PlanPasses: ...
    def even_partition(
        self, times: object, layout: int, variant: int, usable_bytes: float
    ) -> EvenPartition: ...
    def recompute(
        self, times: object, layout: int, cuts: _Array, usable_bytes: float
    ) -> _Array: ...
    def top_plans(
        self,
        times: object,
        memory_limit: int,
        top: int,
        threads: int,
        stop: Callable[[], bool] | None = None,
        below_s: float = ...,
    ) -> RankedPlans: ...
    def front(
        self, times: object, memory_limit: int, most_s: float, threads: int
    ) -> RankedPlans: ...
    def best(
        self, strategy: int, times: object, least: object, below_s: _Array, threads: int
    ) -> PlacedPlans: ...
    def best_on_chips(
        self,
        layers: Sequence[LayersOnChips],
        memory_limit: _Array,
        below_s: _Array,
        planned: bool,
        max_nodes: int,
        threads: int,
    ) -> PlansOnChips: ...
    def rule_out(
        self,
        strategy: int,
        layers: LayersOnChips,
        chips: _Array,
        memory_limit: _Array,
        limits_s: _Array,
        planned: bool,
        max_nodes: int,
        threads: int,
    ) -> tuple[dict[str, _Array], _Array]: ...
    def figures(self, times: object, row: _Array, placed: _Array, borders: _Array) -> _Array: ...
    def bounds(
        self, strategy: int, least: object, memory_limit: _Array, threads: int
    ) -> _Array: ...
    def work_bounds(self, strategy: int, work_s: _Array, memory_limit: _Array) -> _Array: ...
    def layout_bounds(self, times: object, memory_limit: int) -> _Array: ...
    def solve(
        self, times: object, layout: int, memory_limit: int, below_s: float
    ) -> SolvedLayout: ...
