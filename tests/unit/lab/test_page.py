"""Pages of `vfl report`: what they say, of whatever run, and that nothing gets into them."""

from __future__ import annotations

import json
import os
import re
from html import unescape
from pathlib import Path
from xml.etree import ElementTree

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet
import pytest
from click.testing import CliRunner

from tests.harness import pages
from tests.harness.errors import raises
from vfl.cli import cli
from vfl.summary.reading import find
from vfl_common.config.task import Kind, ThresholdRule
from vfl_common.errors import Code, InputError
from vfl_lab import commands
from vfl_lab.report.facts import (
    Facts,
    find_baselines,
    get_training_command,
    list_possible_baselines,
    read_json,
    train_baselines,
)
from vfl_lab.report.many_runs import is_study
from vfl_lab.report.quality import estimate_metrics
from vfl_lab.report.run_page import make_run_page
from vfl_lab.report.worth import compare_with_baselines

WRITTEN = re.compile(
    r"<script|onerror=\S*alert\(1\)>|\x1b|style=\"|https?://(?!www\.w3\.org)", re.IGNORECASE
)


def page_of(folder: Path, **how: str) -> str:
    return commands.write_run_page(find(folder), threshold=how.get("threshold")).read_text()


def alone(
    folder: Path, *, name: str = "bank", kind: str = "splitnn", good: float = 0.2, seed: int = 0
) -> Path:
    """A baseline of one party, whose phase is of this kind."""
    recipe = pages.recipe_of("binary", (name,), phases=[{"kind": kind, "name": kind}], seed=seed)
    table = pages.predictions("binary", 200, good=good)
    return pages.finished_run(folder, parties=(name,), recipe=recipe, table=table, seed=seed)


def test_a_page_says_how_good_the_model_is_for_rows_that_only_some_parties_hold(
    tmp_path: Path,
) -> None:
    table = pages.predictions("binary", 200)
    tested = table.filter(pc.equal(table["split"], "test"))
    held = {"test with bank, shop": tested[:60], "test with bank, telco": tested[60:]}
    place = table.schema.get_field_index("split")
    more = [
        rows.set_column(place, "split", pa.array([name] * len(rows))) for name, rows in held.items()
    ]
    recipe = pages.recipe_of("binary", ("bank", "shop", "telco"))
    recipe["rows"] |= {"align": "psi", "partial": True}
    folder = pages.finished_run(
        tmp_path / "20260101-120000-churn-0001",
        parties=("bank", "shop", "telco"),
        table=pa.concat_tables([table, *more]),
        recipe=recipe,
    )
    facts = Facts(find(folder))
    page = make_run_page(facts, {}, None)
    (shown,) = [
        t for p in page.parts for t in p.tables if t.caption == "Quality by parties that have a row"
    ]
    for name, rows, auc, _ in shown.rows:
        assert rows == str(len(held[name]))
        assert auc == f"{estimate_metrics(facts.predictions[name])['auc'].value:.4f}"
    assert [each[0] for each in shown.rows] == [*held]
    assert "columns for those of these rows that they have" in page_of(folder)


def test_a_page_names_the_label_and_the_day_of_a_run_that_a_person_has_named(
    tmp_path: Path,
) -> None:
    folder = pages.finished_run(tmp_path / "first")
    noted = {"run_id": "first", "finished": True, "label": "churned"}
    (folder / "bank" / "run.json").write_text(json.dumps(noted))
    for at, name in enumerate(("shop", "bank")):
        # 5 and 6 March 2026, 14:03 UTC; the first copy of the recipe was written first.
        written_s = 1_772_719_380 + 86_400 * at
        os.utime(folder / name / "recipe.json", (written_s, written_s))
    html = unescape(page_of(folder))
    assert "Run first, 05 March 2026, 14:03 UTC" in html
    assert "the probability that churned is" in html


def test_a_page_does_not_compare_on_a_few_rows_that_both_happen_to_have_tested(
    tmp_path: Path,
) -> None:
    folder = pages.finished_run(tmp_path / "20260101-120000-churn-0001")
    other = alone(tmp_path / "20260101-120001-churn-alone-0001")
    path = other / "bank" / "predictions.parquet"
    table = pyarrow.parquet.read_table(path)
    pyarrow.parquet.write_table(table.filter(pc.equal(table["split"], "test"))[:29], path)
    html = page_of(folder)
    assert "The run cannot be compared with bank alone: only 29 of 100 test rows are common" in html
    assert "no difference" not in html


