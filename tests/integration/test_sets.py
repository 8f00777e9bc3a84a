"""A model that is trained for sets of parties: exact against one process, whatever else a recipe
asks for, and of use when a party is missing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness import cases, reference, reference_pipe
from tests.harness.memory import in_memory
from tests.harness.sentences import raises
from tests.integration.test_exact import TOLERANCE, federated, largest_deviation
from vfl_common.errors import Code, InputError

SUBSETS: dict[str, Any] = {"subsets": True}
DROPOUT: dict[str, Any] = {"party_dropout": 0.4}
SGD = {"kind": "sgd", "lr": 0.01, "momentum": 0.9}
MLP = {"kind": "mlp", "hidden": [16], "activation": "tanh"}
DATA = cases.columns("sklearn:digits", 3, limit=100)


def recipe(how: dict[str, Any], rule: str = "", parties: int = 3, **phase: Any) -> dict[str, Any]:
    rule = rule or ("mean" if "subsets" in how else "concat")
    model = {"combine": rule, "encoder": MLP, "top": {"hidden": [16], "dropout": 0.1}}
    return cases.recipe(parties, model=model, phase={"optimizer": SGD} | how | phase)


@pytest.mark.parametrize(
    ("how", "rule"),
    [
        (SUBSETS, "mean"),
        (SUBSETS, "max"),
        (SUBSETS, "attention"),
        (DROPOUT, "concat"),
        (DROPOUT, "sum"),
        (DROPOUT, "mean"),
    ],
    ids=str,
)
@pytest.mark.parametrize("parties", [2, 4])
def test_one_process_from_the_paper(
    how: dict[str, Any], rule: str, parties: int, tmp_path: Path
) -> None:
    tables, data = recipe(how, rule, parties), cases.digits(parties)
    want = reference.train(tables, data)
    assert largest_deviation(in_memory(tmp_path, tables, data), want) <= TOLERANCE


@pytest.mark.parametrize("how", [SUBSETS, DROPOUT], ids=str)
@pytest.mark.parametrize(
    "more",
    [
        {"micro_batches": 3},
        {"in_flight": 4, "micro_batches": 2},
        {"local_updates": 3},
        {"cache": {"batches": 3, "uses": 4, "threshold": 0.5}, "in_flight": 2},
    ],
    ids=str,
)
def test_in_flight_in_parts_and_again(
    how: dict[str, Any], more: dict[str, Any], tmp_path: Path
) -> None:
    tables = recipe(how, validate_every=2, epochs=4, checkpoint_steps=7, **more)
    tables["model"]["top"] = {"hidden": [16]}
    want = reference_pipe.train(tables, DATA)
    assert largest_deviation(in_memory(tmp_path, tables, DATA), want) <= TOLERANCE
