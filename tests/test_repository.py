"""The repository itself: portable text, pinned versions, every import declared."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# A mirror or a proxy is the user's choice, so no file names a registry; and nobody else has these folders.
REGISTRY_HOST = re.compile(r"\b(?:pypi|pythonhosted|npmjs|debian)\.(?:org|com)\b")
PRIVATE_PATH = re.compile(r"(?<![\w.])/(?:root|work|home/\w+|Users/\w+)/")


def repository_texts() -> Iterator[tuple[Path, str]]:
    """Each text file that git tracks, or would track, as (path relative to the root, text)."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in filter(None, listing.split("\0")):
        path = ROOT / name
        if not path.is_file():  # deleted, not yet committed
            continue
        content = path.read_bytes()
        if b"\0" not in content:
            yield path.relative_to(ROOT), content.decode()


def lines_matching(pattern: re.Pattern[str]) -> list[str]:
    return [
        f"{path}:{number}: {line.strip()}"
        for path, text in repository_texts()
        for number, line in enumerate(text.splitlines(), start=1)
        if pattern.search(line)
    ]


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def normalized(requirement: str) -> str:
    """The distribution's name in `requirement`, spelled as indexes compare names: `orbax-checkpoint`."""
    name = re.match(r"[\w.-]+", requirement)
    assert name, requirement
    return re.sub(r"[-_.]+", "-", name.group()).lower()


def pinned_versions() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {normalized(name): version for name, version in pins}


def third_party_imports(path: Path) -> Iterator[str]:
    """Top-level names that the module at `path` imports from outside the standard library and this repository."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        for name in names:
            top = name.partition(".")[0]
            if top not in sys.stdlib_module_names and top not in ("jpaged", "pallas_kernels"):
                yield top


def test_patterns_find_what_they_are_for() -> None:
    assert REGISTRY_HOST.search("https://files.python" + "hosted.org/packages")
    assert PRIVATE_PATH.search("open('/ro" + "ot/.cache/x')")
    assert not PRIVATE_PATH.search("proto/work/x, ./work/x and https://host/root/")


def test_no_registry_hosts() -> None:
    assert lines_matching(REGISTRY_HOST) == []


def test_no_private_paths() -> None:
    assert lines_matching(PRIVATE_PATH) == []


def test_constraints_are_names_and_versions() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert pins
    assert [line for line in pins if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []


def test_constraints_pin_every_direct_dependency() -> None:
    declared = project()["dependencies"] + project()["optional-dependencies"]["dev"]
    assert [name for name in declared if normalized(name) not in pinned_versions()] == []


def test_every_import_is_a_declared_dependency() -> None:
    """What the packages import, a plain `pip install jpaged` must bring: other packages' dependencies may change."""
    declared = {normalized(name) for name in project()["dependencies"]}
    distributions = packages_distributions()
    undeclared = {
        f"{path.relative_to(ROOT)}: {top}"
        for package in ("jpaged", "pallas_kernels")
        for path in (ROOT / package).rglob("*.py")
        for top in third_party_imports(path)
        if not declared & {normalized(name) for name in distributions.get(top, [])}
    }
    assert undeclared == set()
