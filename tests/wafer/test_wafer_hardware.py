"""Wafers: dies, rules of manufacture, products, laws, spaces."""

import itertools
import json
import math
from collections import Counter

import jsonschema
import pytest
from golden_files import refused_calls
from hypothesis import given
from hypothesis import strategies as st

from phaze_fast.cli.main import main
from phaze_fast.cost import gemm
from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware import FULL_AREA, Hbm, area, presets
from phaze_fast.schemas import schema
from phaze_fast.wafer import (
    WAFER_SPACES,
    WAFERS,
    Die,
    Layout,
    OffWafer,
    Problem,
    Wafer,
    WaferRules,
    WaferSpace,
    broken_rules,
    load_wafer,
    load_wafer_space,
    wafer_totals,
)
from phaze_fast.wafer.mapping.problem import network_chip

DRAM = load_wafer("dram-wafer")
SRAM = load_wafer("sram-wafer")
SPACE = load_wafer_space("wafer-space")
SMALL = SRAM.die.chip.replace(
    tensor_core=SRAM.die.chip.tensor_core.replace(count=1),
    vector_core=SRAM.die.chip.vector_core.replace(count=1),
    buffer=SRAM.die.chip.buffer.replace(capacity_bytes=2**20),
)


def with_die(wafer, **changes):
    return wafer.replace(die=wafer.die.replace(**changes))


def changed(die=(), **fields):
    """Return the DRAM wafer with other fields, those of its dies in `die`."""
    return with_die(DRAM, **dict(die)).replace(**fields)


def refusal(make, **fields):
    """Return why a wafer or a space is refused: a line for each rule that it breaks."""
    with pytest.raises(InvalidInputError) as caught:
        make(**fields)
    return str(caught.value)


# ---- each rule alone ----


@pytest.mark.parametrize(
    ("changes", "message"), refused_calls("rules of manufacture of a wafer"), ids=str
)
def test_each_rule_alone_gives_both_figures(changes, message):
    assert refusal(changed, **changes) == message


@pytest.mark.parametrize(
    ("wafer", "die", "message"),
    [
        (SRAM, {"d2d_modules_x": 46}, "46 D2D modules need 25.3 mm of the left and right edges; expected at most height_mm, 25 mm"),
        (DRAM, {"d2d_modules_y": 15, "hbm_stacks": 3}, "15 D2D modules and 2 HBM stacks need 25.25 mm of the top edge; expected at most width_mm, 25 mm"),
    ],
)  # fmt: skip
def test_modules_and_stacks_fit_the_edges_of_a_die(wafer, die, message):
    assert refusal(lambda: with_die(wafer, chip=SMALL, **die)) == f"shoreline: {message}"


def test_all_faults_are_listed():
    text = refusal(
        lambda: DRAM.replace(
            die=DRAM.die.replace(width_mm=34.0, hbm_stacks=8, d2d_modules_x=400),
            columns=12,
            dead=((90, 90),),
            reserved_bytes="1 PB",
        )
    )
    rules = [line.partition(":")[0] for line in text.splitlines()]
    assert rules == ["reticle", "shoreline", "shoreline", "area", "window", "memory", "dead"]


def test_faults_of_a_file_name_the_file(tmp_path):
    file = tmp_path / "w.yaml"
    file.write_text(DRAM.to_yaml().replace("hbm_stacks: 2", "hbm_stacks: 6"))
    lines = refusal(lambda: load_wafer(file)).splitlines()
    assert all(line.startswith(f"{file}: ") for line in lines)
    assert {line.split(": ")[1] for line in lines} == {"shoreline", "area"}


def test_a_die_may_stand_either_way_round():
    die = Die(width_mm=33.0, height_mm=26.0, chip=SMALL, d2d_modules_x=1, d2d_modules_y=1)
    for turned in (die, die.replace(width_mm=26.0, height_mm=33.0)):
        assert Wafer(name="w", die=turned).dies == 6 * 8


