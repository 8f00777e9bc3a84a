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

from benchmarks.papers import definition, page, shelf, verify
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
    phases_of,
    resolved,
    run_at,
)
from benchmarks.papers.fedhssl import common as fedhssl
from benchmarks.papers.fedhssl import figure7, table6
from benchmarks.papers.fedonce import common as fedonce
from benchmarks.papers.fedonce.common import upload_bytes
from benchmarks.papers.forecast import forecast
from benchmarks.papers.measures import (
    megabytes,
    megabytes_to,
    minutes_by_itself,
    minutes_split_in_turn,
)
from benchmarks.papers.mocosfl import attack
from benchmarks.papers.mocosfl.common import CIFAR10
from benchmarks.papers.plan import Variant, base_recipe, variants, without_data
from benchmarks.papers.result import RESULTS, judged, load, markdown, result_of
from benchmarks.papers.rules import (
    Cells,
    Claim,
    Rule,
    along,
    below,
    best_of,
    better,
    close,
    holm,
    judge_all,
    near,
    pair,
    ratio,
)
from benchmarks.papers.run import Filled, Runner
from benchmarks.papers.ssvfl import common as ssvfl
from vfl_common.errors import Code, InputError
from vfl_papers.making import resolve
from vfl_papers.prepare import load as load_set
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
    runs = [judge_all(Cells(table, values, scale)) for scale in SCALES]
    for (claim, large), (_, small) in zip(*runs, strict=True):
        assert any(each.verdict != "not run" for each in (*large, *small)), claim.says


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


def test_the_pages_are_up_to_date() -> None:
    kept = {path: path.read_text() for path in page.pages() if path.exists()}
    assert kept == page.pages(), "run `python -m benchmarks.papers --page`"


def test_a_second_program_finds_the_verdicts_of_the_result_files() -> None:
    """``benchmarks.papers.verify`` reads only the files, and tests with scipy's own functions."""
    files = sorted(RESULTS.glob("*.json"))
    assert files
    assert {path.name: verify.differences(path) for path in files} == {
        path.name: [] for path in files
    }


# -- a table of made data
# ----------------------------------------------------------------------


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

    result = result_of("tests.tiny", TINY, "small", [1], again)
    result.save(tmp_path)
    kept = load("tests.tiny", "small", tmp_path)
    assert kept is not None
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
    result = result_of("tests.tiny", TINY, "small", [1], Filled({place: (50.0,)}))
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
    assert [megabytes(split), megabytes(once)] == [4e6 / 2**20, 3e6 / 2**20]
    assert [minutes_by_itself(split), minutes_by_itself(once)] == [3.0, 2.0]
    found: Any = Of(pretrain=Of(run=""), metrics={"validation": {"accuracy": 0.6, "top_5": 0.9}})
    reached = dataclasses.replace(once, result=found, metric="top_5")
    assert megabytes_to(0.8)(reached) == 3e6 / 2**20
    other = dataclasses.replace(reached, settings={"target_metric": "accuracy"})
    assert megabytes_to(0.8)(other) is None
    assert [minutes_split_in_turn(split), minutes_split_in_turn(once)] == [3.5, 2.0]


def test_split_training_ends_at_the_bytes_of_the_rows_that_are_trained_on() -> None:
    data = dataclasses.replace(
        BARS, rows=At(None, 90), settings={"rows": 900}, parties=3, shares=(0.0, 0.2)
    )
    # 4 bytes, 4 numbers, 2 passive parties; a fifth, or a third, to test.
    assert upload_bytes(data, "small", None) == 4 * 4 * 2 * 72
    assert upload_bytes(data, "paper", At(5, 3)) == 4 * 4 * 2 * 720
    assert upload_bytes(data, "small", At(5, 3)) == 4 * 4 * 2 * 60
    # Official test rows are not trained on, but take part in a cross-validation.
    official = dataclasses.replace(data, settings={"rows": 900, "official_test": 0.4})
    assert upload_bytes(official, "paper", None) == 4 * 4 * 2 * 540
    assert upload_bytes(official, "paper", At(5, 3)) == 4 * 4 * 2 * 720


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
# ----------------------------------------------------------------------

ONE = dataclasses.replace(
    TINY,
    data=(dataclasses.replace(BARS, untrained=12.0),),
    lines=(Line("a"), Line("b")),
    columns=(Column("40"),),
    figures={"bars": {"a": (90.0,), "b": (80.0,)}},
    claims=(Claim("a is better", better("a", "b")),),
)


def cells(a: list[float], b: list[float], runs: int | None = None) -> Cells:
    """The cells of two lines, a value for each seed."""
    own = {("bars", "a", "40"): tuple(a), ("bars", "b", "40"): tuple(b)}
    return Cells(ONE, own, "small", runs)


