"""Alignment by several keys (``rows.keys``), compared with the same rule in pandas."""

from __future__ import annotations

import shutil
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import vfl
from tests.harness import matching
from tests.harness.aligning import Parties, Said, changed, small_batches
from tests.harness.errors import raises
from vfl_common.bundle import Bundle, StepKey
from vfl_common.config.data import DataSettings, KeyColumns
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError, InterruptedRun, LostError, PeerError
from vfl_party.data import load_table
from vfl_party.data.id_rules import SEPARATOR, describe_keys
from vfl_party.predict.forget import Person
from vfl_party.rr22 import relay

KEYS = [["nid"], ["phone", "birth"], ["email"]]
COLUMNS = ["nid", "phone", "birth", "email"]
PEOPLE, SHARE = 400, 0.1
small = small_batches(64)
ENGINES = [
    "x25519",
    pytest.param(
        "rr22",
        marks=pytest.mark.skipif(bool(relay.explain_absence()), reason="needs the wheel spu"),
    ),
]


def make_people() -> pd.DataFrame:
    draw = np.random.default_rng(3)
    a, b = draw.normal(size=(2, PEOPLE))
    return pd.DataFrame(
        {
            "nid": [f"{number:06d}" for number in draw.permutation(PEOPLE)],
            # Some people share a telephone number, and few of them a date of birth.
            "phone": [f"0{number}" for number in draw.integers(100, 200, PEOPLE)],
            "birth": [f"1{year}-01-01" for year in draw.integers(970, 975, PEOPLE)],
            "email": [f"u{number}@x.org" for number in range(PEOPLE)],
            "a": a,
            "b": b,
            "y": (a + b > 0).astype(int),
        }
    )


def spoil(people: pd.DataFrame, seed: int) -> pd.DataFrame:
    """Makes 10 % of the cells of each key missing, and 10 % of the others wrong."""
    draw, spoilt = np.random.default_rng(seed), people.copy()
    for column in ("nid", "phone", "email"):
        is_missing = draw.random(len(spoilt)) < SHARE
        is_wrong = ~is_missing & (draw.random(len(spoilt)) < SHARE)
        wrong = [f"{seed}-{number}" for number in range(int(is_wrong.sum()))]
        spoilt[column] = spoilt[column].mask(is_missing, None)
        spoilt.loc[is_wrong, column] = wrong
    return spoilt.sample(frac=1.0, random_state=seed)


def match_in_pandas(tables: list[pd.DataFrame]) -> list[tuple[str, tuple[int, ...]]]:
    """Returns the name of the key and the labels of each table's row, for each common row."""
    left, result = [*tables], []
    for key in KEYS:
        sides = [table.dropna(subset=key) for table in left]
        parts = []
        for number, side in enumerate(sides):
            unique = side[~side.duplicated(key, keep=False)]
            parts.append(unique[key].assign(**{f"row{number}": unique.index}))
        joined = reduce(lambda one, other: one.merge(other, on=key), parts)
        joined = joined.sort_values(key, kind="stable")
        rows = [joined[f"row{number}"] for number in range(len(tables))]
        result += [("+".join(key), row) for row in zip(*rows, strict=True)]
        left = [table.drop(used) for table, used in zip(left, rows, strict=True)]
    return result


BANK = spoil(make_people()[:320], 1).drop(columns="b")
SHOP = spoil(make_people()[80:], 2).drop(columns=["a", "y"])
# A third party has its own names for columns, and writes email addresses in another way.
CLUB = spoil(make_people()[40:360], 4).drop(columns=["a", "y", "b"]).assign(c=1.0)
RENAMED = CLUB.rename(columns={"phone": "tel"}).assign(email=CLUB["email"].str.upper() + " ")


def make_recipe(*parties: str, **rows: Any) -> vfl.Recipe:
    return matching.make_recipe(parties, {"align": "psi", "keys": KEYS, **rows})


def data(frame: pd.DataFrame, label: str | None = None, **settings: Any) -> vfl.Data:
    columns = [settings.get("keys", {}).get(name, name) for name in COLUMNS]
    return vfl.Data(frame, label=label, id=columns, settings=settings)


TWO = {"bank": data(BANK, "y"), "shop": data(SHOP)}


