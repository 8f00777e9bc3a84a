"""Data sets of columns, from small files in the exact official formats to a run of one round."""

from __future__ import annotations

import bz2
import gzip
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.parquet as parquet
import pytest

import vfl
from tests.harness.errors import raises
from tests.unit.papers import made_tables as made
from vfl_common.errors import Code, InputError
from vfl_papers.prepare import load

SMALL: dict[str, dict[str, Any]] = {name: {"train": 40, "test": 20} for name in ("avazu", "criteo")}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], vfl.Prepared]:
    """Prepares a data set once for all tests."""
    known: dict[str, vfl.Prepared] = {}

    def of(name: str) -> vfl.Prepared:
        if name not in known:
            folder = tmp_path_factory.mktemp(name)
            files = made.WRITERS[name](folder)
            known[name] = vfl.prepare(name, files, folder / "out", **SMALL.get(name, {}))
        return known[name]

    return of


def table(found: vfl.Prepared, party: str) -> pa.Table:
    return parquet.read_table(found.parties[party])


def features(each: pa.Table) -> pa.Table:
    return each.drop_columns(
        [name for name in ("id", "label", "split") if name in each.column_names]
    )


def test_libsvm_columns_are_divided_and_labels_are_classes(
    prepared: Callable[[str], vfl.Prepared],
) -> None:
    found = prepared("phishing")
    parts = [table(found, f"party-{k}") for k in range(1, 11)]
    assert [len(features(each).column_names) for each in parts] == [7] * 8 + [6] * 2
    assert parts[0].column_names == ["id", "label", *(f"f{at}" for at in range(1, 8))]
    whole = np.concatenate([np.stack(features(each).columns, 1) for each in parts], 1)
    np.testing.assert_array_equal(whole, made.numbers(made.N, 68) > 0)
    assert parts[0]["label"].to_pylist() == [row % 2 for row in range(made.N)]
    assert "The files have 60 rows (published: 11,055)." in found.notes


def important(folder: Path, **given: Any) -> dict[str, set[str]]:
    """The columns of each party, of which f1, f2 and f3 say the label."""
    values = (made.numbers(400, 68) > 0).astype(float)
    votes = values[:, :3].sum(1) > 1
    (folder / "phishing").write_bytes(made.libsvm(values, votes.astype(int)))
    found = vfl.prepare("phishing", folder, folder / "out", divide="importance", **given)
    names = {party: set(features(table(found, party)).column_names) for party in found.parties}
    assert [len(each) for each in names.values()] == [34, 34]
    assert len(set.union(*names.values())) == 68
    return names


@pytest.mark.parametrize("active", [1, 2])
@pytest.mark.parametrize(("alpha", "best"), [(1, 3), (0.0, 0)])
def test_a_share_of_the_important_columns_is_at_the_party_with_the_labels(
    tmp_path: Path, alpha: float, best: int, active: int
) -> None:
    names = important(tmp_path, alpha=alpha, active=active)
    assert len(names[f"party-{active}"] & {"f1", "f2", "f3"}) == best


def test_important_columns_are_shared_alike_with_one_seed(tmp_path: Path) -> None:
    first, again = important(tmp_path), important(tmp_path, replace=True)
    assert first == again != important(tmp_path, replace=True, seed=1)
    with raises(InputError, Code.CONFIG_INVALID, names="1.5"):
        important(tmp_path, replace=True, alpha=1.5)


def test_the_split_of_two_files_is_kept(prepared: Callable[[str], vfl.Prepared]) -> None:
    first = table(prepared("gisette"), "party-1")
    # A tenth of the training rows is for validation.
    assert Counter(first["split"].to_pylist()) == {"train": 36, "validation": 4, "test": 20}
    assert first["label"].to_pylist() == [1, 0] * 30
    assert len(features(first).column_names) == 500


def test_the_csv_form_of_phishing_has_the_official_names(tmp_path: Path) -> None:
    values = (made.numbers(20, 68) > 0).astype(int)
    columns: dict[str, Any] = {"id": np.arange(20)} | {f"f{at}": values[:, at] for at in range(68)}
    with gzip.open(tmp_path / "phishing.csv.gz", "wb") as file:
        arrow_csv.write_csv(pa.table(columns | {"y": np.arange(20) % 2}), file)
    found = vfl.prepare("phishing", tmp_path, tmp_path / "out", parties=2)
    assert features(table(found, "party-2")).column_names == [f"f{at}" for at in range(35, 69)]
    assert not found.official


