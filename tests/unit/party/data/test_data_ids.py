"""Ids: rules that spell them alike, several columns as one, missing and repeated ones."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.harness.errors import raises
from tests.harness.present import present
from vfl_common.config.data import DataSettings, get_unaligned_settings
from vfl_common.config.recipe_tables import RowsSettings
from vfl_common.errors import Code, InputError
from vfl_party.data import Table, load_table, make_loader
from vfl_party.data.id_rules import SEPARATOR, about_zeros, normalize_ids, shapes_of
from vfl_party.data.ids import IdCounts, in_order, select_rows
from vfl_party.data.row_arrays import IN_MEMORY, Space

SIMPLE = ("trim", "casefold", "nfkc", "digits", "zeros", "email")
TEXTS = st.lists(st.none() | st.text(max_size=8), max_size=12)


def load(source: str, **settings: Any) -> Table:
    return load_table(DataSettings(source=source, **settings), with_label=False)


def spelt(text: str, *rules: str) -> str | None:
    return normalize_ids([[text]], rules).to_pylist()[0]  # type: ignore[no-any-return]


def test_the_shapes_of_ids_show_none() -> None:
    assert shapes_of(["k-12", "c-34", "xy"]) == "A-00 67 %, AA 33 %"
    assert shapes_of(["é1", "ß2"]) == "A0"
    assert shapes_of(["a#1", "b#2"]) == "A?0"
    assert shapes_of([" a", "b"]) == "' A' 50 %, A 50 %"
    assert shapes_of([f"{'k' * length}1" for length in range(1, 9)]) == "A0 of several lengths"
    assert (
        shapes_of([*(f"{'k' * length}1" for length in range(1, 9)), "-"])
        == "A0 89 %, - 11 % of several lengths"
    )
    assert (
        shapes_of(["a1" * length + "-" * length for length in range(1, 11)]) == "too many to show"
    )
    assert len(shapes_of(["a" * 100])) == 24
    # Of two columns.
    assert shapes_of([f"x{SEPARATOR}1"]) == "A 0"
    assert shapes_of([]) == "none"


def test_shapes_show_that_another_party_writes_zeros() -> None:
    numbers = range(0, 4_000_000, 1_237)
    padded, bare = ([f"kd-{number:{form}}" for number in numbers] for form in ("07", ""))
    assert shapes_of(padded) == "AA-0000000; a number begins with 0 in 25 %"
    bare_shapes = "AA-0000000 75 %, AA-000000 23 %, AA-00000 2 %, others less than 1 %"
    assert shapes_of(bare) == f"{bare_shapes}; no number begins with 0"
    # As tables often are: the first ones are the shortest.
    sorted_ids = sorted(bare, key=len)
    assert shapes_of(sorted_ids * 4).startswith("AA-0000000 75 %")


@pytest.mark.parametrize(
    ("ids", "rules", "suspect"),
    [
        (["00417", "12345"], ("trim",), True),
        (["KD-000483", "KD-123456", "KD-123457"], ("trim",), True),
        (["de 12/0004", "de 12/0005"], (), True),
        ([*(f"{number:05}" for number in range(9_990, 10_010))], (), True),
        ([*(str(number) for number in range(1, 847))], ("trim",), False),
        ([f"K{number}" for number in range(0, 900, 7)], (), False),
        (["00417", "12345"], ("trim", "zeros"), False),
        (["anna01@a.org", "berta02@b.org"], ("email",), False),
        ([f"{number * 7919 % 65536:04x}" for number in range(200)], (), False),
        (["K0417", "a", "b-c"], (), False),
        ([], (), False),
    ],
)
def test_zeros_that_another_party_may_have_lost(
    ids: list[str], rules: tuple[str, ...], suspect: bool
) -> None:
    said = (
        "numbers in the ids begin with 0. If the table of another party has lost these zeros, "
        'add "zeros" to'
    )
    assert about_zeros(ids, rules).startswith(f"{said} rows.id_rules.") == suspect
    assert bool(about_zeros(ids, rules)) == suspect


def test_the_hint_about_zeros_names_rules_that_match_bare_numbers() -> None:
    ids, rules = ["CU-024660", "CU-000417", "CU-112233"], ["trim"]
    hint = about_zeros(ids, rules)
    assert hint.endswith('add both: rows.id_rules = ["trim", "digits", "zeros"].')
    assert normalize_ids([ids], [*rules, "digits", "zeros"]).to_pylist() == [
        "24660",
        "417",
        "112233",
    ]
    assert normalize_ids([ids], [*rules, "zeros"]).to_pylist()[0] == "CU-24660"
    # Two numbers, or a number alone.
    assert "digits" not in about_zeros(["01-0417", "02-0418"], rules)
    assert "digits" not in about_zeros(["00417", "00418"], rules)


# -- rules


@pytest.mark.parametrize(
    ("rules", "text", "found"),
    [
        ((), " A b ", " A b "),
        # White space within stays.
        (("trim",), "\t A  b\u00a0\n", "A  b"),
        (("casefold",), "Straße", "strasse"),
        # A full-width digit, a ligature.
        (("nfkc",), "\uff11\ufb01", "1fi"),
        # No Arabic-Indic digit.
        (("digits",), "DE-12 3\u0664", "123"),
        (("zeros",), "AT-004051", "AT-4051"),
        (("zeros",), "007", "7"),
        (("zeros",), "x000-0-100/0012a00", "x0-0-100/12a0"),
        # Arabic-Indic digits stay.
        (("zeros",), "\u0660\u0661", "\u0660\u0661"),
        (("trim", "casefold", "zeros"), " AT-004051", "at-4051"),
        (("email",), " Ada@Example.ORG ", "ada@example.org"),
        # No tricks of one provider.
        (("email",), "a.da+x@gmail.com", "a.da+x@gmail.com"),
        (("nfkc", "digits"), "\uff11", "1"),
        # In the order in which they stand.
        (("digits", "nfkc"), "\uff11", None),
        (("trim",), "  ", None),
    ],
)
def test_each_rule(rules: tuple[str, ...], text: str, found: str | None) -> None:
    assert spelt(text, *rules) == found


@pytest.mark.parametrize("rule", SIMPLE)
@given(ids=TEXTS)
def test_a_rule_applied_twice_is_the_rule(rule: str, ids: list[str | None]) -> None:
    assert normalize_ids([ids], [rule, rule]) == normalize_ids([ids], [rule])


@given(ids=TEXTS, rules=st.lists(st.sampled_from(SIMPLE), max_size=4))
def test_steps_follow_each_other(ids: list[str | None], rules: list[str]) -> None:
    found = normalize_ids([ids], rules).to_pylist()
    step_by_step = normalize_ids([ids], [])
    for rule in rules:
        step_by_step = normalize_ids([step_by_step], [rule])
    assert found == step_by_step.to_pylist()
    assert "" not in found
    assert all(after is None for before, after in zip(ids, found, strict=True) if not before)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("030 / 123 456", "+4930123456"),
        ("+49 (0)30 123456", "+4930123456"),
        ("0049 30 123456", "+4930123456"),
        # A number with its country is of that one.
        ("+44 20 7946 0018", "+442079460018"),
        ("12", None),
        ("nobody", None),
    ],
)
def test_telephone_numbers_are_e164(text: str, found: str | None) -> None:
    assert spelt(text, "phone:DE") == found
    # It has its country now.
    assert spelt(text, "phone:DE", "phone:US") == found


def test_a_country_that_is_none() -> None:
    with raises(InputError, Code.CONFIG_INVALID, names=("phone:XX", "3166")):
        spelt("1", "phone:XX")


def test_telephone_numbers_need_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "phonenumbers", None)
    with raises(InputError, Code.CONFIG_INVALID, names="phone:DE"):
        spelt("1", "phone:DE")


# -- columns and policies


def test_an_id_of_several_columns_lacks_none_of_them() -> None:
    parts: list[list[str | None]] = [[" A", "a", None, "B", "b"], ["1 ", "1", "1", " ", "2"]]
    assert normalize_ids(parts, ["trim", "casefold"]).to_pylist() == [
        "a\x1f1",
        "a\x1f1",
        None,
        None,
        "b\x1f2",
    ]
    # Not both a12.
    assert normalize_ids([["a1", "a"], ["2", "12"]], []).to_pylist() == ["a1\x1f2", "a\x1f12"]


@given(ids=st.lists(st.none() | st.sampled_from("abcdef"), max_size=12))
def test_the_policy_decides_which_rows_stay(ids: list[str | None]) -> None:
    times = Counter(ids)
    first, drop = select_rows(ids, "first"), select_rows(ids, "drop")
    assert first == [
        row for row, each in enumerate(ids) if each is not None and each not in ids[:row]
    ]
    assert drop == [row for row, each in enumerate(ids) if each is not None and times[each] == 1]
    assert select_rows(ids, "error") == first
    counts = IdCounts.of(pa.array(ids, pa.large_string()), len(drop))
    assert (counts.rows, counts.missing, counts.remaining) == (len(ids), times[None], len(drop))


@given(
    ids=st.lists(
        st.none() | st.text(max_size=20) | st.sampled_from(["a", "a\x00", "a\x00\x00", "b" * 70]),
        max_size=30,
    )
)
def test_rows_are_in_the_order_of_the_utf_8_bytes_of_their_ids(ids: list[str | None]) -> None:
    # Of an array that begins in the middle of another, too.
    for start in (0, 3):
        given_ids = pa.array(ids, pa.large_string()).slice(start)
        texts = ids[start:]
        first = [
            row for row, each in enumerate(texts) if each is not None and each not in texts[:row]
        ]
        wanted = sorted(first, key=lambda row: str(texts[row]).encode())
        for space in (IN_MEMORY, Space(gettempdir(), 0)):
            found = in_order(given_ids, "first", space)
            assert found.rows.tolist() == wanted
            assert found.ids.to_pylist() == [texts[row] for row in wanted]
            later = [
                row for row, each in enumerate(texts) if each is not None and each in texts[:row]
            ]
            again = (texts.index(texts[later[0]]), later[0]) if later else None
            assert found.repeated == again


CSV = "who,at,x\n A,1,1\nb,2,2\na,1,3\n,3,4\nC,1,5\n"


@pytest.mark.parametrize(
    ("duplicates", "ids", "x", "why"),
    [
        (
            "first",
            ("a", "b", "c"),
            [1, 2, 5],
            "2 of 5 rows are left out: 1 without an id, 1 with a repeated id",
        ),
        (
            "drop",
            ("b", "c"),
            [2, 5],
            "3 of 5 rows are left out: 1 without an id, 2 with a repeated id",
        ),
    ],
)
def test_rows_that_share_an_id(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    duplicates: str,
    ids: tuple[str, ...],
    x: list[int],
    why: str,
) -> None:
    source = tmp_path / "x.csv"
    source.write_text(CSV)
    table = load(
        str(source), id="who", id_rules=("trim", "casefold"), duplicates=duplicates, drop=("at",)
    )
    assert table.ids == ids
    assert present(table.numeric_NF)[:, 0].tolist() == x
    assert table.counts is not None
    assert table.counts.left_out == why
    # Of the source.
    assert table.select(np.array([0])).counts == table.counts
    (record,) = caplog.records
    assert (record.levelname, record.getMessage()) == ("WARNING", f"{source}: {why}")


def test_a_repeated_id_is_refused_as_the_rules_spell_it(tmp_path: Path) -> None:
    source = tmp_path / "x.csv"
    source.write_text(CSV)
    assert load(str(source), id="who").ids == (" A", "C", "a", "b")
    assert (
        load(str(source), id=["who", "x"], id_rules=("casefold", "trim")).ids[0] == f"a{SEPARATOR}1"
    )
    with raises(InputError, Code.DATA_INVALID, names=("x.csv", "data.duplicates")):
        load(str(source), id="who", id_rules=("trim", "casefold"))


def test_a_table_without_ids_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "x.csv"
    source.write_text("who,x\n,1\n-,2\n")
    with pytest.raises(InputError) as refused:
        load(str(source), id="who", id_rules=("digits",))
    what = "2 of 2 rows are left out: 2 without an id. Correct data.id, data.id_rules or data.duplicates."
    assert str(refused.value) == f"{source}: {what}"


def test_rows_are_counted_as_in_the_source_whatever_is_left_out(tmp_path: Path) -> None:
    source = tmp_path / "x.csv"
    source.write_text("who,x\n,1\na,inf\n")
    with raises(InputError, Code.DATA_INVALID, names="x.csv"):
        load(str(source), id="who")


# -- every source

PLACE, NUMBER, X = ["b ", "a", "a", None], [7, 10, 7, 1], [1.0, 2.0, 3.0, 4.0]
IDS = (f"A{SEPARATOR}10", f"A{SEPARATOR}7", f"B{SEPARATOR}7")


def expect(table: Table) -> None:
    assert table.ids == tuple(each.lower() for each in IDS)
    assert table.numeric_names == ("x",)
    assert present(table.numeric_NF)[:, 0].tolist() == [2, 3, 1]
    assert table.counts == IdCounts(4, 1, 0)


def test_several_columns_of_every_source(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"id": ["place", "number"], "id_rules": ["trim"]}
    (tmp_path / "a.csv").write_text("place,number,x\nb ,7,1\na,10,2\na,7,3\n,1,4\n")
    expect(load(str(tmp_path / "a.csv"), **keys))
    frame = pa.table({"place": PLACE, "number": NUMBER, "x": X})
    parquet.write_table(frame, tmp_path / "a.parquet")
    expect(load(str(tmp_path / "a.parquet"), **keys))
    expect(make_loader({"p": frame})(DataSettings(source="frame of p", **keys), False))
    arrays: dict[str, Any] = {
        "place": np.array([each or "" for each in PLACE]),
        "number": np.array(NUMBER)[:, None],
        "x": np.array(X),
    }
    np.savez(tmp_path / "a.npz", **arrays)
    expect(load(str(tmp_path / "a.npz"), **keys))
    expect(
        make_loader({"p": arrays | {"place": PLACE}})(
            DataSettings(source="frame of p", **keys), False
        )
    )
    with raises(InputError, Code.DATA_INVALID, names=("town", "place")):
        load(str(tmp_path / "a.csv"), id=["place", "town"])


def test_folders_of_images(tmp_path: Path) -> None:
    for name in ("a", "b"):
        Image.new("L", (2, 2)).save(tmp_path / f"{name}.png")
    index = tmp_path / "index.csv"
    index.write_text("file,who,eye\nb.png,Z ,left\na.png,z,right\na.png,,left\n")
    table = load(str(tmp_path), id=["who", "eye"], id_rules=["trim", "casefold"])
    assert table.ids == (f"z{SEPARATOR}left", f"z{SEPARATOR}right")
    assert len(present(table.images_NCHW)) == 2
    index.write_text("file,who\n,a\n")
    with raises(InputError, Code.DATA_INVALID, names=("file", "index.csv")):
        load(str(tmp_path), id="who")


def test_a_number_and_its_text_are_one_id_and_zeros_in_front_are_not(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("who,x\n007,1\n7,2\n")
    parquet.write_table(pa.table({"who": [7], "x": [1]}), tmp_path / "a.parquet")
    assert load(str(tmp_path / "a.csv"), id="who").ids == ("007", "7")
    assert load(str(tmp_path / "a.parquet"), id="who").ids == ("7",)


def test_a_file_of_unaligned_rows_goes_by_the_same_rules(tmp_path: Path) -> None:
    (tmp_path / "more.csv").write_text(CSV)
    own = DataSettings.model_validate(
        {"source": "a.csv", "id": "who", "duplicates": "drop", "unaligned": "more.csv"}
    )
    more = present(
        get_unaligned_settings(
            own.absolute(tmp_path).with_id_rules(RowsSettings(id_rules=("trim", "casefold")))
        )
    )
    assert load_table(more, with_label=False).ids == ("b", "c")