def cut(expected: list[tuple[str, tuple[int, ...]]]) -> dict[str, vfl.Data]:
    """Returns the tables of both parties, cut to the common rows, in their order."""
    tables = []
    for number, table in enumerate((BANK, SHOP)):
        rows = table.loc[[row[number] for _, row in expected]].drop(columns=COLUMNS)
        tables.append(rows.assign(id=[f"{place:05d}" for place in range(len(rows))]))
    return {"bank": vfl.Data(tables[0], label="y"), "shop": vfl.Data(tables[1])}


@pytest.fixture(scope="module")
def expected() -> list[tuple[str, tuple[int, ...]]]:
    return match_in_pandas([BANK, SHOP])


@pytest.fixture(scope="module")
def by_hand(expected: list[tuple[str, tuple[int, ...]]]) -> vfl.Run:
    recipe = make_recipe("bank", "shop").replace(rows={"align": "digest", "keys": []})
    return vfl.simulate(recipe, cut(expected), quiet=True)


def assert_equal_numbers(ours: vfl.Run, by_hand: vfl.Run) -> None:
    for split, metrics in by_hand.metrics.items():
        assert {**ours.metrics[split], "rows": 0} == {**metrics, "rows": 0}
    for party in ("bank", "shop"):
        encoders = [run.model(party).encoder for run in (ours, by_hand)]
        states = [encoder.state_dict() for encoder in encoders if encoder is not None]
        assert len(states) == 2
        for name, value in states[0].items():
            assert torch.equal(value, states[1][name]), (party, name)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("processes", [False, True])
def test_a_run_equals_one_of_tables_that_pandas_matched(
    engine: str, processes: bool, expected: list[tuple[str, tuple[int, ...]]], by_hand: vfl.Run
) -> None:
    recipe = make_recipe("bank", "shop", psi={"engine": engine})
    run = vfl.simulate(recipe, TWO, quiet=True, processes=processes)
    assert_equal_numbers(run, by_hand)
    # All keys have matched rows, and each of them has metrics.
    names = {name for name, _ in expected}
    assert names == {"nid", "phone+birth", "email"}
    for split in ("validation", "test"):
        rows = [run.metrics[f"{split} by {name}"]["rows"] for name in names]
        assert sum(rows) == run.metrics[split]["rows"]
    predicted = pd.DataFrame(run.predictions)
    assert len(predicted) == sum(run.metrics[s]["rows"] for s in ("validation", "test"))
    keys = {BANK.loc[row[0], "a"]: name for name, row in expected}
    ours = predicted.merge(BANK, on=COLUMNS, how="left")
    assert [keys[a] for a in ours["a"]] == list(predicted["matched_by"])


def test_a_prediction_says_which_key_matched_a_row(by_hand: vfl.Run) -> None:
    run = vfl.simulate(make_recipe("bank", "shop"), TWO, quiet=True)
    new = BANK.drop(columns="y")[:150]
    scores = pd.DataFrame(run.predict({"bank": new, "shop": SHOP}))
    matched = {row[0]: name for name, row in match_in_pandas([new, SHOP])}
    assert [key if isinstance(key, str) else None for key in scores["matched_by"]] == [
        matched.get(row) for row in new.index
    ]
    assert set(scores["state"][scores["matched_by"].notna()]) == {"scored"}


def test_three_parties_with_names_and_rules_of_their_own() -> None:
    expected = match_in_pandas([BANK, SHOP, CLUB])
    recipe = make_recipe("bank", "shop", "club", key_rules={"email": ["email"]})
    tables = {**TWO, "club": data(RENAMED, keys={"phone": "tel"})}
    run = vfl.simulate(recipe, tables, quiet=True)
    scores = pd.DataFrame(
        run.predict({"bank": BANK.drop(columns="y"), "shop": SHOP, "club": RENAMED})
    )
    matched = {row[0]: name for name, row in expected}
    assert [key if isinstance(key, str) else None for key in scores["matched_by"]] == [
        matched.get(row) for row in BANK.index
    ]


@pytest.mark.parametrize("baseline", ["combined", "alone"])
def test_baselines_have_the_rows_in_common(
    baseline: str, expected: list[tuple[str, tuple[int, ...]]]
) -> None:
    recipe = make_recipe("bank", "shop")
    ours = vfl.simulate(recipe, TWO, quiet=True, baseline=baseline)
    plain = recipe.replace(rows={"align": "digest", "keys": []})
    theirs = vfl.simulate(plain, cut(expected), quiet=True, baseline=baseline)
    assert ours.metrics == theirs.metrics


