"""Wafers, efforts and readers of answers that tests of `phaze-fast wafer` share."""

import json

from phaze_fast.wafer import load_wafer

DRAM = load_wafer("dram-wafer")
SMALL = DRAM.replace(columns=3, rows=2)
EFFORT = ["--global-batch", "64", "--seeds", "1", "--steps", "500", "--promising", "1"]
QUICK = [*EFFORT, "--budget", "2"]


def document(result):
    code, out, err = result
    assert code == 0, err
    return json.loads(out)


def refused(result):
    """The one line of a refusal."""
    code, out, err = result
    assert (code, out) == (2, ""), err
    assert "Traceback" not in err
    assert "internal error" not in err
    assert all(line.startswith("phaze-fast: ") for line in err.splitlines())
    return err
