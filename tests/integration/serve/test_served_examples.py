"""Every recipe in examples/ that predicts is served with the numbers of a prediction, bit for bit,
however many rows are asked for at once.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import vfl
from tests.harness import cases
from tests.harness.online import Online, predicted
from tests.integration.test_examples import EXAMPLES, RECIPES
from vfl_common.config.recipe import load_recipe

_ROWS = 300
# Rows that are asked for at once: one, and around whole blocks.
_SIZES = (1, 2, 7, 8, 31, 32, 33, 257)
# How long a phase lasts, in any of its words.
_ONCE = {
    "epochs": 1,
    "rounds": 1,
    "steps": 2,
    "validate_every": 1,
    "trees": 3,
    "queue": 16,
    "batch_size": 16,
    "unlabelled_batch_size": 16,
    "own_batch_size": 16,
    "labelled": 40,
}
# Of many that differ only in how encoders were learnt.
_SSL = ("fedgssl-moco", "fedsplitnn", "ssvfl-c-moco", "ssvfl-i-moco", "breast-cancer")


def chosen() -> list[Path]:
    """Returns the recipes, of those for self-supervised learning one of each kind; without those
    whose parties hold different rows, for which there is no joint prediction.
    """
    found = [each for each in RECIPES if each.parent.name != "ssl" or each.stem in _SSL]
    return [each for each in found if load_recipe(each).rows.align != "none"]


def small(path: Path) -> dict[str, Any]:
    """Returns the recipe with few rows, and the shortest training."""
    recipe = tomllib.loads(path.read_text())
    for table in (recipe["rows"], *recipe["phases"]):
        table |= {key: value for key, value in _ONCE.items() if key in table}
        if table.get("kind") == "secureboost":
            table["encryption"] = "none"
    given = recipe["simulate"].get("data")
    if given is not None and "source" in given:
        given["limit"] = _ROWS
    return recipe


@pytest.mark.parametrize("path", chosen(), ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_online_is_predict(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Sources are relative to the recipe.
    monkeypatch.chdir(path.parent)
    run = vfl.simulate(small(path), out=tmp_path / "runs", quiet=True)
    want, online = predicted(run), Online.of(run.folder)
    ids = list(want)
    for number, size in enumerate((*_SIZES, len(ids))):
        # Other rows each time, at other places.
        begin = max(0, min(31 * number, len(ids) - size))
        part = ids[begin : begin + size]
        found = online.score(*part)
        assert set(found.state) == {"scored"}
        online.check_same(found, part, want)
    if online.inexact:
        pytest.skip(f"not exact here, and said so: {online.inexact}")


def test_an_encoder_that_draws_for_each_batch_is_not_exact(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its party says so, and the others do not."""
    recipe = cases.recipe(2, phase={"epochs": 1, "mid": 0.01}, task={"kind": "binary"})
    recipe["simulate"] = {
        "scheme": "columns",
        "data": {"source": "sklearn:breast_cancer", "label": "target", "limit": 60},
    }
    run = vfl.simulate(recipe, out=tmp_path, quiet=True)
    online = Online.of(run.folder)
    active: Any = online.scorer
    assert active._store.held.inexact == ""
    assert online.inexact.startswith("encoder: a row has other bits among")
    (line,) = [each for each in caplog.records if getattr(each, "exact", True) is False]
    assert (line.levelname, getattr(line, "event", "")) == ("WARNING", "exact")


@pytest.mark.parametrize("width", [5, 30])
def test_the_last_bit_of_a_row_follows_from_no_place_in_memory(width: int) -> None:
    """Rows of such widths lie at odd addresses, and were multiplied otherwise there."""
    generator = torch.Generator().manual_seed(0)
    layer = torch.nn.Linear(width, 8)
    x_ND = torch.randn(64, width, generator=generator)
    with torch.no_grad():
        want = layer(x_ND)
        order = torch.arange(64).roll(1)
        assert torch.equal(layer(x_ND[order]), want[order])
