"""Calibration: fits of a few constants, chips and fabrics from files, tables of collectives."""

import ast
import importlib
import os
from pathlib import Path

import numpy as np
import pytest
from golden_files import GOLDEN, refused_calls
from refusals import refusal

from phaze_fast.calibration import (
    benchmark_script,
    calibrate_chip,
    calibrate_fabric,
    validate_collectives,
)
from phaze_fast.calibration.calibrate import Constant, cross_validated_errors, fit_constants
from phaze_fast.calibration.collectives import is_collective_table, read_collectives
from phaze_fast.cost import collective_batch, validate
from phaze_fast.cost.machines import machines
from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware import Accelerator, presets
from phaze_fast.hardware.fabric import fabric_from_dict

module = importlib.import_module("phaze_fast.calibration.calibrate")
SHARED = Path(os.environ.get("PHAZE_SHARED", GOLDEN.parents[2] / "shared")) / "truth"
H200 = presets.chip("h200")
H100 = presets.fabric("dgx-h100")

TEXT = """# nThread 1 nGpus 1 minBytes 8388608 maxBytes 16777216 step: 2(factor) iters: 20
# Using devices
#  Rank  0 Group  0 Pid    313 on a device  0 [0x18] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid    314 on a device  1 [0x2a] NVIDIA H100 80GB HBM3
#                                                out-of-place                in-place
#       size    count  type redop root  time  algbw  busbw #wrong  time  algbw  busbw #wrong
           0        0 float   sum   -1   5.1    0.0    0.0      0   5.0    0.0    0.0      0
     8388608  2097152 float   sum   -1  47.3  177.3  177.3      0  48.0  174.8  174.8      0
    16777216  4194304 float   sum   -1  82.2  204.1  204.1      0  82.0  204.6  204.6      0
# Avg bus bandwidth    : 190.7
"""


RNG = np.random.default_rng(3)
SIZE = 2.0 ** RNG.uniform(5, 25, 80)


def two(values):
    return np.maximum(values[0] + SIZE / values[1], 0.0)


TRUTH = np.array([20.0, 300.0])
WANTED = [Constant("startup", 1.0, 0.01, 1e4), Constant("rate", 50.0, 1.0, 1e5)]


def fitted(measured):
    return fit_constants(lambda x: np.log(two(x) / measured), WANTED)