def test_a_page_gives_no_verdict_on_few_positive_rows(tmp_path: Path) -> None:
    folder = pages.finished_run(tmp_path / "20260101-120000-churn-0001")
    other = alone(tmp_path / "20260101-120001-churn-alone-0001")
    for path in (each / "bank" / "predictions.parquet" for each in (folder, other)):
        table = pyarrow.parquet.read_table(path)
        place, left = table.schema.get_field_index("truth"), 2
        truth = table["truth"].to_pylist()
        for row, split in enumerate(table["split"].to_pylist()):
            if split == "test" and truth[row] == "yes":
                left -= 1
                truth[row] = "yes" if left >= 0 else "no"
        table = table.set_column(place, "truth", pa.array(truth))
        # The baseline lacks test rows that are not positive.
        keep = [s != "test" or t == "yes" or row % 3 > 0 for row, (s, t) in enumerate(
            zip(table["split"].to_pylist(), truth, strict=True))]  # fmt: skip
        pyarrow.parquet.write_table(
            table if path.parents[1] == folder else table.filter(keep), path
        )
    html = unescape(page_of(folder))
    (said,) = set(re.findall(r"No verdict on together and bank alone[^<]*", html))
    assert re.search(r"on the same rows, \d\d of 100 test rows: AUC .* \(no interval\)", said)
    assert re.search(r"Only 2 of \d\d rows are positive\. With fewer than 10, there is no", said)
    assert "test rows: Only 2 of 100 rows are positive." in html
    assert "Together is" not in html
    assert "has not trained a local-only baseline" not in html


@pytest.mark.parametrize("kind", pages.KINDS)
def test_a_page_of_each_kind_of_task_is_one_file_without_anything_from_elsewhere(
    kind: Kind, tmp_path: Path
) -> None:
    html = page_of(pages.finished_run(tmp_path / "20260101-120000-churn-1f2e", kind))
    assert not WRITTEN.search(html)
    assert "default-src 'none'" in unescape(html)
    assert html.count("<svg") == html.count("</svg>") >= 2
    # Each picture has words, each table a caption and headers.
    assert html.count('role="img" aria-label="') == html.count("<figure")
    assert html.count("<caption>") == html.count("<table>") >= 6
    ids = re.findall(r' id="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    for link in re.findall(r'(?:href="|url\()#([^")]+)', html):
        assert link in ids, link


@pytest.mark.parametrize("kind", ["binary", "multiclass", "multilabel"])
def test_words_of_others_are_escaped_and_cut(kind: Kind, tmp_path: Path) -> None:
    folder = pages.finished_run(tmp_path / "run", kind, hostile=True)
    (folder / "leaks.json").write_text(
        json.dumps(
            {
                "rehearsal": pages.HOSTILE[0],
                "recipes": [
                    {
                        "lines": [
                            {
                                "attack": pages.HOSTILE[1],
                                "attacker": "bank",
                                "of": "x",
                                "place": "",
                                "unit": "R2",
                                "value": {"mean": 0.5},
                            }
                        ]
                    }
                ],
            }
        )
    )
    worth = {
        "metric": "auc",
        "absent": "mean",
        "split": "test",
        "subsets": [{"parties": [pages.HOSTILE[0]], "test": 0.5}],
        "shapley": {pages.HOSTILE[1]: {"value": 0.1, "error": 0.0}},
    }
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(summary | {"worth": worth}))
    columns = [{"name": name, "value": 0.1, "error": 0.01} for name in pages.HOSTILE]
    (folder / "shop" / "importance.json").write_text(
        json.dumps({"metric": "auc", "columns": columns})
    )
    (folder / "shop" / "ledger.json").write_text(json.dumps({"entries": [], "tcp": []}))
    for html in (page_of(folder), commands.write_party_page(folder / "shop").read_text()):
        assert "&lt;script&gt;alert(1)" in html
        assert not WRITTEN.search(html)
        assert "<img" not in html
        # Jinja did not compute it, and nobody reads 10,000 letters.
        assert "{{ 7 * 7 }}" in html
        assert "x" * 1_001 not in html
        assert len(html) < 600_000