def test_the_area_of_a_product_is_known():
    wse = load_wafer("wse3-like")
    assert wse.die.chip_area_mm2 > wse.die.outline_mm2
    assert refusal(lambda: with_die(wse, published=False)).startswith("area: circuits of ")


def test_lengths_that_fit_exactly_are_accepted():
    die = Die(width_mm=5.5, height_mm=1.1, chip=SMALL, d2d_modules_x=2, d2d_modules_y=10)
    rules = WaferRules(window_mm=0.3 + 11 * 5.5, d2d_module_mm2=1e-6)
    wafer = Wafer(name="w", die=die.replace(published=True), gap_mm=0.03, rules=rules)
    assert wafer.grid[0] == 11


# ---- bad input ----


@pytest.mark.parametrize(("changes", "words"), refused_calls("fields of dies and wafers"))
def test_bad_fields_of_dies_and_wafers(changes, words):
    assert words in refusal(changed, **changes)


def test_a_die_takes_a_chip_by_name():
    die = Die(width_mm=20.0, height_mm=20.0, chip="dojo-d1", d2d_modules_x=1, d2d_modules_y=1)
    assert die.chip == presets.chip("dojo-d1")
    # All its SRAM is local to its cores, which leaves a model no memory.
    text = refusal(lambda: Wafer(name="w", die=die.replace(published=True)))
    assert text.startswith("memory: 0 bytes of memory a die leave nothing")


# ---- presets ----


@pytest.mark.parametrize("name", WAFERS.names)
def test_every_preset_is_valid_prints_and_comes_back(name):
    wafer = load_wafer(name)
    assert wafer.name == name
    assert broken_rules(wafer) == []
    assert wafer.sources
    assert wafer.notes
    assert str(wafer).startswith(f"{name}: ")
    assert "\n" not in str(wafer)
    assert Wafer.from_dict(json.loads(wafer.to_json())) == wafer
    assert jsonschema.Draft202012Validator(schema("wafer")).is_valid(json.loads(wafer.to_json()))
    assert hash(wafer) == hash(Wafer.from_dict(wafer.to_dict()))


@pytest.mark.parametrize(
    ("name", "grid", "pflops", "sram_gb", "sram_pb_per_s", "area_mm2"),
    [
        # Cerebras WSE-2 data sheet, 2021; 7.5 PFLOP/s dense, Hot Chips 34, 2022.
        ("wse2-like", (12, 7), 7.5, 40, 20, 46_225),
        # Cerebras WSE-3 data sheet, 2024; 125 PFLOP/s count sparsity, eight times the dense rate.
        ("wse3-like", (12, 7), 125 / 8, 44, 21, 46_225),
        # Tesla AI Day, 2021: 9 PFLOP/s and 11 GB a tile; 25 dies of 645 mm2.
        ("dojo-tile-like", (5, 5), 9.05, 11.3, 354 * 25 * 400e9 / 1e15, None),
    ],
)
def test_products_have_their_published_figures(
    name, grid, pflops, sram_gb, sram_pb_per_s, area_mm2
):
    wafer = load_wafer(name)
    assert wafer.grid == grid
    assert wafer.peak_flops() / 1e15 == pytest.approx(pflops, rel=0.015)
    assert wafer.dies * wafer.memory_bytes / 1e9 == pytest.approx(sram_gb, rel=0.03)
    rate = wafer.dies * wafer.tiers()[0].bandwidth_bytes_per_s
    assert rate / 1e15 == pytest.approx(sram_pb_per_s, rel=1e-3)
    if area_mm2:
        assert wafer.area_mm2 == pytest.approx(area_mm2, rel=1e-3)
    else:
        assert wafer.die.outline_mm2 == pytest.approx(645, rel=1e-3)


