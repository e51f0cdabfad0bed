"""The line between Python and C++: strict views, read-only results, named errors, a released GIL."""

import threading
import time

import numpy as np
import pytest
from refusals import refusal

from phaze_fast import _core
from phaze_fast.errors import InvalidInputError, InvalidTypeError
from phaze_fast.hardware import PUBLISHED_AREA, chip_records, energy_table, fabric_record, presets

CHIPS = chip_records([presets.chip("h100"), presets.chip("tpuv4")])
TERMS = list(PUBLISHED_AREA.rates)
FABRIC = fabric_record(presets.fabric("dgx-a100"))


def rows(**changes):
    """Arguments of collective_batch for three good rows, some of them changed."""
    good = {
        "fabrics": FABRIC,
        "fabric": np.zeros(3, np.int32),
        "op": np.zeros(3, np.uint8),
        "payload_bytes": np.full(3, 1e6),
        "ranks": np.full(3, 8, np.int64),
        "stride": np.ones(3, np.int64),
        "threads": 1,
    }
    return {**good, **changes}


def unaligned(array):
    raw = np.zeros(array.nbytes + 1, np.uint8)
    raw[1:] = np.frombuffer(array.tobytes(), np.uint8)
    return raw[1:].view(array.dtype)


ZEROS = np.zeros(3)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("payload_bytes", [1.0], "list is not accepted; expected a NumPy array of float64"),
        ("payload_bytes", None, "NoneType is not accepted"),
        ("payload_bytes", ZEROS.astype("f4"), "dtype float32 is not accepted; expected float64"),
        ("payload_bytes", ZEROS.astype(">f8"), "dtype >f8 is not accepted; expected float64"),
        ("ranks", ZEROS.astype("i4"), "dtype int32 is not accepted; expected int64"),
        ("op", ZEROS.astype("i1"), "dtype int8 is not accepted; expected uint8"),
        ("fabric", ZEROS.astype("i8"), "dtype int64 is not accepted; expected int32"),
        ("fabrics", ZEROS, "dtype float64 is not accepted"),
    ],
)
def test_wrong_types_are_named(name, value, message):
    said = refusal(_core.collective_batch, **rows(**{name: value}), error=InvalidTypeError)
    assert f"{name}: {message}" in said


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("payload_bytes", np.zeros((3, 1)), "2 dimensions are not accepted; expected 1"),
        ("payload_bytes", np.zeros(6)[::2], "stride of 16 bytes is not accepted; expected a contiguous"),
        ("payload_bytes", ZEROS[::-1], "stride of -8 bytes"),
        ("payload_bytes", unaligned(ZEROS), "an unaligned array is not accepted"),
        ("ranks", np.zeros(2, "i8"), "length 2 is not accepted; expected 3"),
        ("stride", np.zeros(4, "i8"), "length 4 is not accepted; expected 3"),
        ("threads", 0, "0 is not accepted; expected a whole number from 1 to 1024"),
        ("threads", 5000, "5000 is not accepted"),
    ],
)  # fmt: skip
def test_wrong_values_are_named(name, value, message):
    said = refusal(_core.collective_batch, **rows(**{name: value}), error=InvalidInputError)
    assert f"{name}: {message}" in said


def test_dtype_errors_are_type_errors_and_values_are_value_errors():
    assert "dtype" in refusal(_core.chip_area, np.zeros(3), TERMS, 1, error=TypeError)
    assert "threads" in refusal(_core.chip_area, CHIPS, TERMS, -1, error=ValueError)


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_bad_area_terms_are_refused(bad):
    for at in range(len(TERMS)):
        with pytest.raises(InvalidInputError, match=r"expected a number from (0|-0\.999) to 1e6"):
            _core.chip_area(CHIPS, [*TERMS[:at], bad, *TERMS[at + 1 :]], 1)