def test_known_constants_are_found_within_their_intervals():
    noise = RNG.normal(0.0, 0.03, len(SIZE))
    measured = two(TRUTH) * np.exp(noise)
    fit = fitted(measured)
    assert fit.values == pytest.approx(TRUTH, rel=0.03)
    assert np.all((fit.low < fit.values) & (fit.values < fit.high))
    assert np.all((fit.low <= TRUTH) & (fit.high >= TRUTH))
    unseen = cross_validated_errors(lambda x: np.log(two(x) / measured), WANTED)
    assert 0.5 * np.abs(noise).mean() < np.abs(unseen).mean() < 1.5 * np.abs(noise).mean()
    wrong = two(TRUTH)
    wrong[::20] *= 3.0  # a few wrong rows do not decide
    assert fitted(wrong).values == pytest.approx(TRUTH, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_shift_is_that_of_the_least_huber_loss(seed):
    """One factor common to all rows: errors above 8% count by their size, others by its square."""
    shifts = np.random.default_rng(seed).normal(0.3, 0.1, 9)

    def loss(shift):
        size = np.abs(shift - shifts)
        return np.where(size < 0.08, size**2 / 2, 0.08 * size - 0.08**2 / 2).sum()

    fit = fit_constants(lambda x: np.log(x[0]) - shifts, [Constant("factor", 1.0, 0.1, 10.0)])
    tried = np.linspace(0.0, 0.6, 60_001)
    assert np.log(fit.values[0]) == pytest.approx(
        tried[np.argmin(list(map(loss, tried)))], abs=1e-3
    )
    assert fit.at_bound == ()
    near = (
        shifts.mean() + (shifts - shifts.mean()) / 10
    )  # where it is the mean, and 90% of a normal
    fit = fit_constants(lambda x: np.log(x[0]) - near, [Constant("factor", 1.0, 0.1, 10.0)])
    spread = 1.645 * near.std(ddof=1) / 3.0
    middle = near.mean()
    limits = [np.log(x[0]) for x in (fit.low, fit.values, fit.high)]
    assert limits == pytest.approx([middle - spread, middle, middle + spread], abs=5e-5)
    fit = fit_constants(lambda x: np.log(x[0]) - near, [Constant("factor", 1.0, 0.1, 1.1)])
    assert fit.at_bound == ("factor",)


def test_a_curved_valley_is_followed_to_its_end():
    """Rosenbrock's function of logarithms: steps must be damped, and damped less again."""
    wanted = [Constant("x", np.exp(-1.2), 0.05, 20.0), Constant("y", np.e, 0.05, 20.0)]

    def log_errors(values):
        x, y = np.log(values)
        return np.array([10.0 * (y - x**2), 1.0 - x])

    assert fit_constants(log_errors, wanted).values == pytest.approx([np.e, np.e], rel=1e-6)


def test_what_rows_cannot_tell_is_named():
    measured = SIZE * 6.0
    wanted = [Constant("a", 1.0, 0.1, 10.0), Constant("b", 3.0, 0.1, 10.0)]
    wanted += [Constant("unused", 2.0, 1.0, 4.0), Constant("fixed", 5.0, 5.0, 5.0)]
    fit = fit_constants(lambda x: np.log(SIZE * x[0] * x[1] / measured), wanted)
    assert fit.collinear == (("b", "a"),)
    assert fit.undetermined == ("unused", "fixed")
    assert fit.at_bound == ()
    assert (fit.values[2], fit.low[2], fit.high[2]) == pytest.approx((2.0, 1.0, 4.0))
    assert fit.values[0] * fit.values[1] == pytest.approx(6.0)


@pytest.mark.parametrize(
    ("strong", "weak", "rows", "undetermined"),
    [
        (0.0, 5e-5, 2, ("strong",)),
        (100.0, 3e-4, 2, ()),
        (1.0, 3e-5, 2, ("weak",)),
        (0.0, 0.0, 2, ("strong", "weak")),
        (1.0, 1.0, 0, ("strong", "weak")),
    ],
)
def test_a_constant_with_little_effect_is_found(strong, weak, rows, undetermined):
    """Alone and beside one of a million times the slope; below 4e-5 of its change it is unknown."""

    def log_errors(values):
        return np.array([strong * np.log(values[0]), weak * np.log(values[1] / 3.0)])[:rows]

    wanted = [Constant(name, 1.0, 0.1, 10.0) for name in ("strong", "weak")]
    fit = fit_constants(log_errors, wanted)
    assert fit.undetermined == undetermined
    assert fit.values[0] == pytest.approx(1.0, rel=1e-3)
    assert fit.values[1] == pytest.approx(3.0 if rows and weak else 1.0, rel=1e-3)


def test_constants_of_a_chip_come_back_from_its_own_times(tmp_path):
    """Rows that a chip predicts lead back to that chip from a wrong start."""
    found = validate(GOLDEN / "h200_gemm.csv", H200)
    lines = ["op,b,m,k,n,us_median"]
    for label, us in zip(found.labels, found.predicted["us_median"], strict=True):
        sizes = label.split("x")
        lines.append(",".join(["mm", *(["1"] if len(sizes) == 3 else []), *sizes, f"{us:.9g}"]))
    path = tmp_path / "gemm.csv"
    path.write_text("\n".join(lines))
    wrong = H200.replace(
        launch_latency_s=5e-6, tuning=H200.tuning.replace(efficiency=0.6, sustained_flops=5e14)
    )
    fit = calibrate_chip([path], wrong, "again")
    again = Accelerator.from_dict(fit.document)
    assert again.launch_latency_s == pytest.approx(H200.launch_latency_s, rel=0.05)
    assert again.tuning.efficiency == pytest.approx(H200.tuning.efficiency, rel=0.02)
    assert again.tuning.sustained_flops == pytest.approx(H200.tuning.sustained_flops, rel=0.02)
    rate = next(c for c in fit.constants if c.name == "sustained_flops")
    assert [rate.low, rate.high] == pytest.approx([rate.value] * 2, rel=0.05)
    assert fit.errors["gemm"]["unseen"] < 0.02 < fit.errors["gemm"]["before"]
    assert again.calibration.state == "partly fitted"
    shapes = np.array([[int(n) for n in label.split("x")[-3:]] for label in found.labels])
    ranges = dict(zip("mkn", np.stack([shapes.min(axis=0), shapes.max(axis=0)], 1), strict=True))
    assert {k: list(v) for k, v in ranges.items()} == {
        name: list(getattr(again.tuning.fitted_range, name)) for name in "mkn"
    }


@pytest.mark.slow
def test_rows_that_a_fit_has_not_seen_are_predicted_as_well():
    files = [GOLDEN / f"h200_{kind}.csv" for kind in ("gemm", "vector", "ends", "attention")]
    fit = calibrate_chip(files, H200)
    limits = {"gemm": 0.085, "vector": 0.10, "attention fwd_us": 0.05, "attention bwd_us": 0.07}
    assert set(fit.errors) == set(limits)
    for kind, most in limits.items():
        assert fit.errors[kind]["unseen"] <= most, kind
    names = [constant.name.split(".") for constant in fit.constants]
    functions = {name[1] for name in names if name[0] == "functions"}
    assert functions > {"gelu", "silu", "softmax", "layernorm", "rmsnorm", "dropout"}
    assert not functions & {"matmul", "add", "multiply", "copy", "relu", "embedding"}
    for constant in fit.constants:
        assert constant.low <= constant.value <= constant.high, constant.name


def test_another_format_leaves_the_chip_s_own_alone():
    fit = calibrate_chip([GOLDEN / "h200_kernels_fp8.csv"], H200)
    again = Accelerator.from_dict(fit.document)
    assert again.tuning.efficiency == H200.tuning.efficiency
    assert again.tuning.formats["fp8"].efficiency != H200.tuning.formats["fp8"].efficiency
    assert validate(GOLDEN / "h200_kernels_fp8.csv", again).columns["us_median"].rows == 60


def test_too_few_rows_and_mixed_formats_are_refused(tmp_path):
    path = tmp_path / "few.csv"
    path.write_text("op,b,m,k,n,us_median\nmm,1,512,512,512,5.0\n")
    assert "1 values for 6 constants" in refusal(calibrate_chip, [path], H200)
    files = [GOLDEN / "h200_gemm.csv", GOLDEN / "h200_kernels_fp8.csv"]
    assert "bf16, fp8 are not accepted together" in refusal(calibrate_chip, files, H200)


def test_nccl_tests_output_is_read(tmp_path):
    path = tmp_path / "all_reduce.txt"
    path.write_text(TEXT)
    rows = read_collectives(path)
    assert (rows.op, rows.ranks) == (["all-reduce"] * 2, [2, 2])
    assert rows.payload_bytes == [2.0**23, 2.0**24]
    assert rows.time_s == pytest.approx([47.3e-6, 82.2e-6])
    found = validate_collectives(path, H100)
    assert found.columns["latency_ms"].mean_abs_err <= 0.10
    assert "no system is named; expected --fabric" in refusal(validate_collectives, path)


@pytest.mark.parametrize("kept", [slice(0, 13), slice(0, 9), slice(4, 13)])
def test_columns_of_nccl_tests_are_found_by_their_names(kept, tmp_path):
    """All columns, those out of place only, and files of releases without type, operation and root."""
    lines = []
    for line in TEXT.splitlines():
        cells = line.split()
        if line.strip()[:1].isdigit() or "time" in cells:
            sharp, cells = cells[: cells[0] == "#"], cells[cells[0] == "#" :]
            fixed = cells[:1] if kept.start else []
            line = " ".join([*sharp, *fixed, *cells[kept]])
        lines.append(line)
    path = tmp_path / "all_reduce.txt"
    path.write_text("\n".join(lines))
    assert read_collectives(path).time_s == pytest.approx([47.3e-6, 82.2e-6])


def table(path, rows):
    path.write_text("system,op,num_gpus,bytes,latency_ms\n" + "\n".join(rows))
    return path


def test_comments_and_blank_lines_may_precede_the_header_of_a_table(tmp_path):
    path = table(tmp_path / "t.csv", ["h100,all_reduce,8,1024,0.02"])
    rows = path.read_text()
    for words in ("one node", "algbw is bytes over seconds", "nThread 1"):
        path.write_text(f"# {words}\n\n{rows}")
        assert is_collective_table(path)
        assert read_collectives(path).time_s == [2e-5]
    assert not is_collective_table(tmp_path)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (["h100,all_reduce,8,1024,0.02"], "1 values for 12 constants"),
        (
            ["h100,all_reduce,2,1024,0.02", "h100,all_reduce,16,1024,0.02"],
            "a group of 16 ranks reaches beyond a node of 8",
        ),
        (
            ["h100,all_reduce,8,1024,0.02", "a100,all_reduce,8,1024,0.02"],
            "systems a100, h100 are not accepted together",
        ),
    ],
)
def test_only_collectives_of_one_node_of_one_machine_are_fitted(tmp_path, rows, said):
    assert said in refusal(calibrate_fabric, [table(tmp_path / "t.csv", rows)], H100)