def test_ujiindoorloc_in_three_forms(tmp_path: Path) -> None:
    made.write_ujiindoorloc(tmp_path)
    packed = vfl.prepare("ujiindoorloc", tmp_path, tmp_path / "a", split="makers", label="LATITUDE")
    pair = tmp_path / "pair"
    pair.mkdir()
    (pair / "trainingData.csv").write_text(made.uji(45))
    (pair / "validationData.csv").write_text(made.uji(15, 1))
    plain = vfl.prepare("ujiindoorloc", pair, tmp_path / "b", split="makers", label="LATITUDE")
    tables = [arrow_csv.read_csv(pair / f"{name}Data.csv") for name in ("training", "validation")]
    both = pa.concat_tables(tables).append_column("part", [["train"] * 45 + ["validation"] * 15])
    own = tmp_path / "own"
    own.mkdir()
    parquet.write_table(both, own / "ujiindoorloc.parquet")
    other = vfl.prepare("ujiindoorloc", own, tmp_path / "c", split="makers", label="LATITUDE")
    for party in packed.parties:
        assert table(packed, party).equals(table(plain, party))
        assert table(packed, party).equals(table(other, party))
    first = table(packed, "party-1")
    assert Counter(first["split"].to_pylist()) == {"train": 45, "test": 15}
    np.testing.assert_array_equal(first["label"], both["LATITUDE"])
    with raises(InputError, Code.CONFIG_INVALID, names="FLOOR"):
        vfl.prepare("ujiindoorloc", tmp_path, tmp_path / "d", label="FLOOR")


def test_movielens_looks_users_and_movies_up(prepared: Callable[[str], vfl.Prepared]) -> None:
    one, other = (table(prepared("movielens"), f"party-{k}") for k in (1, 2))
    assert one.column_names == ["id", "label", "user", "movie"]
    row = one.to_pylist().index(next(each for each in one.to_pylist() if each["movie"] == "2"))
    known = other.slice(row, 1).to_pylist()[0]
    assert known["year"] == 1946
    assert [name for name, value in known.items() if name.startswith("genre") and value] == [
        "genre_Film-Noir"
    ]
    user = int(one["user"][row].as_py())
    assert known["gender"] == "FMM"[user - 1]
    assert known["occupation"] == ["10", "16", "15"][user - 1]


def test_nuswide_keeps_images_of_one_of_ten_concepts(
    prepared: Callable[[str], vfl.Prepared], tmp_path: Path
) -> None:
    image, tags = (table(prepared("nuswide"), f"party-{k}") for k in (1, 2))
    assert (image.num_columns, tags.num_columns) == (634 + 3, 1000 + 2)
    assert Counter(image["split"].to_pylist()) == {"train": 50, "test": 20}
    concepts = sorted(made.CONCEPTS)
    assert image["label"].to_pylist() == [
        concepts.index(made.CONCEPTS[row % 10]) for part in (50, 20) for row in range(part)
    ]
    np.testing.assert_allclose(
        image["wt128"].to_numpy()[:50], made.numbers(50, 128)[:, 127], rtol=1e-6
    )
    assert "The files have 70 rows (published: 269,648)." in prepared("nuswide").notes
    unpacked = vfl.prepare("nuswide", made.write_nuswide_unpacked(tmp_path), tmp_path / "out")
    assert table(unpacked, "party-1").equals(image)
    assert table(unpacked, "party-2").equals(tags)


def test_nuswide_has_five_views_and_the_sky(prepared: Callable[[str], vfl.Prepared]) -> None:
    found = prepared("nuswide_sky")
    widths = [len(features(table(found, name)).column_names) for name in found.parties]
    assert widths == [64, 225, 144, 73, 128]
    first = table(found, "party-1")
    assert first["label"].to_pylist() == [
        int(row % 10 == 0) for part in (50, 20) for row in range(part)
    ]


def test_avazu_draws_rows_and_divides_both_kinds(
    prepared: Callable[[str], vfl.Prepared], tmp_path: Path
) -> None:
    one, other = (table(prepared("avazu"), f"party-{k}") for k in (1, 2))
    assert features(one).column_names == [
        *("hour", "C1", "banner_pos", "site_id", "site_domain", "site_category", "app_id"),
        *("C14", "C15", "C16", "C17"),
    ]
    kinds = [str(each.type) for each in features(other).schema]
    assert kinds == ["string"] * 7 + ["float"] * 4
    assert Counter(one["split"].to_pylist()) == {"train": 40, "test": 20}
    files = made.write_avazu(tmp_path)
    few = vfl.prepare("avazu", files, tmp_path / "out", train=20, test=5, buckets=16)
    drawn = table(few, "party-1")
    assert Counter(drawn["split"].to_pylist()) == {"train": 20, "test": 5}
    assert "categorical_buckets = 16" in few.recipe.read_text()
    whole = arrow_csv.read_csv(tmp_path / "train.gz")
    hours = dict(Counter(map(str, whole["hour"].to_pylist())))
    assert all(hours[each] for each in drawn["hour"].to_pylist())
    with raises(InputError, Code.CONFIG_INVALID, names="60"):
        vfl.prepare("avazu", files, tmp_path / "more", train=60, test=5)


