"""``benchmarks.papers``: every study file holds together, and a small one runs, and resumes."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace as Of
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from benchmarks.papers import page, shelf
from benchmarks.papers.__main__ import main
from benchmarks.papers.check import UnexpectedError, refused_without_data
from benchmarks.papers.compute import Work, computed, order_of
from benchmarks.papers.data import Sources
from benchmarks.papers.describe import (
    EVALUATE,
    SCALES,
    At,
    Column,
    Data,
    Line,
    Place,
    Scale,
    Seen,
    Table,
    Tables,
    labels_of,
    resolved,
    run_at,
)
from benchmarks.papers.fedonce.common import upload_bytes
from benchmarks.papers.measures import megabytes, minutes_by_itself, minutes_split_in_turn
from benchmarks.papers.mocosfl import attack
from benchmarks.papers.mocosfl.common import CIFAR10
from benchmarks.papers.plan import base_recipe, variants, without_data
from benchmarks.papers.result import judged, load, markdown, result_of
from benchmarks.papers.rules import Cells, Claim, along, below, best, better, close, ratio, within
from benchmarks.papers.run import Filled, Runner
from tests.harness.present import present
from vfl_common.errors import Code, InputError
from vfl_party.base.arithmetic import describe_arithmetic

NAMES = shelf.names()


@pytest.mark.parametrize("name", NAMES)
def test_a_study_file_agrees_with_itself(name: str) -> None:
    table = shelf.load(name)
    lines, columns = {each.name for each in table.lines}, len(table.columns)
    assert len(lines) == len(table.lines)
    assert len({each.name for each in table.columns}) == columns
    for data, rows in table.figures.items():
        assert data in {each.name for each in table.data}
        assert set(rows) <= lines
        assert all(len(row) == columns for row in rows.values())
    # A claim that names a line or a column wrongly would never be judged.
    random = np.random.default_rng(0)
    values = {place: tuple(random.uniform(0.1, 0.9, 3)) for place in table.places()}
    for claim in table.claims:
        findings = [*claim.findings(Cells(table, values))]
        assert any(each.verdict != "not run" for each in findings), claim.says


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_of_a_table_is_accepted_or_says_what_it_needs(name: str, scale: Scale) -> None:
    found = refused_without_data(shelf.load(name), scale)
    table = run_at(shelf.load(name), scale)
    # What is there by now is needed no more.
    assert {each.name for each in table.lines if each.needs} <= set(found)
    if table.compute is None:
        planned = variants(table)
        assert planned
        titles = [each.name(name) for each in planned]
        assert len(set(titles)) == len(titles)


def test_the_page_is_up_to_date() -> None:
    hint = "run `python -m benchmarks.papers --page`"
    assert {path: path.read_text() for path in page.DOCS.glob("papers*.md")} == page.pages(), hint


# -- a table of made data


def split(lr: float, epochs: int = 12) -> list[dict[str, object]]:
    optimizer = {"kind": "adam", "lr": lr}
    return [
        {"kind": "splitnn", "epochs": epochs, "batch_size": 16, "optimizer": optimizer},
        EVALUATE,
    ]


BARS = Data(
    "bars",
    "mnist",
    {"kind": "multiclass", "classes": 10},
    2,
    "accuracy",
    {"embedding_size": 4, "encoder": {"kind": "mlp", "hidden": [8]}},
    At(None, 80),
    options={"divide": "halves"},
    whole={"divide": "strips"},
)
TINY = Table(
    place="Table 0",
    title="two methods",
    data=(BARS, dataclasses.replace(BARS, name="absent", prepare="nowhere")),
    lines=(
        Line("VFL", split(0.01), rates=(1e-6, 0.05)),
        Line("Combine", split(0.05, epochs=1), combined=True),
        Line("Solo", split(0.05, epochs=1), alone=True, only=("40",)),
        Line("future", [{"kind": "no-such-phase"}], needs="a phase that nobody has written"),
    ),
    columns=(Column("40", labels=40), Column("20", labels=20), Column("P2", labels=40, host=2)),
    figures={"bars": {"VFL": (90.0, 80.0, None)}},
    source="this test",
    claims=(Claim("more labels help", along("VFL", "20", "40")),),
    seeds=(1, 2),
    small="80 rows",
    percent=True,
)


@pytest.fixture(scope="module")
def bars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The form of MNIST without training images: each class has a bar at another place."""
    folder = tmp_path_factory.mktemp("data")
    labels = np.arange(100, dtype=np.uint8) % 10
    images = np.zeros((100, 28, 28), np.uint8)
    for row, label in enumerate(labels):
        images[row, :, 2 * label : 2 * label + 6] = 255
    np.savez(folder / "mnist10k.npz", images=images, labels=labels)
    return folder