def test_scalar_entries_check_their_codes():
    bound, two = _core.collective_bound, np.repeat(FABRIC, 2)
    assert "op: 6 is not accepted" in refusal(bound, FABRIC, 6, 1.0, 2, 1)
    said = refusal(_core.collective_with, FABRIC, 0, 1.0, 2, 1, 99)
    assert "algorithm: 99 is not accepted" in said
    assert "fabrics: length 2 is not accepted; expected 1" in refusal(bound, two, 0, 1.0, 2, 1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kind", 7),
        ("levels", 0),
        ("levels", 5),
        ("size", -1),
        ("size", 0),  # only the last tier may be unbounded
        ("size", 2**62),
        ("bytes_per_s", 0.0),
        ("bytes_per_s", np.nan),
        ("bytes_per_s", np.inf),
        ("latency_s", -1.0),
        ("latency_s", np.nan),
    ],
)
def test_malformed_fabric_records_get_a_status(field, value):
    record = FABRIC.copy()
    record[field] = value
    times, _, status = _core.collective_batch(**rows(fabrics=record))
    assert status.tolist() == [7, 7, 7]
    assert np.isnan(times).all()
    assert np.isnan(_core.collective_bound(record, 0, 1.0, 2, 1))
    assert _core.collective_with(record, 0, 1.0, 2, 1, 1)[2] == 7


def test_grid_arguments_are_checked():
    base = chip_records([presets.chip("phaze-tpuv4")])
    grid = _core.ChipGrid(base, [(0, [1.0, 2.0])], [], False, False)
    energy = energy_table().to_record()
    assert grid.size == 2
    for begin, end in ((-1, 1), (0, 3), (2, 1)):
        said = refusal(grid.filter, begin, end, TERMS, (0.0, 1e9), False, energy, 1e9)
        assert "expected a range within 2" in said
    said = refusal(grid.pick, np.array([2]), TERMS)
    assert "index: 2 is not accepted; expected 0 to 1" in said
    for axes in (
        [(len(_core.CHIP_DTYPE), [1.0])],
        [(-1, [1.0])],
        [(0, [float("nan")])],
        [(0, [1e300])],
    ):
        assert "axes" in refusal(_core.ChipGrid, base, axes, [], False, False)
    axes = [(i, [1.0] * 2**14) for i in range(5)]
    assert "2^53" in refusal(_core.ChipGrid, base, axes, [], False, False)


def test_empty_batches():
    none = {name: array[:0] for name, array in rows().items() if isinstance(array, np.ndarray)}
    times, algorithm, status = _core.collective_batch(**{**none, "fabrics": FABRIC, "threads": 4})
    assert (len(times), len(algorithm), len(status)) == (0, 0, 0)
    assert len(_core.chip_area(CHIPS[:0], TERMS, 1)) == 0


def test_results_are_read_only_and_inputs_untouched():
    arguments = rows()
    before = {k: v.copy() for k, v in arguments.items() if isinstance(v, np.ndarray)}
    for array in (*_core.collective_batch(**arguments), _core.chip_area(CHIPS, TERMS, 1)):
        assert not array.flags.writeable
    for name, array in before.items():
        assert arguments[name].tobytes() == array.tobytes()
    arguments["payload_bytes"].setflags(write=False)
    assert len(_core.collective_batch(**arguments)[0]) == 3


def test_the_gil_is_released():
    """Another Python thread runs on while a long batch is computed."""
    n = 2_000_000
    long = rows(
        fabric=np.zeros(n, np.int32),
        op=np.zeros(n, np.uint8),
        payload_bytes=np.full(n, 1e6),
        ranks=np.full(n, 64, np.int64),
        stride=np.ones(n, np.int64),
    )
    done = threading.Event()
    ticks = []

    def tick():
        while not done.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    ticker = threading.Thread(target=tick)
    ticker.start()
    begin = time.perf_counter()
    _core.collective_batch(**long)
    end = time.perf_counter()
    done.set()
    ticker.join()
    assert sum(begin < t < end for t in ticks) >= 3


def test_record_dtypes_have_no_padding_surprises():
    for dtype in (_core.CHIP_DTYPE, _core.AREA_DTYPE, _core.ENERGY_DTYPE, _core.FABRIC_DTYPE):
        assert dtype.itemsize == sum(dtype[name].itemsize for name in dtype.names)