@pytest.mark.parametrize(("row", "said"), refused_calls("cells of a table of collectives"))
def test_wrong_cells_name_their_line(tmp_path, row, said):
    path = table(tmp_path / "t.csv", [row])
    assert said in refusal(validate_collectives, path, error=InvalidInputError)


def test_constants_of_a_fabric_come_back_from_its_own_times(tmp_path):
    sizes = 2 ** np.array([10, 14, 17, 19, 20, 22, 24, 27])
    rows = []
    for ranks in (2, 4, 8):
        times = collective_batch(H100, "reduce-scatter", sizes.astype(float), ranks).time_s
        rows += [
            f"h100,reduce_scatter,{ranks},{n},{1e3 * t:.9g}"
            for n, t in zip(sizes, times, strict=True)
        ]
    path = table(tmp_path / "rs.csv", rows[1:])
    assert "23 values for 12 constants" in refusal(calibrate_fabric, [path], H100)
    path = table(tmp_path / "rs.csv", rows)
    assert is_collective_table(path)
    fit = calibrate_fabric([path], H100)
    assert not any(c.name.startswith("in_switch") for c in fit.constants)
    again = fabric_from_dict(fit.document)
    for kind in ("< 1 MiB", ">= 1 MiB"):
        assert fit.errors[kind]["rows"] == 12
        assert fit.errors[kind]["unseen"] < 1e-6
    found = validate_collectives(path, again)
    assert {name: error.rows for name, error in found.columns.items()} == {
        "latency_ms": 24, "latency_ms >= 1 MiB": 12, "latency_ms < 1 MiB": 12,
    }  # fmt: skip
    flat = presets.fabric("phaze-flat")
    assert "has no protocols to fit" in refusal(calibrate_fabric, [path], flat)


