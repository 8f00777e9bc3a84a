"""A run on a table with rows without a label is the run on the table without these rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vfl
from tests.harness import cases


@pytest.mark.parametrize("processes", [False, True])
def test_training_is_that_of_the_labelled_rows(tmp_path: Path, processes: bool) -> None:
    numbers = np.random.default_rng(1).normal(size=(90, 4)).round(3)
    empty = {n for n in range(90) if n % 7 == 3}
    rows = [
        f"u{n},{a},{b},{'' if n in empty else 'no' if a + c < 0 else 'yes'}"
        for n, (a, b, c, _) in enumerate(numbers)
    ]
    header, shop = "who,a,b,y", [f"u{n},{c},{d}" for n, (_, _, c, d) in enumerate(numbers)]
    whole = [row for n, row in enumerate(rows) if n not in empty]
    for name, lines in {"all": [header, *rows], "some": [header, *whole]}.items():
        (tmp_path / f"{name}.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "shop.csv").write_text("\n".join(["who,c,d", *shop]) + "\n")
    recipe = cases.recipe(2, task={"kind": "binary"}, rows={"align": "psi", "test": 0.2})
    recipe["phases"].append({"kind": "evaluate"})

    def run(source: str, processes: bool, **more: Any) -> vfl.Run:
        data: dict[str, Any] = {
            "p0": {"source": str(tmp_path / source), "id": "who", "label": "y", **more},
            "p1": {"source": str(tmp_path / "shop.csv"), "id": "who"},
        }
        return vfl.simulate(
            recipe | {"simulate": {"parties": data}}, quiet=True, processes=processes
        )

    found = run("all.csv", processes, unlabelled="drop")
    wanted = run("some.csv", processes=False)
    assert found.metrics == wanted.metrics
    assert found.predictions == wanted.predictions
    assert set(found.predictions["who"]).isdisjoint(f"u{n}" for n in empty)
