"""The program of the page about searches runs, goes on and compares."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import vfl

pytest.importorskip("optuna")
REPO = Path(__file__).parents[3]
PAGE = REPO / "docs" / "how-to" / "python" / "study.md"
SEARCH, COMPARE, *_ = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_the_page_s_search_goes_on_and_compares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = vfl.Recipe.load(REPO / "examples" / "own-files" / "recipe.toml")
    parties = {
        name: each | {"source": str(REPO / "examples" / "own-files" / each["source"])}
        for name, each in recipe.to_dict()["simulate"]["parties"].items()
    }
    smaller = recipe.replace({"phases.splitnn.epochs": 4, "simulate.parties": parties})
    smaller.save("recipe.toml")
    code, told = SEARCH.replace("runs=30", "runs=8"), dict[str, Any]()
    assert code != SEARCH
    exec(code, told)  # noqa: S102 - our own document
    found = told["search"]
    assert len(found.trials) == 8
    assert {each.state for each in found.trials} <= {"finished", "pruned"}
    best = vfl.simulate(smaller.replace(found.best), quiet=True)
    assert best.metrics["validation"]["auc"] == found.value
    # The same program goes on.
    exec(SEARCH.replace("runs=30", "runs=9"), told)  # noqa: S102 - our own document
    assert told["search"].trials[:8] == found.trials
    exec(COMPARE.replace("11, 12, 13, 14, 15", "11, 12, 13"), told)  # noqa: S102 - as above
    assert len(told["study"]) == 12
