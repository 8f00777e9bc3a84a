"""A run with a defence gives the parameters of a single process that follows the papers' formulas,
to 1e-6.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.harness import cases
from tests.harness import reference_defences as reference
from tests.harness.federation import Federation, Program
from tests.harness.memory import parameters
from tests.harness.plugins import environment, metadata
from tests.integration.test_exact import ROUNDING, largest_deviation
from tests.integration.test_resume import halfway, held, kill, wait_for_checkpoints
from vfl.simulation.inprocess import run_in_process
from vfl_common.config.data import DataSettings
from vfl_common.config.recipe import Recipe
from vfl_party.models import StochasticEncoder

TABLE = cases.columns("sklearn:breast_cancer", 3, limit=120)
GRADIENTS = {"exchange": "embedding", "sent_by": "active"}
EMBEDDINGS = {"exchange": "embedding", "sent_by": "passive"}
DEFENCES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "max_norm": (GRADIENTS | {"kind": "max_norm"}, {"down": reference.max_norm}),
    "marvell": (
        GRADIENTS | {"kind": "marvell", "scale": 2.0},
        {"down": partial(reference.marvell, scale=2.0)},
    ),
    "marvell of an error": (
        GRADIENTS | {"kind": "marvell", "error": 0.3},
        {"down": partial(reference.marvell, error=0.3)},
    ),
    "clipped_gaussian": (
        EMBEDDINGS | {"kind": "clipped_gaussian", "clip": 1.0, "epsilon": 4.0, "delta": 1e-5},
        {"up": partial(reference.clipped, 1.0, 4.0, 1e-5)},
    ),
    "none": ({}, {}),
}


@pytest.mark.parametrize("name", list(DEFENCES))
def test_a_defence_gives_the_parameters_of_its_reference(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    """Both are given one key of noise, which a run draws from the operating system otherwise."""
    monkeypatch.setattr(
        "vfl_party.outbound.filter.secrets", SimpleNamespace(randbits=lambda _bits: reference.KEY)
    )
    transform, formula = DEFENCES[name]
    tables = cases.recipe(
        3,
        task={"kind": "binary"},
        model={"top": {"hidden": [6]}},
        phase={"epochs": 2, "batch_size": 40, "transforms": [transform] if transform else []},
    )
    data = {party: DataSettings.model_validate(own) for party, own in TABLE.items()}
    run_in_process(Recipe.model_validate(tables), data, tmp_path / "run-1")
    got = {party: parameters(tmp_path / "run-1" / party) for party in data}
    worst = largest_deviation(got, reference.train(tables, TABLE, **formula))
    record_property("largest_deviation", worst)
    print(f"{name}: largest deviation {worst:.3g}")
    assert worst <= ROUNDING
    if formula:
        # The defence does something.
        assert largest_deviation(got, reference.train(tables, TABLE)) > 1e-3


LOSSES: dict[str, dict[str, Any]] = {
    "nopeek": {"own_loss": reference.dcor(0.5)},
    "dcor": {"labels_loss": reference.dcor(0.5)},
}


@pytest.mark.parametrize("name", list(LOSSES))
def test_a_term_of_the_loss_gives_the_parameters_of_its_reference(
    name: str, tmp_path: Path, record_property: Any
) -> None:
    tables = cases.recipe(
        3,
        task={"kind": "binary"},
        model={"top": {"hidden": [6]}},
        phase={"epochs": 2, "batch_size": 24, name: 0.5},
    )
    data = {party: DataSettings.model_validate(own) for party, own in TABLE.items()}
    run_in_process(Recipe.model_validate(tables), data, tmp_path / "run-1")
    got = {party: parameters(tmp_path / "run-1" / party) for party in data}
    worst = largest_deviation(got, reference.train(tables, TABLE, **LOSSES[name]))
    record_property("largest_deviation", worst)
    print(f"{name}: largest deviation {worst:.3g}")
    assert worst <= ROUNDING
    assert largest_deviation(got, reference.train(tables, TABLE)) > 1e-3


def test_drawn_embeddings_give_the_parameters_of_their_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    """Both take the same numbers for noise: the product's own depend on every bit of what the
    encoder gives.
    """
    drawn: dict[int, reference.Drawn] = {}

    def noise(encoder: StochasticEncoder, both: torch.Tensor) -> torch.Tensor:
        # Evaluation, of which the reference has none.
        if not encoder.training:
            return torch.zeros(len(both), encoder.width)
        return drawn.setdefault(id(encoder), reference.Drawn()).like(both)

    monkeypatch.setattr(StochasticEncoder, "_noise", noise)
    tables = cases.recipe(
        3,
        task={"kind": "binary"},
        model={"top": {"hidden": [6]}},
        phase={"epochs": 2, "batch_size": 40, "mid": 0.01},
    )
    data = {party: DataSettings.model_validate(own) for party, own in TABLE.items()}
    run_in_process(Recipe.model_validate(tables), data, tmp_path / "run-1")
    # A generation that begins anew takes it from there.
    for party in ("p1", "p2"):
        kept = (tmp_path / "run-1" / party / "noise-secret").read_bytes()
        assert kept == bytes(parameters(tmp_path / "run-1" / party)["encoder.secret"].numpy())
    assert not (tmp_path / "run-1" / "p0" / "noise-secret").exists()
    got = {
        party: {
            name.replace("encoder.encoder.", "encoder."): each
            for name, each in parameters(tmp_path / "run-1" / party).items()
            if name != "encoder.secret"
        }
        for party in data
    }
    worst = largest_deviation(
        got, reference.train(tables, TABLE, draw=partial(reference.mid, 0.01))
    )
    record_property("largest_deviation", worst)
    print(f"mid: largest deviation {worst:.3g}")
    assert worst <= ROUNDING
    assert (
        largest_deviation(got, reference.train(tables, TABLE, draw=partial(reference.mid, 0.02)))
        > 1e-4
    )


@dataclass
class Keyed(Federation):
    """A federation of programs whose noise has the reference's key."""

    plugin: dict[str, str] = field(default_factory=dict)

    def _start(
        self, name: str, args: list[str], environment: dict[str, str] | None = None
    ) -> Program:
        return super()._start(name, args, environment or self.plugin)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "victim"),
    [
        ("marvell", "p0"),
        ("marvell", "p1"),
        ("clipped_gaussian", "p1"),
        ("nopeek and dcor", "p1"),
        ("mid", "p1"),
    ],
)
def test_a_killed_party_goes_on_with_its_noise_bit_for_bit(
    name: str, victim: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "vfl_party.outbound.filter.secrets", SimpleNamespace(randbits=lambda _bits: reference.KEY)
    )
    monkeypatch.setattr(
        "vfl_party.models.layers.secrets", SimpleNamespace(token_bytes=reference.secret)
    )
    terms = {"nopeek and dcor": {"nopeek": 0.5, "dcor": 0.5}, "mid": {"mid": 0.01}}
    defence = terms[name] if name in terms else {"transforms": [DEFENCES[name][0]]}
    tables = cases.recipe(
        3, task={"kind": "binary"}, phase={"epochs": 8, "batch_size": 40, **defence}
    )
    data = {party: DataSettings.model_validate(own) for party, own in TABLE.items()}
    run_in_process(Recipe.model_validate(tables), data, tmp_path / "run-1")
    repository = Path(__file__).parents[2]
    plugin = metadata(
        tmp_path / "plugin", {"vfl.methods": {"keyed": "tests.harness.keyed_plugin:METHOD"}}
    )
    keyed = partial(Keyed, plugin=environment(plugin, repository))
    at = halfway(tmp_path / "run-1", data)
    with held(tmp_path / "killed", tables, TABLE, keyed, sent=at) as (federation, proxy):
        wait_for_checkpoints(federation)
        kill(federation, proxy, victim)
        summary = federation.finish()
        assert summary["interruptions"] == 1
        for party in federation.names:
            whole = parameters(tmp_path / "run-1" / party)
            assert largest_deviation({party: federation.parameters(party)}, {party: whole}) == 0.0
            log = (federation.run_folder / party / "log.jsonl").read_text().splitlines()
            # Nobody sent anything else than before.
            assert not [line for line in log if json.loads(line).get("event") == "noise"]


@pytest.mark.slow
def test_a_run_that_begins_anew_draws_what_it_has_drawn(tmp_path: Path) -> None:
    """Without a checkpoint its weights are the first ones again; other noise on them would average
    out.
    """
    phase = {"epochs": 4, "batch_size": 40, "mid": 0.01}
    tables = cases.recipe(3, task={"kind": "binary"}, phase=phase) | {
        "run": {"checkpoint_every": 100}
    }
    data = {party: DataSettings.model_validate(own) for party, own in TABLE.items()}
    run_in_process(Recipe.model_validate(tables), data, tmp_path / "run-1")
    at = halfway(tmp_path / "run-1", data)
    with held(tmp_path / "killed", tables, TABLE, sent=at) as (federation, proxy):
        secrets = {
            name: (federation.run_folder / name / "noise-secret").read_bytes()
            for name in ("p1", "p2")
        }
        assert not any(federation.checkpoint_labels(name) for name in federation.names)
        kill(federation, proxy, "p1")
        summary = federation.finish()
        assert summary["interruptions"] == 1
        assert len(set(secrets.values())) == 2
        for name, secret in secrets.items():
            assert bytes(federation.parameters(name)["encoder.secret"].numpy()) == secret
