import pytest
from golden_files import refused_calls
from hypothesis import given
from hypothesis import strategies as st

from phaze_fast import units
from phaze_fast.errors import InvalidInputError


@pytest.mark.parametrize(
    ("text", "unit", "expected"),
    [
        ("128 MiB", "bytes", 128 * 2**20),
        ("128MiB", "bytes", 128 * 2**20),
        ("1.5 GB", "bytes", 1.5e9),
        ("4.1 GB", "bytes", 4_100_000_000),
        ("16.1 kB", "bytes", 16_100),
        ("5 \u03bcs", "s", 5e-6),
        ("42", "bytes", 42),
        ("1e3", "bytes", 1000),
        ("1.2e12", "bytes/s", 1.2e12),
        ("200 Gb/s", "bytes/s", 25e9),
        ("1.2 TB/s", "bytes/s", 1.2e12),
        ("4 GiB/s", "bytes/s", 2**32),
        ("1.05 GHz", "Hz", 1.05e9),
        ("2 us", "s", 2e-6),
        ("10min", "s", 600),
        ("1h", "s", 3600),
        ("2 d", "s", 172_800),
        ("2 µs", "s", 2e-6),
        ("-3 ms", "s", -3e-3),
        ("400 W", "W", 400),
        ("250 mW", "W", 0.25),
        ("7 mm2", "mm2", 7),
        (5, "s", 5),
    ],
)
def test_parse(text, unit, expected):
    assert units.parse_quantity(text, unit) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize(("value", "unit"), [*refused_calls("quantities"), (10**400, "bytes")])
def test_refuse(value, unit):
    with pytest.raises(InvalidInputError, match="not accepted"):
        units.parse_quantity(value, unit)


@given(st.integers(0, 2**50), st.floats(1e-9, 1e5))
def test_what_is_written_for_people_reads_back_within_its_digits(size, time_s):
    read = units.parse_quantity
    assert read(units.format_bytes(size), "bytes") == pytest.approx(size, rel=1e-3)
    assert read(units.format_time(time_s), "s") == pytest.approx(time_s, rel=1e-3)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (units.format_bytes(0), "0 B"),
        (units.format_bytes(1023), "1023 B"),
        (units.format_time(0.0), "0 s"),
        (units.format_bandwidth(25e9), "25 GB/s"),
        (units.format_flops(989.4e12), "989.4 TFLOP/s"),
    ],
)
def test_format(written, expected):
    assert written == expected
