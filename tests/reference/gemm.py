"""Matrix products by brute force over the declared mapping space, in plain Python."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

FLOWS = ("os", "ws", "is")
FACTORS = (1, 2, 4, 8)
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
STRIP = 64


@dataclass
class Chip:
    cores: int
    rows: int
    cols: int
    local_bytes: int
    vector_cores: int
    lanes: int
    alus: int
    buffer_bytes: int
    buffer_bytes_per_cycle: float
    port_bytes_per_cycle: float
    hbm_bytes_per_s: float
    clock_hz: float


@dataclass
class Tuning:
    launch_s: float = 0
    vector_launch_share: float = 1
    efficiency: float = 1
    unit_overhead_s: float = 0
    reduction_s: float = 0
    sustained_macs_per_s: float = 0
    hbm_share: float = 1
    hbm_write_share: float = 1
    product_hbm_share: float = 1
    port_share: float = 1
    port_even_bytes_per_cycle: float = 0
    port_odd_bytes_per_cycle: float = 0
    unaligned_unit_overhead_s: float = 0
    unaligned_reduction_s: float = 0
    resident_share: float = 0
    overlapped: bool = True
    tiles: tuple[tuple[int, int], ...] = ()
    even_tiles: tuple[tuple[int, int], ...] = ()
    odd_tiles: tuple[tuple[int, int], ...] = ()
    attention_most: int = 128
    attention_least: int = 128
    attention_efficiency: float = 1
    attention_unit_s: float = 0
    attention_ops: float = 8
    attention_backward_efficiency: float = 1
    attention_backward_ops: float = 16


@dataclass
class Precision:
    in_bytes: float = 2
    out_bytes: float = 2
    acc_bytes: float = 4
    rate: float = 1


def up(a: float, b: int) -> int:
    return int(-(-a // b))


def over(amount: float, rate: float) -> float:
    """Amount by rate; nothing where there is no such part."""
    return amount / rate if rate else 0.0


def folds(m: int, k: float, n: float, r: int, c: int, flow: str) -> tuple[int, float, int]:
    """Folds, elements that each streams, cycles to fill and drain."""
    if flow == "os":
        return up(m, r) * up(n, c), k, r + c - 2
    if flow == "ws":
        return up(k, r) * up(n, c), m, 2 * r + c - 2
    return up(k, r) * up(m, c), n, 2 * r + c - 2


def array_cycles(
    m: int, k: int, n: int, rows: int, cols: int, dataflow: str, overlapped: bool
) -> int:
    f, t, extra = folds(m, k, n, rows, cols, dataflow)
    return int((f - 1) * max(t, rows) + t + extra if overlapped else f * (t + extra))


def operands(m: int, k: int, n: int, p: Precision) -> tuple[float, float, float]:
    return m * k * p.in_bytes, k * n * p.in_bytes, m * n * p.out_bytes


def ladder(limit: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, ...: powers of two and three times them."""
    return [i for i in range(1, limit + 1) if i // (i & -i) in (1, 3)]


def hbm_bytes(m: int, k: int, n: int, capacity: float, precision: Precision) -> float:
    """Least bytes of one product over the three orders and every tile that fits."""
    a, b, d = operands(m, k, n, precision)
    e_i, e_a = precision.in_bytes, precision.acc_bytes
    found = []
    for i, j in product(ladder(m), range(1, n + 1)):
        t_m, t_n = up(m, i), up(n, j)
        if t_m * t_n * e_a + 2 * STRIP * (t_m + t_n) * e_i <= capacity:
            found.append(a * j + b * i + d)
    for side, kept, streamed in ((m, a, b), (n, b, a)):
        for i, j in product(ladder(side), range(1, k + 1)):
            t, t_k, c = up(side, i), up(k, j), 1 if i == j == 1 else 2
            if c * t * t_k * e_i + 2 * STRIP * (t_k * e_i + t * e_a) <= capacity:
                found.append(kept + streamed * i + d + 2 * (j - 1) * m * n * e_a)
    return min([*found, a * n + b * m + d])


def resident(b: int, m: int, k: int, n: int, chip: Chip, tuning: Tuning, p: Precision) -> bool:
    return b * sum(operands(m, k, n, p)[:2]) <= tuning.resident_share * chip.buffer_bytes


def for_rows(k: int, n: int, tuning: Tuning, p: Precision) -> Tuning:
    """The same with the blocks and costs of the kernels that run where rows are unaligned."""
    rows = (k * p.in_bytes, n * p.in_bytes)
    tiles = tuning.odd_tiles if any(r % 4 for r in rows) else tuning.even_tiles
    if not tiles or not any(r % 16 for r in rows):
        return tuning
    return replace(
        tuning, tiles=tiles, launch_s=tuning.launch_s * tuning.vector_launch_share,
        unit_overhead_s=tuning.unaligned_unit_overhead_s, reduction_s=tuning.unaligned_reduction_s,
    )  # fmt: skip


def port_width(k: int, n: int, chip: Chip, tuning: Tuning, p: Precision) -> tuple[float, bool]:
    """Bytes per cycle of one port and whether both ways at once; less where rows are unaligned."""
    rows = (k * p.in_bytes, n * p.in_bytes)
    odd, aligned = any(r % 4 for r in rows), not any(r % 16 for r in rows)
    special = tuning.port_odd_bytes_per_cycle if odd else tuning.port_even_bytes_per_cycle
    if aligned or not special:
        return chip.port_bytes_per_cycle * tuning.port_share, True
    return special, False


def mappings(
    m: int, k: int, n: int, chip: Chip, tuning: Tuning, p: Precision
) -> Iterator[tuple[str, int, int, int]]:
    """Every allowed dataflow, block and split, in the order of ties."""
    r, c = chip.rows, chip.cols
    splits = [s for s in SPLITS if s == 1 or (up(k, s) >= r and s <= k)]
    for (l_m, l_n), s in product(tuning.tiles, splits):
        yield "os", l_m, l_n, s
    for flow, alpha, beta, s in product(FLOWS, FACTORS, FACTORS, splits):
        l_m, l_n = min(m, alpha * r), min(n, beta * c)
        one_fold = flow == "os" and l_m <= r and l_n <= c
        need = 2 * (l_m + l_n) * r * p.in_bytes + l_m * l_n * p.acc_bytes
        if not tuning.tiles and (one_fold or need <= chip.local_bytes):
            yield flow, l_m, l_n, s


def best_mapping(
    b: int, m: int, k: int, n: int, chip: Chip, tuning: Tuning, precision: Precision,
    one_core: bool = False, epilogue_ops: float = 0, extra_bytes: float = 0.0,
) -> dict[str, Any]:  # fmt: skip
    """The fastest mapping, the first of those that tie, with all its terms."""
    tuning = for_rows(k, n, tuning, precision)
    cores, vector_cores = (1, 1) if one_core else (chip.cores, chip.vector_cores)
    e_i, e_o, e_a = precision.in_bytes, precision.out_bytes, precision.acc_bytes
    bandwidth = chip.hbm_bytes_per_s * tuning.hbm_share * tuning.product_hbm_share
    port, full_duplex = port_width(k, n, chip, tuning, precision)
    kept = resident(b, m, k, n, chip, tuning, precision)
    capacity = chip.buffer_bytes or chip.cores * chip.local_bytes
    each = m * n * e_o if kept else hbm_bytes(m, k, n, capacity, precision)
    moved = b * each + extra_bytes if bandwidth else 0.0
    written = b * m * n * e_o
    hbm_s = over(moved + written * (1 / tuning.hbm_write_share - 1), bandwidth)
    sustained = tuning.sustained_macs_per_s * precision.rate * cores / chip.cores
    power_s = over(b * m * k * n, sustained)
    vector_s = over(epilogue_ops * b * m * n, vector_cores * chip.lanes * chip.alus * chip.clock_hz)
    best: dict[str, Any] = {}
    for flow, l_m, l_n, s in mappings(m, k, n, chip, tuning, precision):
        k_c, o = up(k, s), e_o if s == 1 else 2 * e_a
        p_m, p_n = up(m, l_m), up(n, l_n)
        units = b * p_m * p_n * s
        waves = up(units, cores)
        f, t, extra = folds(l_m, k_c, l_n, chip.rows, chip.cols, flow)
        cycles = waves * f * (t + extra)
        if tuning.overlapped:
            cycles = (waves * f - 1) * max(t, chip.rows) + t + extra
        compute_s = cycles / (precision.rate * tuning.efficiency) / chip.clock_hz
        inward, outward = (l_m + l_n) * k_c * e_i, l_m * l_n * o
        passed = max(inward, outward) if full_duplex else inward + outward
        port_s = over(waves * passed, port) / chip.clock_hz
        g_m = min(p_m, 2 ** ((cores.bit_length() - 1) // 2))
        g_n = min(p_n, cores // g_m)
        g_m = min(p_m, cores // g_n)
        through = b * (m * k * e_i * up(p_n, g_n) + k * n * e_i * up(p_m, g_m) + m * n * o * s)
        buffer_s = over(through, chip.buffer_bytes_per_cycle) / chip.clock_hz
        first = (l_m + l_n) * min(k_c, chip.rows) * e_i
        fill_s = 0.0 if kept else over(first, bandwidth)
        work_s = max(compute_s, port_s) + waves * tuning.unit_overhead_s
        before_s = tuning.launch_s + (tuning.reduction_s if s > 1 else 0)
        time_s = before_s + max(work_s, buffer_s, hbm_s, power_s, vector_s) + fill_s
        if not best or time_s < best["time_s"]:
            best = {
                "time_s": time_s, "dataflow": flow, "block": (l_m, l_n), "split": s,
                "compute_s": compute_s, "port_s": port_s, "buffer_s": buffer_s, "hbm_s": hbm_s,
                "power_s": power_s, "vector_s": vector_s, "fill_s": fill_s, "hbm_bytes": moved,
                "buffer_bytes": through, "port_bytes": units * (inward + outward),
            }  # fmt: skip
    return best


def bound(
    b: int, m: int, k: int, n: int, chip: Chip, tuning: Tuning, precision: Precision,
    one_core: bool = False, epilogue_ops: float = 0,
) -> float:  # fmt: skip
    """Seconds that no mapping is faster than."""
    tuning = for_rows(k, n, tuning, precision)
    cores, vector_cores = (1, 1) if one_core else (chip.cores, chip.vector_cores)
    left, right, out = (b * part for part in operands(m, k, n, precision))
    compulsory = out if resident(b, m, k, n, chip, tuning, precision) else left + right + out
    macs, ports = b * m * k * n, cores * port_width(k, n, chip, tuning, precision)[0]
    cycles = max(
        macs / (cores * chip.rows * chip.cols * precision.rate * tuning.efficiency),
        over(left + right + out, chip.buffer_bytes_per_cycle),
        over(max(left + right, out), ports),
        over(epilogue_ops * b * m * n, vector_cores * chip.lanes * chip.alus),
    )
    sustained = tuning.sustained_macs_per_s * precision.rate * cores / chip.cores
    power_s = over(macs, sustained)
    bandwidth = chip.hbm_bytes_per_s * tuning.hbm_share * tuning.product_hbm_share
    hbm_s = over(compulsory + out * (1 / tuning.hbm_write_share - 1), bandwidth)
    return tuning.launch_s + max(cycles / chip.clock_hz, power_s, hbm_s)


def vector_time(
    rows: int, cols: int, read_bytes: float, write_bytes: float, chip: Chip, tuning: Tuning,
    ops: float, row_ops: float, launches: float, factor: float,
    row_limit: int, long_ops: float, long_bytes: float, most_rows: int = 0,
    row_cycles: float = 0.0, one_core: bool = False,
) -> float:  # fmt: skip
    cores = 1 if one_core else chip.vector_cores
    paid = sum(1 for row in range(rows) if most_rows == 0 or row < most_rows)
    more_ops, more_bytes = (long_ops, long_bytes) if 0 < row_limit < cols else (1, 1)
    moved = (read_bytes + write_bytes) * factor * more_bytes
    slower = write_bytes * factor * more_bytes * (1 / tuning.hbm_write_share - 1)
    cycles = max(
        over((rows * cols * ops + paid * row_ops) * more_ops, cores * chip.lanes * chip.alus),
        cols * row_cycles,
        over(moved, cores * chip.port_bytes_per_cycle * tuning.port_share),
        over(moved, chip.buffer_bytes_per_cycle),
    )
    hbm_s = over(moved + slower, chip.hbm_bytes_per_s * tuning.hbm_share)
    started_s = launches * tuning.launch_s * tuning.vector_launch_share
    return started_s + max(cycles / chip.clock_hz, hbm_s)


def attention_time(
    b: int, m: int, n: int, k: int, read_bytes: float, write_bytes: float, causal: bool,
    backward: bool, chip: Chip, tuning: Tuning, precision: Precision, one_core: bool = False,
) -> float:  # fmt: skip
    sizes = [tuning.attention_most]
    while sizes[-1] // 2 >= tuning.attention_least:
        sizes.append(sizes[-1] // 2)
    given = (b, m, n, k, read_bytes, write_bytes, causal, backward)
    return min(_attention_time(*given, chip, tuning, precision, one_core, rows) for rows in sizes)


def _attention_time(
    b: int, m: int, n: int, k: int, read_bytes: float, write_bytes: float, causal: bool,
    backward: bool, chip: Chip, tuning: Tuning, precision: Precision, one_core: bool, rows: int,
) -> float:  # fmt: skip
    cores = 1 if one_core else chip.cores
    efficiency, ops, scores, others = tuning.attention_efficiency, tuning.attention_ops, 1, 1
    if backward:
        efficiency, ops = tuning.attention_backward_efficiency, tuning.attention_backward_ops
        scores, others = 2, 3

    def streamed(inner: float, outer: float) -> float:
        ways = [folds(rows, inner, outer, chip.rows, chip.cols, flow) for flow in FLOWS]
        return min(f * max(t, chip.rows) for f, t, _ in ways)

    def unit(keys: float) -> float:
        tensor = scores * streamed(k, keys) + others * streamed(keys, k)
        lanes = chip.lanes * chip.alus * (1 if one_core else chip.vector_cores / chip.cores)
        cycles = tensor / (precision.rate * efficiency) + over(rows * keys * ops, lanes)
        return cycles / chip.clock_hz

    def loaded(keys: float) -> float:  # K, V, Q, O; backward the gradients of all four as well
        sums = 2 * 2 * precision.acc_bytes * keys * k if backward else 0
        return sums + (2 * keys + (4 if backward else 2) * rows) * k * precision.in_bytes

    def dealt(of: Callable[[float], float], masked: bool) -> float:
        if masked:
            return units / cores * of(mean) + of(n) * (1 - cores / (2 * units))
        return up(units, cores) * of(n)

    def with_overhead(keys: float) -> float:
        return unit(keys) + tuning.attention_unit_s

    units = b * up(m, rows)
    mean = min(n, (n + rows) / 2) if causal else n
    masked = causal and units > cores
    masked = masked and dealt(with_overhead, True) < dealt(with_overhead, False)
    work_s = dealt(unit, masked)
    if rows < tuning.attention_most:
        port = chip.port_bytes_per_cycle * tuning.port_share * chip.clock_hz
        buffer = chip.buffer_bytes_per_cycle * chip.clock_hz
        work_s = max(work_s, over(dealt(loaded, masked), port), over(units * loaded(mean), buffer))
    work_s += dealt(lambda _: tuning.attention_unit_s, masked)
    bandwidth = chip.hbm_bytes_per_s * tuning.hbm_share
    apart_s = over(14 * b * m * k, bandwidth) if backward else 0.0
    hbm_s = over(read_bytes + write_bytes / tuning.hbm_write_share, bandwidth)
    return (3 if backward else 1) * tuning.launch_s + max(work_s, hbm_s) + apart_s
