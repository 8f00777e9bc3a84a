"""``vfl new recipe --protect``: how each preset trains, what the recipe says of it, and that the
default of classes sends nothing that depends on labels.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
from click.testing import CliRunner

import vfl
from benchmarks import defaults_read
from tests.harness.errors import assert_names, raises
from tests.harness.here import vfl_here
from tests.integration.test_label_free import assert_free, twice
from vfl import measured
from vfl.new import files
from vfl.new.commands import new
from vfl.new.rules import KINDS
from vfl.summary.table import yield_protection_notes
from vfl_common.errors import Code, InputError
from vfl_common.summary import ExchangeSummary

LABELS = {"binary": ("no", "yes"), "multiclass": ("a", "b", "c"), "regression": None}
PRESETS = get_args(files.Protect)


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


def data(kind: str) -> dict[str, dict[str, Any]]:
    """Returns the parties' tables for a recipe of such a task."""
    return {
        "bank": {"source": f"{kind}.csv", "id": "customer", "label": "goal"},
        "shop": {"source": "shop.csv", "id": "customer"},
    }


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_recipe_of_each_preset_trains(kind: Any, preset: files.Protect) -> None:
    recipe, _ = written(kind, "--protect", preset)
    assert marked() == f"--protect {preset}"
    if preset in files.LABEL_FREE:
        assert [each.kind for each in recipe.settings.phases] == ["fedonce", "head", "evaluate"]
        assert recipe.settings.rows.split == "random"
        width = 8 if preset == "labels" else files.WIDTHS[kind]
        assert recipe.settings.model.embedding_size == width
        short = recipe.replace({"model.top.trees": 5})
    else:
        (splitnn, _) = recipe.settings.phases
        assert ("mid" in splitnn.settings) == (preset == "columns")
        short = recipe.replace({"phases.splitnn.epochs": 2})
    assert not any(each.transforms for each in recipe.settings.phases)
    run = vfl.simulate(short.replace({"simulate": {"parties": data(kind)}}), quiet=True)
    assert np.isfinite(run.metrics["test"]["loss"])


@pytest.mark.parametrize("kind", ["binary", "multiclass"])
def test_the_default_of_classes_sends_the_same_bytes_with_other_labels(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Private set intersection draws secrets, so that no two runs send the same.
    made = written(kind, "--align", "digest")[0].replace({"model.top.trees": 20}).settings
    first, second = twice(tmp_path / "runs", monkeypatch, made, data(kind))
    assert_free(first, second)


@pytest.mark.parametrize("kind", ["binary", "multiclass"])
def test_a_forecast_of_the_default_of_classes_states_it(kind: str) -> None:
    written(kind)
    told = vfl_here("forecast", "recipe.toml", "--rows", "150", cwd=Path())
    assert told.returncode == 0, told.stderr
    statement = "No message of the active party carries label information"
    assert statement in " ".join(told.stdout.split())


@pytest.mark.parametrize("kind", KINDS)
def test_without_the_flag_a_kind_of_task_has_its_own_preset(kind: Any) -> None:
    _, said = written(kind)
    assert marked() == f"--protect {files.DEFAULTS[kind]}"
    told = [each for each in said.splitlines() if each.startswith(("leaks", "consider"))]
    assert_names("\n".join(told), "--protect", "recipe.toml")


def test_what_is_told_of_all_presets() -> None:
    written("binary", "--method", "secureboost")
    assert marked() == "--method secureboost"
    assert_names(
        "\n".join(each for each in Path("recipe.toml").read_text().splitlines() if "#" in each),
        "--protect",
        "--method",
    )


def test_trees_have_no_presets() -> None:
    with raises(InputError, Code.CONFIG_INVALID, names=("--protect", "--method")):
        written("binary", "--method", "secureboost", "--protect", "labels")


def test_what_is_told_was_measured() -> None:
    kept = json.loads(defaults_read.PROTECT.read_text())
    assert defaults_read.means(kept) == {
        kind: {name: tuple_of(each) for name, each in of.items()}
        for kind, of in measured.MEASURED.items()
    }
    assert defaults_read.floors(kept) == measured.ALONE
    # No table shows more than the figures that people are told.
    for of in kept.values():
        told = measured.MEASURED[of["none"]["kind"]]
        for name in told.keys() & of.keys():
            assert (defaults_read.columns_read(of[name]) or 0.0) <= told[name].columns + 0.0005
            assert (defaults_read.labels_read(of[name]) or 0.0) <= (
                told[name].labels or 0.0
            ) + 0.0005


@pytest.mark.parametrize(
    ("exchange", "preset", "words"),
    [("embedding", "none", "from training"), ("upload", "labels", "from one upload")],
)
def test_a_report_has_the_figure_of_the_training_that_ran(
    exchange: str, preset: str, words: str
) -> None:
    sent = ExchangeSummary(
        phase="x", exchange=exchange, sender="passive parties", receiver="bank",
        sent="embedding z float32 [rows, width]", chain="identity", when="once",
    )  # fmt: skip
    parties = [SimpleNamespace(name="bank", role="active")]
    summary: Any = SimpleNamespace(parties=parties, metrics={}, exchanges=[sent])
    (note,) = yield_protection_notes(summary)
    figure = measured.MEASURED["binary"][preset].columns
    assert f"(R² {figure:.2f} {words} in our rehearsals, the highest of four tables" in note


def tuple_of(each: measured.PresetMeasurement) -> tuple[float, float | None, float]:
    return each.lost, each.labels, each.columns


@pytest.mark.parametrize("kind", KINDS)
def test_each_figure_in_a_recipe_is_a_lower_bound(kind: Any) -> None:
    lines = files.make_comments(kind, "labels")
    assert "Each figure is a lower bound" in " ".join(lines)
    for line in lines:
        preset, _, words = line[2:].partition(": ")
        if preset.startswith("--"):
            assert "columns at least" in words or "columns not measured" in words
            if preset.endswith(("labels", "both")):
                assert words.startswith("labels: none sent (by structure, tested), ")
            else:
                assert words.startswith(("labels at least", "labels not measured"))
