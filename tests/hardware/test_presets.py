"""Chips and fabrics: every figure is the one its source gives; slices, clusters, schemas."""

import json
from functools import cache

import jsonschema
import numpy as np
import pytest
from golden_files import golden_yaml
from refusals import refusal

from phaze_fast import models
from phaze_fast.documents import parse_text
from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware import (
    Accelerator,
    ArchitectureSpace,
    Cluster,
    MeshFabric,
    SpaceSpec,
    Tier,
    TieredFabric,
    TorusFabric,
    Tuning,
    energy_table,
    fabric_record,
    presets,
)
from phaze_fast.schemas import KINDS, schema
from phaze_fast.software import load_precision, load_software

PUBLISHED = golden_yaml("published_hardware.yaml")


@pytest.mark.parametrize("name", PUBLISHED["chips"])
def test_a_chip_has_the_cited_figures(name):
    figures, chip = PUBLISHED["chips"][name], presets.chip(name)
    assert chip.name == name
    rel = 0.003 if "gib" in figures else 0.015
    assert chip.peak_flops() / 1e12 == pytest.approx(figures["tflops"], rel=rel)
    assert (chip.hbm is None) == ("gib" not in figures)
    if chip.hbm is not None:
        assert chip.hbm.capacity_bytes == figures["gib"] * 2**30
        rate = figures["tb_per_s"] * 1e12
        assert chip.hbm.bandwidth_bytes_per_s == pytest.approx(rate, rel=1e-12)
    if "watts" in figures:
        assert chip.power_w == figures["watts"]
        assert any("http" in source for source in chip.sources) or name == "b200"


@pytest.mark.parametrize("name", PUBLISHED["formats"])
def test_other_formats_have_the_cited_rates(name):
    for dtype, tflops in PUBLISHED["formats"][name].items():
        assert presets.chip(name).peak_flops(dtype) / 1e12 == pytest.approx(tflops, rel=0.003)


def test_a_format_that_a_chip_lacks_is_named():
    assert "'fp8' is not accepted by a100-80" in refusal(presets.chip("a100-80").peak_flops, "fp8")


@pytest.mark.parametrize(
    ("name", "tflops", "rel"),
    [("a100-80", 19.5, 0.01), ("h100", 66.9 * 1.83 / 1.98, 0.01), ("mi300x", 163.4, 0.001)],
)
def test_vector_units_reach_their_published_fp32_rate(name, tflops, rel):
    chip = presets.chip(name)
    flops = 2 * chip.vector_core.ops_per_cycle * chip.clock_hz  # a lane multiplies and adds
    assert flops / 1e12 == pytest.approx(tflops, rel=rel)


def test_buffers_have_the_cited_rates_and_sizes():
    hbm_rate = presets.chip("tpuv5e").hbm.bandwidth_bytes_per_s
    cited = (
        ("a100-80", 5120 * 1.41e9, 0),
        ("mi300x", 17.2e12, 0.001),
        ("tpuv5e", 22 * hbm_rate, 0.03),
    )
    for name, rate, rel in cited:
        chip = presets.chip(name)
        assert chip.buffer_bandwidth_bytes_per_s == pytest.approx(rate, rel=rel, abs=0)
    for name, sram_gb in {"dojo-d1": 0.44, "wse-2": 40, "wse-3": 44}.items():
        tensor = presets.chip(name).tensor_core
        assert tensor.count * tensor.local_buffer_bytes / 2**30 == pytest.approx(sram_gb, rel=0.07)


@pytest.mark.parametrize("load", [presets.chip, presets.fabric])
def test_every_preset_has_sources_and_prints(load):
    for name in presets.chip_names() if load is presets.chip else presets.fabric_names():
        preset = load(name)
        assert preset.name == name
        assert preset.sources
        assert all(len(source) > 20 for source in preset.sources) or load is presets.fabric
        assert str(preset).startswith(f"{name}: ")


@pytest.mark.parametrize(
    ("load", "wrong", "meant"),
    [
        (energy_table, "7nn", "7nm"),
        (load_precision, "mxpf8", "mxfp8"),
        (load_software, "deepspeeed", "deepspeed"),
        (models.load, "gpt3-157b", "gpt3-175b"),
        (ArchitectureSpace.load, "tpuv4-aera", "tpuv4-area"),
        (ArchitectureSpace.tpuv4_area().column, "tensor_core.widht", "tensor_core.width"),
    ],
)
def test_an_unknown_name_is_refused_with_what_is_meant(load, wrong, meant):
    assert f"did you mean '{meant}'" in refusal(load, wrong, error=InvalidInputError)


# ---- what a chip's times rest on ----


