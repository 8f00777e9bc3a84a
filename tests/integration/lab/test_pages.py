"""Pages of `vfl report`, of real runs; and the same pages in a browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import pages
from tests.harness.browser import NARROW, WIDE, Browser, browser
from tests.harness.errors import raises
from tests.harness.federation import launcher
from tests.harness.here import vfl_here
from tests.harness.memory import in_process, run_here
from tests.integration import test_ranking as ranking
from tests.integration import test_task
from tests.integration.test_resume import held, kill
from tests.integration.test_task import (
    AMOUNT,
    BINARY,
    CLASS,
    CLASSES,
    DIED,
    LABELS,
    REGRESSION,
    SURVIVAL,
    YES,
    data,
    recipe,
)
from vfl.library.simulate import run_files
from vfl.simulation.live import View
from vfl.simulation.run import run_federation
from vfl.summary.reading import find
from vfl_common.config.base import parse
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_common.summary import load_summary
from vfl_lab import commands
from vfl_lab.report.facts import Facts, find_baselines, train_baselines
from vfl_lab.report.quality import estimate_metrics
from vfl_party.base.statistics import MAIN_METRICS
from vfl_party.forecast.count import forecast, outlook_of
from vfl_party.forecast.result import compare_with_ledger

# Fixtures.
tables, queries = test_task.tables, ranking.tables
TASKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "binary": (BINARY, YES),
    "multiclass": (CLASSES, CLASS),
    "multilabel": ({"kind": "multilabel", "classes": 3}, {"labels": LABELS}),
    "regression": (REGRESSION, AMOUNT),
    "survival": (SURVIVAL, DIED),
}
TOLD = {"report": {"tell_passives": ["auc", "loss"]}}


@pytest.mark.parametrize("kind", [*TASKS, "ranking"])
def test_a_page_has_the_numbers_that_the_run_has_reported(
    kind: str, tables: Path, queries: Path, tmp_path: Path
) -> None:
    """From predictions as parties keep them, of every kind of task."""
    run = tmp_path / "20260101-120000-case-1f2e"
    if kind == "ranking":
        summary = in_process(run, ranking.recipe(), ranking.data(queries))
    else:
        task, label = TASKS[kind]
        summary = in_process(run, recipe(task), data(tables, **label))
        # The active party's own folder says it, as there is no party file beside.
        assert Facts(find(run)).label == label.get("label", ", ".join(label.get("labels", ())))
    facts = Facts(find(run))
    reported = summary.metrics["test"]
    found = {
        name: each.value for name, each in estimate_metrics(facts.predictions["test"], 20).items()
    }
    shared = found.keys() & reported.keys()
    assert MAIN_METRICS[facts.predictions["test"].kind] in shared
    # Parties measure in float32.
    assert {n: found[n] for n in shared} == pytest.approx(
        {n: reported[n] for n in shared}, abs=1e-5, rel=1e-5
    )
    html = commands.write_run_page(find(run)).read_text()
    assert f"{found[MAIN_METRICS[facts.predictions['test'].kind]]:.4g}"[:5] in html


def told_recipe(tables: Path) -> dict[str, Any]:
    return recipe(BINARY) | TOLD | {"simulate": {"parties": data(tables, **YES)}}


def told(run: Path) -> dict[str, Any]:
    return {name: json.loads((run / name / "told.json").read_text()) for name in ("p1", "p2")}


def test_passive_parties_are_told_the_metrics_that_the_recipe_names(
    tables: Path, tmp_path: Path
) -> None:
    """In one process and over gRPC, to the last bit, and as forecast."""
    made = told_recipe(tables)
    parsed = parse(Recipe, made, "recipe")
    said = forecast(outlook_of(parsed, tmp_path))
    run_files(made, tmp_path, tmp_path / "here")
    run_federation(made, parsed, tmp_path, tmp_path / "apart", View(parsed), launcher())
    for name in ("here", "apart"):
        summary = load_summary(tmp_path / name / "summary.json")
        wanted = {
            split: {metric: summary.metrics[split][metric] for metric in ("auc", "loss")}
            for split in ("validation", "test")
        }
        assert told(tmp_path / name) == {"p1": wanted, "p2": wanted}
        assert all(
            link.forecast == link.counted for link in compare_with_ledger(said, summary.bytes)
        )
        verdicts = [each for each in summary.bytes.by_link if each.kind == "verdict"]
        # Two splits, two metrics, eight bytes each, to each of two parties.
        assert [(each.phase, each.payload_bytes) for each in verdicts] == [("evaluate", 32)] * 2
        assert any(
            each.exchange == "told" and "auc, loss" in each.sent + each.how
            for each in summary.exchanges
        )
    assert told(tmp_path / "here") == told(tmp_path / "apart")
    html = commands.write_party_page(tmp_path / "here" / "p1").read_text()
    assert "Metrics of the model on the test rows, from p0" in html


@pytest.mark.slow
def test_a_run_that_is_disturbed_tells_the_same(tables: Path, tmp_path: Path) -> None:
    """Real programs, one of which is killed: hence the seconds."""
    made = {key: value for key, value in told_recipe(tables).items() if key != "simulate"}
    of = data(tables, **YES)
    _, ours = run_here(tmp_path / "ours", made, of)
    with held(tmp_path / "theirs", made, of, received=6_000) as (federation, proxy):
        kill(federation, proxy, "p2")
        assert federation.finish()["interruptions"] == 1
        assert told(federation.run_folder) == told(ours.run_folder)


def test_nothing_is_told_without_being_asked_for(tables: Path, tmp_path: Path) -> None:
    made = {key: value for key, value in told_recipe(tables).items() if key != "report"}
    run_files(made, tmp_path, tmp_path / "run")
    assert not list((tmp_path / "run").glob("*/told.json"))
    found = load_summary(tmp_path / "run" / "summary.json")
    assert all(each.kind != "verdict" for each in found.bytes.by_link)


@pytest.mark.parametrize("named", [["rmse"], ["auc", "auc"]])
def test_only_metrics_of_the_task_can_be_told(named: list[str], tables: Path) -> None:
    made = told_recipe(tables) | {"report": {"tell_passives": named}}
    with raises(InputError, Code.CONFIG_INVALID, names="tell_passives"):
        parse(Recipe, made, "recipe")


def test_metrics_are_told_by_an_evaluation(tables: Path) -> None:
    made = told_recipe(tables)
    made["phases"] = made["phases"][:1]
    with raises(InputError, Code.CONFIG_INVALID, names="tell_passives"):
        parse(Recipe, made, "recipe")


@pytest.mark.slow
def test_a_missing_baseline_is_trained_beside_the_run(tables: Path, tmp_path: Path) -> None:
    """A process of its own, as people start it: hence the seconds."""
    made = told_recipe(tables)
    parsed = parse(Recipe, made, "recipe")
    run = tmp_path / "runs" / "20260101-120000-case-1f2e"
    run_federation(made, parsed, tmp_path, run, View(parsed), launcher())
    facts = Facts(find(run))
    assert not find_baselines(facts)
    train_baselines(facts, ["gbdt"])
    (kind, found), *others = find_baselines(facts).items()
    assert (kind, others) == ("gbdt", [])
    assert found.predictions["test"].keys == facts.predictions["test"].keys
    done = vfl_here("report", run, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    html = (run / "report.html").read_text()
    assert "all in one place, with trees" in html
    assert f"vfl report {run} --baselines" in html


@pytest.fixture(scope="session")
def seen() -> Iterator[Browser]:
    with browser() as found:
        yield found


def check(page: Path, seen: Browser, *, findings: bool = True) -> None:
    """Looks at a page on a desk and a telephone, light and dark, and as it is printed."""
    shades = set()
    for width, dark in ((WIDE, False), (NARROW, True)):
        seen.look(page, width=width, dark=dark)
        shades.add(seen.background)
        assert seen.overflow <= 0
        if findings:
            assert seen.findings == []
    assert len(shades) == 2
    # A4 without its margins.
    seen.look(page, width=720, printed=True)
    assert seen.overflow <= 0
    assert seen.complaints == []


@pytest.mark.parametrize("kind", pages.KINDS)
def test_a_page_can_be_read_in_a_browser(kind: Any, seen: Browser, tmp_path: Path) -> None:
    run = pages.finished_run(tmp_path / "20260101-120000-churn-1f2e", kind)
    check(commands.write_run_page(find(run)), seen)


def test_a_page_of_hostile_words_can_be_read_in_a_browser(seen: Browser, tmp_path: Path) -> None:
    run = pages.finished_run(tmp_path / "20260101-120000-churn-1f2e", hostile=True)
    check(commands.write_run_page(find(run)), seen)


def test_other_pages_can_be_read_in_a_browser(seen: Browser, tmp_path: Path) -> None:
    run = pages.finished_run(tmp_path / "20260101-120000-churn-0001")
    other = pages.finished_run(tmp_path / "20260101-120001-churn-0002", seed=1)
    (run / "shop" / "ledger.json").write_text(json.dumps({"entries": [], "tcp": []}))
    check(commands.write_party_page(run / "shop"), seen)
    check(commands.write_comparison_page([find(run), find(other)]), seen)


def test_a_browser_sees_what_is_wrong_with_a_page(seen: Browser, tmp_path: Path) -> None:
    """So that the tests above can fail."""
    html = commands.write_run_page(find(pages.finished_run(tmp_path / "run"))).read_text()
    wide = (
        '<div style="width:3000px">wide</div><img src="data:image/gif;base64,R0lGODlhAQABAAAAACw=">'
    )
    broken = tmp_path / "broken.html"
    broken.write_text(re.sub("<main>", f"<main>{wide}<p>{'x' * 9}</p>", html))
    seen.look(broken, width=NARROW)
    # The policy lets no style in: the page is not wider, and the console says so.
    assert any("style-src" in each for each in seen.complaints)
    assert any(each.startswith("image-alt") for each in seen.findings)
    broken.write_text(html.replace("*{box-sizing", "main{width:3000px}*{box-sizing"))
    seen.look(broken, width=NARROW)
    assert seen.complaints
