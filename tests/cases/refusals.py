"""What the package says where it refuses: one line that names what is wrong."""

import pytest

from phaze_fast.errors import PhazeError


def refusal(call, *args, error=PhazeError, **kwargs):
    """Return the message of the error that a call raises, which is one line."""
    with pytest.raises(error) as caught:
        call(*args, **kwargs)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)
