"""The leak meter on runs of trees: what it overhears is what the trees are, and encryption hides
sums alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import vfl
from tests.harness import cases
from tests.harness.errors import assert_names
from vfl_leaks.attacks.trees import compute_sides, number_nodes, yield_trees
from vfl_leaks.rehearsal import Rehearsal, rehearse
from vfl_party.methods.secureboost.columns import encode_rows
from vfl_party.methods.secureboost.joint_walk import forest_of

ATTACKS = ["nodes", "sides", "sums"]


def tables(**phase: Any) -> dict[str, Any]:
    made = cases.recipe(3, task={"kind": "binary"})
    settings = {
        "kind": "secureboost",
        "trees": 4,
        "learning_rate": 0.5,
        "encryption": "none",
        "early_stopping": 4,
    }
    data = cases.columns("sklearn:breast_cancer", 3, limit=300)
    return made | {"phases": [settings | phase], "simulate": {"parties": data}}


def test_what_is_overheard_is_what_the_trees_are(tmp_path: Path) -> None:
    """The sides that the active party hears are those of the owner's splits, and nodes follow from
    all sides.
    """
    (tmp_path / "record").mkdir()
    rehearsal = Rehearsal(tmp_path / "record")
    rehearse(vfl.Recipe.from_dict(tables()), {}, tmp_path / "runs", rehearsal.attach, quiet=True)
    active, owner = (rehearsal.parties[name].party for name in ("p0", "p1"))
    rows = np.concatenate([active.rows.get("train"), active.rows.get("validation")])
    forest = forest_of(owner)
    codes_NF = encode_rows(owner, forest.columns)[rows]
    trees = [tree for tree in yield_trees(rehearsal.scene("p0", 1)) if tree.passive == "p1"]
    assert len(trees) == 4
    compared = 0
    for tree, kept in zip(trees, forest.trees, strict=False):
        found = compute_sides(tree, len(rows))
        splits = [kept.splits[at] for at in sorted(kept.splits)]
        assert len(found) == len(splits)
        for side_N, split in zip(found, splits, strict=True):
            inside = side_N != 0
            assert ((side_N[inside] > 0) == split.goes_left(codes_NF[inside])).all()
            compared += int(inside.sum())
        assert tree.columns is not None
        assert len(tree.columns) == len(tree.chosen[0][0])
    assert compared > 0
    own = [number_nodes(tree) for tree in yield_trees(rehearsal.scene("p1", 1))]
    assert [each.tolist() for each in own] == [number_nodes(tree).tolist() for tree in trees]


def test_attacks_on_trees_have_figures_and_encryption_hides_only_sums() -> None:
    plain = vfl.leaks(tables(trees=2), attacks=ATTACKS, quiet=True).found[0]
    found = {(line.attack, line.attacker) for line in plain.lines}
    assert found == {("nodes", "p1"), ("nodes", "p2"), ("sides", "p0"), ("sums", "p0")}
    for note in plain.notes:
        assert_names(note, "sides: p2")
    assert not any("embeddings" in note for note in plain.notes)
    secret = vfl.leaks(
        tables(trees=2, encryption="paillier", key_bits=1024), attacks=ATTACKS, quiet=True
    ).found[0]
    assert any("encryption" in note for note in secret.notes)
    assert secret.lines
    for line in secret.lines:
        (other,) = (
            each
            for each in plain.lines
            if (each.attack, each.attacker, each.of, each.knows) == _key(line)
        )
        assert other.value == line.value


def _key(line: Any) -> tuple[str, str, str, str]:
    return line.attack, line.attacker, line.of, line.knows
