"""The packages as they are built: the sdist has all of the repository, an index shows the README
without dead links, and the server runs where torch is not.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Callable
from email import message_from_bytes
from importlib.metadata import distribution
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests.harness import cases
from tests.harness.federation import Federation

ROOT = Path(__file__).parents[2]
GIT = shutil.which("git")
SERVER = ROOT / "deploy" / "server" / "pyproject.toml"
README = (ROOT / "README.md").read_text()
RELATIVE = re.compile(r"\]\((?!https?:|mailto:|#)")
readme: Callable[[str, str], str] = run_path(str(ROOT / "setup.py"))["readme"]


def project(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads(file.read_text())["project"]
    return found


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the repository, and nothing that was built in it."""
    if GIT is None or not (ROOT / ".git").exists():
        pytest.skip("this is no clone: it cannot be said which files are the repository's")
    root = tmp_path_factory.mktemp("copy")
    for name in tracked():
        target = root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)
    return root


def tracked() -> list[str]:
    done = subprocess.run(
        [GIT or "git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    # A file that was removed is listed until the next commit.
    return [name for name in done.stdout.splitlines() if os.path.lexists(ROOT / name)]


def build(source: Path, out: Path, kind: str) -> Path:
    command = [sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", str(out)]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    (found,) = out.glob("[!.]*")
    # What an index asks of it.
    check = [sys.executable, "-m", "twine", "check", "--strict", str(found)]
    assert subprocess.run(check, capture_output=True).returncode == 0
    return found


def test_the_sdist_has_all_that_the_repository_has(copy: Path, tmp_path: Path) -> None:
    with tarfile.open(build(copy, tmp_path / "dist", "sdist")) as archive:
        names = [member.name.partition("/")[2] for member in archive if not member.isdir()]
        top = archive.getnames()[0].partition("/")[0]
        info = archive.extractfile(f"{top}/PKG-INFO")
        assert info is not None
        facts = message_from_bytes(info.read())
    made = {name for name in names if ".egg-info/" in name} | {"PKG-INFO", "setup.cfg"}
    # What one service of builds reads is of no use elsewhere.
    assert set(names) - made == {name for name in tracked() if not name.startswith(".ci/")}
    assert facts["Version"] == project(ROOT / "pyproject.toml")["version"]
    assert facts["Description-Content-Type"] == "text/markdown"
    text = facts.get_payload()
    assert isinstance(text, str)
    assert "# vfl: vertical federated learning" in text
    assert not RELATIVE.search(text)


def test_without_an_address_words_stay_and_links_go() -> None:
    assert len(RELATIVE.findall(README)) > 10
    text = readme(README, "")
    assert not RELATIVE.search(text)
    assert readme("![a](docs/a.svg)\n\nSee [this\npage](docs/b.md#c).", "") == "See this\npage."
    outside = "[x](https://example.org/a) and [below](#below)"
    assert readme(outside, "") == outside


def test_with_an_address_links_and_pictures_become_absolute() -> None:
    source = "https://example.org/vfl"
    text = readme("![a](docs/a.svg) [b](docs/b.md#c) [d](https://example.org)", source)
    assert text == (
        f"![a]({source}/raw/main/docs/a.svg) [b]({source}/blob/main/docs/b.md#c) [d](https://example.org)"
    )
    assert not RELATIVE.search(readme(README, source))


def test_the_server_alone_has_the_version_and_the_libraries_of_vfl() -> None:
    whole, alone = project(ROOT / "pyproject.toml"), project(SERVER)
    same = ("version", "requires-python", "license", "authors")
    assert {key: alone[key] for key in same} == {key: whole[key] for key in same}
    assert set(alone["dependencies"]) <= set(whole["dependencies"])
    assert alone["scripts"] == {"vfl-server": whole["scripts"]["vfl-server"]}


def without_torch(wheel: Path, folder: Path) -> Path:
    """A virtual environment with the wheel and the libraries that it asks for; returns its
    programs.
    """
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    shutil.unpack_archive(wheel, packages, "zip")
    wanted = list(project(SERVER)["dependencies"])
    seen: set[str] = set()
    while wanted:
        need = Requirement(wanted.pop())
        if need.name in seen or (need.marker and not need.marker.evaluate({"extra": ""})):
            continue
        seen.add(need.name)
        found = distribution(need.name)
        wanted += found.requires or []
        for top in {file.parts[0] for file in found.files or []} - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(found.locate_file(top))  # type: ignore[arg-type]
    program = folder / "bin" / "vfl-server"
    text = "from vfl_server.cli import main; main()"
    program.write_text(f"#!{folder}/bin/python\n{text}\n")
    program.chmod(0o755)
    return folder / "bin"


@pytest.mark.slow
def test_the_server_serves_a_run_where_torch_is_not(copy: Path, tmp_path: Path) -> None:
    wheel = build(copy / "deploy" / "server", tmp_path / "dist", "wheel")
    rooms = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in rooms if not name.endswith(".dist-info")} == {
        "vfl_common",
        "vfl_server",
    }
    programs = without_torch(wheel, tmp_path / "alone")
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    for module, code in (("torch", 1), ("pyarrow", 1), ("vfl_party", 1), ("vfl_server.app", 0)):
        done = subprocess.run(
            [programs / "python", "-c", f"import {module}"],
            capture_output=True,
            text=True,
            env=clean,
            cwd=tmp_path,
        )
        assert done.returncode == code, done.stderr
    shown = subprocess.run(
        [programs / "vfl-server", "--version"], capture_output=True, text=True, env=clean
    )
    assert shown.stdout == f"vfl-server, version {project(SERVER)['version']}\n", shown.stderr
    data = cases.columns("sklearn:breast_cancer", 2, limit=100)
    with Federation(tmp_path / "run", cases.recipe(2), data, fresh=True) as federation:
        options = ("recipe.toml", "--listen", "127.0.0.1:0", "--metrics", "0")
        server = federation.start(
            "server", str(programs / "vfl-server"), "run", *options, environment=clean
        )
        federation.address = server.wait_for("ready", 60)["address"]
        for name in federation.names:
            federation.start_party(name)
        assert federation.finish()["metrics"]["validation"]
