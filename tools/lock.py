"""Write the versions and hashes that CI installs: tools/requirements.txt.

    python3 dev.py lock

What is needed stands in pyproject.toml; pip-tools finds the versions. Torch is not among them: CI
takes it from whatever index serves a build for its processors, at a version that dev.py names.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "tools" / "requirements.txt"
EXTRAS = ("dev", "test", "dask", "docs", "opt", "plot", "ray", "table", "trace")
HEAD = """\
# What CI installs, each package at one version with the hashes of its files; python3 dev.py lock
# writes this file from pyproject.toml. Install it with: pip install --require-hashes -r FILE
"""


def wanted() -> list[str]:
    """Everything that building, testing and documenting needs, as pyproject.toml has it."""
    data = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    project = data["project"]
    found = [*data["build-system"]["requires"], *project["dependencies"]]
    for extra in EXTRAS:
        found += project["optional-dependencies"][extra]
    return sorted({text for text in found if not text.startswith("phaze-fast")})


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "wanted.in").write_text("\n".join(wanted()) + "\n")
        command = [
            sys.executable, "-m", "piptools", "compile", "--generate-hashes", "--strip-extras",
            "--no-emit-index-url", "--no-emit-trusted-host", "--no-emit-find-links", "--no-header",
            "--no-annotate", "--allow-unsafe", "--quiet", "--resolver=backtracking",
            "--output-file", str(folder / "locked.txt"), str(folder / "wanted.in"),
        ]  # fmt: skip
        if subprocess.run(command, check=False).returncode != 0:
            return 1
        text = (folder / "locked.txt").read_text()
    lines = [line for line in text.splitlines() if line and not line.lstrip().startswith("#")]
    if re.search(r"https?://|--index|--find-links", "\n".join(lines)):
        sys.exit("the lock names a place to install from")
    LOCK.write_text(HEAD + "\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