def test_links_of_products():
    # 576 lanes of 112 Gb/s on four edges: 2 TB/s per edge and direction.
    assert load_wafer("dojo-tile-like").link_bytes_per_s == pytest.approx([2.016e12] * 2)
    x, y = load_wafer("wse2-like").link_bytes_per_s
    assert (x, y) == pytest.approx((154 * 4 * 1.1e9, 66 * 4 * 1.1e9))
    # 220 Pb/s: four links of 32 bits per cycle, both ways, at every core.
    assert pytest.approx(220e15, rel=0.1) == 850_000 * 8 * 32 * 1.1e9


def test_streams_of_products():
    wse = load_wafer("wse3-like")
    stream = wse.tiers()[-1]
    assert stream.name == "stream"
    assert stream.bandwidth_bytes_per_s * 84 == pytest.approx(150e9)
    assert stream.capacity_bytes == wse.off_wafer.capacity_bytes // 84
    assert [tier.name for tier in wse.replace(off_wafer=None).tiers()] == ["sram"]


@pytest.mark.parametrize(
    ("name", "published_w", "least", "most"),
    [
        # Tesla AI Day, 2021: 400 W a D1 die, 25 of them; the model says 3% more.
        ("dojo-tile-like", 25 * 400.0, 0.95, 1.1),
        # Cerebras CS-2: 15 kW. The model says 2.2 times as much: all of the 20 PB/s at the energy
        # of a 32 KiB SRAM is 21 kW by itself, and real work never reads at that rate.
        ("wse2-like", 15e3, 1.5, 2.4),
    ],
)
def test_peak_power_of_products(name, published_w, least, most):
    totals = wafer_totals(load_wafer(name))
    assert least <= totals.peak_w / published_w <= most


def test_costs_and_spares():
    """Tested dies cost more with their number and less with spares; a monolith is one wafer."""
    tile = load_wafer("dojo-tile-like")
    none, two = wafer_totals(tile), wafer_totals(tile, spares=2)
    assert none.assembly_yield == pytest.approx(0.99**25)
    expected = sum(math.comb(25, k) * 0.01**k * 0.99 ** (25 - k) for k in range(3))
    assert two.assembly_yield == pytest.approx(expected)
    assert two.cost_usd == pytest.approx(none.cost_usd * 0.99**25 / expected)
    whole = wafer_totals(load_wafer("wse2-like"))
    assert (whole.assembly_yield, whole.cost_usd) == (1.0, 9346.0)
    stacks = (
        wafer_totals(DRAM).cost_usd
        - wafer_totals(with_die(DRAM, hbm_stacks=0, published=True).replace(rows=5)).cost_usd
    )
    assert stacks * 0.99**40 == pytest.approx(40 * 32e9 / 2**30 * 10.0)


def test_the_network_of_a_die_slows_products_alone():
    tile = load_wafer("dojo-tile-like")
    shared = with_die(tile, network_bytes_per_s=None)
    times = [
        Problem("bertlarge", wafer).mapping(Layout(5, 5, 1, 64)).score()["compute_s"][0]
        for wafer in (shared, tile, with_die(tile, network_bytes_per_s=1e12))
    ]
    assert times[0] < times[1] < times[2]
    assert network_chip(shared) == shared.chip


def test_presets_have_local_buffers():
    """Products ran at half of peak where a core's blocks of outputs were too small for its port."""
    for wafer in (DRAM, SRAM):
        chip = wafer.chip
        assert chip.tensor_core.local_buffer_bytes == 512 * 1024
        shape = {"m": 4096, "k": 4096, "n": 4096}
        starved = chip.replace(tensor_core=chip.tensor_core.replace(local_buffer_bytes=None))
        assert gemm(chip, **shape).time_s < 0.7 * gemm(starved, **shape).time_s
    attention = load_wafer("dojo-tile-like").chip.tuning.attention
    assert attention is not None
    assert attention.least_queries == 1


# ---- properties ----