def test_a_forecast_is_an_upper_bound() -> None:
    run = vfl.simulate(make_recipe("bank", "shop"), TWO, quiet=True)
    forecast = vfl.forecast(make_recipe("bank", "shop"), rows=320)
    one_key = vfl.forecast(make_recipe("bank", "shop", keys=[["nid"]]), rows=320)
    sent, most, once = (
        counts.by_phase["align"].message_bytes for counts in (run.bytes, forecast, one_key)
    )
    assert once < sent < most
    assert abs(most - 3 * once) < 100


def test_at_least_counts_the_rows_of_all_keys(
    expected: list[tuple[str, tuple[int, ...]]],
) -> None:
    vfl.simulate(make_recipe("bank", "shop", at_least=len(expected)), TWO, quiet=True)
    with raises(PeerError, Code.ROWS_DIFFER, names="rows.at_least"):
        vfl.simulate(make_recipe("bank", "shop", at_least=len(expected) + 1), TWO, quiet=True)


# -- interrupted

COLUMN_PLACES = KeyColumns(rules=((), (), ()), keys=((0,), (1, 2)))


def make_ids(*rows: tuple[str, str, str]) -> tuple[str, ...]:
    return tuple(sorted(SEPARATOR.join(row) for row in rows))


FIRST = make_ids(
    *((f"n{number}", f"p{number}", "d") for number in range(8)),
    ("", "p8", "d"),
    ("x", "p9", "d"),
    ("", "twice", "d"),
    ("y", "twice", "d"),
)
SECOND = make_ids(
    *((f"n{number}", "", "d") for number in range(4, 12)),
    ("", "p8", "d"),
    ("", "p9", "d"),
    ("", "p9", ""),
    ("", "twice", "d"),
)
MATCHED = [*(("1", f"n{number}") for number in range(4, 8)), ("2", "p8", "d"), ("2", "p9", "d")]


class Recorder:
    """Notes all that is sent, and interrupts the run before the bundle of a number."""

    def __init__(self, at: int | None = None) -> None:
        self.said: list[Said] = []
        self._at = at

    def __call__(self, sender: str, receiver: str, step: StepKey, bundle: Bundle) -> Bundle:
        if self._at is not None and len(self.said) >= self._at:
            raise InterruptedRun("a test asked for it")
        self.said.append(Said(sender, receiver, step, {}))
        return bundle


def align(folder: Path, tap: Recorder, **more: Any) -> Parties:
    rows = {"keys": [["nid"], ["phone", "birth"]], "psi": {"engine": "x25519"}}
    sets = {"p0": FIRST, "p1": SECOND}
    return Parties(folder, sets, rows=rows, key_columns=COLUMN_PLACES, tap=tap, **more)


def test_rows_that_share_a_key_are_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "vfl_party"):
        aligned = align(tmp_path, Recorder()).align()
    texts = {record.getMessage() for record in caplog.records if "key 2" in record.getMessage()}
    common = "rows are common to all parties;"
    assert texts == {
        f"key 2 of 2 (phone+birth): 2 of 6 {common} 2 more rows share the key with another row",
        f"key 2 of 2 (phone+birth): 2 of 3 {common} 0 more rows share the key with another row",
    }
    assert [tuple(text.split(SEPARATOR)) for text in aligned["p0"].ids] == MATCHED
    assert aligned["p1"].ids == aligned["p0"].ids
    assert [*aligned["p0"].keys] == [0, 0, 0, 0, 1, 1]
    for name, ids in (("p0", FIRST), ("p1", SECOND)):
        own = [ids[row].split(SEPARATOR) for row in aligned[name].rows]
        assert [row[0] for row in own[:4]] == [key for _, key in MATCHED[:4]]
        assert [row[1:] for row in own[4:]] == [list(key) for _, *key in MATCHED[4:]]


def count_bundles(folder: Path) -> int:
    whole = Recorder()
    align(folder, whole).align()
    return len(whole.said)


