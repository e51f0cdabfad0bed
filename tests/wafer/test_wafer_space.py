"""Spaces of wafers against a loop over their points: what is feasible, and why not the rest."""

import itertools
import json
from collections import Counter

import jsonschema
import pytest
from wafer_cases import DRAM, SPACE, SRAM, refusal

from phaze_fast.errors import InvalidInputError
from phaze_fast.schemas import schema
from phaze_fast.wafer import WAFER_SPACES, Wafer, WaferSpace, load_wafer, load_wafer_space


def by_loop(space):
    """The same enumeration, one validated wafer at a time."""
    found, rejected = [], Counter()
    for values in itertools.product(*space.axes.values()):
        data = space.base.model_dump()
        varied = dict(zip(space.axes, values, strict=True))
        varied |= {field: varied[source] for field, source in space.ties.items()}
        for field, value in varied.items():
            place = data
            *path, leaf = field.split(".")
            for part in path:
                place = place[part]
            place[leaf] = value
        try:
            found.append(Wafer.from_dict(data))
        except InvalidInputError as error:
            rejected.update({line.partition(":")[0] for line in str(error).splitlines()})
    return found, rejected


AXES = {
    "die.width_mm": (18.0, 25.0, 27.0),
    "die.hbm_stacks": (0, 2, 4),
    "die.chip.tensor_core.count": (8, 24),
    "rules.window_mm": (40.0, 215.0),
    "columns": (None, 2),
}


@pytest.mark.parametrize(
    "space",
    [
        WaferSpace(name="all", base=DRAM, axes=AXES),
        SPACE.replace(axes={**SPACE.axes, "die.height_mm": (25.0,), "die.width_mm": (18.0, 25.0)}),
    ],
    ids=["every-kind-of-field", "preset"],
)
def test_a_space_is_the_loop_over_its_grid(space):
    wafers, rejected = space.wafers()
    found, expected = by_loop(space)
    assert rejected == expected
    assert len(wafers) == len(found) == len(space.index)
    for wafer, other in zip(wafers, found, strict=True):
        assert wafer.replace(name="same", die=other.die, sources=(), notes="") == other.replace(
            name="same", sources=(), notes=""
        )
        assert wafer.die.replace(chip=other.die.chip) == other.die
        assert wafer.die.chip.replace(name="same", sources=(), notes="") == other.die.chip.replace(
            name="same", sources=(), notes="", die_area_mm2=None, power_w=None
        )


def test_the_space_that_comes_with_the_package():
    assert WAFER_SPACES.names == ("wafer-space",)
    wafers, rejected = SPACE.wafers()
    assert SPACE.grid_size == 1296
    assert 200 <= len(wafers) <= 1296
    assert set(rejected) == {"area", "shoreline"}
    assert len({wafer.name for wafer in wafers}) == len(wafers)
    assert {wafer.die.hbm_stacks for wafer in wafers} == {0, 1, 2, 4}
    for wafer in wafers[::50]:
        assert Wafer.from_dict(wafer.to_dict()) == wafer
        assert wafer.die.d2d_modules_x == wafer.die.d2d_modules_y
        assert wafer.chip.vector_core.count == wafer.chip.tensor_core.count
    assert SPACE.wafers()[0] is wafers
    again = WaferSpace.from_dict(json.loads(SPACE.to_json()))
    assert again == SPACE
    assert again.wafers() == (wafers, rejected)
    assert jsonschema.Draft202012Validator(schema("wafer-space")).is_valid(
        json.loads(SPACE.to_json())
    )


def test_where_the_base_stands():
    base = SPACE.wafers()[0][SPACE.base_index]
    assert SPACE.index[SPACE.base_index] == int(base.name.split("[")[1].split("]")[0])
    assert base.die.replace(chip=DRAM.die.chip) == DRAM.die
    assert WaferSpace(name="s", base=DRAM, axes={"rows": (1, 2)}).base_index is None
    ties = {"die.d2d_modules_y": "die.chip.tensor_core.count"}
    other = WaferSpace(name="s", base=SRAM, axes={"die.d2d_modules_x": (14,)}, ties=ties)
    assert other.wafers()[0][0].die.d2d_modules_y == 8
    assert other.base_index is None


def test_a_space_without_axes_is_its_base():
    space = WaferSpace(name="only", base="dram-wafer", axes={})
    (wafer,), rejected = space.wafers()
    assert (wafer.name, rejected, space.base_index) == ("only[0]", {}, 0)
    assert wafer.replace(name=DRAM.name, sources=DRAM.sources, notes=DRAM.notes) == DRAM