def test_pictures_have_no_style_and_are_xml(tmp_path: Path) -> None:
    html = page_of(pages.finished_run(tmp_path / "run"))
    for picture in re.findall(r"<svg.*?</svg>", html, re.DOTALL):
        for element in ElementTree.fromstring(picture).iter():  # noqa: S314 - our own
            assert "style" not in element.attrib
            assert not element.tag.endswith("}style")


def test_numbers_stand_on_the_page_with_their_intervals(tmp_path: Path) -> None:
    folder = pages.finished_run(tmp_path / "run")
    html = page_of(folder, threshold="cost=1:5")
    facts = Facts(find(folder))
    found = make_run_page(facts, {}, None)
    auc = found.tiles[0]
    assert auc.name == "AUC, test rows"
    assert re.search(rf"{auc.value}.*{auc.note.split(' (')[0]}", html, re.DOTALL)
    for words in (
        "lowest cost (1 : 5)",
        "share of all so far",
        "Who took part",
        "clipped_gaussian",
        "0" * 64,
        "leave without a defence",
        "67 % of bank",
        "Hardware and software of the parties",
        "torch 2.14.1, oneDNN 3.12.0",
        "MKL_CBWR=AUTO",
        "Resumes with different arithmetic",
        "processor: a processor",
    ):
        assert words in html, words


def test_a_page_says_whether_asking_the_others_was_worth_it(tmp_path: Path) -> None:
    folder = pages.finished_run(tmp_path / "20260101-120000-churn-0001")
    html = page_of(folder)
    assert "No local-only baseline of bank was trained on these rows yet" in html
    assert "vfl simulate bank.toml --baseline alone" in html
    alone(tmp_path / "20260101-120001-churn-alone-0001")
    alone(tmp_path / "20260101-120002-churn-combined-0001", name="combined", good=1.5)
    alone(tmp_path / "20260101-120003-churn-gbdt-0001", name="combined", kind="gbdt", good=1.4)
    # Of another seed, and of another recipe.
    alone(tmp_path / "20260101-120004-churn-alone-0002", seed=1)
    found = find_baselines(Facts(find(folder)))
    assert {kind: each.folder.name[-18:] for kind, each in found.items()} == {
        "alone": "0001-churn-alone-0001"[-18:],
        "combined": "0002-churn-combined-0001"[-18:],
        "gbdt": "0003-churn-gbdt-0001"[-18:],
    }
    html = page_of(folder)
    assert "Together is better than bank alone on the same 100 rows" in html
    assert (
        "No significant difference between together and all in one place on the same 100 rows"
        in html
    )
    facts = Facts(find(folder))
    own = estimate_metrics(facts.predictions["test"])
    pairs = {each.kind: each for each in compare_with_baselines(facts, found, own)}
    gain = pairs["alone"].gain["auc"]
    assert gain.low > 0.05
    assert gain.value == pytest.approx(
        pairs["alone"].mine["auc"].value - pairs["alone"].theirs["auc"].value
    )
    assert list_possible_baselines(Facts(find(folder))) == [
        "alone",
        "gbdt-alone",
        "combined",
        "gbdt",
    ]


@pytest.mark.parametrize(("good", "said"), [(1.4, True), (0.2, False)])
def test_a_page_says_that_the_own_model_is_better_if_a_party_is_away(
    good: float, said: bool, tmp_path: Path
) -> None:
    whole, away = (pages.predictions("binary", 200, good=each) for each in (1.5, 0.3))
    away = away.filter(pc.equal(away["split"], "test"))
    place = away.schema.get_field_index("split")
    away = away.set_column(place, "split", pa.array(["test without shop"] * len(away)))
    table = pa.concat_tables([whole, away])
    folder = pages.finished_run(tmp_path / "20260101-120000-churn-0001", table=table)
    html = unescape(page_of(folder))
    words = "bank alone is better than the federation on test without shop rows: "
    assert "Quality without a party" in html
    assert words not in html
    alone(tmp_path / "20260101-120001-churn-alone-0001", good=good)
    html = unescape(page_of(folder))
    assert (words in html) is said
    assert ("train a student for them" in html) is said
    facts = Facts(find(folder))
    (own,) = (each.predictions["test"] for each in find_baselines(facts).values())
    without = facts.predictions["test without shop"]
    figures = [f"{estimate_metrics(each)['auc'].value:.4f}" for each in (own, without)]
    assert ("{} against {} on the same 100 rows".format(*figures) in html) is said


