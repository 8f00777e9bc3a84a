"""``vfl.prepare``: what every data set has in common, by the example of MNIST."""

from __future__ import annotations

import gzip
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import vfl
from tests.harness.errors import raises
from tests.unit.papers.made import MNIST, idx, write_mnist
from vfl.cli import cli
from vfl_common.errors import Code, InputError
from vfl_papers import dividing
from vfl_papers.dataset import Content, DataSet, Files, Form, Need, PaperUse, Request
from vfl_papers.dividing import COLUMNS
from vfl_papers.prepare import REGISTRY, draw_rows, load
from vfl_party.base.plugins import use_plugins


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mnist(tmp_path_factory.mktemp("mnist"))


def npz(prepared: vfl.PreparedData, party: str) -> dict[str, Any]:
    with np.load(prepared.parties[party]) as file:
        return dict(file)


def test_every_party_has_its_quarter_of_the_same_rows(files: Path, tmp_path: Path) -> None:
    found = vfl.prepare("mnist", files, tmp_path / "out")
    assert list(found.parties) == ["party-1", "party-2", "party-3", "party-4"]
    first, second, third, fourth = (npz(found, name) for name in found.parties)
    whole = np.concatenate(
        [
            np.concatenate([first["image"], second["image"]], 2),
            np.concatenate([third["image"], fourth["image"]], 2),
        ],
        1,
    )
    assert (whole == np.concatenate([MNIST["train"][0], MNIST["test"][0]])).all()
    assert (first["label"] == np.concatenate([MNIST["train"][1], MNIST["test"][1]])).all()
    assert Counter(first["split"].tolist()) == {b"train": 60, b"test": 20}
    assert all((each["id"] == first["id"]).all() for each in (second, third, fourth))
    assert not any("label" in each for each in (second, third, fourth))


def test_what_differs_from_the_published_files_is_said(files: Path, tmp_path: Path) -> None:
    found = vfl.prepare("mnist", files, tmp_path / "out")
    assert not found.official
    assert "The files have 60 train rows (published: 60,000)." in found.notes
    assert all(f"- {note}" in found.summary.read_text() for note in found.notes)


def test_fewer_rows_keep_the_shares_and_any_active_party(files: Path, tmp_path: Path) -> None:
    found = vfl.prepare("mnist", files, tmp_path / "out", rows=40, active=3, validation=0.2, seed=5)
    assert next(iter(found.parties)) == "party-3"
    active = npz(found, "party-3")
    assert Counter(active["label"].tolist()) == dict.fromkeys(range(10), 4)
    assert Counter(active["split"].tolist()) == {b"train": 24, b"validation": 6, b"test": 10}
    # The summary counts the rows that were drawn, and not all that were read.
    assert ": 30 train, 10 test. 20 % of these training rows" in found.summary.read_text()
    again = vfl.prepare(
        "mnist", files, tmp_path / "again", rows=40, active=3, validation=0.2, seed=5
    )
    assert found.parties["party-3"].read_bytes() == again.parties["party-3"].read_bytes()


@pytest.mark.parametrize("deal", ["even", "classes:2", "dirichlet:5"])
def test_whole_rows_are_dealt_to_clients_once(files: Path, tmp_path: Path, deal: str) -> None:
    found = vfl.prepare("mnist", files, tmp_path / "out", divide="rows", deal=deal, parties=5)
    clients = [npz(found, f"client-{k}") for k in range(1, 6)]
    ids = np.concatenate([each["id"] for each in clients])
    assert sorted(ids.tolist()) == sorted(set(ids.tolist()))
    assert len(ids) == 80
    assert all((each["split"] == b"test").sum() == 4 for each in clients)
    if deal == "classes:2":
        labels = np.concatenate([MNIST["train"][1], MNIST["test"][1]])
        for each in clients:
            own = each["id"][each["split"] == b"train"].astype(int)
            assert len(set(labels[own].tolist())) == 2


def test_the_summary_names_the_paper_whose_numbers_the_recipe_has(
    files: Path, tmp_path: Path
) -> None:
    aligned = vfl.prepare("mnist", files, tmp_path / "aligned", divide="halves", parties=2)
    assert "The values of the recipe are from FedOnce" in aligned.summary.read_text()
    # FedOnce, the only paper that uses MNIST, trains no clients.
    dealt = vfl.prepare("mnist", files, tmp_path / "dealt", divide="rows", parties=4)
    for text in (dealt.summary.read_text(), dealt.recipe.read_text()):
        assert "are our own, because no paper divides" in text
        assert "FedOnce" not in text


