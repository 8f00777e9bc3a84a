"""The methods of examples/plugin beside plain_split: what a method can do beyond training."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import vfl
from tests.harness import cases
from tests.harness.errors import raises
from tests.harness.federation import Federation, Program
from tests.harness.memory import parameters
from tests.harness.plugins import EXAMPLE, environment, importing, place
from tests.integration.test_resume import HANDSHAKE_BYTES, held, kill
from vfl_common.errors import Code, InputError

WATCHED = {"kind": "watched", "name": "t", "epochs": 30, "batch_size": 24, "lr": 0.5}
# The same in our own method.
OURS = {
    "kind": "splitnn",
    "name": "t",
    "epochs": 30,
    "batch_size": 24,
    "optimizer": {"kind": "sgd", "lr": 0.5},
    "early_stopping": {"metric": "loss", "patience": 2},
}
WIDTH = 64
# What p2 sends in a round: of the training and the validation rows.
ROUND_BYTES = 4 * WIDTH * (160 + 20)
# In its third step.
FOURTH_ROUND = HANDSHAKE_BYTES + 3 * ROUND_BYTES + int(2.5 * 4 * WIDTH * 24)
PRIVATE = {"kind": "private_alone", "name": "t", "epochs": 3, "batch_size": 24}
DATA = cases.columns("sklearn:breast_cancer", 3, limit=200)


def tables(*phases: dict[str, Any], **more: Any) -> dict[str, Any]:
    made = cases.recipe(3, task={"kind": "binary"}, model={"embedding_size": WIDTH}, **more)
    return made | {"phases": list(phases), "simulate": {"parties": DATA}}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return place(tmp_path_factory.mktemp("methods"))


@pytest.fixture
def plugins(site: Path) -> Iterator[dict[str, dict[str, Any]]]:
    """The example's methods as objects: nothing is installed."""
    with importing(site):
        private_alone = import_module("private_alone")
        watched = import_module("watched")

        modules = [watched, private_alone]
        yield {"methods": {each.__name__: each.METHOD for each in modules}}


@pytest.fixture(scope="module")
def ours() -> vfl.Run:
    return vfl.simulate(tables(OURS, {"kind": "evaluate"}), quiet=True)


def same(run: Path, other: Path) -> None:
    for name in DATA:
        want, got = parameters(other / name), parameters(run / name)
        assert got.keys() == want.keys()
        assert all(torch.equal(got[key], want[key]) for key in want), name


def test_a_method_validates_and_ends_early_as_ours_does(
    plugins: dict[str, Any], ours: vfl.Run
) -> None:
    recipe = tables(WATCHED | {"patience": 2}, {"kind": "evaluate"})
    run = vfl.simulate(recipe, plugins=plugins, quiet=True)
    rounds = len([name for name in run.curves()["phase"] if name == "t"])
    # Otherwise nothing has ended early, and no weights were restored.
    assert 2 < rounds < 30
    for split in ("validation", "test"):
        assert run.metrics[split] == ours.metrics[split]
    same(run.folder, ours.folder)
    forecast = vfl.forecast(recipe, plugins=plugins)
    short = vfl.forecast(
        tables(WATCHED | {"epochs": rounds}, {"kind": "evaluate"}), plugins=plugins
    )
    assert short.by_phase["t"] == run.bytes.by_phase["t"]
    assert forecast.by_phase["t"].payload_bytes > run.bytes.by_phase["t"].payload_bytes


def test_the_example_equals_its_reference_in_one_process() -> None:
    with importing(EXAMPLE):
        import_module("test_plain_split").test_a_run_has_the_parameters_of_one_process()


def test_it_needs_validation_rows(plugins: dict[str, Any]) -> None:
    with raises(InputError, Code.CONFIG_INVALID, names="rows.validation"):
        vfl.simulate(tables(WATCHED, rows={"validation": 0.0}), plugins=plugins, quiet=True)


def test_attacks_know_the_rows_of_a_method_that_inherits_rows_at(plugins: dict[str, Any]) -> None:
    found = vfl.leaks(
        tables(WATCHED | {"epochs": 2}), plugins=plugins, attacks=["norm"], quiet=True
    )
    assert {line.attacker for line in found.found[0].lines} == {"p1", "p2"}


@pytest.mark.parametrize("victim", ["p0", "p1"])
def test_a_method_that_is_killed_goes_on_from_its_state(
    victim: str, tmp_path: Path, site: Path, ours: vfl.Run
) -> None:
    """Over gRPC, in the fourth round: with the best weights so far of a checkpoint."""

    class Plugged(Federation):
        def start_party(self, name: str, *options: str) -> Program:
            words = ["vfl-party", "run", self.write_party(name).name, *options]
            return self.start(name, *words, environment=environment(site))

    phases: list[dict[str, Any]] = [WATCHED | {"patience": 2}, {"kind": "evaluate"}]
    recipe = {key: of for key, of in tables(*phases).items() if key != "simulate"}
    with held(tmp_path, recipe, DATA, Plugged, sent=FOURTH_ROUND) as (federation, proxy):
        federation.wait_for_checkpoint("000003.t.3")
        kill(federation, proxy, victim)
        assert federation.finish()["interruptions"] == 1
        same(federation.run_folder, ours.folder)


def test_a_method_spends_a_budget_that_is_planned(plugins: dict[str, Any]) -> None:
    recipe = tables(PRIVATE | {"dp": {"epsilon": 4.0}}, {"kind": "evaluate"})
    run = vfl.simulate(recipe, plugins=plugins, quiet=True)
    privacy = run.summary.privacy
    assert privacy is not None
    assert 3.9 < privacy.epsilon <= 4.0
    assert privacy.noise_multiplier > 0.5
    again = vfl.simulate(recipe, plugins=plugins, quiet=True)
    one, other = (each.model("p0").top for each in (run, again))
    assert one is not None
    assert other is not None
    # Its noise is nobody's to draw again.
    assert not torch.equal(one.state_dict()["0.weight"], other.state_dict()["0.weight"])
    assert "t" not in run.bytes.by_phase