def test_an_interrupted_alignment_resumes_in_its_pass(tmp_path: Path) -> None:
    for at in range(count_bundles(tmp_path / "whole")):
        folder = tmp_path / str(at)
        errors = align(folder, Recorder(at)).outcomes()[1]
        assert any(isinstance(error, InterruptedRun) for error in errors)
        again = Recorder()
        aligned = align(folder, again).align()
        assert [tuple(text.split(SEPARATOR)) for text in aligned["p1"].ids] == MATCHED
        # A party that comes back later has the same rows without a message.
        kept = align(folder, again).kept("p0")
        assert kept.ids == aligned["p0"].ids
        assert [*kept.rows] == [*aligned["p0"].rows]


def test_a_key_that_no_row_has_is_an_empty_pass(tmp_path: Path) -> None:
    sets = {"p0": make_ids(("n1", "", ""), ("n2", "", "")), "p1": SECOND}
    rows = {"keys": [["phone", "birth"], ["nid"]]}
    places = KeyColumns(rules=((), (), ()), keys=((1, 2), (0,)))
    both = Parties(
        tmp_path,
        {**sets, "p1": (*SECOND, *make_ids(("n1", "", "")))},
        rows=rows,
        key_columns=places,
    )
    aligned = both.align()
    assert [*aligned["p0"].ids] == [f"2{SEPARATOR}n1"]


@pytest.mark.parametrize("known_at", [0, 1])
def test_a_party_that_has_lost_its_rows_of_a_pass_repeats_it(known_at: int, tmp_path: Path) -> None:
    expected = align(tmp_path, Recorder()).align()["p0"].ids
    # p0 has finished; p1 was killed before it removed the attempt, and lost the later passes.
    for number in range(known_at + 1, 3):
        shutil.rmtree(tmp_path / "run" / "p1" / "alignment" / f"key-{number}")
    assert align(tmp_path, Recorder()).align()["p1"].ids == expected


def test_a_party_that_has_left_is_named_if_a_pass_is_not_known(tmp_path: Path) -> None:
    sets = {"p0": FIRST, "p1": SECOND, "p2": SECOND}
    rows = {"keys": [["nid"], ["phone", "birth"]]}
    Parties(tmp_path, sets, rows=rows, key_columns=COLUMN_PLACES).align()
    shutil.rmtree(tmp_path / "run" / "p1" / "alignment" / "key-2")
    gone = Parties(tmp_path, sets, rows=rows, key_columns=COLUMN_PLACES, left=frozenset({"p2"}))
    with raises(LostError, Code.PARTY_LOST, names="p2"):
        gone.align()


def test_too_few_rows_leave_no_secret_behind(tmp_path: Path) -> None:
    both = align(tmp_path, Recorder())
    both.rows["at_least"] = len(MATCHED) + 1
    with raises(PeerError, Code.ROWS_DIFFER, names="rows.at_least"):
        both.align()
    for party in both.sets:
        assert not [*(tmp_path / "run" / party / "alignment").glob("*/*")]


def test_a_false_number_of_known_passes_is_an_error(tmp_path: Path) -> None:
    def lie(sender: str, _receiver: str, step: StepKey, bundle: Bundle) -> Bundle:
        is_meeting = sender == "p0" and "known" in bundle.tensors
        return changed(bundle, "known", b"\2") if is_meeting else bundle

    both = align(tmp_path, Recorder())
    both.tap = lie
    with raises(PeerError, Code.MALFORMED_MESSAGE, names="p0"):
        both.align()


# -- what else reads ids


def test_keys_may_be_numbers_with_gaps_in_pandas() -> None:
    table = SHOP.assign(nid=pd.to_numeric(SHOP["nid"], errors="coerce"), email=np.nan)
    assert table["nid"].dtype == float
    bank = BANK.assign(nid=pd.to_numeric(BANK["nid"], errors="coerce"))
    run = vfl.simulate(
        make_recipe("bank", "shop"), {"bank": data(bank, "y"), "shop": data(table)}, quiet=True
    )
    expected = match_in_pandas([bank, table.assign(email=None)])
    assert {name for name, _ in expected} == {"nid", "phone+birth"}
    assert run.metrics["test by nid"]["rows"] > 0
    scores = pd.DataFrame(run.predict({"bank": bank.drop(columns="y"), "shop": table}))
    assert scores["matched_by"].notna().sum() == len(expected)


