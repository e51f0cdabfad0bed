"""Wafers that several tests start from, and what they say when a rule is broken."""

import pytest

from phaze_fast.errors import InvalidInputError
from phaze_fast.wafer import load_wafer, load_wafer_space

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


def refusal(make):
    with pytest.raises(InvalidInputError) as caught:
        make()
    return str(caught.value)
