"""Presets against the figures their sources publish; schemas; clusters."""

import json

import jsonschema
import pytest

from phaze_fast import models
from phaze_fast.documents import parse_text
from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware import (
    ArchitectureSpace,
    Cluster,
    MeshFabric,
    TorusFabric,
    energy_table,
    presets,
)
from phaze_fast.schemas import KINDS, schema


@pytest.mark.parametrize(("name", "sram_gb"), [("dojo-d1", 0.44), ("wse-2", 40), ("wse-3", 44)])
def test_sram_only_chips_hold_what_is_published(name, sram_gb):
    tensor = presets.chip(name).tensor_core
    assert tensor.count * tensor.local_buffer_bytes / 2**30 == pytest.approx(sram_gb, rel=0.07)


@pytest.mark.parametrize(("name", "fp32_tflops"), [("a100-80", 19.5), ("h100", 66.9 * 1.83 / 1.98)])
def test_vector_units_reach_their_published_fp32_rate(name, fp32_tflops):
    chip = presets.chip(name)
    flops = 2 * chip.vector_core.ops_per_cycle * chip.clock_hz  # a lane multiplies and adds
    assert flops / 1e12 == pytest.approx(fp32_tflops, rel=0.01)


@pytest.mark.parametrize("name", presets.chip_names())
def test_every_chip_has_sources_and_prints(name):
    chip = presets.chip(name)
    assert chip.sources
    assert all(len(source) > 20 for source in chip.sources)
    assert str(chip).startswith(f"{name}: ")


@pytest.mark.parametrize("name", presets.fabric_names())
def test_every_fabric_has_sources_and_prints(name):
    fabric = presets.fabric(name)
    assert fabric.name == name
    assert fabric.sources
    assert str(fabric).startswith(f"{name}: ")


def test_fabrics_have_the_published_rates():
    assert presets.fabric("phaze-flat").bandwidth_bytes_per_s == 4 * 2**30
    dgx = presets.fabric("dgx-a100")
    assert [t.bandwidth_bytes_per_s for t in dgx.tiers] == [600e9 / 2, 200e9 / 8]
    dgx = presets.fabric("dgx-h100")
    assert [t.bandwidth_bytes_per_s for t in dgx.tiers] == [900e9 / 2, 400e9 / 8]
    pod = presets.fabric("tpuv4-pod")
    assert (pod.capacity, pod.link_bandwidth_bytes_per_s) == (4096, 50e9)


def test_buffer_bandwidth():
    assert presets.chip("a100-80").buffer_bandwidth_bytes_per_s == 5120 * 1.41e9


def test_rates_by_format():
    h100 = presets.chip("h100")
    assert h100.peak_flops("fp8") == 2 * h100.peak_flops("bf16")
    with pytest.raises(InvalidInputError, match="'fp8' is not accepted by a100-80"):
        presets.chip("a100-80").peak_flops("fp8")


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
    with pytest.raises(InvalidInputError, match="devices: 7 is not accepted by m"):
        mesh.sized(7)
    with pytest.raises(InvalidInputError):
        TorusFabric(name="t", dims=(3,), link_bandwidth_bytes_per_s=1.0).sized(0)


def test_capacity():
    assert presets.fabric("phaze-flat").capacity is None
    assert presets.fabric("dgx-a100").capacity is None
    assert presets.fabric("wafer-mesh").capacity == 64


# ---- schemas ----


@pytest.mark.parametrize("kind", KINDS)
def test_schemas_are_schemas(kind):
    jsonschema.Draft202012Validator.check_schema(schema(kind))


def valid(kind, data):
    return jsonschema.Draft202012Validator(schema(kind)).is_valid(data)


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