def test_every_chip_says_what_its_times_rest_on():
    for name in presets.chip_names():
        calibration = presets.chip(name).calibration
        assert calibration.chip == name
        assert calibration.fitted == (name == "h200")
        assert bool(calibration.note) != calibration.fitted
        assert (calibration.state == "not fitted") == (
            not presets.chip(name).tuning.fitted and not calibration.carried_from
        )
        if calibration.carried_from:
            assert calibration.carried_from in presets.chip_names()


def test_constants_that_are_carried_over_are_those_of_the_chip_they_come_from():
    """A preset that names h200 uses its constants, but for clock, tiles and power limits."""

    def of(chip, field):
        value = getattr(chip.tuning, field)
        if field != "formats":
            return value
        return {name: own.replace(sustained_flops=None) for name, own in value.items()}

    own = {"clock_factor", "blocks", "sustained_flops", "carried_from"}
    own |= {"fitted", "fitted_range", "sources", "step_flops"}
    for name in presets.chip_names():
        chip = presets.chip(name)
        source = chip.calibration.carried_from
        if source and not chip.tuning.fitted:
            theirs = presets.chip(source)
            assert chip.launch_latency_s == theirs.launch_latency_s
            # There is no flash attention 2 for the V100; the H100 of 500 W limits attention too.
            limited = name in ("v100-32", "h100-96")
            other = {"attention", "attention_kernels"} if limited else set()
            for field in set(Tuning.model_fields) - own - other - {"dispatch_s"}:
                assert of(chip, field) == of(theirs, field), (name, field)


def test_a_chip_of_ones_own_is_not_fitted_and_a_design_never_is():
    text = presets.chip("h200").to_dict()
    mine = Accelerator.from_dict({**text, "name": "mine", "tuning": {}})
    assert mine.calibration.state == "not fitted"
    assert "mine" in mine.calibration.note
    spec = {"name": "s", "axes": {"tensor_core.count": [100]}}
    for base, state, source in (
        ("h200", "carried over", "h200"),
        ("a100-80", "carried over", "a100-80"),
        ("b200", "carried over", "b200"),
        ("tpuv4", "not fitted", ""),
    ):
        chip = ArchitectureSpace(SpaceSpec.from_dict({**spec, "base": base}))[0]
        assert chip.calibration.state == state
        assert chip.calibration.carried_from == source
        assert chip.calibration.to_dict()["fitted"] is False
        assert chip.tuning.efficiency == presets.chip(base).tuning.efficiency


# ---- fabrics ----


@pytest.mark.parametrize("name", PUBLISHED["tiers"])
def test_tiers_have_the_cited_sizes_and_rates(name):
    fabric, (sizes, cited) = presets.fabric(name), zip(*PUBLISHED["tiers"][name], strict=True)
    assert tuple(tier.size for tier in fabric.tiers) == sizes
    rates = [tier.share_bytes_per_s / 1e9 for tier in fabric.tiers]
    assert rates == pytest.approx(list(cited), rel=1e-12)
    record = fabric_record(fabric)[0]
    assert record["bytes_per_s"][: len(sizes)] / 1e9 == pytest.approx(rates, rel=1e-12)


def test_fabrics_hold_what_is_published():
    assert presets.fabric("phaze-flat").bandwidth_bytes_per_s == 4 * 2**30
    assert presets.fabric("phaze-flat").capacity is presets.fabric("dgx-a100").capacity is None
    assert presets.fabric("wafer-mesh").capacity == 64
    nvl72 = presets.fabric("nvl72-gb200")
    assert 2 * 72 * nvl72.tiers[0].bandwidth_bytes_per_s == pytest.approx(130e12, rel=0.004)
    assert presets.fabric("llama3-roce").capacity == 24_576
    assert presets.fabric("llama3-roce").tiers[1].size * 8 == 3072


@pytest.mark.parametrize("name", PUBLISHED["tori"])
def test_tori_have_the_cited_chips_and_bandwidth(name):
    pod, (chips, gigabytes_per_s) = presets.fabric(name), PUBLISHED["tori"][name]
    assert pod.capacity == chips
    ports = 2 * len(pod.dims)
    both_ways = 2 * ports * pod.link_bandwidth_bytes_per_s
    assert both_ways / 1e9 == pytest.approx(gigabytes_per_s)


def test_a_slice_wraps_only_where_its_pod_does():
    def wraps(name, devices):
        fabric = Cluster(devices=devices, fabric=name).fabric
        return fabric.dims, fabric_record(fabric)["wrap"][0, : len(fabric.dims)].tolist()

    assert wraps("tpuv5e-pod", 256) == ((16, 16), [1, 1])
    assert wraps("tpuv5e-pod", 128) == ((16, 8), [1, 0])
    assert wraps("tpuv6e-pod", 32) == ((8, 4), [0, 0])
    assert wraps("tpuv5p-pod", 512) == ((8, 8, 8), [1, 1, 1])
    assert wraps("tpuv5p-pod", 32) == ((4, 4, 2), [1, 1, 0])
    assert wraps("tpuv4-pod", 8) == ((2, 2, 2), [1, 1, 1])  # as it always was
    mixed = TorusFabric(name="t", dims=(6, 4), link_bandwidth_bytes_per_s=1.0, wrap_multiple=4)
    assert fabric_record(mixed)["wrap"][0].tolist() == [0, 1, 0, 0]


