"""The program of the page about Optuna runs, and prunes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import vfl

optuna = pytest.importorskip("optuna")
REPO = Path(__file__).parents[2]
PAGE = REPO / "docs" / "how-to" / "python" / "search.md"
SEARCH, COMPARE = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_the_page_s_search_prunes_goes_on_and_compares(
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
    # Fewer trials, the last ones of which are compared with the first.
    code = SEARCH.replace("n_startup_trials=5, n_warmup_steps=3", "n_startup_trials=1")
    assert code != SEARCH
    code, told = code.replace("n_trials=30", "n_trials=8"), dict[str, Any]()
    exec(code, told)  # noqa: S102 - our own document
    states = [trial.state.name for trial in told["search"].trials]
    assert set(states) == {"COMPLETE", "PRUNED"}
    pruned = [trial for trial in told["search"].trials if trial.state.name == "PRUNED"]
    assert all(0 < len(trial.intermediate_values) < 4 for trial in pruned)
    best = recipe_of(smaller, told["search"].best_params)
    assert vfl.simulate(best, quiet=True).metrics["validation"]["auc"] == told["search"].best_value
    # The same program goes on.
    exec(code.replace("n_trials=8", "n_trials=1"), told)  # noqa: S102 - our own document
    assert len(told["search"].trials) == 9
    exec(COMPARE.replace("11, 12, 13, 14, 15", "11, 12, 13"), told)  # noqa: S102 - as above
    assert len(told["study"]) == 12


def recipe_of(recipe: vfl.Recipe, best: dict[str, Any]) -> vfl.Recipe:
    return recipe.replace(
        {"phases.splitnn.optimizer.lr": best["lr"], "model.embedding_size": best["width"]}
    )
