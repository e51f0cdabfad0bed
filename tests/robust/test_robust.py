"""Search under uncertainty: certificates against brute force, laws, refusals, the command."""

import json
import math

import numpy as np
import pytest
from case_counts import first_slow, slow_ones
from golden_files import refused_calls
from robust_cases import CLUSTER, MODEL, STEP, brute_force, case

import phaze_fast as pf
from phaze_fast.cli.main import main
from phaze_fast.errors import InvalidInputError
from phaze_fast.robust import (
    AREA_TERMS,
    AreaRange,
    Uncertainty,
    default_uncertainty,
    terms_mm2,
    widened_space,
)

SPACE = pf.ArchitectureSpace.published()


def same(one, other):
    return one.replace(name="chip") == other.replace(name="chip")


def check_certificate(seed):
    given = case(seed)
    tolerance = (0.05, 0.1, 0.3)[seed % 3]
    found = pf.search(
        MODEL, given.space, CLUSTER, STEP, uncertainty=given.box, tolerance=tolerance, threads=1
    )
    robust = found.robust
    chips, nominal, worst = brute_force(given)
    own = next(k for k, chip in enumerate(chips) if same(chip, robust.chip))
    start = next(k for k, chip in enumerate(chips) if same(chip, found.best.chip))
    assert robust.proven
    assert nominal[own]
    # What is certified holds at every point tried, for the robust chip and the nominal winner.
    assert worst[own] <= robust.max_regret * (1 + 1e-9)
    assert worst[start] <= robust.nominal.bound * (1 + 1e-9)
    # Regrets that are said to be attained exist: corners of the box are among the points.
    assert robust.attained <= robust.max_regret <= robust.bound * (1 + tolerance) * (1 + 1e-9)
    assert 1.0 <= robust.bound <= robust.attained
    # No chip is better by more than the tolerance, as far as the points tried can tell.
    assert robust.max_regret <= max(worst[nominal].min(), robust.bound) * (1 + tolerance) + 1e-9
    return worst[own] > 1.0


@pytest.mark.parametrize("block", slow_ones(range(2), 1))
def test_certificates_hold_against_brute_force(block):
    telling = [check_certificate(seed) for seed in range(4 * block, 4 * block + 4)]
    assert any(telling)


@first_slow("block", range(9), slow=2)
def test_certificates_hold_against_brute_force_on_many(block):
    for seed in range(8 + 10 * block, 18 + 10 * block):
        check_certificate(seed)


def test_a_box_of_zero_width_gives_todays_answer():
    few = SPACE[45_000:45_060]
    plain = pf.search("bert-large", few, CLUSTER, STEP)
    still = {name: [1.0, 1.0] for name in ("matrix_rate", "hbm_bandwidth", "tensor_area")}
    found = pf.search("bert-large", few, CLUSTER, STEP, uncertainty=still)
    assert found.robust.chip == plain.best.chip
    assert found.robust.time_s == plain.best.time_s
    assert found.robust.max_regret == found.robust.bound == found.robust.nominal.bound == 1.0
    assert found.robust.possible_winners == 1
    assert found.robust.proven
    assert found.outcome.winners == plain.outcome.winners


@pytest.mark.parametrize("seed", [4, 7])
def test_a_wider_box_has_no_fewer_possible_winners_and_no_less_regret(seed):
    given = case(seed)
    counts, attained = [], []
    for share in (0.0, 0.5, 1.0):
        box = {
            name: [1 + (low - 1) * share, 1 + (high - 1) * share]
            for name, (low, high) in given.box.items()
        }
        args = (MODEL, given.space, CLUSTER, STEP)
        robust = pf.search(*args, uncertainty=box, tolerance=0.1, threads=1).robust
        counts.append(robust.possible_winners)
        attained.append(robust.nominal.attained)
    assert counts == sorted(counts)
    assert counts[0] == 1
    assert attained[0] == 1.0
    assert attained[2] >= attained[1] / 1.1


