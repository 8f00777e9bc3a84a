"""Makes plug-ins look installed: a folder of metadata on the path, beside the folder of their modules."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from tests.harness.federation import program_environment


def metadata(folder: Path, entry_points: Mapping[str, Mapping[str, str]], name: str = "plugin") -> Path:
    """Writes what pip would write for a package with ``entry_points`` ({group: {name: "module:attribute"}})."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in of.items())
        for group, of in entry_points.items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return folder


def environment(*folders: Path) -> dict[str, str]:
    """Returns the programs' environment with ``folders`` on the path of modules."""
    given = program_environment()
    path = [*map(str, folders), *filter(None, [given.get("PYTHONPATH", "")])]
    return given | {"PYTHONPATH": os.pathsep.join(path)}
