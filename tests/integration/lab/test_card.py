"""`vfl card`: what the files say stands in it, what a person wrote stays, and no name is more than
text.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from tests.harness import cases
from tests.harness.errors import raises
from tests.harness.federation import toml
from tests.harness.here import vfl_here
from vfl_common.errors import Code, InputError
from vfl_common.run_folder import RunFolder
from vfl_common.summary import load_summary
from vfl_lab.report.model_card import (
    TO_WRITE,
    CardFacts,
    escape_prose,
    format_block,
    format_code,
    read_run,
    render_card,
    write,
)

HOSTILE = (
    "<img src=x onerror=alert(1)> [a](https://evil.example) **b** `c` | # https://evil.example \x1b[31m\n# d "
    + "x" * 10_000
)
PLACES = ["summary", "owners", "direct-use", "out-of-scope", "risks", "data", "evaluation"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, and the baseline of its active party."""
    folder = tmp_path_factory.mktemp("card")
    data = {"source": "sklearn:digits", "label": "target", "limit": 100}
    phases = [
        {"kind": "splitnn", "epochs": 2, "batch_size": 24},
        {"kind": "evaluate", "splits": ["validation", "test"]},
    ]
    recipe = cases.recipe(2) | {"phases": phases, "simulate": {"scheme": "halves", "data": data}}
    (folder / "case.toml").write_text(toml(recipe))
    for options in ([], ["--baseline", "alone"]):
        done = vfl_here("simulate", "case.toml", *options, cwd=folder)
        assert done.returncode == 0, done.stderr
    (found,) = (each for each in (folder / "runs").glob("[!.]*") if "alone" not in each.name)
    return found


def rendered(text: str) -> str:
    return str(MarkdownIt("gfm-like", {"linkify": False, "html": True}).render(text))


def test_a_card_has_what_the_files_say(run: Path, tmp_path: Path) -> None:
    done = vfl_here("card", run, "--out", "card.md", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "card.md\n")
    assert done.stderr == f"to write: {', '.join(PLACES)}\n"
    text = (tmp_path / "card.md").read_text()
    summary = load_summary(run / "summary.json")
    assert text.startswith("---\nlibrary_name: vfl\n")
    assert f"| recipe digest | `{summary.recipe_digest}` |" in text
    tested = summary.metrics["test"]["accuracy"]
    assert f"| {summary.metrics['validation']['accuracy']:.4g} | {tested:.4g} |" in text
    assert "| `p1` | passive | columns |" in text
    for each in summary.exchanges:
        assert f"| {each.phase} | {each.sender} | {each.receiver} |" in text
    assert f"in {summary.bytes.total.messages:,} messages." in text
    assert "No phase trained with differential privacy." in text
    # The baseline beside it, on the test rows.
    alone = next(each for each in run.parent.glob("[!.]*") if "alone" in each.name)
    its_own = load_summary(alone / "summary.json").metrics["test"]
    row = " | ".join(f"{its_own[name]:.4g}" for name in summary.metrics["test"])
    assert f"| `alone` | {row} |" in text
    # The recipe in it is the recipe.
    found = json.loads(text.split("```json\n")[1].split("\n```")[0])
    own = RunFolder(run / "p0", run.name).recipe()
    assert type(own).model_validate(found).digest() == own.digest()
    assert text.count(TO_WRITE) == len(PLACES)


def test_a_passive_party_tells_what_it_knows(run: Path, tmp_path: Path) -> None:
    # On its own machine it has only its own folder.
    own = tmp_path / "runs" / run.name
    shutil.copytree(run / "p1", own / "p1")
    text = render_card(read_run(own, None))
    assert text == render_card(read_run(run, "p1")) == render_card(read_run(run / "p1", None))
    assert "as described by the files of `p1`" in text
    ledger = json.loads((own / "p1" / "ledger.json").read_text())["entries"]
    (embeddings,) = (
        each
        for each in ledger
        if (each["phase"], each["kind"], each["direction"]) == ("splitnn", "embedding", "sent")
    )
    assert (
        f"| `p0` | `splitnn` | `embedding` | {embeddings['message_bytes'] / 1000:.3g} kB |" in text
    )
    assert "only the server and the active party have the summary" in text
    assert "accuracy" not in text
    done = vfl_here("card", own / "p1", cwd=tmp_path)
    assert done.stdout == f"{own / 'p1' / 'model-card.md'}\n"


