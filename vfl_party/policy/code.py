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
    """Yields (``group:name``, digest) of plug-ins; ``names``: ``group:name`` of each."""
    for name in names:
        group, _, short = name.partition(":")
        for entry in entry_points(group=group, name=short):
            yield name, digest_of(entry.module)


def digest_of(module: str) -> str:
    """Returns ``sha256:`` and the digest of a module's file; if it is in a package, of all files of
    the whole package, with their names, because the module may import and read them all.
    ``sha256:unknown`` if there are none.

    Of a namespace package, which several projects share, only the package within it counts. The
    code is not run.
    """
    spec = _outermost(module)
    if spec is None:
        return _UNKNOWN
    if spec.submodule_search_locations is not None:
        roots = [Path(location) for location in spec.submodule_search_locations]
        files = sorted((root, path) for root in roots for path in _files(root))
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


def _outermost(module: str) -> ModuleSpec | None:
    """Returns the first part of a module's name that is no namespace: of ``a.b.c``, ``a``, or else
    ``a.b``, or else ``a.b.c``. Parts before are namespaces, which have no code to run.
    """
    parts, spec = module.split("."), None
    for count in range(1, len(parts) + 1):
        spec = importlib.util.find_spec(".".join(parts[:count]))
        if spec is None or spec.origin is not None:
            break
    return spec


def _files(root: Path) -> Iterator[Path]:
    """Yields the files below a folder; not what Python has compiled from them."""
    for path in root.rglob("*"):
        if path.is_file() and "__pycache__" not in path.relative_to(root).parts:
            yield path
