"""The release before and this one in one federation, as real programs over TLS: it works, or is
refused at joining.

The release before is a tree of this repository's history on PYTHONPATH, which is what its wheel
would install. Both releases use the same other packages.
"""

from __future__ import annotations

import io
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.harness.cases import digits, recipe
from tests.harness.errors import assert_names
from tests.harness.federation import BIN, START_S, Federation, Program, reason_to_wait, refused
from tests.harness.sharing import program_environment
from tests.integration.test_resume import wait_for_checkpoints

# The last commit that speaks protocol 7.
BEFORE = "5edffaf"
REPOSITORY = Path(__file__).parents[2]
TREES: dict[str, Any] = {
    "kind": "secureboost",
    "trees": 1,
    "depth": 2,
    "bins": 4,
    "encryption": "none",
}


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the release before; skips if the history does not reach so far."""
    folder = tmp_path_factory.mktemp("before")
    names = ["vfl", "vfl_common", "vfl_party", "vfl_server"]
    try:
        archive = subprocess.run(
            ["git", "archive", "--format=zip", BEFORE, *names],  # noqa: S607 - whichever git the tests find
            cwd=REPOSITORY,
            capture_output=True,
            check=True,
            timeout=60,
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip(f"needs git, and a clone whose history reaches back to {BEFORE}")
    with zipfile.ZipFile(io.BytesIO(archive)) as tree:
        tree.extractall(folder)
    return folder


def _program(name: str) -> str:
    return f"from {name.replace('-', '_')}.cli import main; main()"


class Mixed(Federation):
    """A federation some of whose programs are of the release before."""

    def start_mixed(self, before: Path, older: set[str], *names: str) -> None:
        """Starts the server, then the parties ``names``; those in ``older`` are of the release
        before.
        """
        environment = program_environment() | {"PYTHONPATH": str(before)}
        commands = {"server": ["vfl-server", "serve", "recipe.toml", "--listen", "127.0.0.1:0"]}
        commands |= {name: ["vfl-party", "run", f"{name}.toml"] for name in names}
        for name, (program, *args) in commands.items():
            if name != "server":
                path = self.write_party(name)
                # It always begins as the recipe says, and does not know the key.
                if name in older:
                    path.write_text(path.read_text().replace('init = "recipe"\n', ""))
            if name in older:
                # The installed programs are those of this release.
                line = [str(BIN / "python"), "-c", _program(program), *args]
                self.programs[name] = Program(name, line, self.folder, environment=environment)
            else:
                self.start(name, program, *args)
            if name == "server":
                self.address = self.programs[name].wait_for("ready", START_S)["address"]
            elif name != names[-1]:
                # So that the last one is the one that is refused.
                self.programs["server"].wait_for("joined", START_S, party=name)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The summary of this release with itself."""
    with Federation(tmp_path_factory.mktemp("alone"), recipe(2), digits(2)) as federation:
        federation.start_all()
        return federation.finish()


@pytest.mark.parametrize("older", [{"server"}, {"p1"}, {"p0"}], ids="-".join)
def test_split_training_works_with_the_release_before(
    older: set[str], before: Path, alone: dict[str, Any], tmp_path: Path
) -> None:
    with Mixed(tmp_path / "f", recipe(2), digits(2)) as federation:
        federation.start_mixed(before, older, "p0", "p1")
        summary = federation.finish()
        if "p0" in older:
            # The release before sums areas under curves in float32; the other metrics are equal.
            for split, metrics in summary["metrics"].items():
                assert set(metrics) == set(alone["metrics"][split])
                if "auc" in metrics:
                    auc = pytest.approx(alone["metrics"][split]["auc"], rel=0, abs=1e-7)
                    assert metrics.pop("auc") == auc
            expected = {
                split: {name: value for name, value in metrics.items() if name != "auc"}
                for split, metrics in alone["metrics"].items()
            }
        else:
            expected = alone["metrics"]
        assert summary["metrics"] == expected
        assert summary["recipe_digest"] == alone["recipe_digest"]
        versions = {each["name"]: each.get("version", "") for each in summary["parties"]}
        # It did run code of the release before.
        told = set() if "server" in older else {"server", "p0", "p1"} - older
        assert {name for name, version in versions.items() if version} == told


@pytest.mark.parametrize("what", ["psi", "trees"])
@pytest.mark.parametrize("older", ["server", "p1"])
def test_what_has_changed_is_refused_at_joining_in_one_sentence(
    what: str, older: str, before: Path, tmp_path: Path
) -> None:
    tables = recipe(2, rows={"align": "psi"}) if what == "psi" else recipe(2) | {"phases": [TREES]}
    names = ["p1"] if older == "server" else ["p0", "p1"]
    with Mixed(tmp_path / "f", tables, digits(2)) as federation:
        federation.start_mixed(before, {older}, *names)
        refused(federation.programs["p1"], "p1", "7", "8")
        # Who waits hears at once why.
        if older == "p1":
            assert_names(reason_to_wait(federation.programs["p0"], "p1"), "p1")


def test_a_question_to_a_server_of_the_release_before_is_a_note(
    before: Path, tmp_path: Path
) -> None:
    with Mixed(tmp_path / "f", recipe(2), digits(2)) as federation:
        federation.start_mixed(before, {"server"})
        federation.write_party("p1")
        asked = federation.start("asked", "vfl-party", "check", "p1.toml")
        assert asked.wait() == 0, asked.stderr
        (line,) = [each["text"] for each in asked.seen() if " server " in each.get("text", "")[:20]]
        assert line.startswith("note  server")
        assert_names(line, "127.0.0.1")


def test_a_server_of_the_release_before_does_not_end_the_run_of_a_party_that_fails(
    before: Path, tmp_path: Path
) -> None:
    """It would take the word of a party that cannot join for the end of the run."""
    with Mixed(tmp_path / "f", recipe(2), digits(2)) as federation:
        federation.start_mixed(before, {"server"}, "p0")
        federation.programs["p0"].wait_for("waiting")
        data = federation.data["p1"]
        federation.data["p1"] = {"source": "none.csv", "id": "id"}
        refused(federation.start_party("p1"), "none.csv")
        federation.data["p1"] = data
        federation.start_party("p1")
        federation.finish()


def test_an_upgrade_resumes_an_unfinished_run(before: Path, tmp_path: Path) -> None:
    with Mixed(tmp_path / "f", recipe(2, phase={"epochs": 150}), digits(2)) as federation:
        everybody = {"server", "p0", "p1"}
        federation.start_mixed(before, everybody, "p0", "p1")
        federation.programs["server"].wait_for("progress")
        wait_for_checkpoints(federation)
        for program in federation.programs.values():
            program.kill()
        federation.start_mixed(before, set(), "p0", "p1")
        assert federation.programs["server"].wait_for("started")["checkpoint"]
        summary = federation.finish()
        # There is one.
        assert summary["run_id"] == federation.run_folder.name
        assert {each["version"] != "" for each in summary["parties"]} == {True}