def test_adders_of_switches_are_fitted_to_all_reduces_of_more_than_two(tmp_path):
    sizes, rows = 2 ** np.arange(10, 29), []
    for ranks in (2, 8):
        times = collective_batch(H100, "all-reduce", sizes.astype(float), ranks).time_s
        rows += [
            f"h100,all_reduce,{ranks},{n},{1e3 * t:.9g}" for n, t in zip(sizes, times, strict=True)
        ]
    fit = calibrate_fabric([table(tmp_path / "ar.csv", rows)], H100)
    assert {c.name for c in fit.constants} >= {"in_switch.startup_s", "in_switch.two_rank_share"}


@pytest.mark.shared
@pytest.mark.slow
@pytest.mark.skipif(not SHARED.exists(), reason="other people's measurements are not here")
def test_fabrics_against_measured_collectives():
    found = validate_collectives(SHARED / "aiconfigurator" / "nccl.csv")
    assert found.columns["latency_ms >= 1 MiB"].mean_abs_err <= 0.06
    assert found.columns["latency_ms < 1 MiB"].mean_abs_err <= 0.15
    lines = (SHARED / "aiconfigurator" / "nccl.csv").read_text().splitlines(keepends=True)
    assert len(lines) == 500
    assert fabric_from_dict(H100.to_dict()) == H100


