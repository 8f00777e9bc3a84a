"""The package in examples/plugin, installed by pip beside the product, or placed there: nothing in
it is touched.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import vfl
from tests.harness import cases
from tests.harness.federation import BIN, Federation, Program, refused
from tests.harness.hosts import NAMES, Hosts, halves_of_digits, missing
from tests.harness.memory import parameters
from tests.harness.plugins import EXAMPLE, environment, importing, install, place
from tests.harness.sharing import FRESH
from vfl_common.config.recipe import load_recipe
from vfl_common.run_folder import create
from vfl_common.summary import load_summary
from vfl_party.runtime.preflight import check

LR = 0.1
_WHY = missing()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the example is, as if installed."""
    return place(tmp_path_factory.mktemp("plugin"))


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which another version of it is."""
    return place(tmp_path_factory.mktemp("newer"), "1.1")


@pytest.fixture
def here(site: Path) -> Iterator[None]:
    """The example is installed for this process."""
    with importing(site):
        yield


def run(folder: Path, phase: dict[str, Any], site: Path) -> tuple[Federation, dict[str, Any]]:
    """A run of two parties with one phase that is named ``splitnn``; (its federation, its
    summary).
    """
    tables = cases.recipe(2) | {
        "phases": [{"name": "splitnn", "epochs": 2, "batch_size": 24} | phase]
    }
    with Federation(folder, tables, cases.digits(2)) as federation:
        federation.start_server()
        for name in federation.names:
            party = federation.write_party(name).name
            federation.start(name, "vfl-party", "run", party, environment=environment(site))
        return federation, federation.finish()


def files(folder: Path) -> dict[str, str]:
    """What makes a plug-in: {file: its text} of modules and entry points."""
    kept = [*folder.glob("*.py"), *folder.glob("*.dist-info/entry_points.txt")]
    return {
        str(path.relative_to(folder)): "\n".join(sorted(path.read_text().split())) for path in kept
    }


def test_a_method_from_outside_trains_as_ours_does(tmp_path: Path, site: Path) -> None:
    placed, site = site, install(tmp_path)
    assert files(site) == files(placed)
    ours, _ = run(
        tmp_path / "ours", {"kind": "splitnn", "optimizer": {"kind": "sgd", "lr": LR}}, site
    )
    theirs, summary = run(tmp_path / "theirs", {"kind": "plain", "lr": LR}, site)
    for name in ours.names:
        want, got = ours.parameters(name), theirs.parameters(name)
        assert got.keys() == want.keys()
        assert all(torch.equal(got[key], want[key]) for key in want), name
    assert [line["exchange"] for line in summary["exchanges"]] == ["rows", "embedding", "embedding"]


def test_a_transform_and_a_codec_from_outside_are_in_the_chain(tmp_path: Path, site: Path) -> None:
    transforms = [{"kind": "row_clip", "exchange": "embedding", "norm": 0.5}]
    phase = {"kind": "plain", "codec": "saturating", "transforms": transforms}
    _, summary = run(tmp_path, phase, site)
    (up,) = (
        line
        for line in summary["exchanges"]
        if (line["exchange"], line["sender"]) == ("embedding", "passive parties")
    )
    assert up["chain"] == "rows clipped to 0.5 -> saturating float16"
    sent = {
        line["kind"]: line["payload_bytes"]
        for line in summary["bytes"]["by_link"]
        if line["phase"] == "splitnn"
    }
    # Epochs, training rows, width, bytes a number.
    assert sent["embedding"] == sent["gradient"] == 2 * 80 * 8 * 2


@pytest.mark.usefixtures("here")
def test_processes_and_the_library_compute_the_same(
    tmp_path: Path, site: Path, newer: Path
) -> None:
    """The example's own recipe: a method, an encoder and a codec from outside; no prediction with
    other versions.
    """
    recipe = shutil.copy(EXAMPLE / "recipe.toml", tmp_path)
    done = subprocess.run(
        [BIN / "vfl", "simulate", recipe, "--out", "runs"],
        cwd=tmp_path,
        env=environment(site),
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    (theirs,) = (tmp_path / "runs").glob("[!.]*")
    ours = vfl.simulate(recipe, out=tmp_path / "ours")
    assert ours.metrics["test"] == load_summary(theirs / "summary.json").metrics["test"]
    assert ours.metrics["test"]["accuracy"] > 0.85
    for name in ("bank", "hospital", "retailer", "telecom"):
        want, got = parameters(theirs / name), parameters(ours.folder / name)
        assert got.keys() == want.keys()
        assert any(key.startswith("encoder.blocks") for key in got)
        assert all(torch.equal(got[key], want[key]) for key in want), name
        facts = json.loads((theirs / name / "run.json").read_text())
        assert (
            facts["plugins"] == json.loads((ours.folder / name / "run.json").read_text())["plugins"]
        )
        assert set(facts["plugins"].values()) == {"vfl-example-plugin 1.0"}
    words = [
        "vfl-party",
        "predict",
        str(theirs / "federation" / "hospital.toml"),
        "--run",
        str(theirs),
    ]
    program = Program("predict", words, tmp_path, fresh=FRESH, environment=environment(newer))
    names = ("vfl.encoders:residual", "vfl-example-plugin 1.0", "vfl-example-plugin 1.1")
    with contextlib.closing(program):
        refused(program, *names)


@pytest.mark.usefixtures("here")
def test_a_forecast_counts_what_the_plug_ins_send() -> None:
    found = vfl.forecast(EXAMPLE / "recipe.toml")
    # Of training; a codec of two bytes, there and back.
    rows, epochs, width, parties = 1258, 5, 16, 3
    assert found.by_phase["plain"].payload_bytes == rows * epochs * width * parties * 2 * 2


def federation_of(folder: Path, phases: list[dict[str, Any]], **model: Any) -> Federation:
    return Federation(folder, cases.recipe(2, model=model) | {"phases": phases}, cases.digits(2))


PHASES: list[dict[str, Any]] = [{"kind": "splitnn", "epochs": 1, "codec": "saturating"}]
RESIDUAL = {"kind": "residual", "width": 8}


@pytest.mark.usefixtures("here")
def test_check_names_the_plug_ins_with_their_versions(tmp_path: Path) -> None:
    with federation_of(tmp_path, PHASES, encoder=RESIDUAL) as federation:
        federation.address, federation.extra = (
            "127.0.0.1:1",
            {"p1": {"encoder": {"kind": "residual", "width": 9}}},
        )
        found = {
            name: [*check(federation.write_party(name), None, offline=True)]
            for name in federation.names
        }
    assert all(each.fine for lines in found.values() for each in lines)
    said = {
        name: [each.text for each in lines if each.about == "plug-in"]
        for name, lines in found.items()
    }
    for texts in said.values():
        codec, encoder = texts
        assert codec.startswith("vfl.codecs:saturating: vfl-example-plugin 1.0 ")
        assert encoder.startswith("vfl.encoders:residual: vfl-example-plugin 1.0 ")
    assert said["p0"][1] != said["p1"][1]


def test_a_plug_in_that_is_not_installed_is_one_sentence(tmp_path: Path) -> None:
    with federation_of(tmp_path, PHASES) as federation:
        federation.start_server()
        refused(federation.start_party("p1"), "'saturating'", "bfloat16")


def test_another_version_is_one_sentence_at_both_ends(
    tmp_path: Path, site: Path, newer: Path
) -> None:
    with federation_of(tmp_path, PHASES) as federation:
        server = federation.start_server()
        first = federation.write_party("p0").name
        federation.start("p0", "vfl-party", "run", first, environment=environment(site))
        server.wait_for("joined", party="p0")
        late = federation.write_party("p1").name
        program = federation.start("p1", "vfl-party", "run", late, environment=environment(newer))
        versions = ("vfl-example-plugin 1.1 at p1", "vfl-example-plugin 1.0 at p0")
        sentence = refused(program, "vfl.codecs:saturating", *versions)
        told = server.wait_for("refused", party="p1", code="PLUGINS_DIFFER")
        assert sentence.endswith(told["why"])
        back = federation.start("p1", "vfl-party", "run", late, environment=environment(site))
        # With the version of the others, the run begins.
        assert back.wait(60) == 0
        federation.finish()


def test_an_unfinished_run_needs_the_version_with_which_it_began(
    tmp_path: Path, newer: Path
) -> None:
    with federation_of(tmp_path, PHASES) as federation:
        federation.address = "127.0.0.1:1"
        path = federation.write_party("p1")
        folder = create(tmp_path / "runs", "earlier", "p1", load_recipe(tmp_path / "recipe.toml"))
        folder.note(job="train", plugins={"vfl.codecs:saturating": "vfl-example-plugin 1.0"})
        folder.unlock()
        program = federation.start(
            "p1", "vfl-party", "run", path.name, environment=environment(newer)
        )
        versions = ("vfl-example-plugin 1.0", "vfl-example-plugin 1.1")
        refused(program, "vfl.codecs:saturating", *versions)


@pytest.mark.skipif(bool(_WHY), reason=_WHY or "hosts of their own")
def test_over_two_hosts(tmp_path: Path, site: Path) -> None:
    """Bank and hospital of the example's recipe, each in a network namespace; and the server in a
    third.
    """
    recipe = tomllib.loads((EXAMPLE / "recipe.toml").read_text())
    recipe = {key: table for key, table in recipe.items() if key != "simulate"} | {
        "parties": recipe["parties"][:2]
    }
    with Hosts(tmp_path, NAMES, environment(site)["PYTHONPATH"]) as hosts:
        halves_of_digits(hosts, recipe)
        server = hosts.start("fed", "vfl-server run recipe.toml --listen 0.0.0.0:7000")
        server.wait_for("ready")
        parties = [hosts.start(name, f"vfl-party run {name}.toml") for name in ("bank", "hospital")]
        for program in (*parties, server):
            assert program.wait(180.0) == 0, program.stderr
        (path,) = hosts.home("fed").glob("runs/*/summary.json")
    assert load_summary(path).metrics["test"]["accuracy"] > 0.85
