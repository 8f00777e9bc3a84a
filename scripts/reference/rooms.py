"""The rooms of a package: what each holds, from its docstring, and its files, from the upper layers to the lower."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

HEADINGS = ("room", "what it holds", "files")
REPO = Path(__file__).parents[2]
_GENERATED = "pb"


def rows(package: str) -> Iterator[tuple[str, str, str]]:
    """Yields a line for a package and for each room in it, as import-linter's layers have them."""
    top = REPO / package
    yield _line(top)
    for name in _layers(package):
        if (top / name).is_dir() and name != _GENERATED:
            yield from _below(top / name)


def _below(folder: Path) -> Iterator[tuple[str, str, str]]:
    yield _line(folder)
    for each in sorted(folder.iterdir()):
        if (each / "__init__.py").exists():
            yield from _below(each)


def _line(folder: Path) -> tuple[str, str, str]:
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    files = sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")
    said = " ".join(text.split("\n\n")[0].split()).replace("``", "`").replace("|", "\\|")
    return f"`{folder.relative_to(REPO)}`", said, ", ".join(files) or "–"


def _layers(package: str) -> list[str]:
    settings = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["importlinter"]
    own = next(each for each in settings["contracts"] if each.get("containers") == [package])
    return [name.strip() for layer in own["layers"] for name in layer.split("|")]