@pytest.mark.parametrize(
    ("own", "key_rules", "is_refused"),
    [
        (["trim"], {}, False),
        (["trim"], {"email": ["trim"]}, False),
        (["trim"], {"email": ["casefold"]}, True),
        (None, {"email": ["trim"]}, True),
    ],
)
def test_no_recipe_changes_the_id_of_label_noise(
    own: list[str] | None, key_rules: dict[str, Any], is_refused: bool
) -> None:
    recipe = make_recipe("bank", "shop", key_rules=key_rules)
    rows = Recipe.model_validate(recipe.to_dict()).rows
    settings = DataSettings.model_validate(
        {"source": "x.csv", "id": ["customer", *COLUMNS], "id_rules": own}
    )
    assert settings.with_id_rules(rows).spelt_by_recipe == is_refused


def test_one_key_finds_a_person_to_forget() -> None:
    recipe = Recipe.model_validate(make_recipe("bank", "shop").to_dict())
    settings = DataSettings.model_validate({"source": "x.csv", "id": COLUMNS})
    person = Person(("n1", "", "", "new@x.org"), settings, None)
    columns = [["n1", "n2", None], ["p", None, "p"], ["d", "d", "d"], ["old@x.org"] * 3]
    assert person.among(columns, recipe).tolist() == [True, False, False]


def test_a_random_limit_chooses_the_same_people(tmp_path: Path) -> None:
    rows = Recipe.model_validate(make_recipe("bank", "shop").to_dict()).rows
    chosen = []
    for name, frame in (("bank", BANK), ("shop", SHOP)):
        frame.to_csv(tmp_path / name, index=False)
        settings = DataSettings(
            source=str(tmp_path / name),
            id=tuple(COLUMNS),
            format="text",
            limit=160,
            limit_by="random",
        )
        ids = load_table(settings.with_id_rules(rows), with_label=False).ids
        assert len(ids) == 160
        chosen.append({text.split(SEPARATOR)[0] for text in ids} - {""})
    common = len(set(BANK["nid"].dropna()) & set(SHOP["nid"].dropna()))
    # Half of the rows are chosen; by whole ids, both parties would choose a quarter of the people.
    assert len(chosen[0] & chosen[1]) > 0.4 * common


# -- settings


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ({"keys": [["a"]], "align": "digest"}, "align"),
        ({"keys": [["a"]], "partial": True}, "partial"),
        ({"keys": [[]]}, "keys"),
        ({"keys": [["a", "a"]]}, "keys"),
        ({"keys": [["a"], ["a"]]}, "keys"),
        ({"keys": [[f"k{number}"] for number in range(10)]}, "at most 9"),
        ({"keys": [["a"]], "key_rules": {"b": ["trim"]}}, "b is not in keys"),
    ],
)
def test_unusable_keys_are_refused(rows: dict[str, Any], words: str) -> None:
    with raises(InputError, Code.CONFIG_INVALID, names=words):
        make_recipe("bank", "shop", **rows)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"id": ["nid", "phone", "birth"]}, "lacks email"),
        ({"keys": {"phone": "nid"}}, "each name needs another column"),
    ],
)
def test_unusable_columns_are_refused(settings: dict[str, Any], words: str) -> None:
    rows = Recipe.model_validate(make_recipe("bank", "shop").to_dict()).rows
    data_settings = DataSettings(**{"source": "x.csv", "id": COLUMNS, **settings})
    with raises(InputError, Code.CONFIG_INVALID, names=words):
        data_settings.with_id_rules(rows)


def test_check_describes_each_key() -> None:
    columns = [["a1", "a2", None], ["1", "1", "2"], ["x", "x", None]]
    keys = KeyColumns(rules=((), ("trim",), ()), keys=((0,), (1, 2)))
    lines = describe_keys(columns, keys, ["nid", "phone+birth"])
    assert lines[0] == "3 rows in the source, 1 without any key"
    assert lines[1].startswith("key 1, nid: 2 rows have it, 2 of them alone; shapes: A0")
    assert lines[2].startswith("key 2, phone+birth: 2 rows have it, 0 of them alone")


def test_a_cell_with_the_separator_is_refused() -> None:
    frame = SHOP.assign(email=f"a{SEPARATOR}b")
    with raises(InputError, Code.DATA_INVALID, names="U+001F"):
        vfl.simulate(make_recipe("bank", "shop"), {**TWO, "shop": data(frame)}, quiet=True)