def test_criteo_from_its_archive_equals_its_file(
    prepared: Callable[[str], vfl.Prepared], tmp_path: Path
) -> None:
    (tmp_path / "train.txt").write_text(made.criteo())
    plain = vfl.prepare("criteo", tmp_path, tmp_path / "out", train=40, test=20)
    packed = prepared("criteo")
    for party in packed.parties:
        assert table(packed, party).equals(table(plain, party))
    assert table(plain, "party-2")["I8"].null_count > 0
    assert 'missing = "zero"' in plain.recipe.read_text()


def wrong(folder: Path, name: str, data: bytes | str) -> None:
    (folder / name).write_bytes(data.encode() if isinstance(data, str) else data)


@pytest.mark.parametrize(
    ("name", "file", "data"),
    [
        pytest.param(*each, id=f"{each[0]}-{number}")
        for number, each in enumerate(
            [
                ("phishing", "phishing", "2 1:1\n"),
                ("phishing", "phishing", "1 69:1\n"),
                ("phishing", "phishing", "id,y\n1,2\n"),
                ("phishing", "phishing", ""),
                ("covtype", "covtype.libsvm.binary.bz2", bz2.compress(b"1 1:1\n" * 9999)[:-9]),
                ("superconduct", "superconductivty+data.zip", "no zip"),
                ("superconduct", "train.csv", "a,critical_temp\n1,2\n"),
                (
                    "avazu",
                    "train.gz",
                    gzip.compress(made.avazu().replace(",1,141", ",2,141").encode()),
                ),
                ("avazu", "train.gz", gzip.compress(b"id,clicks\n1,0\n")),
                ("criteo", "train.txt", "0\t1\t2\n"),
                ("criteo", "train.txt", made.criteo().replace("\t2\t", "\ttwo\t")),
                ("criteo", "dac.tar.gz", gzip.compress(b"no tar file")),
            ]
        )
    ],
)
def test_files_that_are_not_what_their_makers_publish(
    tmp_path: Path, name: str, file: str, data: bytes | str
) -> None:
    wrong(tmp_path, file, data)
    with raises(InputError, Code.FILE_INVALID) as caught:
        vfl.prepare(name, tmp_path, tmp_path / "out", **SMALL.get(name, {}))
    assert "Download it again." in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("ratings.dat", "9::1::5::1\n"),
        ("movies.dat", "1::Toy Story::Comedy\n2::A (1999)::Comedy\n4::B (1999)::Comedy\n"),
        ("movies.dat", "1::A (1999)::Comic\n2::A (1999)::Comedy\n4::B (1999)::Comedy\n"),
        ("users.dat", "1::F::1::10\n"),
    ],
    ids=["rating", "year", "genre", "user"],
)
def test_damaged_movielens(tmp_path: Path, name: str, changes: str) -> None:
    folder = tmp_path / "ml-1m"
    folder.mkdir()
    texts = {"ratings.dat": "1::1::5::1\n", "users.dat": made.USERS, "movies.dat": made.MOVIES}
    for each, text in (texts | {name: changes}).items():
        wrong(folder, each, text.encode("latin-1"))
    with raises(InputError, Code.FILE_INVALID):
        vfl.prepare("movielens", tmp_path, tmp_path / "out")


@pytest.mark.parametrize("cut", ["Train_Normalized_EDH.dat", "Train_Tags1k.dat", "sky_Train.txt"])
def test_nuswide_whose_files_have_other_rows(tmp_path: Path, cut: str) -> None:
    made.write_nuswide_unpacked(tmp_path)
    path = next(tmp_path.rglob(f"*{cut}"))
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-3]))
    with raises(InputError, Code.FILE_INVALID):
        vfl.prepare("nuswide", tmp_path, tmp_path / "out")


@pytest.mark.parametrize("name", made.WRITERS)
def test_missing_files_are_named(name: str, tmp_path: Path) -> None:
    with raises(InputError, Code.FILE_INVALID) as caught:
        vfl.prepare(name, tmp_path, tmp_path / "out")
    assert load(name).forms[0].needs[0].name in str(caught.value)
