"""``vfl new recipe --protect``: what a preset adds, what is told of it, and that one trains with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from click.testing import CliRunner

import vfl
from benchmarks import defaults_read
from tests.harness.sentences import raises, worded_as_before
from vfl.new import protect
from vfl.new.commands import new
from vfl.new.rules import KINDS
from vfl_common.errors import Code, InputError

LABELS = {"binary": ("no", "yes"), "multiclass": ("a", "b", "c"), "regression": None}
PRESETS = get_args(protect.Protect)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    numbers = np.random.default_rng(5).normal(size=(150, 6)).round(4)
    for kind, classes in LABELS.items():
        rows = [
            f"K{n},{a},{b},{c},{round(a + d, 3) if classes is None else classes[n % len(classes)]}"
            for n, (a, b, c, d, _, _) in enumerate(numbers)
        ]
        Path(f"{kind}.csv").write_text("\n".join(["customer,a,b,c,goal", *rows]) + "\n")
    rows = [f"K{n},{d},{e},{f}" for n, (_, _, _, d, e, f) in enumerate(numbers)]
    Path("shop.csv").write_text("\n".join(["customer,d,e,f", *rows]) + "\n")


def written(kind: str, *more: str) -> tuple[vfl.Recipe, str]:
    """Returns the recipe that is written for a table, and what is said."""
    args = ["recipe", "--data", f"{kind}.csv", "--active", "bank", "--passive", "shop"]
    result = CliRunner().invoke(
        new, [*args, "--label", "goal", "--force", *more], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    return vfl.Recipe.load("recipe.toml"), result.stdout


def marked() -> str:
    """Returns the preset that the recipe's comments mark as chosen."""
    (line,) = [each for each in Path("recipe.toml").read_text().splitlines() if "# > " in each]
    return line.removeprefix("# > ").partition(":")[0]


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_recipe_of_each_preset_trains(kind: str, preset: protect.Protect) -> None:
    recipe, _ = written(kind, "--protect", preset)
    assert marked() == f"--protect {preset}"
    (splitnn, _) = recipe.settings.phases
    hides_labels, hides_columns = preset in ("labels", "both"), preset in ("columns", "both")
    assert [each.sent_by for each in splitnn.transforms] == (["active"] if hides_labels else [])
    assert ("mid" in splitnn.settings) == hides_columns
    data: dict[str, Any] = {
        "bank": {"source": f"{kind}.csv", "id": "customer", "label": "goal"},
        "shop": {"source": "shop.csv", "id": "customer"},
    }
    short = recipe.replace({"phases.splitnn.epochs": 2, "simulate": {"parties": data}})
    run = vfl.simulate(short, quiet=True)
    assert np.isfinite(run.metrics["test"]["loss"])


@pytest.mark.parametrize("kind", KINDS)
def test_without_the_flag_a_kind_of_task_has_its_own_preset(kind: Any) -> None:
    _, said = written(kind)
    assert marked() == f"--protect {protect.DEFAULTS[kind]}"
    told = [each for each in said.splitlines() if each.startswith(("leaks", "consider"))]
    worded_as_before("\n".join(told))


def test_what_is_told_of_all_presets() -> None:
    written("binary", "--method", "secureboost")
    assert marked() == "--method secureboost"
    worded_as_before(
        "\n".join(each for each in Path("recipe.toml").read_text().splitlines() if "#" in each)
    )


def test_trees_have_no_presets() -> None:
    with raises(InputError, Code.CONFIG_INVALID):
        written("binary", "--method", "secureboost", "--protect", "labels")


def test_what_is_told_was_measured() -> None:
    kept = json.loads(defaults_read.PROTECT.read_text())
    assert defaults_read.means(kept) == {
        kind: {name: tuple_of(each) for name, each in of.items()}
        for kind, of in protect.MEASURED.items()
    }


def tuple_of(each: protect.Measured) -> tuple[float, float | None, float]:
    return each.lost, each.labels, each.columns


def test_no_default_adds_noise_through_which_labels_are_read() -> None:
    assert {*protect.DEFAULTS.values()} == {"none"}


@pytest.mark.parametrize("kind", KINDS)
def test_each_figure_in_a_recipe_is_a_lower_bound(kind: Any) -> None:
    lines = protect.comments(kind, "labels")
    assert "Each figure is a lower bound" in " ".join(lines)
    for line in lines:
        if line[2:].startswith("--"):
            assert "columns at least" in line
            assert "labels at least" in line or "labels not measured" in line
