"""scripts/release in a small repository of its own: what it refuses, shows, and leaves behind."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

GIT = shutil.which("git") or "git"
SCRIPT = Path(__file__).parents[2] / "scripts" / "release"
PYPROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "small"
version = "0.1.0"
readme = "README.md"
requires-python = ">=3.11"

[tool.setuptools]
py-modules = ["small"]
"""
HASH = "    --hash=sha256:" + "0" * 63
LOCK = f"# Made.\nclick==8.1.8 ; python_version >= '3.11' \\\n{HASH}1 \\\n{HASH}2\n"
Spoiling = Callable[[Path], None]
CHANGELOG = "# Changelog\n\n## Unreleased\n\n- A first line.\n\n## 0.1.0 (2026-01-01)\n\n- Begun.\n"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "small"
    (root / "scripts").mkdir(parents=True)
    (root / "deploy" / "locks").mkdir(parents=True)
    shutil.copy(SCRIPT, root / "scripts")
    texts = {
        "pyproject.toml": PYPROJECT,
        "CHANGELOG.md": CHANGELOG,
        "CITATION.cff": "cff-version: 1.2.0\nversion: 0.1.0\n",
        "README.md": "A small package.\n",
        "small.py": "",
        ".gitignore": "dist/\n",
        "deploy/locks/requirements-cpu.txt": LOCK,
        "deploy/locks/requirements-cuda.txt": f"-r requirements-cpu.txt\nhip==2 \\\n{HASH}1\n",
    }
    for name, text in texts.items():
        (root / name).write_text(text)
    git(root, "init", "--quiet", "--initial-branch=main")
    git(root, "config", "user.name", "A. Person")
    git(root, "config", "user.email", "person@example.org")
    commit(root, "Begin")
    return root