def test_a_die_of_dram_wafer():
    chip = DRAM.chip
    assert chip.hbm == Hbm(capacity_bytes="32 GB", bandwidth_bytes_per_s=2 * 819e9, stacks=2)
    assert chip.replace(hbm=None) == DRAM.die.chip
    assert area(chip, FULL_AREA).total_mm2 == pytest.approx(DRAM.die.chip_area_mm2, rel=1e-12)
    assert SRAM.chip == SRAM.die.chip
    # Links of a column cross the band of stacks, beyond the reach of an advanced package.
    assert DRAM.link_bytes_per_s == pytest.approx((14 * 512e9, 14 * 512e9 * 0.17))
    assert SRAM.link_bytes_per_s == (14 * 512e9, 14 * 512e9)
    flat = DRAM.replace(rules=DRAM.rules.replace(d2d_reach_mm=13.0))
    assert flat.link_bytes_per_s == SRAM.link_bytes_per_s


def test_tiers_and_the_reserve():
    wafer = DRAM.replace(
        reserved_bytes="2 GB",
        dead=((0, 0),),
        off_wafer=OffWafer(capacity_bytes="39 TB", bandwidth_bytes_per_s="390 GB/s"),
    )
    sram, dram, stream = wafer.tiers()
    assert (sram.name, sram.capacity_bytes) == ("sram", 128 * 2**20)
    assert sram.bandwidth_bytes_per_s == 5120 * 1.05e9
    assert (dram.name, dram.capacity_bytes) == ("dram", 30 * 10**9)
    assert dram.capacity_bytes == wafer.memory_bytes
    assert (stream.capacity_bytes, stream.bandwidth_bytes_per_s) == (10**12, 1e10)
    small = SRAM.replace(reserved_bytes="20 MiB")
    assert small.tiers()[0].capacity_bytes == small.memory_bytes == 300 * 2**20


def test_dead_dies():
    wafer = DRAM.replace(dead=[[7, 4], [1, 0]])
    assert wafer.dead == ((1, 0), (7, 4))
    assert wafer == DRAM.replace(dead=((1, 0), (7, 4)))
    assert wafer.positions == 40
    assert wafer.dies == 38
    assert not wafer.alive(1, 0)
    assert not wafer.alive(7, 4)
    assert wafer.alive(0, 1)
    assert wafer.die_map() == "#.######\n########\n########\n########\n#######."
    assert wafer.peak_flops() == 38 * DRAM.die.chip.peak_flops()
    assert "(2 dead)" in str(wafer)
    with pytest.raises(
        InvalidInputError, match="8, 0 is not accepted by dram-wafer; expected 0 to 7"
    ):
        wafer.alive(8, 0)
    assert Wafer.from_dict(wafer.to_dict()) == wafer


def test_yield_is_negative_binomial():
    wafer = DRAM.replace(defects_per_cm2=0.1, known_good_dies=False)
    assert wafer.die_yield == pytest.approx((1 + 6.25 * 0.1 / 2) ** -2)
    assert wafer.expected_dead == pytest.approx(40 * (1 - wafer.die_yield))
    assert wafer.replace(known_good_dies=True).expected_dead == 0
    poisson = wafer.replace(rules=WaferRules(defect_clustering=1e6))
    assert poisson.die_yield == pytest.approx(math.exp(-0.625), rel=1e-5)
    assert wafer.replace(defects_per_cm2=0.0).die_yield == 1.0


def test_peaks_by_format():
    assert load_wafer("dojo-tile-like").peak_flops("fp8") == pytest.approx(9.06e15, rel=1e-3)
    with pytest.raises(InvalidInputError, match="'fp8' is not accepted by dram-die"):
        DRAM.peak_flops("fp8")


# ---- command line ----


