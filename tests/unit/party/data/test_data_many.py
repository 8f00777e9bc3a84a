"""Columns with more categories than fit, hashed into buckets; rows that a limit takes at random."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.parquet as parquet
import pytest

from tests.harness.present import present
from tests.unit.party.data.test_data_packed import written
from tests.unit.party.data.test_data_sources import load, refused
from vfl_common.config.data import DataSettings
from vfl_party.data import Preprocessor, Table, read_rows
from vfl_party.data import stream as cells_as_text
from vfl_party.data.inputs.features import MISSING, RESERVED

N = 400


def bucket(text: str, count: int) -> str:
    return str(int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") % count)


def people(folder: Path, ending: str = ".csv") -> str:
    random = np.random.default_rng(1)
    table = pa.table(
        {
            "id": [f"c{row:03}" for row in range(N)],
            "device": [f"d{each}" if each else None for each in random.integers(0, 90, N)],
            "code": random.integers(0, 7, N).astype(float),
            "y": ["no", "yes"] * (N // 2),
        }
    )
    path = str(folder / f"x{ending}")
    (arrow_csv.write_csv if ending == ".csv" else parquet.write_table)(table, path)
    return path


def words_of(table: Table, k: int) -> list[str | None]:
    assert table.categorical is not None
    words = [*table.categorical.words[k], None]
    return [words[code] for code in table.categorical.codes_NK[:, k]]


@pytest.mark.parametrize("ending", [".csv", ".parquet"])
def test_categories_become_the_buckets_of_their_digests(tmp_path: Path, ending: str) -> None:
    source = people(tmp_path, ending)
    settings: dict[str, Any] = {"id": "id", "label": "y", "categorical": ["code"]}
    plain = load(source, **settings, with_label=True)
    hashed = load(source, **settings, with_label=True, categorical_buckets={"device": 16})
    expected = [None if each is None else bucket(each, 16) for each in words_of(plain, 0)]
    assert words_of(hashed, 0) == expected
    assert words_of(hashed, 1) == words_of(plain, 1) != expected
    # All columns of categories; a whole number is the same text in every file. No label is one.
    both = load(source, **settings, with_label=True, categorical_buckets=5)
    assert words_of(both, 1) == [bucket(str(each), 5) for each in words_of(plain, 1)]
    assert set(present(both.labels)) == {"no", "yes"}


@pytest.mark.parametrize("ending", [".csv", ".parquet"])
@pytest.mark.parametrize("column", ["devise", "code"])
def test_buckets_of_what_is_no_column_of_categories_are_refused(
    tmp_path: Path, ending: str, column: str
) -> None:
    source = people(tmp_path, ending)
    refused(source, id="id", label="y", categorical_buckets={"device": 16, column: 4})
    load(source, id="id", label="y", categorical=["code"], categorical_buckets={"code": 4})


def test_notes_count_the_values_that_share_a_bucket(tmp_path: Path) -> None:
    source = people(tmp_path)
    settings = DataSettings(source=source, id=("id",), drop=("y",), categorical_buckets=16)
    words = {f"d{each}" for each in range(1, 90)}
    text = (
        "column 'device': 89 values are hashed into 16 buckets, of which 16 are used, and 89 values"
    )
    assert [note for note in read_rows(settings, False).notes if text in note]
    assert len({bucket(each, 16) for each in words}) == 16
    many = settings.model_copy(update={"categorical_buckets": {"device": 1 << 20}})
    assert any("0 values share a bucket" in note for note in read_rows(many, False).notes)


def test_any_number_of_values_fits_into_buckets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cells_as_text, "MAX_WORDS", 50)
    table = load(people(tmp_path), id="id", drop=["y"], categorical_buckets={"device": 40})
    assert len(present(table.categorical).words[0]) <= 40


def test_digests_of_many_blocks_are_those_of_one() -> None:
    digests = cells_as_text.hash_values([f"v{row % 70_000}" for row in range(200_000)])
    seen = cells_as_text.Digests()
    for start in range(0, len(digests), 1000):
        seen.add(digests[start : start + 1000])
    np.testing.assert_array_equal(seen.all(), np.unique(digests))
    assert len(seen.all()) == 70_000


def test_a_value_that_training_did_not_have_has_the_code_of_its_bucket(tmp_path: Path) -> None:
    source = people(tmp_path)
    settings = DataSettings(source=source, id=("id",), drop=("y", "code"), categorical_buckets=4)
    table = load(source, **settings.model_dump(include={"id", "drop", "categorical_buckets"}))
    preprocessor = Preprocessor.fit(
        table, np.arange(N), one_hot=False, flatten=False, settings=settings
    )
    new = written(tmp_path / "new.csv", "id,device\n1,never seen\n2,\n")
    rows = load(new, id="id", drop=[], categorical_buckets=4)
    codes = present(preprocessor.transform(rows).categories)
    assert codes[:, 0].tolist() == [RESERVED + int(bucket("never seen", 4)), MISSING]


# --- Random rows


@pytest.mark.parametrize("ending", [".csv", ".parquet"])
def test_a_limit_at_random_takes_the_smallest_digests_of_the_ids(
    tmp_path: Path, ending: str
) -> None:
    source = people(tmp_path, ending)
    table = load(source, id="id", label="y", limit=50, limit_by="random", with_label=True)
    every = load(source, id="id", label="y", with_label=True)
    digests = {each: blake2b(each.encode(), digest_size=8).digest() for each in every.ids}
    chosen = sorted(sorted(digests, key=digests.__getitem__)[:50])
    assert list(table.ids) == chosen
    rows = [int(each[1:]) for each in chosen]
    np.testing.assert_array_equal(present(table.labels), present(every.labels)[rows])
    np.testing.assert_array_equal(table.numeric_NF, every.numeric_NF[rows])  # type: ignore[index]
    # More than the first rows.
    assert max(rows) > N // 2


def test_parties_that_limit_agree_whatever_the_order_and_the_spelling(tmp_path: Path) -> None:
    ids = [f"c{row:03}" for row in range(N)]
    one = written(tmp_path / "a.csv", "id,a\n" + "".join(f"{each},1\n" for each in ids))
    other = written(
        tmp_path / "b.csv", "id,b\n" + "".join(f" {each.upper()},2\n" for each in reversed(ids))
    )
    limited: dict[str, Any] = {"id": "id", "limit": 30, "limit_by": "random"}
    found = load(one, **limited)
    assert found.ids == load(other, **limited, id_rules=["trim", "casefold"]).ids
    assert set(found.ids) < set(load(one, **{**limited, "limit": 60}).ids)
    assert len(load(one, **{**limited, "limit": 900}).ids) == N
    assert (
        load("sklearn:iris", limit=10, limit_by="random").ids != load("sklearn:iris", limit=10).ids
    )
