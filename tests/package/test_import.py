"""What `import phaze_fast` costs and offers."""

import json
import subprocess
import sys
from importlib.metadata import version
from types import ModuleType

import pytest

import phaze_fast as pf


def fresh(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import phaze_fast", "numpy pydantic yaml typer rich numba highspy phaze_fast._core"),
        ("import phaze_fast as pf; pf.presets", "typer rich phaze_fast.cli"),
    ],
)
def test_imports_load_nothing_heavy(code, heavy):
    loaded = fresh(f"import json, sys; {code}; print(json.dumps(sorted(sys.modules)))")
    assert set(heavy.split()).isdisjoint(loaded)


def test_every_public_name_resolves_and_is_listed():
    subpackages = [name for name in pf.__all__ if isinstance(getattr(pf, name), ModuleType)]
    assert 35 <= len(pf.__all__) - len(subpackages) <= 45
    for name in pf.__all__:
        assert getattr(pf, name) is not None
    assert dir(pf) == sorted(pf.__all__)


def test_search_is_the_function_whatever_is_imported_first():
    import phaze_fast.explore.find
    import phaze_fast.pipeline

    assert pf.search is phaze_fast.pipeline.search
    code = "import json, phaze_fast.explore.find; from phaze_fast import search; "
    assert fresh(code + "print(json.dumps(callable(search)))")


def test_the_version_and_a_name_that_is_not_there():
    assert pf.__version__ == version("phaze-fast")
    with pytest.raises(AttributeError, match="no attribute 'serach'"):
        _ = pf.serach
