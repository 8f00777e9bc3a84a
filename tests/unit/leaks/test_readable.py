"""What the leak meter knows of our own methods: the rows of each message are those of its
tensors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import cases
from tests.harness.memory import in_process
from vfl_leaks.rehearsal import Rehearsal

# So small that no weight changes: each embedding is then what the final encoder gives for its rows.
STILL = {"kind": "sgd", "lr": 1e-30}
SPLIT = {"kind": "splitnn", "epochs": 2, "batch_size": 32, "optimizer": STILL}


@pytest.mark.parametrize(
    ("phases", "exchanges"),
    [
        ([SPLIT, {"kind": "evaluate"}], {"embedding", "validation"}),
        ([SPLIT | {"micro_batches": 2}], {"embedding", "validation"}),
        ([SPLIT | {"validate_every": 2, "checkpoint_steps": 3}], {"embedding", "validation"}),
        ([{"kind": "head", "epochs": 1, "batch_size": 32}], {"upload"}),
        ([{"kind": "head"}], {"upload"}),
    ],
    ids=["split", "micro-batches", "parts of an epoch", "head", "trees that stop early"],
)
def test_rows_are_those_of_the_tensors_that_came(
    phases: list[dict[str, Any]], exchanges: set[str], tmp_path: Path
) -> None:
    # Their upload has the validation rows, too.
    trees = {"kind": "gbdt", "trees": 5, "early_stopping": 2}
    model = {"top": trees} if "epochs" not in phases[0] else None
    made = cases.recipe(3, task={"kind": "binary"}, model=model) | {"phases": phases}
    (tmp_path / "record").mkdir()
    rehearsal = Rehearsal(tmp_path / "record")
    data = cases.columns("sklearn:breast_cancer", 3, limit=200)
    in_process(tmp_path / "run", made, data, attach=rehearsal.attach)
    scene = rehearsal.scene("p0", 1)
    for name in ("p1", "p2"):
        owner, found = scene.owners[name], set[str]()
        for batch in scene.embeddings[name]():
            with torch.no_grad():
                wanted = owner.encoder(*owner.inputs(batch.rows))
            torch.testing.assert_close(batch.came, wanted)
            found.add(batch.exchange)
        assert found == exchanges


def test_gradients_have_the_rows_of_the_embeddings_that_they_answer(tmp_path: Path) -> None:
    made = cases.recipe(3, task={"kind": "binary"}) | {"phases": [SPLIT | {"micro_batches": 2}]}
    (tmp_path / "record").mkdir()
    rehearsal = Rehearsal(tmp_path / "record")
    data = cases.columns("sklearn:breast_cancer", 3, limit=200)
    in_process(tmp_path / "run", made, data, attach=rehearsal.attach)
    asked = {
        (each.round, each.batch): each.rows.tolist()
        for each in rehearsal.scene("p0", 1).embeddings["p2"]()
        if each.exchange == "embedding"
    }
    answered = {
        (each.round, each.batch): each.rows.tolist()
        for each in rehearsal.scene("p2", 1).gradients()
    }
    assert answered == asked
    # What each party was meant to get is heard of all receivers, though all get the same.
    assert all(each.meant is not None for each in rehearsal.scene("p2", 1).gradients())