def verdict(rule: Rule, found: Cells) -> str:
    table = dataclasses.replace(ONE, claims=(Claim("it is true", rule),))
    ((_, (finding,)),) = judge_all(dataclasses.replace(found, table=table))
    return finding.verdict


NOISY = [80.1, 79.9, 80.0]


@pytest.mark.parametrize(
    ("rule", "a", "b", "expected"),
    [
        (better("a", "b"), [90.0, 90.2, 89.9], NOISY, "holds"),
        (better("b", "a"), [90.0, 90.2, 89.9], NOISY, "contradicted"),
        # Below the floor of half a point, however sure.
        (better("a", "b"), [80.3, 80.1, 80.2], NOISY, "undecided"),
        # Above the floor, but not above the noise.
        (better("a", "b"), [95.0, 78.0, 82.0], NOISY, "undecided"),
        # A mean of 0 that binary fractions make 4e-17.
        (better("a", "b", floor=0.0), [79.9975, 80.005, 79.9975], [80.0] * 3, "undecided"),
        (close("a", "b", 1.0), [80.2, 80.1, 80.0], NOISY, "holds"),
        (close("a", "b", 1.0), [85.2, 85.1, 85.0], NOISY, "contradicted"),
        (close("a", "b", 1.0), [82.0, 78.5, 80.0], NOISY, "undecided"),
        (near([(("a", "40"), ("b", "40"))], 1.0, one_sided=True), [90.2, 90, 90], NOISY, "holds"),
        (ratio("a", "b", 2.0), [40.0, 41.0, 40.5], [10.0, 10.1, 10.0], "holds"),
        (ratio("a", "b", 2.0), [15.0, 15.1, 15.0], [10.0, 10.1, 10.0], "contradicted"),
        (ratio("a", "b", 2.0), [30.0, 15.0, 22.0], [10.0, 10.1, 10.0], "undecided"),
        (ratio("a", "b", 2.0, counted=True), [40.0], [10.0], "holds"),
        (best_of(["a"], ["b"]), [90.0, 90.2, 89.9], NOISY, "holds"),
        (below("a", 50.0), [40.0, 40.1, 39.9], NOISY, "holds"),
        (below("a", 50.0), [60.0, 60.1, 59.9], NOISY, "contradicted"),
        # One run shows no spread, and two untrained networks are not compared.
        (better("a", "b"), [90.0], [80.0], "undecided"),
        (better("a", "b"), [11.9, 11.8, 11.7], [10.1, 9.9, 10.0], "undecided"),
    ],
)
def test_a_rule_gives_its_verdict(
    rule: Rule, a: list[float], b: list[float], expected: str
) -> None:
    assert verdict(rule, cells(a, b)) == expected


def test_a_claim_with_a_missing_cell_or_run_is_not_judged() -> None:
    a = [90.0, 90.2, 89.9]
    assert verdict(better("a", "b"), cells(a, [])) == "not run"
    assert verdict(better("a", "b"), cells(a, NOISY, runs=3)) == "holds"
    assert verdict(better("a", "b"), cells(a, NOISY, runs=5)) == "not run"
    assert judged(ONE, None)[0][1][0].verdict == "not run"
    # Half of a difference of differences is not judged (Fig. 9 of FedOnce once was).
    double = pair([(("a", "40"), ("b", "40")), (("b", "20"), ("a", "20"))])
    two = dataclasses.replace(ONE, columns=(Column("40"), Column("20")), figures={})
    found = dataclasses.replace(cells(a, NOISY), table=two)
    table = dataclasses.replace(two, claims=(Claim("it is true", double),))
    ((_, (finding,)),) = judge_all(dataclasses.replace(found, table=table))
    assert finding.verdict == "not run"


def test_p_values_of_a_table_are_corrected_together() -> None:
    # R: p.adjust(c(0.01, 0.04, 0.03), "holm").
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    # p is 0.022 alone, and four times that with three other tests.
    a, b = [81.9, 83.0, 82.5], NOISY
    assert verdict(better("a", "b"), cells(a, b)) == "holds"
    claims = tuple(Claim(str(at), better("a", "b")) for at in range(4))
    found = judge_all(
        dataclasses.replace(cells(a, b), table=dataclasses.replace(ONE, claims=claims))
    )
    assert {finding.verdict for _, (finding,) in found} == {"undecided"}


