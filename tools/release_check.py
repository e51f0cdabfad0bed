"""The check list of a release: each line done by a command here, none by hand.

    python3 dev.py release           # what takes a minute or two
    python3 dev.py release --all     # with everything that CI runs

Exit code 1 where something is missing.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path

import sbom

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
COPYLEFT = re.compile(r"\bA?GPL|Affero|SSPL")


def said(*words: str | Path) -> tuple[int, str]:
    done = subprocess.run(
        [str(word) for word in words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.returncode, (done.stdout + done.stderr).strip()


def version() -> str:
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


def one_version() -> str:
    """pyproject.toml, CITATION.cff and the newest part of CHANGELOG.md have one version."""
    own = version()
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.M)
    newest = re.search(r"^## \[?([0-9.]+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    for name, found in (("CITATION.cff", cited), ("CHANGELOG.md", newest)):
        if not found or found[1] != own:
            return f"{name} has {found[1] if found else 'none'}, pyproject.toml {own}"
    return ""


def clean_tree() -> str:
    """Everything is committed."""
    _, changed = said("git", "status", "--porcelain")
    return f"not committed: {changed.splitlines()[0]}" if changed else ""


def untagged() -> str:
    """No tag of this version is there yet."""
    _, tags = said("git", "tag", "--list", f"v{version()}")
    return f"tag {tags} is there already" if tags else ""


def locked() -> str:
    """Every requirement of pyproject.toml is locked, with hashes, at a version that it accepts."""
    import lock
    from packaging.requirements import Requirement

    text = lock.LOCK.read_text()
    pinned = {sbom.key(n): v for n, v in re.findall(r"^([\w.-]+)==([^ ;\\]+)", text, re.M)}
    for wish in map(Requirement, lock.wanted()):
        have = pinned.get(sbom.key(wish.name))
        if have is None or not wish.specifier.contains(have, prereleases=True):
            return f"{wish} is locked at {have}: python3 dev.py lock"
    bare = [n for n in re.split(r"\n(?=\S)", text) if "==" in n and "--hash=sha256:" not in n]
    return f"no hash: {bare[0].split()[0]}" if bare else ""


def licences() -> str:
    """Every package that is needed says its licence, and none asks for more than a notice."""
    for row in sbom.bill()["components"]:
        (own,) = row["licenses"]
        text = own.get("expression") or own["license"]["name"]
        if not text:
            return f"{row['name']} names no licence"
        if COPYLEFT.search(text.replace("LGPL", "")):
            return f"{row['name']} is {text}"
    return ""


def bill_of_materials() -> str:
    """A bill of materials can be written."""
    code, text = said(sys.executable, ROOT / "tools" / "sbom.py")
    return "" if code == 0 else text


def documents() -> str:
    """LICENSE, SECURITY.md, CITATION.cff, CONTRIBUTING.md and CHANGELOG.md are there."""
    wanted = ("LICENSE", "SECURITY.md", "CITATION.cff", "CONTRIBUTING.md", "CHANGELOG.md")
    missing = [name for name in wanted if not (ROOT / name).is_file()]
    return f"missing: {missing}" if missing else ""


def packages() -> str:
    """The sdist builds, the wheel builds from it, and both hold the licence."""
    with tempfile.TemporaryDirectory() as folder:
        code, text = said(sys.executable, "-m", "build", "--outdir", folder, ".")
        if code:
            return text.splitlines()[-1]
        (wheel,) = Path(folder).glob("*.whl")
        names = zipfile.ZipFile(wheel).namelist()
        if not any(name.endswith("LICENSE") for name in names):
            return f"{wheel.name} has no LICENSE"
        return portable(wheel)


def portable(wheel: Path) -> str:
    """The wheel needs nothing that a manylinux_2_28 system lacks; asked where auditwheel is."""
    tool = BIN / "auditwheel"
    if not sys.platform.startswith("linux") or not tool.exists():
        return ""
    code, text = said(tool, "show", wheel)
    found = re.search(r"manylinux_2_(\d+)_", " ".join(text.split()))
    if code or not found or int(found[1]) > 28:
        return f"auditwheel: {text[-200:]}"
    return ""


def linted() -> str:
    """Style, types and stubs."""
    code, text = said(sys.executable, ROOT / "dev.py", "lint")
    return "" if code == 0 else text[-300:]


def everything() -> str:
    """All that CI runs."""
    code, text = said("bash", ROOT / ".ci" / "run")
    return "" if code == 0 else text[-300:]


QUICK: tuple[Callable[[], str], ...] = (
    one_version, clean_tree, untagged, documents, locked, licences, bill_of_materials, packages,
)  # fmt: skip


def main() -> int:
    steps = (*QUICK, linted, everything) if "--all" in sys.argv else QUICK
    missing = 0
    for step in steps:
        wrong = step()
        missing += bool(wrong)
        sys.stdout.write(f"[{'x' if not wrong else ' '}] {(step.__doc__ or '').splitlines()[0]}\n")
        if wrong:
            sys.stdout.write(f"      {wrong}\n")
        sys.stdout.flush()
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
