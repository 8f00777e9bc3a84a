"""Digests of the plug-ins that a run has a party use."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterable, Iterator
from importlib.metadata import entry_points
from pathlib import Path


def digests(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yields (``group:name``, digest) of plug-ins; ``names``: ``group:name`` of each."""
    for name in names:
        group, _, short = name.partition(":")
        for entry in entry_points(group=group, name=short):
            yield name, digest_of(entry.module)


def digest_of(module: str) -> str:
    """Returns ``sha256:`` and the digest of a module's file; of a package, of its files of Python,
    with their names.
    """
    found = importlib.util.find_spec(module)
    path = Path(found.origin) if found is not None and found.origin else None
    if path is None:
        return "sha256:unknown"
    whole = path.name == "__init__.py"
    files = sorted(path.parent.rglob("*.py")) if whole else [path]
    digest = hashlib.sha256()
    for each in files:
        content = each.read_bytes()
        digest.update(f"{each.relative_to(path.parent).as_posix()} {len(content)} ".encode())
        digest.update(content)
    return f"sha256:{digest.hexdigest()}"
