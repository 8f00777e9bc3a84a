"""Digests of the plug-ins of a run."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec
from importlib.metadata import entry_points
from pathlib import Path

_UNKNOWN = "sha256:unknown"


def digests(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yields (``group:name``, digest) for each installed plug-in in ``names``.

    ``names``: The plug-ins as ``group:name``.
    """
    for name in names:
        group, _, short = name.partition(":")
        for entry in entry_points(group=group, name=short):
            yield name, digest_of(entry.module)


def digest_of(module: str) -> str:
    """Returns the digest of a module's code, as ``sha256:`` and the hexadecimal digest.

    For a module in a package, the digest includes the names and contents of all files in the
    package, because the module may import or read them. In a namespace package, which several
    projects share, only the package inside it counts. The code is not run. Returns
    ``sha256:unknown`` if there are no files.
    """
    spec = _find_outermost_package(module)
    if spec is None:
        return _UNKNOWN
    if spec.submodule_search_locations is not None:
        roots = [Path(location) for location in spec.submodule_search_locations]
        files = sorted((root, path) for root in roots for path in _yield_files(root))
    elif spec.has_location and spec.origin is not None:
        files = [(Path(spec.origin).parent, Path(spec.origin))]
    else:
        files = []
    digest = hashlib.sha256()
    for root, path in files:
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        digest.update(f"{path.relative_to(root).as_posix()!r} {content}\n".encode())
    return f"sha256:{digest.hexdigest()}" if files else _UNKNOWN


def _find_outermost_package(module: str) -> ModuleSpec | None:
    """Returns the spec of the outermost package or module that is not a namespace package.

    For ``a.b.c`` this is ``a``, or else ``a.b``, or else ``a.b.c``. Finding the spec of ``a.b``
    imports ``a``, which runs no code if ``a`` is a namespace package.
    """
    parts, spec = module.split("."), None
    for count in range(1, len(parts) + 1):
        spec = importlib.util.find_spec(".".join(parts[:count]))
        if spec is None or spec.origin is not None:
            break
    return spec


def _yield_files(root: Path) -> Iterator[Path]:
    """Yields the files in a folder and its subfolders, without compiled Python files."""
    for path in root.rglob("*"):
        if path.is_file() and "__pycache__" not in path.relative_to(root).parts:
            yield path
