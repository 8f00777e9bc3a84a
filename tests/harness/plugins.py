"""Packages of plug-ins for tests: installed by pip, or made to look so by a folder of metadata on
the path.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.harness.sharing import program_environment

EXAMPLE = Path(__file__).parents[2] / "examples" / "plugin"


def install(folder: Path) -> Path:
    """Has pip build and install the example into ``folder``, without a network. Returns the
    path.
    """
    source, target = folder / "source", folder / "site"
    # Pip builds beside it.
    shutil.copytree(EXAMPLE, source, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--no-build-isolation",
    ]
    done = subprocess.run(
        [*pip, "--disable-pip-version-check", "--target", str(target), str(source)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return target


@contextlib.contextmanager
def importing(folder: Path) -> Iterator[None]:
    """Lets the block import the example's modules from ``folder``, and none that another test has
    imported; they are forgotten afterwards.
    """

    def forget() -> None:
        for module in EXAMPLE.glob("*.py"):
            sys.modules.pop(module.stem, None)

    forget()
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        forget()


def place(folder: Path, version: str = "1.0") -> Path:
    """Puts the example into ``folder`` as pip would, under ``version``, in no time. Returns the
    path.
    """
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())
    for module in project["tool"]["setuptools"]["py-modules"]:
        shutil.copy(EXAMPLE / f"{module}.py", folder)
    named = project["project"]
    return metadata(folder, named["entry-points"], named["name"], version)


def metadata(
    folder: Path,
    entry_points: Mapping[str, Mapping[str, str]],
    name: str = "plugin",
    version: str = "1.0",
) -> Path:
    """Writes what pip would write for a package with ``entry_points`` ({group: {name:
    "module:attribute"}}).
    """
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
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
