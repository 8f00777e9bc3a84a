"""Rows that some parties do not hold (``rows.partial``): exact against one process, resumable, counted
by the forecast, and evaluated and predicted with those who hold them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.harness import reference_partial
from tests.harness.aligning import Direct
from tests.harness.federation import Federation
from tests.harness.memory import in_memory, in_process
from tests.harness.sentences import raises
from tests.integration.test_exact import TOLERANCE, largest_deviation
from tests.integration.test_resume import held, kill
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_party.align import digest, rounds
from vfl_party.forecast.count import forecast, outlook_of

SUBSETS: dict[str, Any] = {"subsets": True}
DROPOUT: dict[str, Any] = {"party_dropout": 0.4}
SGD = {"kind": "sgd", "lr": 0.05, "momentum": 0.9}
NAMES = ("p0", "p1", "p2", "p3")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Four parties' tables of two numbers each: of 90 people each party knows some."""
    drawn, folder = np.random.default_rng(4), tmp_path_factory.mktemp("tables")
    x = drawn.normal(size=(90, 8))
    y = (x.sum(axis=1) > 0).astype(int)
    found: dict[str, dict[str, Any]] = {}
    for place, (name, share) in enumerate(zip(NAMES, (0.9, 0.6, 0.5, 0.3), strict=True)):
        there = np.flatnonzero(drawn.random(90) < share)
        lines = ["id,a,b" + ",y" * (place == 0)]
        for row in there:
            cells = [f"c{row:02}", *(f"{each:.6f}" for each in x[row, 2 * place : 2 * place + 2])]
            lines.append(",".join([*cells, *([str(y[row])] if place == 0 else [])]))
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")
        found[name] = {"source": str(folder / f"{name}.csv"), "id": ["id"]}
    found["p0"]["label"] = "y"
    return found


def recipe(
    how: dict[str, Any], rule: str = "", *, kind: str = "splitnn", **phase: Any
) -> dict[str, Any]:
    rule = rule or ("mean" if "subsets" in how else "concat")
    mlp = {"kind": "mlp", "hidden": [5], "activation": "tanh"}
    return {
        "name": "partial",
        "seed": 3,
        "task": {"kind": "binary"},
        "parties": [
            {"name": name, "role": "active" if name == "p0" else "passive"} for name in NAMES
        ],
        "rows": {"align": "psi", "partial": True},
        "model": {"embedding_size": 4, "combine": rule, "encoder": mlp, "top": {"hidden": [5]}},
        "phases": [
            {"kind": kind, "epochs": 2, "batch_size": 7, "optimizer": SGD, **how, **phase},
        ],
    }


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets an alignment within this process take no time."""
    monkeypatch.setattr(rounds, "Masking", Direct)
    monkeypatch.setitem(digest._SCRYPT, "n", 2)


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize(
    ("how", "rule"),
    [
        (SUBSETS, "mean"),
        (SUBSETS, "attention"),
        (DROPOUT, "concat"),
        (DROPOUT, "mean"),
        ({}, "concat"),
        ({}, "mean"),
        ({}, "sum"),
        ({}, "max"),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["splitnn", "head"])
def test_one_process_row_by_row(
    kind: str, how: dict[str, Any], rule: str, data: dict[str, Any], tmp_path: Path
) -> None:
    tables = recipe(how, rule, kind=kind)
    want = reference_partial.train(tables, data)
    assert largest_deviation(in_memory(tmp_path, tables, data), want) <= TOLERANCE / 10