def test_a_table_runs_and_resumes(bars: Path, tmp_path: Path) -> None:
    said: list[str] = []
    runner = Runner("small", Sources(bars, tmp_path / "data"), tmp_path / "runs", 1, said.append)
    found = runner.fill("tests.tiny", TINY, [1])
    cells = {place[1:]: values for place, values in found.values.items()}
    assert set(cells) == {
        ("VFL", "40"), ("VFL", "20"), ("VFL", "P2"),
        ("Combine", "40"), ("Combine", "20"), ("Combine", "P2"), ("Solo", "40"),
    }  # fmt: skip
    assert all(len(values) == 1 for values in cells.values())
    # Of two learning rates, the one that learns.
    assert set(found.rates.values()) == {0.05}
    assert min(cells["VFL", "40"]) > 20.0
    assert list(found.absent) == ["absent"]
    assert "unknown data set 'nowhere'" in found.absent["absent"]
    assert all("nobody has written" in why for why in found.left_out.values())
    assert found.left_out

    runs = sorted((tmp_path / "runs").glob("*-bars-*/*/summary.json"))
    before = {path: path.stat().st_mtime_ns for path in runs}
    # As if the command had been killed in its last run.
    shutil.rmtree(runs[-1].parent)
    again = runner.fill("tests.tiny", TINY, [1])
    assert again.values == found.values
    after = {path for path in runs if path.stat().st_mtime_ns != before[path]}
    assert after == {runs[-1]}

    # Two at a time, in other processes.
    several = dataclasses.replace(runner, out=tmp_path / "several", jobs=2)
    some = several.fill("tests.tiny", dataclasses.replace(TINY, lines=TINY.lines[1:3]), [1])
    assert len(some.values) == 4
    assert some.values == {place: found.values[place] for place in some.values}

    result = result_of("tests.tiny", "small", [1], again)
    result.save(tmp_path)
    kept = present(load("tests.tiny", "small", tmp_path))
    assert kept.values.keys() == result.values.keys()
    assert kept.machine == result.machine == str(describe_arithmetic(torch.device("cpu")))
    text = markdown(TINY, kept)
    assert "| VFL | 90.000 → **" in text
    assert "more labels help (bars: " in text
    assert "not the official files" in " ".join(kept.notes["bars"])


def test_official_test_rows_take_part_in_a_cross_validation() -> None:
    (variant, *_) = variants(TINY)
    given = without_data(variant)
    assert given["rows"]["split"] == "column"
    made = base_recipe("x", variant, "small", given, folds=True)
    assert "split" not in made["rows"]
    for own in made["simulate"]["parties"].values():
        assert "split" not in own
        # It is no feature either.
        assert own["drop"] == ["split"]
    refused_without_data(dataclasses.replace(TINY, folds=3), "small")


def test_a_page_shows_the_lines_and_columns_that_were_run() -> None:
    place = ("bars", "VFL", "40")
    result = result_of("tests.tiny", "small", [1], Filled({place: (50.0,)}))
    text = markdown(TINY, result, briefly=True)
    assert "| bars | 40 |" in text
    assert "| VFL | 90.000 → **50.000** |" in text
    assert "80.000" in markdown(TINY, result)
    assert "80.000" not in text


def seen(phase: str, kinds: dict[str, int]) -> Seen:
    """A run of one phase and an evaluation. ``kinds``: {kind of message: bytes}."""
    links = [Of(phase=phase, kind=kind, message_bytes=size) for kind, size in kinds.items()]
    links.append(Of(phase="evaluate", kind="embedding", message_bytes=10**9))
    parties = [
        Of(name=name, role=role, times=[Of(phase=phase, compute_s=seconds)])
        for name, role, seconds in (("a", "active", 60.0), ("p", "passive", 120.0))
    ]
    parties.append(Of(name="q", role="passive", times=[Of(phase=phase, compute_s=30.0)]))
    summary: Any = Of(parties=parties, bytes=Of(by_link=links))
    result: Any = Of(pretrain=Of(run=""))
    return Seen(result, Path(), summary, "accuracy")


def test_measures_of_a_run() -> None:
    split = seen("splitnn", {"embedding": 3_000_000, "gradient": 2_000_000})
    once = seen("head", {"embedding": 3_000_000})
    # Embeddings of validation rows are no training.
    assert [megabytes(split), megabytes(once)] == [4.0, 3.0]
    assert [minutes_by_itself(split), minutes_by_itself(once)] == [3.0, 2.0]
    assert [minutes_split_in_turn(split), minutes_split_in_turn(once)] == [3.5, 2.0]