def test_a_result_is_current_while_its_table_runs_the_same(tmp_path: Path) -> None:
    result = result_of("tests.tiny", TINY, "small", [1], Filled({("bars", "VFL", "40"): (50.0,)}))
    result.save(tmp_path)
    kept = load("tests.tiny", "small", tmp_path)
    assert kept is not None
    assert kept.is_current(TINY)
    assert kept.definition
    longer = dataclasses.replace(TINY, lines=(Line("VFL", split(0.01, epochs=13)), *TINY.lines[1:]))
    assert not kept.is_current(longer)
    # Words do not change what runs.
    assert kept.is_current(dataclasses.replace(TINY, notes=("new",)))


def test_claims_were_frozen_as_they_are() -> None:
    kept = definition.frozen()
    assert {name: each["claims"] for name, each in kept.items()} == {
        name: definition.claims_digest(name) for name in NAMES
    }, "run `python -m benchmarks.papers --freeze`"


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


def planned(name: str) -> list[Variant]:
    """Returns what a table prepares and runs; nothing if it computes its cells itself."""
    table = shelf.load(name)
    return [] if table.compute is not None else variants(table)


@pytest.mark.parametrize("name", NAMES)
def test_vfl_prepare_takes_the_options_of_a_table(name: str) -> None:
    for of in planned(name):
        options = resolved(of.options, "paper")
        how: dict[str, Any] = {key: options.pop(key, None) for key in ("paper", "divide", "deal")}
        how |= {"active": options.pop("active", 1), "validation": None, "options": options}
        dataset = load_set(of.data.prepare)
        plan = resolve(of.data.prepare, dataset, parties=of.parties, seed=0, **how)
        kind, _, count = plan.request.deal.partition(":")
        if of.data.dealt and kind == "classes":
            # Each class belongs to a client.
            assert int(count) * of.parties >= of.data.task["classes"]


@pytest.mark.parametrize("name", [each for each in NAMES if shelf.load(each).figures])
def test_the_numbers_of_a_paper_contradict_none_of_its_claims(name: str) -> None:
    table, random = shelf.load(name), np.random.default_rng(0)
    papers = {place: table.paper(place) for place in table.places()}
    values = {k: tuple(v * random.normal(1.0, 1e-4, 5)) for k, v in papers.items() if v is not None}
    for claim, findings in judge_all(Cells(table, values, "paper")):
        assert claim.ours or "contradicted" not in {each.verdict for each in findings}, claim.says


@pytest.mark.parametrize("data", [ssvfl.IMAGENET, ssvfl.MODELNET], ids=lambda each: each.name)
def test_networks_and_bytes_of_ssvfl_are_those_of_the_paper(data: Data) -> None:
    assert data.model["encoder"]["small_images"] is False
    assert data.metric == "top_5"
    # For ModelNet10 the targets of Table 1 are of top-1 accuracy.
    assert ("target_metric" in data.settings) == (data is ssvfl.MODELNET)
    sent = shelf.load("ssvfl.table1").figures[data.name]["SS-VFL-I"]
    numbers = data.parties * data.model["embedding_size"] * data.settings["train"].paper
    assert sent == pytest.approx([4 * share * numbers / 2**20 for share in ssvfl.SHARES], rel=0.02)
    # ``vfl prepare`` writes the same.
    (use,) = (each for each in load_set(data.prepare).uses if each.paper == "SS-VFL")
    assert (use.recipe["model"], use.recipe["phases"][0]["ssl"]) == (data.model, "simclr")


def test_the_attacker_of_table_6_has_pretrained_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def attacked(_work: Work, _data: Data, method: str, _seed: int, iso: float = 0.0) -> Any:
        return {"recovered": 1.0 + iso if method == "FedHSSL-SimSiam" else -1.0, "main 0": 0.5}

    monkeypatch.setattr(table6, "attacked", attacked)
    work: Any = Of(seeds=[1], data=lambda table: table.data[1:2])
    found = {place[2]: values for place, values in table6.compute(work)}
    assert (found["A_SimSiam"], found["A_FedHSSL"], found["A_FedHSSL, ISO"]) == ([-1], [1], [1.1])


def test_data_and_pretraining_of_fedhssl_are_those_of_the_appendices() -> None:
    data = fedhssl.MODELNET
    own = load_set(data.prepare)
    assert (data.prepare, own.options["size"][0]) == ("modelnet40", 32)
    assert own.rows * data.options["samples"] == pytest.approx(24_630 + 6_204, rel=0.02)
    assert data.model["encoder"] == {"kind": "resnet18", "last_layer": False}
    lines = (fedhssl.local("simsiam"), fedhssl.hybrid("simsiam"))
    rates = [phases_of(each.pretrain, data)[0]["optimizer"]["lr"].paper for each in lines]
    # As released, without guidance and with γ = 0.5.
    assert rates == pytest.approx([0.1, 0.05])
    rounds = [figure7._all_rounds(each)[0]["rounds"].paper for each in fedhssl.PAPER]
    assert (rounds, len(resolved(fedhssl.CVT.rates, "paper"))) == ([10, 40, 40, 40], 3)