@pytest.mark.shared
@pytest.mark.skipif(not SHARED.exists(), reason="other people's measurements are not here")
@pytest.mark.parametrize(
    ("file", "chip", "most"),
    [
        ("gemm_a100_bf16", "a100-80", 0.07),
        ("gemm_h100_bf16", "h100", 0.07),
        ("gemm_h200_bf16", "h200", 0.07),
        ("gemm_b200_bf16", "b200", 0.07),
        ("gemm_gb200_bf16", "gb200", 0.12),
        ("attention_fwd_causal_a100_bf16", "a100-80", 0.10),
        ("attention_fwd_causal_h100_bf16", "h100", 0.10),
        ("attention_fwd_causal_h200_bf16", "h200", 0.10),
        ("attention_fwd_causal_b200_bf16", "b200", 0.10),
    ],
)
def test_chips_against_other_people_s_kernels(file, chip, most):
    found = validate(SHARED / "aiconfigurator" / f"{file}.csv", presets.chip(chip))
    (error,) = found.columns.values()
    assert error.scaled_mean_abs_err <= most
    assert sum(found.unsupported.values()) < 0.1 * error.rows


def test_the_benchmark_script_stands_alone():
    tree = ast.parse(benchmark_script())
    imported = {
        (node.module if isinstance(node, ast.ImportFrom) else node.names[0].name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    plain = {"__future__", "collections", "csv", "os", "pathlib", "random", "statistics", "sys"}
    assert imported == plain | {"torch"}


def test_constants_of_attention_start_at_the_kernel_that_was_measured(tmp_path):
    lines = ["batch_size,isl,num_heads,num_key_value_heads,head_dim,kernel_source,latency_ms"]
    sizes = [(b, s) for b in (1, 4) for s in (512, 1024, 2048, 4096)]
    lines += [f"{b},{s},16,16,128,flash_attn,{0.02 + 4e-9 * b * s * s}" for b, s in sizes]
    path = tmp_path / "serving.csv"
    path.write_text("\n".join(lines))
    fit, found = calibrate_chip([path], H200), validate(path, H200).columns["latency_ms"]
    (errors,) = fit.errors.values()  # of the same seconds as those of a validation
    assert errors["before"] == pytest.approx(found.mean_abs_err)
    starts = {c.name: c.before for c in fit.constants}
    own = H200.tuning.attention_kernels["flash2"]
    assert starts["attention.efficiency"] == pytest.approx(own.efficiency)
    assert starts["attention.ops_per_score"] == pytest.approx(own.ops_per_score)
    assert not [name for name in starts if "backward" in name]  # forward passes alone


@pytest.mark.parametrize(
    ("file", "names"),
    [
        (
            "h200_attention.csv",
            {
                *("attention.efficiency", "attention.ops_per_score", "attention.unit_overhead_s"),
                *("attention.backward_efficiency", "attention.backward_ops_per_score"),
            },
        ),
        ("h200_vector.csv", {"functions.gelu.ops_per_element", "functions.silu.ops_per_element"}),
    ],
)
def test_rows_tell_the_constants_that_their_times_depend_on(file, names):
    tables = [module.read_measurements(GOLDEN / file)]
    rows = module._Rows.of(tables)
    base = machines(H200).tunings.copy()
    found = {slot.name for slot in module._slots(tables, rows, "bf16", 1.0, base)}
    assert found >= names
    free = {f"functions.{name}.ops_per_element" for name in ("add", "multiply", "copy", "relu")}
    assert not found & {*free, "functions.embedding.ops_per_element"}
    products = {"efficiency", "sustained_flops", "unit_overhead_s"}
    assert not found & products


def blocks(count):
    return [[64, 64], [128, 128]][:count]


@pytest.mark.parametrize(("even", "odd", "own"), [(2, 0, True), (0, 2, True), (0, 0, False)])
def test_unaligned_products_have_constants_where_a_chip_has_blocks_for_them(
    tmp_path, even, odd, own
):
    path = tmp_path / "gemm.csv"
    path.write_text("op,b,m,k,n,us_median\nmm,1,512,510,512,5.0\n")
    tuning = H200.tuning.replace(even_blocks=blocks(even), odd_blocks=blocks(odd))
    base = machines(H200.replace(tuning=tuning)).tunings
    tables = [module.read_measurements(path)]
    slots = module._slots(tables, module._Rows.of(tables), "bf16", 1.0, base)
    assert ("unaligned_unit_overhead_s" in {slot.name for slot in slots}) == own


def test_costs_of_functions_are_those_of_long_rows(tmp_path):
    """Of more than 15 us, others tell of the launch; no function costs less than one operation."""
    sizes = [(op, 4096, n) for op in ("copy", "gelu") for n in (2048, 4096, 8192, 16384)]
    sizes += [("silu", 4096, 2048), ("silu", 4096, 2944)]
    path = tmp_path / "vector.csv"  # all as fast as the memory
    lines = [f"{op},{rows},{cols},{2.0 + rows * cols * 1e-6}" for op, rows, cols in sizes]
    path.write_text("\n".join(["op,rows,cols,us_median", *lines]))
    fit = {c.name: c for c in calibrate_chip([path], H200).constants}
    gelu = "functions.gelu.ops_per_element"
    assert [name for name in fit if name.startswith("functions")] == [gelu]
    assert 1.0 <= fit[gelu].low <= fit[gelu].high < 50.0


def test_a_rate_without_a_limit_is_fitted_from_the_peak(tmp_path):
    path = tmp_path / "gemm.csv"
    lines = [
        f"mm,1,{n},{n},{k},{2.0 + 2e-9 * n * n * k}"
        for n in (512, 4096)
        for k in (512, 768, 1024, 2048, 4096, 8192)
    ]
    path.write_text("\n".join(["op,b,m,k,n,us_median", *lines]))
    chip = H200.replace(tuning=H200.tuning.replace(sustained_flops=None))
    fit = {c.name: c for c in calibrate_chip([path], chip).constants}
    assert fit["sustained_flops"].before == pytest.approx(chip.peak_flops())


def test_constants_of_a_fabric_begin_at_its_own():
    """Larger groups are as much slower than two devices as in the fabric, operation by operation."""
    rows = module.CollectiveRows()
    for op in ("all-reduce", "reduce-scatter", "all-to-all"):
        for ranks in (2, 8):
            rows.add("", op, ranks, 1e6, 1e-3)
    tuning = H100.tiers[0].library
    starts = {c.name: c.start for c in module._constants(tuning, rows)}
    for field in ("ring", "exchange"):
        last = getattr(tuning, field)[-1]
        own = last.many_rank_share / last.two_rank_share
        assert starts[f"{field}.{last.name}.many_over_two"] == pytest.approx(own)
    ring = tuning.ring[-1]
    two, many = ring.shares("reduce-scatter")
    name = f"ring.{ring.name}.reduce-scatter"
    assert starts[f"{name}.many_over_two"] == pytest.approx(many / two)
    assert starts[f"{name}.two_rank_share"] == pytest.approx(two)
    assert not [name for name in starts if "all-gather" in name]