def test_split_training_ends_at_the_bytes_of_the_rows_that_are_trained_on() -> None:
    data = dataclasses.replace(BARS, rows=At(None, 90), settings={"rows": 900}, parties=3)
    # 4 bytes, 4 numbers, 2 passive parties; a tenth for validation, and a fifth or a third to test.
    assert upload_bytes(data, "small", None) == 4 * 4 * 2 * 63
    assert upload_bytes(data, "paper", At(5, 3)) == 4 * 4 * 2 * 630
    assert upload_bytes(data, "small", At(5, 3)) == 4 * 4 * 2 * 51


def test_numbers_are_kept_by_their_key(tmp_path: Path) -> None:
    said: list[str] = []
    work = Work("small", [1], tmp_path / "own", Sources(tmp_path, tmp_path), said.append)
    again = dataclasses.replace(work)
    assert work.once("λ = 1", lambda: {"a": 1.5}) == {"a": 1.5}
    assert work.once("λ = 2", lambda: {"a": 2.5}) == {"a": 2.5}
    assert again.once("λ = 1", dict) == {"a": 1.5}
    assert said == ["λ = 1", "λ = 2"]


def test_a_process_of_a_seed_keeps_what_the_table_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compute(work: Work) -> Iterator[tuple[Place, list[float]]]:
        yield ("bars", "VFL", "40"), [work.once("one", lambda: {"a": 1.5})["a"]]
        raise InputError(Code.DATA_INVALID, "the second is not there")

    table = dataclasses.replace(TINY, compute=compute)
    monkeypatch.setattr(shelf, "load", lambda _name: table)
    work = Work("small", [1], tmp_path / "own", Sources(tmp_path, tmp_path), print)
    computed(order_of("tests.tiny", work, 1))
    assert work.once("one", dict) == {"a": 1.5}


COMPUTES = """
import os
from pathlib import Path
from benchmarks.papers.compute import Work
from benchmarks.papers.data import Sources

def computed(order):
    sources = Sources(Path(order["given"]), Path(order["own"]))
    work = Work(order["scale"], [order["seed"]], Path(order["folder"]), sources, print)
    work.once(str(order["seed"]), lambda: {"process": os.getpid()})
"""


def test_seeds_are_computed_in_other_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(COMPUTES)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("benchmarks.papers.run._COMPUTES", "own:computed")

    def compute(work: Work) -> Iterator[tuple[Place, list[float]]]:
        here = {"process": float(os.getpid())}
        found = [work.once(str(seed), lambda: here)["process"] for seed in work.seeds]
        yield ("bars", "VFL", "40"), found

    table = dataclasses.replace(TINY, compute=compute)
    sources = Sources(tmp_path, tmp_path)
    for jobs, others in ((1, False), (2, True)):
        runner = Runner("small", sources, tmp_path / str(jobs), jobs, print)
        (found,) = runner.fill("tests.tiny", table, [1, 2]).values.values()
        assert len(found) == 2
        assert (os.getpid() not in found) == others


def test_resistance_is_learnt_transferred_and_attacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = attack._phases

    def short(*how: Any) -> list[Tables]:
        before, still, probe = whole(*how)
        once: Tables = {"epochs": 1, "batch_size": 8}
        return [before | once, still | once, probe | {"epochs": 1, "least_steps": 1}]

    monkeypatch.setattr(attack, "_phases", short)
    monkeypatch.setattr(attack, "CIFAR10", dataclasses.replace(CIFAR10, rows=120))
    random = np.random.default_rng(0)
    folder = tmp_path / "data" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        rows = random.integers(0, 256, (40, 1 + 3 * 32 * 32), np.uint8)
        rows[:, 0] = np.arange(40) % 10
        (folder / f"{name}.bin").write_bytes(rows.tobytes())
    said: list[str] = []
    sources = Sources(tmp_path / "data", tmp_path / "prepared")
    work = Work("small", [1], tmp_path / "runs" / "table", sources, said.append)
    found = attack.resisted(work, 1, cut=1)
    assert set(found) == set(attack.METRICS)
    assert 0 <= found["accuracy"] <= 100
    # An attacker that knows nothing of noise answers with grey: its MSE is the variance, 1/12, or
    # less, since images are made smaller.
    assert 0 < found["mse"] < 0.2
    # Two tables that need the same run share it.
    other = dataclasses.replace(work, folder=tmp_path / "runs" / "another")
    assert attack.resisted(other, 1, cut=1, source="SVHN") == found
    assert len(said) == 1


