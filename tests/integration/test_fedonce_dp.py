"""FedOnce-L1 between processes: what it costs is said, stays within the budget, and is not spent
twice.

Samples and noise are private: two runs differ. A run that resumes from a checkpoint is exact: the
same party's state, trained on in this process, gives the same parameters.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from tests.harness import cases
from tests.harness.errors import assert_names
from tests.harness.federation import Federation, refused
from tests.harness.kills import Killed, killed, plugged
from vfl.summary.table import print_tables
from vfl_common.config.base import parse
from vfl_common.config.data import DataSettings
from vfl_common.config.recipe import Recipe, load_recipe
from vfl_common.stages import parse_rounds_done
from vfl_common.summary import Summary
from vfl_party.assembly.models import encoder_settings
from vfl_party.assembly.party import assemble, expect_rows, open_party
from vfl_party.base.phase import RoundReport
from vfl_party.phases.course import Course

LIMIT, TRAIN = 300, 240
DATA = cases.columns("sklearn:breast_cancer", 3, limit=LIMIT)
DP = {"epsilon": 4.0, "delta": 1e-5}


def recipe(epochs: int = 3, **dp: Any) -> dict[str, Any]:
    tables = cases.recipe(
        3, task={"kind": "binary"}, model={"embedding_size": 3, "top": {"hidden": [8]}}
    )
    tables["model"]["encoder"] = {"kind": "mlp", "hidden": [12], "dropout": 0.1}
    tables["run"]["kept_checkpoints"] = 50
    adam = {"kind": "adam", "lr": 3e-3, "schedule": "cosine"}
    fedonce = {
        "kind": "fedonce",
        "epochs": epochs,
        "batch_size": 60,
        "optimizer": adam,
        "dp": DP | dp,
    }
    head = fedonce | {"kind": "head", "own_encoder": "trained", "epochs": 5}
    tables["phases"] = [fedonce, head, {"kind": "evaluate"}]
    return tables


def run(folder: Path, tables: dict[str, Any]) -> tuple[dict[str, Any], Federation]:
    with Federation(folder, tables, DATA) as federation:
        federation.start_all()
        return federation.finish(), federation


def lines(federation: Federation, name: str, phase: str) -> list[dict[str, Any]]:
    """A party's rounds of a phase."""
    text = (federation.run_folder / name / "metrics.jsonl").read_text()
    return [each for each in map(json.loads, text.splitlines()) if each["phase"] == phase]


def continued(
    federation: Federation, name: str, label: str, tree: Any
) -> tuple[dict[str, Tensor], RoundReport]:
    """A party's parameters at the end of the phase that it was in at checkpoint ``label``, trained
    on here.
    """
    given = load_recipe(federation.folder / "recipe.toml")
    settings = parse(DataSettings, federation.data[name], name)
    opened = open_party(given, name, settings, encoder_settings(given, name, None))
    job = assemble(opened, expect_rows(opened))
    generators = torch.get_rng_state()
    try:
        job.load_state(tree["job"])
        phase_name, done = parse_rounds_done(label)
        (phase,) = [each for each in job.phases if each.name == phase_name]
        phase.load_state(tree["phase"])
        for round_ in range(done, phase.rounds):
            report = phase.run_round(round_)
        phase.finish()
    finally:
        torch.set_rng_state(generators)
    models = job.state()["models"]
    return {
        f"{model}.{key}": value for model, state in models.items() for key, value in state.items()
    }, report


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for key, tensor in want.items():
        assert torch.equal(got[key], tensor), key


def test_one_budget_covers_all_parties(tmp_path: Path) -> None:
    summary, federation = run(tmp_path, recipe())
    privacy = summary["privacy"]
    assert 3.5 < privacy["epsilon"] <= 4
    assert (privacy["delta"], privacy["mode"], privacy["division"]) == (1e-5, "fixed", "moments")
    assert_names(privacy["statement"], "3.99")
    out = io.StringIO()
    print_tables(Summary.model_validate(summary), (), Console(file=out, width=500))
    assert privacy["statement"] in out.getvalue()
    for name, phase, steps in (
        ("p1", "fedonce", 3 * 4),
        ("p2", "fedonce", 3 * 4),
        ("p0", "head", 5 * 4),
    ):
        rounds = [each for each in lines(federation, name, phase) if each["metrics"]]
        spent = [
            each["metrics"]["local" if phase == "fedonce" else "train"]["epsilon"]
            for each in rounds
        ]
        assert spent == sorted(spent)
        assert abs(spent[-1] - privacy["epsilon"]) < 1e-9
        # 4 an epoch: 60 of 240 rows.
        assert rounds[-1]["steps"] == steps
        parameters = federation.parameters(name)
        assert not [key for key in parameters if "running" in key or "_module" in key]
        # From every checkpoint within a phase, the same noise and the same samples follow.
        for label in federation.checkpoint_labels(name):
            began, done = parse_rounds_done(label)
            if began == phase and done < len(lines(federation, name, phase)):
                tree = federation.store(federation.run_folder, name).load(label)
                got, _ = continued(federation, name, label, tree)
                assert_same(got, parameters)
    assert "accuracy" in summary["metrics"]["test"]


def test_matched_targets_guarantee_nothing_and_simple_division_costs_noise(tmp_path: Path) -> None:
    summary, federation = run(tmp_path, recipe(mode="matched", division="simple"))
    assert_names(summary["privacy"]["statement"], "3.99")
    assert 3.5 < summary["privacy"]["epsilon"] <= 4
    plan = Course(Recipe.model_validate(recipe())).privacy(TRAIN)
    assert plan is not None
    assert summary["privacy"]["noise_multiplier"] > 1.1 * plan.report().noise_multiplier
    assert lines(federation, "p1", "fedonce")[0]["metrics"]["local"]["moved"] > 0


def test_batch_norm_is_refused_before_training(tmp_path: Path) -> None:
    tables = recipe()
    tables["parties"] = tables["parties"][:2]
    tables["task"] = {"kind": "multiclass", "classes": 10}
    tables["model"]["encoder"] = {"kind": "cnn", "channels": [4]}
    with Federation(tmp_path, tables, cases.digits(2)) as federation:
        federation.start_server()
        refused(federation.start_party("p1"), "batch_norm = false")
        assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").glob("*/p1"))


def test_a_killed_party_spends_nothing_twice(tmp_path: Path) -> None:
    epochs = 8
    tables = recipe(epochs)
    tables["run"]["kept_checkpoints"] = 2
    with Killed(tmp_path / "f", tables, DATA) as federation:
        federation.plugin = plugged(tmp_path / "site")
        killed(federation, "p1", "checkpoint-named")
        label, tree = federation.checkpoint_labels("p1")[-1], federation.checkpoint("p1")
        federation.start_one("p1")
        summary = federation.finish()
        assert summary["interruptions"] == 1
        phase, done = parse_rounds_done(label)
        assert phase == "fedonce"
        assert 0 < done < epochs
        (p1,) = [each for each in summary["parties"] if each["name"] == "p1"]
        assert p1["steps"] == 4 * epochs
        got, report = continued(federation, "p1", label, tree)
        assert_same(got, federation.parameters("p1"))
        last = lines(federation, "p1", "fedonce")[-1]["metrics"]["local"]["epsilon"]
        assert report.metrics["local"]["epsilon"] == last
        assert abs(last - summary["privacy"]["epsilon"]) < 1e-9
        assert 3.5 < summary["privacy"]["epsilon"] <= 4