def test_baselines_of_fedonce_have_the_columns_and_bytes_of_the_paper() -> None:
    whole = [each for each in planned("fedonce.figure9") if each.whole]
    # Without the ratio α of the parties' columns.
    assert [each.options for each in whole] == [{"divide": "columns"}] * 2
    data = (fedonce.MNIST, fedonce.GISETTE, fedonce.NUSWIDE)
    numbers = [60_000 * 16 * 3, 6_000 * 3 * 9, 161_789 * 8 * 4]
    assert [upload_bytes(each, "paper", None) / 4 for each in data] == numbers
    lines = {each.name: each.on for each in shelf.load("fedonce.figure5").lines}
    assert lines["SecureBoost-Comm"] == ("covtype", "NUS-WIDE", "MovieLens")
    # Ridge regression, by scikit-learn's default: |w|² beside the sum of squares.
    (phase, _) = phases_of(fedonce.LINEAR.finetune, fedonce.UJI)
    assert phase["optimizer"]["weight_decay"].paper == pytest.approx(2 / (0.9 * 21_048))
    assert phases_of(fedonce.LINEAR.finetune, fedonce.MNIST)[0]["optimizer"]["weight_decay"] == 0
    hosts = {
        variant.first.host: variant.data
        for variant in planned("fedonce.figure5")
        if variant.data.name == "MovieLens" and not variant.whole
    }
    # Table 5 has other settings for MovieLens with its second party as the host.
    assert [hosts[host].model["embedding_size"] for host in (1, 2)] == [3, 48]
    assert [hosts[host].settings["head"]["epochs"].paper for host in (1, 2)] == [40, 100]


def test_what_is_not_the_papers_is_not_counted() -> None:
    rows = page.coverage().splitlines()[2:]
    assert [int(row.split("|")[2]) for row in rows] == [12, 11, 2, 11]
    own = {name: sum(each.ours for each in shelf.load(name).claims) for name in NAMES}
    assert (own["fedonce.table4"], own["mocosfl.table8"], own["mocosfl.section_b5"]) == (1, 1, 2)
    # Without SVHN there is nothing to run at the scale small.
    assert run_at(shelf.load("mocosfl.table9"), "small").data == ()
    private = shelf.load("fedonce.table6")
    assert not any(each.rule.one_sided for each in private.claims)
    assert all(each.untrained is not None for each in private.data)


def test_a_forecast_multiplies_the_time_of_a_row_and_that_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = dataclasses.replace(
        TINY,
        data=(BARS,),
        lines=(Line("Combine", split(0.05, epochs=5), combined=True),),
        columns=(Column("40", labels=40),),
    )
    seen: list[float] = []

    def fill(_self: Runner, _name: str, table: Table, seeds: list[int]) -> Filled:
        # A run takes 2 s and 1 ms for each of 400 rows that is trained on or evaluated.
        (phase, _) = phases_of(table.lines[0].finetune, BARS)
        seen.append(phase["epochs"])
        return Filled(seconds=len(seeds) * (2.0 + 0.001 * 400 * (phase["epochs"] + 1)))

    monkeypatch.setattr(Runner, "fill", fill)
    runner = Runner("small", Sources(tmp_path, tmp_path), tmp_path, 1, print)
    # Two seeds of 80 rows, 5 epochs and an evaluation.
    assert dict(forecast("tests.tiny", one, runner)) == {"bars": pytest.approx(2 * (2.0 + 0.48))}
    assert seen == [1, 21]


def test_a_run_with_fewer_cells_never_replaces_a_current_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = {("bars", "VFL", "40"): (50.0, 60.0), ("bars", "VFL", "20"): (40.0, 30.0)}
    monkeypatch.setattr(shelf, "load", lambda _name: TINY)
    monkeypatch.setattr(shelf, "chosen", lambda _names: ["tests.tiny"])
    one_seed = {place: values[:1] for place, values in cells.items()}
    for found in (cells, dict([*cells.items()][:1]), one_seed):
        monkeypatch.setattr(Runner, "fill", lambda *_, found=found: Filled(found))
        shown = CliRunner().invoke(main, ["--data", str(tmp_path), "--results", str(tmp_path)])
        assert ("are missing from this run" in shown.output) == (found != cells)
        kept = [load("tests.tiny", "small", tmp_path / each) for each in ("", "partial")]
        assert [each and each.values for each in kept] == [cells, found if found != cells else None]


# -- the command
# ----------------------------------------------------------------------


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
