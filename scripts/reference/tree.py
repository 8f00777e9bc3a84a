"""The packages, with their docstrings, and the groups of entry points, with the files that read them."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).parents[2]
PACKAGE_HEADINGS = ("package", "what it holds")
SEAM_HEADINGS = ("group", "read in", "entries of this repository")
CORE = ("vfl", "vfl_party", "vfl_server", "vfl_common")
_GENERATED = "pb"
# The name of a group as an argument, or as the constant of a module.
_GROUP = re.compile(r'(?:[(=]|_GROUP = )"(vfl(?:_party)?\.[a-z]+)"')


def packages(of: str) -> Iterator[tuple[str, str]]:
    """Yields the packages of the tree, the core first; or those in the package ``of``, from the
    upper layers to the lower ones.
    """
    if of:
        folders = [REPO / of / name for name in _layers(of) if name != _GENERATED]
    else:
        satellites = sorted(path.parent.name for path in REPO.glob("vfl*/__init__.py"))
        names = [*CORE, *(name for name in satellites if name not in CORE)]
        folders = [REPO / name for name in names]
    for folder in folders:
        if folder.is_dir():
            text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
            sentence = " ".join(text.split("\n\n")[0].split()).split(". ")[0].removesuffix(".")
            yield f"`{folder.name}`", sentence.replace("``", "`").replace("|", "\\|") + "."


def seams() -> Iterator[tuple[str, str, str]]:
    """Yields the groups of entry points, in alphabetical order."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    readers: dict[str, set[str]] = {}
    for path in REPO.glob("vfl*/**/*.py"):
        for group in _GROUP.findall(path.read_text()):
            readers.setdefault(group, set()).add(f"`{path.relative_to(REPO)}`")
    for group in sorted({*readers, *project["entry-points"]}):
        entries = ", ".join(sorted(project["entry-points"].get(group, ())))
        yield f"`{group}`", ", ".join(sorted(readers.get(group, ()))), entries or "–"


def _layers(package: str) -> list[str]:
    settings = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["importlinter"]
    own = next(each for each in settings["contracts"] if each.get("containers") == [package])
    return [name.strip() for layer in own["layers"] for name in layer.split("|")]
