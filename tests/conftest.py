"""Settings of every test: the same random cases each run, and more of them on request.

`pytest --hypothesis-profile=deep` draws thousands of fresh cases instead.
"""

import gc
import os

from hypothesis import settings

os.environ.pop("COLUMNS", None)  # which pytest-xdist sets; output is as wide as in a pipe
gc.set_threshold(20_000)  # thousands of tests are collected, and stay

settings.register_profile("steady", derandomize=True, max_examples=50, deadline=None)
settings.register_profile("deep", max_examples=5000, deadline=None)
settings.load_profile("steady")


def pytest_collection_finish():
    """Only what tests make is looked through for garbage."""
    gc.freeze()