def test_oversubscription_is_a_share_of_the_port():
    def fabric(factor):
        return TieredFabric(
            name="f",
            tiers=(
                Tier(name="node", size=8, bandwidth_bytes_per_s=100.0),
                Tier(name="top", bandwidth_bytes_per_s=10.0, oversubscription=factor),
            ),
        )

    assert fabric_record(fabric(1.0))["bytes_per_s"][0, :2].tolist() == [100.0, 10.0]
    assert fabric_record(fabric(4.0))["bytes_per_s"][0, :2].tolist() == [100.0, 2.5]
    assert "(1:4)" in str(fabric(4.0))
    assert "(1:" not in str(fabric(1.0))
    for bad in (0.5, 0, -1, float("inf"), float("nan")):
        with pytest.raises(InvalidInputError, match="oversubscription"):
            Tier(name="t", bandwidth_bytes_per_s=1.0, oversubscription=bad)


def test_a_full_mesh_needs_a_size():
    mesh = {"name": "m", "links": "full-mesh", "bandwidth_bytes_per_s": 1.0}
    for size in (None, 1):
        with pytest.raises(InvalidInputError, match="a full mesh needs 2 or more"):
            TieredFabric(name="f", tiers=({**mesh, "size": size},))
    record = fabric_record(presets.fabric("mi300x-platform"))
    assert record["full_mesh"][0].tolist() == [1, 0, 0, 0]
    assert not np.any(fabric_record(presets.fabric("tpuv5e-pod"))["full_mesh"])


# ---- clusters ----


@pytest.mark.parametrize(
    ("devices", "dims"),
    [
        (4096, (16, 16, 16)),
        (1024, (16, 8, 8)),
        (64, (4, 4, 4)),
        (8, (2, 2, 2)),
        (48, (4, 4, 3)),
        (1, (1, 1, 1)),
        (13, (13, 1, 1)),
    ],
)
def test_a_torus_is_cut_to_the_most_cubical_slice(devices, dims):
    assert Cluster(devices=devices, fabric=presets.fabric("tpuv4-pod")).fabric.dims == dims


def test_slices_exist_only_where_the_grid_has_them():
    mesh = MeshFabric(name="m", dims=(4, 6), link_bandwidth_bytes_per_s=1.0)
    assert mesh.sized(18).dims == (3, 6)
    assert mesh.sized(24).dims == (4, 6)
    assert isinstance(mesh.sized(4), MeshFabric)
    assert "devices: 7 is not accepted by m" in refusal(mesh.sized, 7)
    torus = TorusFabric(name="t", dims=(3,), link_bandwidth_bytes_per_s=1.0)
    assert "devices: 0 is not accepted by t" in refusal(torus.sized, 0)


# ---- schemas ----


@pytest.mark.parametrize("kind", KINDS)
def test_schemas_are_schemas(kind):
    jsonschema.Draft202012Validator.check_schema(validator(kind).schema)


@cache
def validator(kind):
    return jsonschema.Draft202012Validator(schema(kind))


def valid(kind, data):
    return validator(kind).is_valid(data)


def test_schemas_accept_what_we_write_and_refuse_what_we_refuse():
    for name in presets.chip_names():
        data = json.loads(presets.chip(name).to_json())
        assert valid("chip", data)
        assert not valid("chip", {**data, "colour": 1})
    for name in presets.fabric_names():
        assert valid("fabric", json.loads(presets.fabric(name).to_json()))
    for name in models.names():
        assert valid("model", json.loads(models.load(name).to_json()))
    assert valid("energy-table", json.loads(energy_table().to_json()))
    assert valid("space", json.loads(ArchitectureSpace.tpuv4_area().spec.to_json()))
    assert valid(
        "cluster",
        {"devices": 4, "fabric": {"kind": "flat", "name": "f", "bandwidth_bytes_per_s": "1 GB/s"}},
    )
    assert not valid(
        "cluster",
        {"devices": 0, "fabric": {"kind": "flat", "name": "f", "bandwidth_bytes_per_s": 1}},
    )


def test_schemas_accept_the_short_forms_of_a_file():
    text = "{name: s, base: tpuv4, axes: {tensor_core.width: {powers_of_two: [1, 8]}, clock_hz: [1.0e9]}}"
    assert valid("space", parse_text(text, "t"))
    assert valid("cluster", parse_text("{devices: 64, fabric: tpuv4-pod, chip: h100}", "t"))