@pytest.mark.parametrize(
    "given",
    [
        {"rows": 81},
        {"rows": 0},
        {"parties": 5},
        {"active": 5},
        {"validation": 1.0},
        {"paper": "fedhssl"},
        {"divide": "circles"},
        {"deal": "even"},
        {"divide": "rows", "deal": "alike:3"},
        {"divide": "rows", "deal": "classes"},
        {"divide": "rows", "active": 2},
        {"size": 3},
    ],
    ids=lambda given: " ".join(f"{key}={value}" for key, value in given.items()),
)
def test_what_does_not_fit_the_data_set_is_refused(
    files: Path, tmp_path: Path, given: dict[str, Any]
) -> None:
    with raises(InputError, Code.CONFIG_INVALID):
        vfl.prepare("mnist", files, tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()
    assert list(tmp_path.iterdir()) == []


def test_missing_files_are_named_with_their_publisher(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    with raises(InputError, Code.FILE_INVALID, names=("ubyte.gz", "yann.lecun.com")):
        vfl.prepare("mnist", tmp_path, tmp_path / "out")
    with raises(InputError, Code.FILE_INVALID):
        vfl.prepare("mnist", tmp_path / "nowhere", tmp_path / "out")


def test_a_name_that_is_unknown_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with raises(InputError, Code.CONFIG_INVALID, names=("minst", "mnist")):
        vfl.prepare("minst", tmp_path, tmp_path / "out")


@pytest.mark.parametrize("fault", ["cut", "longer", "dims", "flat", "labels", "packed"])
def test_a_damaged_file_is_refused(tmp_path: Path, fault: str) -> None:
    write_mnist(tmp_path)
    images = tmp_path / "train-images-idx3-ubyte.gz"
    body = gzip.decompress(images.read_bytes())
    made = {
        "cut": gzip.compress(body[:-1]),
        "longer": gzip.compress(body + b"\0"),
        # Announces 4 billion images.
        "dims": gzip.compress(body[:4] + b"\xff" * 4 + body[8:]),
        "flat": gzip.compress(idx(MNIST["train"][1])),
        "labels": gzip.compress(idx(MNIST["train"][0][:-1])),
        "packed": images.read_bytes()[:-20],
    }
    images.write_bytes(made[fault])
    with raises(InputError, Code.FILE_INVALID, names="ubyte.gz"):
        vfl.prepare("mnist", tmp_path, tmp_path / "out")


def test_a_folder_is_replaced_only_if_asked_and_if_it_was_prepared(
    files: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    vfl.prepare("mnist", files, out, rows=20)
    with raises(InputError, Code.FILE_INVALID):
        vfl.prepare("mnist", files, out)
    found = vfl.prepare("mnist", files, out, replace=True)
    assert len(npz(found, "party-1")["id"]) == 80
    (out / "runs").mkdir()
    with raises(InputError, Code.FILE_INVALID):
        vfl.prepare("mnist", files, out, replace=True)
    (out / "PREPARED.md").unlink()
    with raises(InputError, Code.FILE_INVALID):
        vfl.prepare("mnist", files, out, replace=True)


def test_the_command_lists_describes_and_prepares(files: Path, tmp_path: Path) -> None:
    def said(*args: str) -> str:
        done = CliRunner().invoke(cli, ["prepare", *args], catch_exceptions=False)
        assert done.exit_code == 0
        return done.output

    listed = said("--list")
    assert all(name in listed for name in REGISTRY.names())
    assert "train-images-idx3-ubyte.gz" in said("mnist", "--list")
    out = said("mnist", "--from", str(files), "--out", str(tmp_path / "o"), "--rows", "20")
    assert "party-4.npz" in out
    assert f"Next: vfl simulate {tmp_path / 'o' / 'recipe.toml'}" in out


@pytest.mark.parametrize(
    "args",
    [
        ["mnist"],
        ["mnist", "--from", ".", "--set", "size"],
        ["mnist", "--from", ".", "--deal", "even"],
        ["mnist", "--from", ".", "--set", "size=3"],
        ["phishing", "--from", ".", "--set", "alpha=0.2"],
    ],
    ids=["no folder", "no value", "an option", "no setting", "another division's setting"],
)
def test_the_command_refuses_what_it_cannot_use(args: list[str]) -> None:
    with raises(InputError, Code.CONFIG_INVALID):
        CliRunner().invoke(cli, ["prepare", *args], catch_exceptions=False)


def test_every_data_set_describes_itself() -> None:
    for name in REGISTRY.names():
        found = load(name)
        assert found.uses
        assert all(use.division in found.divisions for use in found.uses)
        for use in found.uses:
            allowed = found.divisions[use.division].parties
            assert not allowed or use.parties in allowed


def table_set(n: int, block: int) -> DataSet:
    """Returns a data set of n rows with five columns, which are read in blocks; without a split."""

    def blocks(rows: npt.NDArray[np.int64]) -> Iterator[pa.Table]:
        for start in range(0, len(rows), block):
            own = rows[start : start + block]
            yield pa.table(
                {f"x{j}": own * 10 + j for j in range(5)} | {"c": [f"k{r % 3}" for r in own]}
            )

    def read(_: Files, __: Request) -> Content:
        return Content(np.arange(n) % 2, None, blocks)

    recipe = dividing.splitnn({"kind": "tabular", "hidden": [4]}, 2)
    return DataSet(
        "Numbers",
        "nobody",
        "numbers",
        n,
        {"kind": "binary"},
        (Form((), read),),
        {"columns": COLUMNS},
        (PaperUse("FedOnce", "Table 1", "columns", 4, recipe, validation=0.1),),
        "little",
    )


def test_strata_with_few_rows_are_drawn_by_their_share() -> None:
    """A hundred classes with two training rows and a test row each."""
    labels, splits = (
        np.repeat(np.arange(100), 3),
        np.array(["train", "train", "test"] * 100, object),
    )
    content = Content(labels, splits, lambda rows: iter(()))
    used = draw_rows(content, 100, seed=1)
    assert len(set(used.tolist())) == 100
    assert 28 <= (splits[used] == "test").sum() <= 38
    assert np.bincount(labels[used], minlength=100).max() <= 2
    assert used.tolist() != draw_rows(content, 100, seed=2).tolist()


@pytest.mark.parametrize(
    ("need", "told"),
    [
        (Need("a.bin", bytes=3, md5="900150983cd24fb0d6963f7d28e17f72"), []),
        (Need("a.bin", bytes=4), ["a.bin has 3 bytes (published: 4)."]),
        (
            Need("a.bin", bytes=3, md5="0" * 32),
            ["a.bin differs from the published file (its MD5 differs)."],
        ),
        (Need("a.bin.gz", ("a.bin",), bytes=4), []),
    ],
    ids=["same", "size", "content", "unpacked"],
)
def test_files_are_compared_with_what_is_published(
    tmp_path: Path, need: Need, told: list[str]
) -> None:
    (tmp_path / "a.bin").write_bytes(b"abc")
    known = table_set(500, 70)
    given = replace(known, forms=(replace(known.forms[0], needs=(need,), rows={"": 500}),))
    with use_plugins({"datasets": {"numbers": given}}):
        found = vfl.prepare("numbers", tmp_path, tmp_path / "out")
        assert list(found.notes) == told
        assert found.official == (not told)
        part = vfl.prepare("numbers", tmp_path, tmp_path / "part", rows=400)
        assert not part.official


def test_columns_are_divided_and_written_in_blocks(tmp_path: Path) -> None:
    with use_plugins({"datasets": {"numbers": table_set(50, 7)}}):
        found = vfl.prepare("numbers", tmp_path, tmp_path / "out", rows=40, active=2)
        tables = [pq.read_table(path) for path in found.parties.values()]
        assert [each.column_names for each in tables] == [
            ["id", "label", "x2", "x3"],
            ["id", "x0", "x1"],
            ["id", "x4"],
            ["id", "c"],
        ]
        assert all(each["id"] == tables[0]["id"] for each in tables)
        ids = np.array([int(each) for each in tables[0]["id"].to_pylist()])
        assert (tables[0]["x3"].to_numpy() == 10 * ids + 3).all()
        assert (tables[0]["label"].to_numpy() == ids % 2).all()
        assert tables[0]["label"].to_numpy().sum() == 20
        with raises(InputError, Code.CONFIG_INVALID):
            vfl.prepare("numbers", tmp_path, tmp_path / "other", parties=7)


def test_the_list_needs_no_torch() -> None:
    code = "import sys; from vfl_papers.commands import make_listing; make_listing(); print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "vfl_papers.commands" in found.stdout.split()
    assert "torch" not in found.stdout.split()
