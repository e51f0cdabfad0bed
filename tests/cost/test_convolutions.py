"""Convolutions and what surrounds them: measured kernels, systolic arrays, and laws."""

import csv
import math
from functools import cache

import numpy as np
import pytest
from golden_files import GOLDEN
from hypothesis import given
from hypothesis import strategies as st

from phaze_fast import _core
from phaze_fast.cost.operators import operator_costs
from phaze_fast.hardware import presets
from phaze_fast.models.aten import figures
from phaze_fast.models.recording import Array, Call
from phaze_fast.opgraph.graph import function_code

DIRECTIONS = ("forward", "input", "weight")


def array(shape, last=False, parameter=False):
    """A bf16 array, contiguous or with its channels last."""
    _n, c, *area = shape
    width = math.prod(area)
    strides = (c * width, 1, *(c * math.prod(area[at + 1 :]) for at in range(len(area))))
    size = 2 * math.prod(shape)
    return Array(id(shape), tuple(shape), 2, size, parameter, strides if last else ())


def convolution(n, c, size, k, r, stride=1, pad=0, groups=1, channels_last=0, direction="forward"):
    """The work of one convolution, as a recording of PyTorch has it."""
    side, last = (size + 2 * pad - r) // stride + 1, bool(channels_last)
    x, out = array((n, c, size, size), last), array((n, k, side, side), last)
    weights = array((k, c // groups, r, r), last, parameter=True)
    options = {"strides": (stride, stride), "groups": groups, "transposed": False}
    options["channels_last"] = last
    reads, writes = {
        "forward": ((x, weights), (out,)),
        "input": ((out, weights), (x,)),
        "weight": ((out, x), (weights,)),
    }[direction]
    name = "convolution" if direction == "forward" else f"convolution_{direction}"
    if direction != "forward":
        options |= {"x": x.shape, "weights": weights.shape, "out": out.shape}
    return figures(Call(name, reads, writes, (), direction != "forward", (), 0, options))


def records(works):
    """Operators as the cost kernels take them."""
    ops = np.zeros(len(works), dtype=_core.OPERATOR_DTYPE)
    ops["collective"] = -1
    for op, work in zip(ops, works, strict=True):
        op["function"] = function_code(work.kind, work.function)
        op["b"], op["m"], op["n"], op["k"] = work.sizes
        op["read_bytes"], op["write_bytes"] = work.read_bytes, work.write_bytes
    return ops


@cache
def rows(name):
    with (GOLDEN / name).open() as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def measured(keep, least_us=40.0):
    """Errors (logarithms) of the H200's convolutions that take long enough to be told apart."""
    errors = {direction: [] for direction in DIRECTIONS}
    for row in rows("h200_convolutions.csv"):
        sizes = [int(row[name]) for name in list(row)[:9]]
        if keep(*sizes):
            works = [convolution(*sizes, direction) for direction in DIRECTIONS]
            for direction, cost in zip(
                DIRECTIONS, operator_costs("h200", records(works)), strict=True
            ):
                us = float(row[f"{direction}_us"])
                if us >= least_us:
                    errors[direction].append(math.log(cost.time_s * 1e6 / us))
    return errors


@pytest.mark.parametrize(
    ("name", "keep", "most"),
    [
        ("channels last", lambda *s: s[8] and s[7] == 1 and min(s[1], s[3]) >= 64, 0.13),
        ("NCHW", lambda *s: not s[8] and s[7] == 1 and min(s[1], s[3]) >= 64, 0.17),
        ("few channels", lambda *s: s[7] == 1 and min(s[1], s[3]) < 64, 0.26),
        ("depthwise", lambda *s: s[7] == s[1], 0.15),
    ],
)
def test_convolutions_measured_on_an_h200(name, keep, most):
    by_direction = measured(keep, least_us=60.0)
    errors = np.concatenate(list(by_direction.values()))
    assert len(errors) >= 30
    assert np.abs(errors).mean() < most, (name, np.abs(errors).mean())
    assert abs(errors.mean()) < 0.15, (name, errors.mean())


NORMS = {"batch_norm": "native_batch_norm", "group_norm": "native_group_norm"}
POOL = "max_pool2d_with_indices"


def spatial(op, n, c, size, last):
    """The work of an operator of h200_spatial.csv, forward."""
    x = array((n, c, size, size), last)
    weights = Array(1, (c,), 2, 2 * c, True)
    if op in NORMS:
        return figures(Call(NORMS[op], (x, weights, weights), (x,), (), False, (), 0))
    if op == "scale_channels":
        return figures(Call("mul", (x, array((n, c, 1, 1))), (x,), (), False, (), 0))
    if op == "permute_copy":
        return figures(Call("clone", (x,), (array(x.shape, not last),), (), False, (), 0))
    if op == "max_pool":
        half = array((n, c, size // 2, size // 2), last)
        return figures(Call(POOL, (x,), (half, half), (), False, (), 0))
    name = {"add": "add", "relu": "relu", "gelu": "gelu", "silu": "silu"}[op]
    return figures(Call(name, (x, x) if op == "add" else (x,), (x,), (), False, (), 0))


@pytest.mark.parametrize(
    ("op", "most"),
    [
        ("batch_norm", 0.28),
        ("group_norm", 0.15),
        ("scale_channels", 0.20),
        ("permute_copy", 0.35),
        ("max_pool", 0.15),
        ("relu", 0.15),
        ("gelu", 0.15),
        ("silu", 0.15),
    ],
)
def test_norms_pools_and_element_wise_kernels_measured_on_an_h200(op, most):
    errors = []
    for row in rows("h200_spatial.csv"):
        us, last = float(row["forward_us"]), row["channels_last"] == "1"
        if row["op"] != op or us < 50.0 or (op == "group_norm" and last):
            continue  # PyTorch copies the channels of a group norm first if they are last
        work = spatial(op, *(int(row[name]) for name in ("n", "c", "size")), last)
        seconds = operator_costs("h200", records([work]))[0].time_s
        errors.append(math.log(seconds * 1e6 / us))
    assert len(errors) >= 3
    assert np.mean(np.abs(errors)) < most, np.mean(np.abs(errors))


def array_simulated(image, filters, rows_, cols):
    """Cycles of a convolution on one output-stationary array, one multiplication at a time.

    Row i of the array gets the elements of a patch, one a cycle, i cycles late; column j those of a
    filter, j cycles late. Returns the convolution that the array computes as well.
    """
    _c, height, width = image.shape
    count, _, r, s = filters.shape
    out_h, out_w = height - r + 1, width - s + 1
    patches = [image[:, y : y + r, x : x + s].ravel() for y in range(out_h) for x in range(out_w)]
    left, right = np.array(patches), filters.reshape(count, -1)
    out, cycles = np.zeros((len(left), count)), 0
    for top in range(0, len(left), rows_):
        for first in range(0, count, cols):
            depth = left.shape[1]
            for cycle in range(depth + rows_ + cols - 2):
                for i in range(min(rows_, len(left) - top)):
                    for j in range(min(cols, count - first)):
                        at = cycle - i - j
                        if 0 <= at < depth:
                            out[top + i, first + j] += left[top + i, at] * right[first + j, at]
                cycles += 1
    return out.T.reshape(count, out_h, out_w), cycles


def test_cycles_of_a_convolution_are_those_of_an_array_that_is_simulated():
    random = np.random.default_rng(7)
    image, filters = random.normal(size=(3, 6, 5)), random.normal(size=(5, 3, 3, 2))
    out, cycles = array_simulated(image, filters, 4, 3)
    for k, y, x in ((0, 0, 0), (4, 3, 3), (2, 1, 2)):
        assert out[k, y, x] == pytest.approx((image[:, y : y + 3, x : x + 2] * filters[k]).sum())
    shape = {"x": (1, 3, 6, 5), "weights": (5, 3, 3, 2), "out": (1, 5, 4, 4)}
    reads = (array(shape["x"]), array(shape["weights"], parameter=True))
    options = {"strides": (1, 1), "groups": 1, "transposed": False}
    work = figures(Call("convolution", reads, (array(shape["out"]),), (), False, (), 0, options))
    _, m, n, k = work.sizes
    counted, status = _core.array_cycles(
        *(np.array([size], dtype=np.int64) for size in (m, k, n, 4, 3)),
        np.zeros(1, dtype=np.int32), False, 1,
    )  # fmt: skip
    assert status[0] == 0
    assert counted[0] == cycles


sizes = st.tuples(
    st.integers(1, 4),
    st.sampled_from([8, 16, 64]),
    st.integers(4, 20),
    st.sampled_from([8, 64, 96]),
    st.sampled_from([1, 3]),
    st.sampled_from([1, 2]),
    st.just(1),
    st.just(1),
)


@given(sizes, st.sampled_from(DIRECTIONS))
def test_on_systolic_chips_layouts_are_free_and_inputs_are_read_once(shape, direction):
    last, nchw = (convolution(*shape, layout, direction) for layout in (1, 0))
    assert nchw.flops == last.flops == pytest.approx(2.0 * math.prod(last.sizes), rel=0.35)
    ops = records([last, nchw])
    one, other = operator_costs("tpuv4", ops)
    assert one.time_s == other.time_s
    assert one.bound_s <= one.time_s * (1 + 1e-12)
    assert one.hbm_bytes == pytest.approx(last.read_bytes + last.write_bytes, rel=0.05, abs=4096)
    plain = ops[:1].copy()
    plain["function"] = plain["read_bytes"] = plain["write_bytes"] = 0
    (patches,) = operator_costs("tpuv4", plain)
    assert one.compute_cycles == patches.compute_cycles or one.time_s <= patches.time_s
    if direction != "input" or shape[5] == 1:  # strides split the gradient's filter
        assert one.hbm_bytes <= patches.hbm_bytes * 1.05


@given(sizes, st.sampled_from(DIRECTIONS), st.integers(0, 1))
def test_bounds_of_convolutions_hold_on_gpus(shape, direction, last):
    (cost,) = operator_costs("h200", records([convolution(*shape, last, direction)]))
    assert 0.0 < cost.bound_s <= cost.time_s * (1 + 1e-12)
    assert presets.chip("h200").tuning.functions["layout"].launches > 0.0