def test_areas_at_corners_and_edges_are_those_of_sampling():
    rng = np.random.default_rng(3)
    space = pf.ArchitectureSpace.full_area()[::3000]
    for follows in (True, False):
        limit = space.spec.area.replace(follows_base=follows)
        spec = space.spec.replace(area=limit)
        own = pf.ArchitectureSpace(spec, space.selection)
        box = Uncertainty.load(
            {"tensor_area": [0.8, 1.2], "network_area": [0.5, 1.5], "buffer_area": [0.9, 1.3]},
            own,
            CLUSTER,
        )
        areas = AreaRange.of(own, own.chips, box)
        low, high = box.area_range()
        factors = low + (high - low) * rng.random((400, len(AREA_TERMS)))
        terms = terms_mm2(own, own.chips)
        base = terms_mm2(own, pf.hardware.chip_records([spec.base]))[0]
        most = limit.max_mm2 * (factors @ base / base.sum() if follows else np.ones(400))
        over = terms @ factors.T / most
        chips = np.arange(len(own))
        for rival in rng.choice(np.flatnonzero(areas.fits_somewhere), 5):
            there = over[rival] <= 1.0
            exact = areas.excess_where_fits(int(rival))
            sampled = np.maximum(over[:, there].max(axis=1, initial=1.0), 1.0)
            assert (sampled <= exact * (1 + 1e-9)).all()
            assert np.allclose(
                exact, [areas.excess_against(k, np.array([rival]))[0] for k in chips], rtol=1e-9
            )
        assert (areas.fits_always <= (over <= 1 + 1e-9).all(axis=1)).all()
        assert ((over <= 1).any(axis=1) <= areas.fits_somewhere).all()
    assert np.allclose(terms.sum(axis=1), own.area_mm2)


def test_the_default_box_names_its_sources_and_widens_the_space():
    box = default_uncertainty(SPACE, CLUSTER)
    assert len(box.constants) >= 12
    assert all(c.low <= c.nominal <= c.high and c.source for c in box.constants)
    wide = widened_space(SPACE, box)
    assert set(SPACE.index) < set(wide.index)
    nodes = pf.Cluster(devices=16, fabric="dgx-a100")
    names = {c.name for c in default_uncertainty(SPACE, nodes).constants}
    assert {"fabric_bandwidth.node", "fabric_latency.cluster"} <= names


@pytest.mark.parametrize(("box", "said"), refused_calls("boxes of constants"))
def test_bad_boxes_are_refused_in_one_line(box, said):
    with pytest.raises(InvalidInputError, match=said) as error:
        pf.search(MODEL, SPACE[:3], CLUSTER, STEP, uncertainty=box)
    assert "\n" not in str(error.value)
    assert "uncertainty" in str(error.value)


def test_a_tolerance_that_is_none_is_refused():
    with pytest.raises(InvalidInputError, match="tolerance"):
        pf.search(
            MODEL, SPACE[:3], CLUSTER, STEP, uncertainty={"clock": [0.9, 1.0]}, tolerance=math.nan
        )


def test_the_command_adds_what_the_contract_names(tmp_path, monkeypatch):
    monkeypatch.setenv("PHAZE_FAST_CACHE", str(tmp_path / "cache"))
    spec = case(4).space.spec
    space, box, out = tmp_path / "few.yaml", tmp_path / "box.yaml", tmp_path / "found.json"
    space.write_text(spec.to_yaml())
    box.write_text("matrix_rate: [0.9, 1.0]\ntensor_area: {low: 0.8, high: 1.2, source: me}\n")
    options = "--devices 4 --global-batch 8 --micro-batch 1 --tp 1 --baselines none --quiet --space"
    command = ["search", "gpt2-small", *options.split(), str(space)]
    assert main([*command, "--uncertainty", str(box), "--json", "-o", str(out)]) == 0
    document = json.loads(out.read_text())
    assert document["robust"]["proven"] is True
    assert document["robust"]["chip"]["tensor_core"]["count"] >= 2
    assert document["robust"]["max_regret"] >= 1.0
    assert document["nominal_max_regret"] >= document["robust"]["bound"]
    assert isinstance(document["possible_winners"], int)
    assert document["possible_winners"] >= 1
    assert document["constants"]["tensor_area"]["source"] == "me"
    box.write_text("matrix_rate: [1.0, 0.9]\n")
    assert main([*command, "--uncertainty", str(box), "--json"]) == 2
