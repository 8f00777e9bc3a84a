"""The account over several runs of real programs: what they spend together, limits, and kills."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.rdp import RdpAccountant

from tests.harness import cases
from tests.harness.federation import Federation, refused, toml
from tests.harness.kills import Killed, killed, plugged
from tests.harness.present import present
from vfl_common.config.base import parse
from vfl_common.config.data import DataSettings
from vfl_common.config.recipe import load_recipe
from vfl_governance.account.limits import plan_disclosures
from vfl_governance.account.store import FILE
from vfl_party.assembly.models import encoder_settings
from vfl_party.assembly.party import assemble, expect_rows, open_party
from vfl_party.cli import cli
from vfl_party.privacy.accountant import ORDERS, compose
from vfl_party.privacy.label_noise import LABEL_SECRET
from vfl_party.record.book import folder_of

ROWS, WIDTH = 60, 4
DATA = cases.columns("sklearn:breast_cancer", 2, limit=ROWS)


def account(federation: Federation, name: str) -> dict[str, dict[str, Any]]:
    """What ``vfl-party account`` says of each peer, about the people."""
    found = CliRunner().invoke(cli, ["account", str(federation.folder / f"{name}.toml"), "--json"])
    assert found.exit_code == 0, found.output
    lines = [json.loads(line) for line in found.output.splitlines()]
    assert all(line["data_set"] == 1 for line in lines), lines
    return {line["peer"]: line for line in lines}


def split(epochs: int = 2, **phase: Any) -> dict[str, Any]:
    """Split training of all rows."""
    return cases.recipe(
        2,
        task={"kind": "binary"},
        model={"embedding_size": WIDTH, "encoder": {"kind": "mlp", "hidden": [8]}},
        phase={"epochs": epochs, "batch_size": 15} | phase,
        rows={"validation": 0.0, "test": 0.0},
    )


def limited(**limits: Any) -> dict[str, dict[str, Any]]:
    return {"p1": {"policy": {"level": "open", "account": limits}}}


def test_runs_add_up_until_one_is_refused_before_it_starts(tmp_path: Path) -> None:
    """Two epochs tell 8 numbers of each person: one run fits into 12, and a second does not."""
    with Federation(tmp_path, split(), DATA, limited(numbers_of_a_person=12)) as federation:
        federation.start_all()
        federation.finish()
        found = account(federation, "p1")["p0"]
        assert (found["runs"], found["people"]) == (1, ROWS)
        assert found["spent"]["numbers_of_a_person"] == 2 * WIDTH
        assert found["spent"]["bytes_of_a_person"] == 2 * WIDTH * 4
        assert found["left"] == {"numbers_of_a_person": 4}
        assert found["spent"]["epsilon"] == 0
        assert found["without_privacy"] == 8
        folder = folder_of(tmp_path / "runs", "p1")
        assert (folder / FILE).stat().st_mode & 0o777 == 0o600
        lines = (folder / "lines.jsonl").read_bytes()
        federation.start_all()
        text = refused(federation.programs["p1"], "policy.account.numbers_of_a_person = 12", "p0")
        assert "8 numbers about one person are spent at p0, and this run would add 8" in text
        # Nothing left, and the others read no figure.
        assert (folder / "lines.jsonl").read_bytes() == lines
        federation.programs["p0"].stop()
        said = CliRunner().invoke(cli, ["check", str(tmp_path / "p1.toml"), "--offline"])
        assert text.removeprefix("error: ").strip() in said.output
        # Without the file the record gives the same account.
        before = account(federation, "p1")
        (folder / FILE).unlink()
        assert account(federation, "p1") == before


def test_a_recipe_that_spells_ids_in_another_way_makes_nobody_a_new_person(tmp_path: Path) -> None:
    """The other parties may have written the recipe."""
    spelt = split() | {"rows": split()["rows"] | {"id_rules": ["casefold"]}}
    for rules in (None, ["casefold"]):
        folder = tmp_path / str(rules)
        data = {name: each | ({"id_rules": rules} if rules else {}) for name, each in DATA.items()}
        with Federation(folder, spelt, data, limited(predictions=9)) as federation:
            federation.address = "127.0.0.1:1"
            path = federation.write_party("p1")
            said = CliRunner().invoke(cli, ["check", str(path), "--offline"])
        text = "policy.account: counts people by their ids"
        assert (text in said.output) is (rules is None), said.output


def private(epochs: int = 3) -> dict[str, Any]:
    """FedOnce-L1 over all rows: 4 steps an epoch at a rate of 1/4."""
    found = split()
    dp = {"noise_multiplier": 2.0, "delta": 1e-5}
    fedonce = {"kind": "fedonce", "epochs": epochs, "batch_size": ROWS // 4, "dp": dp}
    found["phases"] = [fedonce, fedonce | {"kind": "head", "epochs": 1}]
    found["run"] |= {"checkpoint_every": 1}
    return found


def epsilon(steps: int) -> float:
    """What dp-accounting composes."""
    found = RdpAccountant(orders=list(ORDERS))
    event = PoissonSampledDpEvent(0.25, GaussianDpEvent(2.0))
    return float(found.compose(SelfComposedDpEvent(event, steps)).get_epsilon(1e-5))


def ended(federation: Federation) -> None:
    """Waits for all to end well; there are several runs."""
    for name, program in federation.programs.items():
        assert program.wait() == 0, f"{name}: {program.stderr}"


def test_noise_on_labels_is_drawn_once_over_all_runs(tmp_path: Path) -> None:
    """The second run costs no more; another ε does."""
    tables = split()
    tables["task"]["label_epsilon"] = 1.0
    limits = {"p0": {"policy": {"level": "open", "account": {"epsilon": 1.2}}}}
    secret = folder_of(tmp_path / "runs", "p0") / LABEL_SECRET
    with Federation(tmp_path, tables, DATA, limits) as federation:
        for _ in range(2):
            federation.start_all()
            ended(federation)
            kept = secret.read_bytes()
            assert account(federation, "p0")["p1"]["spent"]["epsilon"] == 1.0
        assert secret.read_bytes() == kept
        assert secret.stat().st_mode & 0o777 == 0o600
        assert account(federation, "p1")["p0"]["spent"]["epsilon"] == 0
        tables["task"]["label_epsilon"] = 0.5
        (tmp_path / "recipe.toml").write_text(toml(tables))
        federation.start_all()
        text = refused(federation.programs["p0"], "policy.account.epsilon = 1.2", "p1")
        assert "an ε of 1 for one person is spent at p1, and this run would add 0.5" in text


def test_private_training_adds_up_over_runs_and_a_kill_costs_nothing_twice(tmp_path: Path) -> None:
    """Two runs fit, a third would not. At orders that are not whole dp-accounting takes an upper
    bound.
    """
    steps = 3 * 4
    limits = limited(epsilon=epsilon(2 * steps + 1))
    with Killed(tmp_path / "f", private(), DATA, limits) as federation:
        federation.plugin = plugged(tmp_path / "site")
        for name in ("server", *federation.names):
            federation.start_one(name)
        ended(federation)
        killed(federation, "p1", "checkpoint-named")
        # What it has spent is known before it comes back.
        spent = account(federation, "p1")["p0"]["spent"]["epsilon"]
        assert epsilon(steps + 4) * 0.999 <= spent < epsilon(2 * steps) * 0.999
        federation.start_one("p1")
        ended(federation)
        found = account(federation, "p1")["p0"]
        assert found["spent"]["epsilon"] == pytest.approx(epsilon(2 * steps), rel=1e-3)
        # Its representations, once a run, are not covered.
        assert found["without_privacy"] == 2 * WIDTH
        # The active party's own: one epoch of its head a run.
        other = account(federation, "p0")["p1"]["spent"]["epsilon"]
        assert other == pytest.approx(epsilon(2 * 4), rel=1e-3)
        federation.start_one("server")
        federation.start_one("p1")
        text = refused(federation.programs["p1"], "policy.account.epsilon")
        assert "is spent at p0, and this run would add" in text


def test_a_limit_that_is_met_in_a_run_ends_it_before_the_bundle_leaves(tmp_path: Path) -> None:
    """A run that resumes sends the bundles since its checkpoint again: they have left twice."""
    with Killed(tmp_path / "f", split(), DATA, limited(numbers_of_a_person=8)) as federation:
        federation.plugin = plugged(tmp_path / "site")
        killed(federation, "p1", "checkpoint-begun")
        # Checkpoints are written beside: the next epoch may have begun.
        spent = account(federation, "p1")["p0"]["spent"]["numbers_of_a_person"]
        assert spent in (WIDTH, 2 * WIDTH)
        federation.start_one("p1")
        text = refused(federation.programs["p1"], "policy.account.numbers_of_a_person = 8")
        assert "the next bundle would add 4; it was not sent" in text
        assert account(federation, "p1")["p0"]["spent"]["numbers_of_a_person"] == 8
        other = federation.programs["p0"]
        assert other.wait() == 4
        assert "the party's policy does not let something out" in other.stderr
        assert "policy.account" not in other.stderr


def test_trees_are_counted_in_bits(tmp_path: Path) -> None:
    tables = split()
    trees = {"trees": 2, "depth": 3, "encryption": "none", "min_child_weight": 0.5}
    tables["phases"] = [{"kind": "secureboost", **trees}]
    tables["rows"] = {"validation": 0.0, "test": 0.2}
    with Federation(tmp_path, tables, DATA, limited(split_bits=2 * 3)) as federation:
        federation.start_all()
        federation.finish(30.0)
        log = [
            json.loads(line)
            for line in (federation.run_folder / "p1" / "log.jsonl").read_text().splitlines()
        ]
        (said,) = [line["message"] for line in log if line.get("event") == "answered"]
        # While trees grew; rows for testing walk through them afterwards.
        grown = int(said.split("at most ")[1].split()[0])
        assert 0 < grown <= account(federation, "p1")["p0"]["spent"]["split_bits"] <= 6


def noisy() -> dict[str, Any]:
    """Split training with noise, then an evaluation; rows of all three splits."""
    tables = split(epochs=3)
    noise = {"kind": "clipped_gaussian", "clip": 1.0, "epsilon": 0.5, "delta": 1e-6}
    at = {"exchange": "embedding", "sent_by": "passive"}
    tables["phases"][0]["transforms"] = [at | noise]
    tables["phases"].append({"kind": "evaluate", "splits": ["validation", "test"]})
    tables["rows"] = {"validation": 0.2, "test": 0.25}
    return tables


@pytest.mark.parametrize("tables", [noisy(), private()], ids=["noise", "dp"])
def test_a_run_spends_what_was_planned(tables: dict[str, Any], tmp_path: Path) -> None:
    """Numbers, bytes and ε of each peer, to the last digit: no row is left out of these batches."""
    with Federation(tmp_path, tables, DATA) as federation:
        federation.start_all()
        federation.finish()
        recipe = load_recipe(tmp_path / "recipe.toml")
        for name, peer in (("p0", "p1"), ("p1", "p0")):
            settings = parse(DataSettings, DATA[name], name)
            opened = open_party(recipe, name, settings, encoder_settings(recipe, name, None))
            made = assemble(opened, expect_rows(opened))
            plans = present(plan_disclosures(made.party, len(opened.table), "train"))
            plan = plans[peer]
            spent = account(federation, name)[peer]["spent"]
            for what in ("numbers_of_a_person", "bytes_of_a_person", "bytes"):
                assert plan.amounts[what] == spent[what], (name, what)
            assert compose(plan.costs.items(), 1e-5) == pytest.approx(spent["epsilon"], rel=1e-9)
            assert spent["epsilon"] > 0 or (name, tables["phases"][0]["kind"]) == ("p0", "splitnn")


def test_predictions_are_counted_and_limited(tmp_path: Path) -> None:
    """Each row once a prediction; the second prediction would be one too many for a person."""
    with Federation(tmp_path, split(), DATA, limited(predictions_of_a_person=1)) as federation:
        federation.start_all()
        federation.finish()
        trained = f"runs/{federation.run_folder.name}"
        federation.server_options = ("--predict",)
        for number in (1, 2):
            federation.start_server()
            for name in federation.names:
                path = federation.write_party(name).name
                out = ("--out", f"scores-{number}.csv") if name == "p0" else ()
                federation.start(name, "vfl-party", "predict", path, "--run", trained, *out)
            if number == 2:
                break
            ended(federation)
            found = account(federation, "p1")["p0"]["spent"]
            assert (found["predictions_of_a_person"], found["predictions"]) == (1, ROWS)
        text = refused(federation.programs["p1"], "policy.account.predictions_of_a_person = 1")
        assert "1 predictions of one person are spent at p0, and this run would add 1" in text
        # The active party sends nothing about people.
        assert account(federation, "p0")["p1"]["spent"]["predictions"] == 0
