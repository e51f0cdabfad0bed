"""The best two chips for a fleet: brute force over all pairs, laws, the command."""

import itertools
import json
import math

import numpy as np
import pytest
from search_cases import published_space, some_with_every_hbm

import phaze_fast as pf
from phaze_fast.cli.main import main
from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware.package import Prices

CLUSTER = pf.Cluster(devices=8, fabric="tpuv4-pod")
STEP = pf.Training(global_batch=32, seq=256, micro_batch=4, tp=1)
MODELS = ["gpt2-small", "bert-large", "opt-1.3b"]


@pytest.mark.parametrize(("seed", "objective"), [(0, "time"), (1, "cost"), (2, "area")])
def test_the_pair_is_that_of_brute_force(seed, objective):
    space, weights = some_with_every_hbm(seed, 8), [1.0, 2.0, 1.5]
    asked = {"weights": weights, "objective": objective, "threads": 1}
    found = pf.search(MODELS, space, CLUSTER, STEP, portfolio=True, **asked)
    rows = [pf.evaluate_batch(model, space, CLUSTER, STEP, threads=1) for model in MODELS]
    usd = Prices().device_usd(space.area_mm2, space.chips["hbm_bytes"].astype(float)) * 8
    per_s = {"time": 1.0, "area": space.area_mm2 * 8, "cost": usd}[objective]
    logs = np.log([row.time_s * per_s for row in rows])
    shares = np.array(weights) / sum(weights)
    best = min(
        float(shares @ np.minimum(logs[:, a], logs[:, b]))
        for a, b in itertools.combinations_with_replacement(range(len(space)), 2)
    )
    pair = found.portfolio
    assert pair.proven
    assert math.isclose(pair.value, math.exp(best), rel_tol=1e-9)
    assert math.isclose(pair.bound, pair.value, rel_tol=1e-9)
    assert math.isclose(pair.single_value, math.exp((shares @ logs).min()), rel_tol=1e-9)
    assert pair.gain >= 1.0 - 1e-12
    assert sorted(name for names in pair.models for name in names) == sorted(MODELS)
    # The chips named have the values said, each for its models.
    places = [next(k for k, c in enumerate(space) if c == chip) for chip in pair.chips]
    of_chip = {n: k for k, names in zip(places, pair.models, strict=True) for n in names}
    own = sum(w * logs[i, of_chip[m]] for i, (m, w) in enumerate(zip(MODELS, shares, strict=True)))
    assert math.isclose(math.exp(own), pair.value, rel_tol=1e-9)


@pytest.mark.slow
def test_one_model_has_no_pair_and_the_command_writes_one(tmp_path, monkeypatch):
    monkeypatch.setenv("PHAZE_FAST_CACHE", str(tmp_path))
    with pytest.raises(InvalidInputError, match="portfolio: 1 models are not accepted") as error:
        pf.search("gpt2-small", published_space()[:3], CLUSTER, STEP, portfolio=True)
    assert "\n" not in str(error.value)
    out = tmp_path / "found.json"
    options = "--devices 8 --global-batch 32 --seq 256 --micro-batch 4 --tp 1 --hbm 32 --quiet"
    options += " --space examples/small_space.yaml --objective area --portfolio --json -o"
    assert main(["search", *MODELS[:2], *options.split(), str(out)]) == 0
    document = json.loads(out.read_text())
    assert document["objective"] == {"name": "area", "unit": "mm2 s a step"}
    assert document["portfolio"]["proven"] is True
    assert document["portfolio"]["gain"] >= 1.0
