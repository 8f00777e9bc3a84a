"""The leak meter on shared tops: it hears what leaves and what comes back, changes nothing, and has
figures.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import vfl
from tests.harness import cases
from tests.harness.errors import assert_names
from tests.harness.memory import parameters
from vfl_leaks.attacks.shared_weights import collect_shared
from vfl_leaks.rehearsal import Rehearsal, rehearse


def tables(parties: int = 2, **phase: Any) -> dict[str, Any]:
    made = cases.recipe(parties, task={"kind": "binary"})
    settings = {
        "kind": "fedhssl",
        "ssl": "simsiam",
        "rounds": 3,
        "batch_size": 32,
        "projector": [16, 16],
    }
    data = cases.columns("sklearn:breast_cancer", parties, limit=200)
    rows = {"validation": 0.1, "test": 0.3}
    return made | {
        "rows": rows,
        "phases": [settings | {"predictor": 8} | phase],
        "simulate": {"parties": data},
    }


@pytest.mark.parametrize("phase", [{"codec": "float16"}, {"iso_weights": 1.0}], ids=str)
def test_what_is_overheard_is_what_the_server_averages_and_changes_nothing(
    phase: dict[str, Any], tmp_path: Path
) -> None:
    plain = vfl.simulate(tables(**phase), out=tmp_path / "runs", quiet=True)
    (tmp_path / "record").mkdir()
    rehearsal = Rehearsal(tmp_path / "record")
    run = rehearse(
        vfl.Recipe.from_dict(tables(**phase)), {}, tmp_path / "runs", rehearsal.attach, quiet=True
    )
    noisy = "iso_weights" in phase
    for name in ("p0", "p1"):
        one, other = parameters(plain.folder / name), parameters(run.folder / name)
        assert one.keys() == other.keys()
        # Noise is nobody's to draw again.
        assert noisy or all(torch.equal(one[key], other[key]) for key in one)
    server = rehearsal.parties["p0"].party.recipe.server
    heard = collect_shared(rehearsal.scene(server, 1))
    assert sorted(heard.sent) == sorted(heard.means) == [0, 1, 2]
    for round_, mean in heard.means.items():
        uploads = heard.sent[round_]
        assert uploads.keys() == {"p0", "p1"}
        for key, value in mean.items():
            wanted = (uploads["p0"][key] + uploads["p1"][key]) / 2
            assert torch.allclose(value, wanted, atol=1e-6, rtol=0 if noisy else 1e-3), key
        assert any(not torch.equal(uploads["p0"][key], uploads["p1"][key]) for key in mean)
    peer = collect_shared(rehearsal.scene("p1", 1))
    assert all(of_party.keys() == {"p1"} for of_party in peer.sent.values())
    assert all(
        torch.equal(peer.sent[2]["p1"][key], heard.sent[2]["p1"][key]) for key in heard.means[2]
    )


def test_figures_of_server_and_peers_and_who_is_refused() -> None:
    found = vfl.leaks(tables(3), attacks=["tops", "uploads"], quiet=True).found[0]
    pairs = {(line.attack, line.attacker) for line in found.lines}
    server = next(attacker for attack, attacker in pairs if attack == "uploads")
    assert pairs == {("tops", "p0"), ("tops", "p1"), ("tops", "p2"), ("uploads", server)}
    assert all(0.5 <= line.value.mean <= 1 and line.chance_high is not None for line in found.lines)
    for note in found.notes:
        assert_names(note, "rank 8 of 8")
    alone = vfl.leaks(tables(aggregate=False), attacks=["tops", "uploads"], quiet=True).found[0]
    assert not alone.lines
    (why,) = {note.partition(": ")[2] for note in alone.notes}
    assert_names(why, "shares weights")
