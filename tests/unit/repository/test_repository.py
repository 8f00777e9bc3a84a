"""The repository's own files: locks, workflows, citation and targets agree with pyproject.toml."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from check_jsonschema import main as check_jsonschema
from click.testing import CliRunner
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tests import core
from tests.core import OPTIONAL

ROOT = Path(__file__).parents[3]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CPU, CUDA, SERVER = LOCKS = [
    ROOT / "deploy" / "locks" / f"requirements-{name}.txt" for name in ("cpu", "cuda", "server")
]
EXTRAS = sorted({*PROJECT["optional-dependencies"]} - {"dev", "docs", "fuzz"})
OF_EXTRAS = [ROOT / "deploy" / "locks" / f"requirements-{extra}.txt" for extra in EXTRAS]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text()
PYTHONS = ["3.11", "3.12", "3.13"]
SCHEMAS = [
    *[("vendor.github-workflows", path) for path in WORKFLOWS],
    *[("custom.github-workflows-require-timeout", path) for path in WORKFLOWS],
    ("vendor.dependabot", ROOT / ".github" / "dependabot.yml"),
    ("vendor.github-issue-forms", ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml"),
    ("vendor.github-issue-forms", ROOT / ".github" / "ISSUE_TEMPLATE" / "feature.yml"),
    ("vendor.citation-file-format", ROOT / "CITATION.cff"),
    ("vendor.compose-spec", ROOT / "docker-compose.yml"),
    ("vendor.compose-spec", ROOT / "docker-compose.oneshot.yml"),
]


def pins(lock: Path) -> dict[str, list[Requirement]]:
    """{library: its pins}; a library may have one for each range of Pythons."""
    found: dict[str, list[Requirement]] = {}
    for line in lock.read_text().splitlines():
        if re.match(r"[a-z0-9]", line):
            pin = Requirement(line.removesuffix("\\"))
            found.setdefault(pin.name, []).append(pin)
    return found


def steps() -> list[dict[str, Any]]:
    jobs = [yaml.safe_load(path.read_text())["jobs"] for path in WORKFLOWS]
    return [step for each in jobs for job in each.values() for step in job["steps"]]


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))


@pytest.mark.parametrize("lock", LOCKS, ids=["cpu", "cuda", "server"])
def test_a_lock_is_of_the_dependencies_as_they_are(lock: Path) -> None:
    wanted = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["serve"]
    digest = hashlib.sha256(json.dumps(wanted).encode()).hexdigest()
    assert digest in lock.read_text(), "the dependencies have changed: run `make lock`"


def test_the_locks_have_versions_that_the_dependencies_allow() -> None:
    locked = pins(CPU) | pins(CUDA)
    for line in PROJECT["dependencies"]:
        wanted = Requirement(line)
        found = locked[canonicalize_name(wanted.name)]
        versions = [next(iter(pin.specifier)).version for pin in found]
        assert all(version in wanted.specifier for version in versions), line


@pytest.mark.parametrize("extra", EXTRAS)
def test_each_extra_that_a_party_installs_has_a_lock_in_the_versions_of_the_others(
    extra: str,
) -> None:
    lock = ROOT / "deploy" / "locks" / f"requirements-{extra}.txt"
    wanted = PROJECT["optional-dependencies"][extra]
    digest = hashlib.sha256(json.dumps(wanted).encode()).hexdigest()
    assert digest in lock.read_text(), "the extra has changed: run `make lock`"
    assert f"\n-r {CPU.name}\n" in lock.read_text()
    assert not set(pins(lock)) & {*pins(CPU), *pins(CUDA)}
    locked = pins(CPU) | pins(lock)
    for line in wanted:
        requirement = Requirement(line)
        for pin in locked[canonicalize_name(requirement.name)]:
            assert next(iter(pin.specifier)).version in requirement.specifier, line


def test_every_lock_is_audited() -> None:
    assert {*LOCKS, *OF_EXTRAS} == {*LOCKS[0].parent.glob("*.txt")}
    audits = [step["run"] for step in steps() if "--require-hashes" in step.get("run", "")]
    assert any("for lock in deploy/locks/requirements-*.txt" in audit for audit in audits)


@pytest.mark.parametrize("lock", [*LOCKS, *OF_EXTRAS], ids=["cpu", "cuda", "server", *EXTRAS])
def test_a_lock_has_one_version_with_hashes_of_each_library_and_no_address(lock: Path) -> None:
    text = lock.read_text()
    for found in pins(lock).values():
        assert [[each.operator for each in pin.specifier] for pin in found] == [["=="]] * len(found)
        assert len(found) == 1 or all(pin.marker for pin in found)
    blocks = re.findall(r"^[a-z0-9].*\n(?:    --hash=sha256:[0-9a-f]{64}.*\n)+", text, re.MULTILINE)
    assert len(blocks) == sum(map(len, pins(lock).values()))
    lines = [line for line in text.splitlines() if not line.startswith(("#", "-r "))]
    assert lines == "".join(blocks).splitlines()
    assert "://" not in text


def test_torch_is_in_the_lock_for_cuda_alone_and_that_one_has_all_else_too() -> None:
    assert {"torch", "torchvision"} <= set(pins(CUDA))
    assert not set(pins(CPU)) & set(pins(CUDA))
    only_cuda = re.compile("torch|torchvision|triton|nvidia-.*|cuda-.*")
    assert [name for name in pins(CPU) if only_cuda.fullmatch(name)] == []
    assert f"-r {CPU.name}\n" in CUDA.read_text()


def test_the_server_s_lock_has_its_libraries_in_the_versions_of_the_others() -> None:
    alone = tomllib.loads((ROOT / "deploy" / "server" / "pyproject.toml").read_text())["project"]
    locked = pins(SERVER)
    assert {canonicalize_name(Requirement(each).name) for each in alone["dependencies"]} <= set(
        locked
    )
    others = pins(CPU)
    assert all(others[name] == found for name, found in locked.items())
    assert len(locked) < len(others) / 2


@pytest.mark.parametrize(("schema", "path"), SCHEMAS, ids=lambda each: getattr(each, "name", each))
def test_a_file_follows_its_schema(schema: str, path: Path) -> None:
    done = CliRunner().invoke(check_jsonschema, ["--builtin-schema", schema, str(path)])
    assert done.exit_code == 0, done.output


def test_actions_are_named_by_their_commit() -> None:
    used = [step["uses"] for step in steps() if "uses" in step]
    assert used
    assert [each for each in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", each)] == []


def test_workflows_run_targets_and_scripts_that_there_are() -> None:
    commands = [step["run"] for step in steps() if "run" in step]
    made = {command.removeprefix("make ") for command in commands if command.startswith("make ")}
    assert made <= targets()
    scripts = [line.split()[0] for line in commands if line.startswith(("scripts/", "deploy/"))]
    assert scripts
    assert all((ROOT / script).stat().st_mode & 0o111 for script in scripts)


def test_the_pythons_that_are_promised_are_those_that_are_tested() -> None:
    classified = [line.rsplit(" ", 1)[1] for line in PROJECT["classifiers"] if "Python ::" in line]
    assert classified == PYTHONS
    assert [each for each in PYTHONS if each in SpecifierSet(PROJECT["requires-python"])] == PYTHONS
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "checks.yml").read_text())["jobs"]
    for name in ("test", "package"):
        assert jobs[name]["strategy"]["matrix"]["python"] == PYTHONS


def test_the_citation_is_of_this_version_and_names_the_four_papers() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]
    papers = [each["notes"].split()[0] for each in citation["references"]]
    assert papers == ["FedHSSL", "FedOnce", "SS-VFL-I", "MocoSFL"]


def test_make_help_says_what_each_target_does() -> None:
    told = set(re.findall(r"^([a-z-]+):.*## \w", MAKEFILE, re.MULTILINE))
    assert told == targets()
    (phony,) = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    assert set(phony.split()) == targets()


def test_a_wheel_has_every_file_of_the_packages() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packages = [path for path in ROOT.glob("vfl*") if (path / "__init__.py").exists()]
    files = {
        path
        for package in packages
        for path in package.rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc", ".md")
    }
    included = {
        path
        for package, patterns in setuptools["package-data"].items()
        for pattern in patterns
        for room in ([ROOT / package.replace(".", "/")] if package != "*" else ROOT.glob("vfl*"))
        for path in room.glob(f"**/{pattern}" if package == "*" else pattern)
    }
    assert {"py.typed", "card.md.jinja", "page.html", "page.js"} <= {path.name for path in files}
    assert not files - included


def test_every_path_that_the_core_tests_leave_out_exists() -> None:
    for tests, tested in OPTIONAL.items():
        assert (ROOT / tests).exists(), tests
        assert all(any(ROOT.glob(f"{path.rstrip('/')}*")) for path in tested), tested


def test_a_change_of_what_optional_tests_test_runs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_after(*changes: str) -> set[str]:
        monkeypatch.setattr(core, "list_changes", lambda: changes)
        return {name for name in OPTIONAL if not core.is_left_out(ROOT / name)}

    assert run_after() == set()
    assert run_after("tests/unit/lab/test_page.py") == {"tests/unit/lab"}
    assert run_after("vfl_lab/study.py") == {
        *("tests/unit/lab", "tests/integration/lab", "tests/unit/repository")
    }