def test_baselines_are_made_only_where_all_tables_are(tmp_path: Path) -> None:
    facts = Facts(find(pages.finished_run(tmp_path / "run")))
    with raises(InputError, Code.CONFIG_INVALID, names=("--baselines", "bank.toml")):
        train_baselines(facts, ["alone"])
    (tmp_path / "run" / "federation").mkdir()
    for name in ("bank", "shop"):
        (tmp_path / "run" / "federation" / f"{name}.toml").write_text("")
    assert get_training_command(facts) == f"vfl report {tmp_path / 'run'} --baselines"


def test_what_each_party_is_worth_is_shown_where_the_run_has_measured_it(tmp_path: Path) -> None:
    folder = pages.finished_run(tmp_path / "run")
    summary = json.loads((folder / "summary.json").read_text())
    worth = {
        "metric": "auc",
        "absent": "mean",
        "split": "test",
        "subsets": [
            {"parties": [], "validation": 0.5, "test": 0.5},
            {"parties": ["bank", "shop"], "validation": 0.8, "test": 0.81},
        ],
        "shapley": {"bank": {"value": 0.21, "error": 0.0}, "shop": {"value": 0.1, "error": 0.02}},
    }
    (folder / "summary.json").write_text(json.dumps(summary | {"worth": worth}))
    columns = [
        {"name": "visits", "value": 0.05, "error": 0.01},
        {"name": "income", "value": 0.07, "error": 0.01},
    ]
    (folder / "shop" / "importance.json").write_text(
        json.dumps({"metric": "auc", "columns": columns})
    )
    html = page_of(folder)
    for words in ("Shapley", "+0.2100", "bank, shop", "0.8100", "Columns of shop", "income"):
        assert words in html, words
    (folder / "shop" / "importance.json").write_text('{"metric": "auc", "columns": [3]}')
    html = page_of(folder)
    assert "importance.json of shop cannot be read." in html


def test_a_page_of_many_parties_stays_small_and_says_what_it_leaves_out(tmp_path: Path) -> None:
    parties = ("bank", *(f"shop{at}" for at in range(300)))
    html = page_of(pages.finished_run(tmp_path / "run", parties=parties))
    assert len(html) < 1_500_000
    assert "The first 24 of 301 parties are shown; summary.json has all." in html
    assert re.search(r"\d+ more rows are not shown", html)


def test_a_run_without_predictions_still_has_a_page(tmp_path: Path) -> None:
    folder = pages.finished_run(tmp_path / "run")
    (folder / "bank" / "predictions.parquet").unlink()
    assert "No predictions were stored, so there are no curves." in page_of(folder)
    (folder / "bank" / "predictions.parquet").write_bytes(b"PAR1")
    with raises(InputError, Code.FILE_INVALID, names=("predictions.parquet", "bank")):
        page_of(folder)


def test_a_class_without_rows_makes_no_curves(tmp_path: Path) -> None:
    table = pages.predictions("binary", 40)
    only = table.set_column(table.column_names.index("truth"), "truth", [["no"] * 40])
    html = page_of(pages.finished_run(tmp_path / "run", table=only))
    assert "ROC curve" not in html
    assert "accuracy" in html


def test_a_passive_party_has_its_own_page(tmp_path: Path) -> None:
    folder = pages.finished_run(tmp_path / "run")
    (folder / "summary.json").unlink()
    shop = folder / "shop"
    entry = {
        "peer": "bank",
        "phase": "splitnn",
        "kind": "embedding",
        "direction": "sent",
        "payload_bytes": 4_000,
        "message_bytes": 4_100,
        "messages": 9,
    }
    (shop / "ledger.json").write_text(json.dumps({"entries": [entry], "tcp": []}))
    done = CliRunner().invoke(cli, ["report", str(shop)], catch_exceptions=False)
    assert str(shop / "report.html") in done.output
    html = (shop / "report.html").read_text()
    assert "bank has sent no metrics" in html
    assert "4.1 kB" in html
    assert "visits" in html
    # Nothing of what lies at the active party.
    assert "ROC" not in html
    (shop / "told.json").write_text(json.dumps({"test": {"auc": 0.8125, "accuracy": None}}))
    html = commands.write_party_page(shop).read_text()
    assert "AUC 0.8125" in html
    assert "Hardware and software of the parties" not in html
    facts = json.loads((shop / "run.json").read_text())
    facts["arithmetic"] = pages.arithmetic_of("Z80").model_dump()
    (shop / "run.json").write_text(json.dumps(facts))
    assert "Z80" in commands.write_party_page(shop).read_text()