def test_what_a_party_is_worth_stands_in_the_card_if_it_was_measured(
    run: Path, tmp_path: Path
) -> None:
    copy = tmp_path / run.name
    shutil.copytree(run, copy)
    summary = json.loads((copy / "summary.json").read_text())
    summary["worth"] = {
        "metric": "auc",
        "absent": "mean",
        "split": "test",
        "subsets": [
            {"parties": ["p0"], "validation": 0.75, "test": 0.5},
            {"parties": [], "validation": None, "test": 0.25},
        ],
        "shapley": {"p0": {"value": 0.125, "error": 0.0}, HOSTILE: {"value": 0.0625, "error": 0.5}},
    }
    (copy / "summary.json").write_text(json.dumps(summary))
    text = render_card(read_run(copy, None))
    assert "| `p0` | 0.125 | 0 |" in text
    assert "| `p0` | 0.75 | 0.5 |\n| none |  | 0.25 |" in text
    assert "<img" not in rendered(text)


@pytest.mark.parametrize("name", [HOSTILE, "`", "``a`", "a|b", "<b>", "  "])
def test_a_name_is_only_text(name: str) -> None:
    for made in (format_code(name), escape_prose(name)):
        page = rendered(f"| a | b |\n| --- | --- |\n| {made} | `z` |\n| x | y |")
        assert "<img" not in page
        assert "<a " not in page
        assert "<b>" not in page
        assert "<strong>" not in page
        assert "<h1>" not in page
        # It has stayed in its own cell.
        assert page.count("<td>") == 4
        assert "<td><code>z</code></td>" in page
    page = rendered(format_block(f"```\n<img src=x>\n{name}", "json"))
    assert page.count("<pre>") == 1
    assert "<img" not in page


def test_a_person_s_words_stay_and_are_never_lost(run: Path, tmp_path: Path) -> None:
    path, text = tmp_path / "card.md", render_card(read_run(run, None))
    assert write(path, text) == PLACES
    before = path.read_text()
    mine = "Scores of digits.\n\n# A heading of mine, and `code`\n"
    path.write_text(
        before.replace(f"{TO_WRITE} what the model does, for whom, in two sentences.\n", mine)
    )
    # Written again, with other facts: the words are there, and the facts are new.
    left = write(path, text.replace("# Model card", "# New model card"))
    again = path.read_text()
    assert left == PLACES[1:]
    assert f"<!-- yours: summary -->\n{mine}<!-- /yours -->" in again
    assert "# New model card" in again
    # And again, without a change.
    write(path, text.replace("# Model card", "# New model card"))
    assert path.read_text() == again
    # Lines that end as on Windows.
    path.write_bytes(again.replace("\n", "\r\n").encode())
    write(path, text)
    assert mine in path.read_text()
    # Words elsewhere.
    for changed in (again.replace("## Uses", "## Uses of mine"), again + "\nmine\n", "mine", ""):
        path.write_text(changed)
        with raises(InputError, Code.FILE_INVALID):
            write(path, text)
        assert path.read_text() == changed
    # A place that there is no more.
    path.write_text(again)
    with raises(InputError, Code.FILE_INVALID, names=("--out", "card.md")):
        write(path, text.replace("<!-- yours: summary -->", "<!-- yours: other -->"))
    assert path.read_text() == again


def test_what_is_no_trained_run_is_one_sentence(run: Path, tmp_path: Path) -> None:
    with raises(InputError, Code.FILE_INVALID):
        read_run(tmp_path, None)
    with raises(InputError, Code.FILE_INVALID, names=("p7", "p0")):
        read_run(run, "p7")
    own = tmp_path / "20260101-120000-case-1f2e"
    shutil.copytree(run / "p1", own / "p1")
    facts = json.loads((own / "p1" / "run.json").read_text())
    (own / "p1" / "run.json").write_text(json.dumps(facts | {"finished": False}))
    with raises(InputError, Code.FILE_INVALID, names="p1"):
        read_run(own, None)


def test_hostile_words_of_peers_are_only_text(run: Path) -> None:
    found = read_run(run, None)
    assert found.summary is not None
    summary = found.summary.model_copy(
        update={
            "without": [HOSTILE],
            "exchanges": [
                each.model_copy(update={"sent": HOSTILE, "chain": HOSTILE, "sender": HOSTILE})
                for each in found.summary.exchanges
            ],
            "metrics": {HOSTILE: {HOSTILE: float("nan")}},
        }
    )
    page = rendered(render_card(CardFacts(found.folder, found.recipe, summary=summary)))
    assert "<img" not in page
    assert "<a " not in page
    assert "not a number" in page