def git(root: Path, *args: str) -> str:
    done = subprocess.run([GIT, *args], cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit(root: Path, message: str) -> None:
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", message)


def release(root: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/release", *args]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)


def as_it_was(root: Path) -> tuple[str, str, bool]:
    return git(root, "rev-parse", "HEAD"), git(root, "tag"), (root / "dist").exists()


def test_a_release_is_a_commit_a_tag_a_wheel_and_an_sdist(repository: Path) -> None:
    done = release(repository, "0.2.0")
    assert done.returncode == 0, done.stderr
    assert git(repository, "log", "-1", "--format=%s") == "Release 0.2.0"
    assert git(repository, "status", "--porcelain") == ""
    head = git(repository, "rev-parse", "HEAD")
    assert git(repository, "rev-parse", "v0.2.0^{commit}") == head
    message = git(repository, "tag", "--list", "--format=%(contents:body)", "v0.2.0")
    assert message == "- A first line."
    names = {path.name for path in (repository / "dist").iterdir()}
    made = {"small-0.2.0-py3-none-any.whl", "small-0.2.0.tar.gz"}
    lists = {"small-0.2.0-cpu.cdx.json", "small-0.2.0-cuda.cdx.json"}
    assert names == {*made, *lists, "SHA256SUMS"}
    sums = dict(
        line.split("  ")[::-1]
        for line in (repository / "dist" / "SHA256SUMS").read_text().splitlines()
    )
    assert sums == {
        name: hashlib.sha256((repository / "dist" / name).read_bytes()).hexdigest()
        for name in made | lists
    }
    assert "twine upload dist/small-0.2.0-py3-none-any.whl dist/small-0.2.0.tar.gz" in done.stdout
    found = json.loads((repository / "dist" / "small-0.2.0-cuda.cdx.json").read_text())
    assert (found["bomFormat"], found["specVersion"]) == ("CycloneDX", "1.6")
    assert found["metadata"]["component"]["purl"] == "pkg:pypi/small@0.2.0"
    assert [each["purl"] for each in found["components"]] == [
        "pkg:pypi/click@8.1.8",
        "pkg:pypi/hip@2",
    ]
    facts = [each["value"] for each in found["components"][0]["properties"]]
    assert facts == ["python_version >= '3.11'", *("0" * 63 + end for end in "12")]
    assert 'version = "0.2.0"' in (repository / "pyproject.toml").read_text()
    assert "version: 0.2.0\ndate-released: 20" in (repository / "CITATION.cff").read_text()
    changelog = (repository / "CHANGELOG.md").read_text()
    assert changelog.startswith("# Changelog\n\n## Unreleased\n\n## 0.2.0 (20")
    assert changelog.endswith(")\n\n- A first line.\n\n## 0.1.0 (2026-01-01)\n\n- Begun.\n")
    # Nothing has changed since, so there is nothing to release.
    assert release(repository, "0.3.0").returncode == 2


def test_the_page_of_images_installs_locks_as_pip_takes_them() -> None:
    """A lock has hashes of libraries alone, so pip refuses it as constraints (``-c``)."""
    root = Path(__file__).parents[2]
    page = (root / "docs/how-to/operate/kubernetes.md").read_text()
    for name in ("server", "cuda", "cpu"):
        lock = root / f"deploy/locks/requirements-{name}.txt"
        command = f"pip install --no-deps --require-hashes -r {lock.name}"
        assert command in lock.read_text()
        assert lock.name in page
    shown = [line for line in page.splitlines() if line.startswith("pip install")]
    assert shown == [
        "pip install --no-deps --require-hashes -r deploy/locks/requirements-server.txt",
        "pip install --no-deps dist/vfl_server-*.whl",
    ]


def test_the_lists_of_libraries_have_every_pin_of_the_locks() -> None:
    loader = SourceFileLoader("release", str(SCRIPT))
    spec = importlib.util.spec_from_loader("release", loader)
    assert spec is not None
    script = importlib.util.module_from_spec(spec)
    loader.exec_module(script)
    locks = [*(SCRIPT.parents[1] / "deploy" / "locks").glob("requirements-*.txt")]
    assert len(locks) > 3
    for lock in locks:
        text = lock.read_text()
        if "\n-r requirements-cpu.txt\n" in text:
            text += lock.with_name("requirements-cpu.txt").read_text()
        pins = [line for line in text.splitlines() if "==" in line and line[0] not in "# "]
        hashes = text.count("--hash=sha256:")
        found = json.loads(script.sbom(lock, {"name": "vfl", "version": "1.0.0"}, 0))
        facts = [one for each in found["components"] for one in each["properties"]]
        assert len({each["bom-ref"] for each in found["components"]}) == len(pins), lock.name
        assert sum(one["name"] == "vfl:lock:sha256" for one in facts) == hashes, lock.name


def test_a_dry_run_shows_a_release_on_any_branch_and_keeps_nothing(repository: Path) -> None:
    git(repository, "checkout", "--quiet", "-b", "elsewhere")
    before = as_it_was(repository)
    done = release(repository, "0.2.0", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "- A first line." in done.stdout
    assert "small-0.2.0-py3-none-any.whl" in done.stdout
    assert as_it_was(repository) == before
    assert git(repository, "status", "--porcelain") == ""


def dirty(root: Path) -> None:
    (root / "new.txt").write_text("")


def elsewhere(root: Path) -> None:
    git(root, "checkout", "--quiet", "-b", "elsewhere")


def tagged(root: Path) -> None:
    git(root, "tag", "v0.2.0")


def nothing_new(root: Path) -> None:
    (root / "CHANGELOG.md").write_text(CHANGELOG.replace("- A first line.\n\n", ""))
    commit(root, "Say nothing")


@pytest.mark.parametrize("spoil", [dirty, elsewhere, tagged, nothing_new])
def test_a_tree_that_is_not_fit_is_refused(repository: Path, spoil: Spoiling) -> None:
    spoil(repository)
    before = as_it_was(repository)
    done = release(repository, "0.2.0")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert as_it_was(repository) == before


@pytest.mark.parametrize("version", ["0.0.9", "1.0", "new", "0.2.0-rc1"])
def test_a_version_that_cannot_follow_is_refused(repository: Path, version: str) -> None:
    before = as_it_was(repository)
    assert release(repository, version).returncode == 2
    assert as_it_was(repository) == before