def test_names_of_points():
    axes = {"die.chip.buffer.capacity_bytes": ["64 MiB"], "die.width_mm": [25.0], "columns": [None]}
    (wafer,), _ = WaferSpace(name="s", base=DRAM, axes=axes).wafers()
    assert wafer.name == "s[0]: buffer.capacity_bytes 64 MiB, width_mm 25, columns None"
    assert wafer.chip.name == "dram-die: buffer.capacity_bytes 64 MiB"


def test_the_order_of_axes_counts():
    one = WaferSpace(name="s", base=DRAM, axes={"rows": (1, 2), "columns": (1, 2)})
    two = WaferSpace(name="s", base=DRAM, axes={"columns": (1, 2), "rows": (1, 2)})
    assert [w.grid for w in one.wafers()[0]] == [(1, 1), (2, 1), (1, 2), (2, 2)]
    assert [w.grid for w in two.wafers()[0]] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert one != two
    assert one.digest() != two.digest()


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        (
            {"die.hbm_stack": [1]},
            "axes: unknown field 'die.hbm_stack'; did you mean 'die.hbm_stacks'?",
        ),
        ({"die.chip.hbm.stacks": [1]}, "axes: unknown field 'die.chip.hbm.stacks'"),
        ({"name": ["a"]}, "axes: unknown field 'name'; accepted: a number of the wafer"),
        (
            {"die.hbm_stacks": [0, -1]},
            "axes.die.hbm_stacks: -1 is not accepted; expected a number >= 0",
        ),
        ({"die.hbm_stacks": []}, "axes.die.hbm_stacks: [] is not accepted; expected a list"),
        ({"die.hbm_stacks": 3}, "axes.die.hbm_stacks: 3 is not accepted; expected a list"),
        ({"columns": [2, 2]}, "axes.columns: a value is given twice"),
        ({"off_wafer.capacity_bytes": [1]}, "axes: dram-wafer has no off_wafer to vary"),
        (
            {"columns": list(range(1, 1002)), "rows": list(range(1, 1002))},
            "a grid of 1002001 points is more than 1000000",
        ),
        (3, "axes: 3 is not accepted; expected a mapping"),
    ],
)
def test_bad_axes(axes, words):
    assert words in refusal(lambda: WaferSpace(name="s", base=DRAM, axes=axes))


@pytest.mark.parametrize(
    ("ties", "words"),
    [
        ({"die.nothing": "columns"}, "ties: unknown field 'die.nothing'"),
        ({"columns": "rows"}, "ties.columns: a tied field cannot be an axis too"),
        ({"rows": "die.width_mm"}, "ties.rows: 25.5 is not accepted; expected a whole number"),
    ],
)
def test_bad_ties(ties, words):
    axes = {"columns": [1, 2], "die.width_mm": [25.5]}
    assert words in refusal(lambda: WaferSpace(name="s", base=DRAM, axes=axes, ties=ties))


def test_bad_names():
    assert "did you mean 'dram-wafer'?" in refusal(lambda: load_wafer("dram-wafr"))
    assert "wafer space: 'x' is neither" in refusal(lambda: load_wafer_space("x"))
    assert "'x' is neither a preset" in refusal(lambda: WaferSpace(name="s", base="x", axes={}))


def test_values_that_make_no_chip_together():
    axes = {"die.chip.buffer.bytes_per_cycle": [0.0]}
    space = WaferSpace(name="s", base=DRAM, axes=axes)
    assert refusal(space.wafers).startswith("buffer.bytes_per_cycle: 0 is not accepted")


def test_axes_of_the_stream():
    axes = {"off_wafer.bandwidth_bytes_per_s": ["150 GB/s", "1 TB/s"]}
    wafers, _ = WaferSpace(name="s", base="wse3-like", axes=axes).wafers()
    assert [w.off_wafer.bandwidth_bytes_per_s for w in wafers] == [150e9, 1e12]
    assert {w.die for w in wafers} == {load_wafer("wse3-like").die}


def test_a_space_from_a_file(tmp_path):
    file = tmp_path / "s.yaml"
    file.write_text("{name: s, base: sram-wafer, axes: {die.hbm_stacks: [0, 1]}}")
    space = load_wafer_space(file)
    assert [w.dies for w in space.wafers()[0]] == [64]
    assert space.wafers()[1] == {"area": 1}