def test_labels_may_be_a_share_of_the_training_rows() -> None:
    data = dataclasses.replace(BARS, settings={"train": At(4000, 200)})
    column = Column("1%", share=0.01)
    assert [labels_of(column, data, scale) for scale in SCALES] == [40, 2]
    assert resolved({"a": [At(1, 2)]}, "small") == {"a": [2]}


# -- rules

ONE = dataclasses.replace(
    TINY,
    data=(BARS,),
    lines=(Line("a"), Line("b")),
    columns=(Column("x"), Column("y")),
    figures={"bars": {"a": (90.0, 80.0), "b": (80.0, 70.0)}},
    claims=(Claim("a is better", better("a", "b")),),
)


def cells(a: float, b: float, spread: float = 0.1) -> Cells:
    values: dict[Place, tuple[float, ...]] = {
        ("bars", line, column): (value - spread, value + spread * (2 if line == "a" else 1))
        for line, value in (("a", a), ("b", b))
        for column in ("x", "y")
    }
    return Cells(ONE, values)


@pytest.mark.parametrize(
    ("judge", "a", "b", "verdict"),
    [
        (better("a", "b"), 90, 80, "holds"),
        (better("a", "b"), 84, 80, "direction"),
        (better("a", "b"), 79, 80, "not found"),
        (close("b", "a", 1.0), 80, 79.5, "holds"),
        (close("b", "a", 1.0), 80, 78.5, "direction"),
        (close("b", "a", 1.0), 80, 70, "not found"),
        (ratio("a", "b", 2.0), 40, 10, "holds"),
        (ratio("a", "b", 2.0), 15, 10, "direction"),
        (ratio("a", "b", 2.0), 9, 10, "not found"),
        (best("a"), 90, 80, "holds"),
        (best("b"), 90, 80, "not found"),
        (below("a", 50.0), 40, 10, "holds"),
        (below("a", 50.0), 60, 10, "not found"),
        (within(6.0), 85, 75, "holds"),
        (within(1.0), 10, 10, "not found"),
    ],
)
def test_a_rule_gives_its_verdict(judge: object, a: float, b: float, verdict: str) -> None:
    (finding,) = Claim("it is so", judge).findings(cells(a, b))  # type: ignore[arg-type]
    assert finding.verdict == verdict


def test_a_difference_within_the_noise_is_a_direction() -> None:
    noisy = {("bars", "a", "x"): (70.0, 95.0), ("bars", "b", "x"): (80.0, 80.0)}
    (finding,) = Claim("it is so", better("a", "b", share=0.0)).findings(Cells(ONE, noisy))
    assert finding.verdict == "direction"
    (none,) = Claim("it is so", better("a", "b")).findings(Cells(ONE, {}))
    assert none.verdict == "not run"
    assert judged(ONE, None)[0][1][0].verdict == "not run"


@pytest.mark.parametrize(
    ("phases", "changes", "why"),
    [
        ([{"kind": "splitnn", "epoch": 1}], {}, "'epoch'"),
        (split(0.01), {"model.encoder": {"kind": "nobodys"}}, "nobodys"),
        (split(0.01), {"model.top": {"kind": "nobodys"}}, "nobodys"),
        (split(0.01), {"task.kind": "regression", "task.classes": None}, "'accuracy'"),
    ],
)
def test_a_line_that_is_refused_without_a_reason_is_an_error(
    phases: list[dict[str, object]], changes: dict[str, object], why: str
) -> None:
    wrong = dataclasses.replace(TINY, lines=(Line("wrong", phases, changes=changes),))
    with pytest.raises(UnexpectedError) as caught:
        refused_without_data(wrong, "small")
    assert why in str(caught.value)


# -- the command


def test_the_list_says_which_data_are_there(bars: Path) -> None:
    shown = CliRunner().invoke(main, ["fedonce.table7", "--list", "--data", str(bars)])
    assert shown.exit_code == 0, shown.output
    words = shown.output.split()
    assert "fedonce.table7" in words
    at = words.index("mnist:")
    assert words[at + 1] == "present"


def test_a_name_that_is_unknown_is_refused() -> None:
    shown = CliRunner().invoke(main, ["fedonce.table99", "--list"])
    assert shown.exit_code == 2
    assert "there is no table 'fedonce.table99'" in shown.output
    assert "give --data DIR" in CliRunner().invoke(main, ["fedonce.table7"]).output
