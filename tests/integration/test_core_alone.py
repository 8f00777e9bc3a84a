"""The core works without its satellites, and a real party has no observer of the leak meter."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import vfl
from tests.harness import cases
from tests.harness.errors import raises
from tests.harness.federation import BIN, Federation, refused
from tests.harness.plugins import environment, importing, metadata, place
from vfl_common.config.party import PartyFile
from vfl_common.config.policy import PolicySettings
from vfl_common.errors import Code, InputError, VflError
from vfl_governance.account import limits
from vfl_governance.grants import approval
from vfl_party.policy import guards

REPO = Path(__file__).parents[2]
PACKAGES = ("vfl", "vfl_common", "vfl_party", "vfl_server")  # The core.

# In each round of either side: its chains are those that the party has made, and the process has
# imported nothing of the leak meter.
LOOK = """        self.models.train()
        import sys
        ends = self.party.exchanges.opened.values()
        kinds = {type(chain).__name__ for each in ends for chain in (each.chains.up, each.chains.down)}
        meter = [name for name in sys.modules if name.startswith("vfl_leaks")]
        if kinds != {"Chain"} or meter:
            raise RuntimeError(f"observed: {sorted(kinds)}, {meter[:1]}")
"""


@pytest.fixture
def looking(tmp_path: Path) -> Path:
    """A folder with the example of plug-ins, whose method fails if it is observed."""
    folder = tmp_path / "site"
    folder.mkdir()
    place(folder)
    module = folder / "plain_split.py"
    text = module.read_text()
    assert text.count("        self.models.train()\n") == 2
    module.write_text(text.replace("        self.models.train()\n", LOOK))
    return folder


def tables() -> dict[str, Any]:
    return cases.recipe(2) | {"phases": [{"kind": "plain", "epochs": 1, "batch_size": 24}]}


def test_a_real_party_has_no_observer_and_imports_nothing_of_the_leak_meter(
    tmp_path: Path, looking: Path
) -> None:
    with Federation(tmp_path, tables(), cases.digits(2)) as federation:
        federation.start_server()
        for name in federation.names:
            party = federation.write_party(name).name
            federation.start(name, "vfl-party", "run", party, environment=environment(looking))
        # A phase that fails would fail the run.
        assert federation.finish()["steps"] > 0


def test_the_same_phase_sees_the_observer_of_a_rehearsal(looking: Path) -> None:
    with importing(looking), pytest.raises(VflError, match="ObservedChain"):
        vfl.leaks(
            tables() | {"simulate": {"parties": cases.digits(2)}}, attacks=["norm"], quiet=True
        )


@pytest.fixture
def without(tmp_path: Path) -> dict[str, str]:
    """The environment of an installation without the satellites and their entry points."""
    site = tmp_path / "installed"
    for name in PACKAGES:
        shutil.copytree(REPO / name, site / name, ignore=shutil.ignore_patterns("__pycache__"))
    scripts = {name: f"{name.replace('-', '_')}.cli:main" for name in ("vfl-party", "vfl-server")}
    metadata(site, {"console_scripts": {"vfl": "vfl.cli:main", **scripts}}, name="vfl")
    return environment(site)


def test_without_the_satellites_the_programs_and_the_library_work(
    tmp_path: Path, without: dict[str, str]
) -> None:
    def run(*command: str) -> str:
        done = subprocess.run(
            command, cwd=tmp_path, env=without, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    said = run(str(BIN / "vfl"), "--help")
    assert "simulate" in said
    assert not {"leaks", "prepare", "report", "study"} & {
        line.split()[0] for line in said.splitlines() if line.startswith("  ") and line.strip()
    }
    said = run(str(BIN / "vfl-party"), "--help")
    assert "\n  run" in said
    assert not {"account", "approve", "disclosures", "grants", "serve"} & {*said.split()}
    library = """
import vfl
assert "installed" in vfl.__file__
assert vfl.simulate and not {"leaks", "prepare", "study", "compare"} & set(dir(vfl))
assert not hasattr(vfl, "leaks") and not hasattr(vfl, "study")
from vfl import *
"""
    run(sys.executable, "-c", library)
    recipe = tmp_path / "recipe.toml"
    text = (REPO / "examples" / "breast-cancer.toml").read_text()
    recipe.write_text(text.replace("epochs = 30", "epochs = 1"))
    run(str(BIN / "vfl"), "simulate", str(recipe), "--out", "runs")
    (made,) = (tmp_path / "runs").glob("[!.]*")
    assert (made / "summary.json").exists()


NEEDS = {"approval": "each", "account": {"predictions": 10_000}}


@pytest.mark.parametrize("key", NEEDS)
def test_a_party_whose_policy_needs_a_guard_that_is_missing_sends_nothing(
    key: str, tmp_path: Path, without: dict[str, str]
) -> None:
    with Federation(tmp_path, cases.recipe(2), cases.digits(2)) as federation:
        federation.extra["p1"] = {"policy": {"level": "open", key: NEEDS[key]}}
        federation.start_server()
        file = federation.write_party("p1").name
        said = f"policy.{key} in the party file: needs the package vfl_governance"
        check = federation.start("p1", "vfl-party", "check", file, "--offline", environment=without)
        assert check.wait() == 2
        assert said in str(check.seen()) + check.stderr
        refused(federation.start("p1", "vfl-party", "run", file, environment=without), said)
        assert not [*(tmp_path / "runs").glob("*/p1")]


def test_the_installed_guards_are_loaded_unless_one_that_a_policy_needs_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = [
        PartyFile.model_construct(policy=PolicySettings.model_validate({key: value}))
        for key, value in NEEDS.items()
    ]
    factories: list[guards.GuardFactory] = [limits, approval]
    assert [guards.load_factories(file) for file in files] == [factories] * 2
    monkeypatch.setattr(guards, "entry_points", lambda group: ())
    for file in files:
        with raises(InputError, Code.REFUSED, names=("vfl_governance",)):
            guards.load_factories(file)
    assert guards.load_factories(PartyFile.model_construct(policy="allow_all")) == []