def test_a_number_of_more_digits_than_a_float_has_ends_no_page(tmp_path: Path) -> None:
    path = tmp_path / "told.json"
    path.write_text('{"test": {"auc": 1%s, "rows": 12}}' % ("0" * 400))
    assert read_json(path) == {"test": {"auc": float("inf"), "rows": 12}}


def test_several_runs_are_compared_in_one_page(tmp_path: Path) -> None:
    for seed in range(3):
        table = pages.predictions("binary", 200, seed)
        pages.finished_run(
            tmp_path / f"20260101-12000{seed}-churn-000{seed}", table=table, seed=seed
        )
    alone(tmp_path / "20260101-120009-churn-alone-0001")
    runs = sorted(map(str, tmp_path.iterdir()))
    done = CliRunner().invoke(cli, ["report", *runs], catch_exceptions=False)
    assert done.output.split() == [str(tmp_path / "comparison.html")]
    html = (tmp_path / "comparison.html").read_text()
    values = [Facts(find(Path(run))) for run in runs]
    assert len(values) == 4
    assert re.search(r"0\.\d{4} ± 0\.\d{4}", html)
    assert "churn: splitnn has the best mean" in html
    assert "bank alone" in html
    assert "worse" in html
    assert not WRITTEN.search(html)


def test_a_study_has_its_page(tmp_path: Path) -> None:
    head = "study,method,seed,group,labels,test_loss,test_auc,test_rmse,pretrain_bytes,finetune_bytes,pretrain_s,finetune_s"
    lines = [
        f"s,{method},{seed},{group},,0.4,0.{8 + seed},{54.33 + 7.173 * seed},0,1000,0,2.5"
        for method, group in (("together", "federated"), ("alone", "alone"))
        for seed in range(2)
    ]
    (tmp_path / "results.csv").write_text("\n".join([head, *lines]) + "\n")
    (tmp_path / "differences.csv").write_text(
        "study,method,against,labels,metric,pairs,difference,low,high,p,comparisons,verdict\n"
        "s,alone,together,,auc,3,-0.1,-0.2,-0.05,0.01,1,worse\n"
    )
    assert is_study(tmp_path)
    done = CliRunner().invoke(cli, ["report", str(tmp_path)], catch_exceptions=False)
    assert done.output.split() == [str(tmp_path / "report.html")]
    html = (tmp_path / "report.html").read_text()
    # A deviation has as many digits as its mean.
    for words in (
        "0.8500 ± 0.0707",
        "57.92 ± 5.072",
        "-0.1000",
        "-0.2000 to -0.0500",
        "worse",
        "1 kB",
    ):
        assert words in html, words
    (tmp_path / "results.csv").write_text("a,b\n1,2\n")
    with raises(InputError, Code.FILE_INVALID, names="results.csv"):
        commands.write_study_page(tmp_path)
    (tmp_path / "results.csv").write_text("study,method,seed\n")
    with raises(InputError, Code.FILE_INVALID, names="results.csv"):
        commands.write_study_page(tmp_path)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("0.3", 0.3),
        ("f1", ThresholdRule(rule="f1")),
        ("rate=0.1", ThresholdRule(rule="rate", rate=0.1)),
        ("cost=1:5", ThresholdRule(rule="cost", false_positive=1, false_negative=5)),
    ],
)
def test_a_threshold_is_a_number_or_a_rule(text: str, rule: ThresholdRule | float) -> None:
    assert commands.parse_threshold(text) == rule


@pytest.mark.parametrize(
    "text", ["", "1", "f2", "rate=", "rate=2", "cost=1", "cost=a:b", "cost=-1:2"]
)
def test_what_is_no_threshold_is_refused(text: str) -> None:
    with raises(InputError, Code.CONFIG_INVALID, names=("--threshold", "0.1")):
        commands.parse_threshold(text)