def test_wafers_on_the_command_line(capsys, tmp_path):
    assert main(["show", "wafer", "--json"]) == 0
    assert [w["name"] for w in json.loads(capsys.readouterr().out)] == list(WAFERS.names)
    assert main(["show", "wafer"]) == 0
    assert "wse2-like" in capsys.readouterr().out
    assert main(["show", "wafer", "dojo-tile-like"]) == 0
    assert "#####\n" in capsys.readouterr().out
    assert main(["show", "wafer", "dram-wafer", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["grid"], shown["live_dies"]) == ([8, 5], 40)
    for kind, record in (("wafer", DRAM), ("wafer-space", SPACE)):
        file = tmp_path / f"{kind}.yaml"
        file.write_text(record.to_yaml())
        assert main(["check", str(file)]) == 0
        assert f"a valid {kind}" in capsys.readouterr().out.replace("\n", "")


# ---- laws ----


def test_more_stacks_mean_fewer_dies():
    roomy = with_die(DRAM, chip=SMALL, d2d_modules_y=0, height_mm=20.0)
    dies = [with_die(roomy, hbm_stacks=k).dies for k in range(5)]
    assert dies == sorted(dies, reverse=True)
    assert dies == [80, 48, 48, 32, 32]
    memory = [with_die(roomy, hbm_stacks=k).memory_bytes for k in range(1, 5)]
    assert memory == sorted(memory)
    assert SRAM.dies > DRAM.dies


def test_stacks_stand_between_rows():
    depth = DRAM.rules.hbm_stack_depth_mm
    # Two stacks of 8.5 mm fit side by side beside a die of 25 mm, four do not.
    for stacks, between in ((0, 0), (1, 1), (2, 1), (4, 2)):
        wafer = with_die(DRAM, chip=SMALL, d2d_modules_y=0, hbm_stacks=stacks)
        one, two = (wafer.extent_mm(1, rows)[1] for rows in (1, 2))
        assert two - one == pytest.approx(25.0 + 0.5 + between * depth)
        assert one == pytest.approx(25.0 + min(stacks, 2) * depth)


@st.composite
def drawn_wafers(draw):
    rules = WaferRules(window_mm=draw(st.floats(60.0, 300.0)))
    die = Die(
        width_mm=draw(st.floats(4.0, 33.0)),
        height_mm=draw(st.floats(4.0, 33.0)),
        chip=SMALL,
        d2d_modules_x=draw(st.integers(0, 64)),
        d2d_modules_y=draw(st.integers(0, 64)),
        hbm_stacks=draw(st.integers(0, 6)),
    )
    try:
        return Wafer(name="drawn", die=die, gap_mm=draw(st.floats(0.0, 5.0)), rules=rules)
    except InvalidInputError:
        return None


@given(drawn_wafers())
def test_the_grid_fits_and_no_more_would(wafer):
    if wafer is None:
        return
    window = wafer.rules.window_mm
    columns, rows = wafer.grid
    assert max(wafer.size_mm) <= window * (1 + 1e-9)
    assert wafer.extent_mm(columns + 1, rows)[0] > window
    assert wafer.extent_mm(columns, rows + 1)[1] > window
    for changes in ({"columns": columns + 1}, {"rows": rows + 1}):
        assert refusal(lambda c=changes: wafer.replace(**c)).startswith("window: ")
    assert wafer.dies * wafer.die.outline_mm2 <= wafer.area_mm2 * (1 + 1e-9)


@given(drawn_wafers())
def test_links_never_exceed_their_shoreline(wafer):
    if wafer is None:
        return
    die, rules = wafer.die, wafer.rules
    per_mm = rules.d2d_module_bytes_per_s / rules.d2d_module_mm * (1 + 1e-8)
    free = die.width_mm - die.stacks_on_edges[0] * rules.hbm_stack_mm
    assert wafer.link_bytes_per_s[0] <= die.height_mm * per_mm
    assert wafer.link_bytes_per_s[1] <= free * per_mm + 1e-3
    assert sum(die.stacks_on_edges) == die.hbm_stacks


# ---- space ----


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


MANY = {side: list(range(1, 1002)) for side in ("columns", "rows")}
SAID = "a grid of 1002001 points is more than 1000000"


@pytest.mark.parametrize(("axes", "words"), [*refused_calls("axes of a wafer space"), (MANY, SAID)])
def test_bad_axes(axes, words):
    assert words in refusal(lambda: WaferSpace(name="s", base=DRAM, axes=axes))


@pytest.mark.parametrize(("ties", "words"), refused_calls("ties of a wafer space"))
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
