"""Fuzzy linkage (``rows.align = "fuzzy"``) of tables with typing errors, beside the true pairs."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import vfl
from tests.harness import matching
from tests.harness.errors import raises
from tests.harness.federation import Federation, toml
from tests.harness.granting import command, needs_grants
from vfl.summary.table import yield_protection_notes
from vfl_common.config.recipe_tables import FuzzyField
from vfl_common.errors import Code, InputError, PeerError
from vfl_common.linkage import ENCODING_BYTES, link
from vfl_leaks.attacks.encodings import identify_rows
from vfl_party.align.fuzzy import encode
from vfl_party.data.id_rules import SEPARATOR

FIELDS = {
    "name": {"hashes": 10},
    "street": {},
    "town": {},
    "birth": {"hashes": 10, "positional": True},
}
COLUMNS = ["number", *FIELDS]
LETTERS = np.array([*"abcdefghijklmnopqrstuvwxyz"])
PEOPLE = 500


def draw_word(draw: np.random.Generator, length: int) -> str:
    return "".join(draw.choice(LETTERS, length))


def make_people() -> pd.DataFrame:
    draw = np.random.default_rng(11)
    names = [draw_word(draw, 6) for _ in range(120)]
    towns = [draw_word(draw, 8) for _ in range(20)]
    a, b = draw.normal(size=(2, PEOPLE))
    return pd.DataFrame(
        {
            "name": [" ".join(draw.choice(names, 2)) for _ in range(PEOPLE)],
            "street": [f"{draw.integers(1, 99)} {draw_word(draw, 7)}" for _ in range(PEOPLE)],
            "town": draw.choice(towns, PEOPLE),
            "birth": [f"19{draw.integers(0, 99):02d}{draw.integers(1, 9):02d}11" for _ in a],
            "a": a,
            "b": b,
            "y": (a + b > 0).astype(int),
        }
    )


def misspell(people: pd.DataFrame, seed: int) -> pd.DataFrame:
    """Changes a letter of one or two fields of each row, and empties some cells."""
    draw, wrong = np.random.default_rng(seed), people.copy()
    for row in wrong.index:
        for column in draw.choice([*FIELDS], draw.integers(1, 3), replace=False):
            text = [*wrong.loc[row, column]]
            text[draw.integers(len(text))] = draw.choice(LETTERS)
            wrong.loc[row, column] = "".join(text)
        if draw.random() < 0.05:
            wrong.loc[row, "street"] = None
    return wrong.sample(frac=1.0, random_state=seed)


def number(frame: pd.DataFrame, prefix: str) -> pd.DataFrame:
    return frame.assign(number=[f"{prefix}{row}" for row in range(len(frame))])


# Half of the people of each table are in the other one.
BANK = number(make_people()[:330].drop(columns="b"), "b")
SHOP = number(misspell(make_people()[170:], 2).drop(columns=["a", "y"]), "s")
CLUB = number(misspell(make_people()[100:400], 3)[["name", "street", "town", "birth", "b"]], "c")
TRUE = {(row, row) for row in BANK.index if row in SHOP.index}


def make_recipe(*parties: str, **rows: Any) -> vfl.Recipe:
    fuzzy = {"fields": FIELDS, **rows.pop("fuzzy", {})}
    return matching.make_recipe(parties, {"align": "fuzzy", "fuzzy": fuzzy, **rows})


def data(frame: pd.DataFrame, label: str | None = None) -> vfl.Data:
    return vfl.Data(frame, label=label, id=COLUMNS)


TWO = {"bank": data(BANK, "y"), "shop": data(SHOP)}


def read_links(run: vfl.Run, party: str, frame: pd.DataFrame) -> list[int]:
    """Returns the labels of the common rows of a party's frame, in the common order."""
    with np.load(Path(run.folder) / party / "alignment" / "links.npz") as file:
        ranks = file["ranks"]
    by_id = frame.fillna("").assign(
        key=lambda f: [SEPARATOR.join(row) for row in f[COLUMNS].to_numpy().tolist()]
    )
    rows = by_id.sort_values("key").index[np.flatnonzero(ranks >= 0)]
    return [int(row) for row in rows[np.argsort(ranks[ranks >= 0])]]


def get_f1(links: set[tuple[int, int]], true: set[tuple[int, int]]) -> float:
    return 2 * len(links & true) / (len(links) + len(true))


@pytest.mark.parametrize("processes", [False, True])
def test_a_run_links_rows_with_typing_errors(processes: bool, tmp_path: Path) -> None:
    run = vfl.simulate(
        make_recipe("bank", "shop"), TWO, quiet=True, out=tmp_path, processes=processes
    )
    rows = [read_links(run, name, f) for name, f in (("bank", BANK), ("shop", SHOP))]
    assert get_f1(set(zip(*rows, strict=True)), TRUE) > 0.97
    sent = run.bytes.by_phase["align"]
    # The tables have equal sizes, so only the number of common rows differs from the forecast.
    forecast = vfl.forecast(make_recipe("bank", "shop"), rows=330).by_phase["align"]
    assert 0 < forecast.payload_bytes - sent.payload_bytes == 8 * (330 - len(rows[0]))
    # The numbers are those of tables that were cut by hand, in the order of the links.
    cut = {
        "bank": vfl.Data(cut_rows(BANK, rows[0]), label="y"),
        "shop": vfl.Data(cut_rows(SHOP, rows[1])),
    }
    by_hand = vfl.simulate(
        make_recipe("bank", "shop").replace(rows={"align": "digest", "fuzzy": {"fields": {}}}),
        cut,
        quiet=True,
    )
    assert run.metrics == by_hand.metrics
    # Another run with the links of this one has the same numbers.
    again = vfl.simulate(
        make_recipe("bank", "shop", alignment=Path(run.folder).name), TWO, quiet=True, out=tmp_path
    )
    assert again.metrics == run.metrics
    # It sends no encodings, so there is nothing to warn of.
    reused = vfl.forecast(make_recipe("bank", "shop", alignment="earlier"), rows=330)
    assert reused.by_phase["align"].payload_bytes == again.bytes.by_phase["align"].payload_bytes
    warned = [
        any("encodings show server" in note for note in yield_protection_notes(each.summary))
        for each in (run, again)
    ]
    assert warned == [True, False]
    for fuzzy, error, words in (
        ({"fields": {"name": {}, "birth": {}}}, InputError, "rows.fuzzy.fields"),
        ({"min_precision": 1.0}, PeerError, "precision"),
        ({"threshold": 0.9}, InputError, "rows.fuzzy.threshold"),
    ):
        recipe = make_recipe("bank", "shop", alignment=Path(run.folder).name, fuzzy=fuzzy)
        code = Code.ROWS_DIFFER if error is PeerError else Code.CONFIG_INVALID
        with raises(error, code, names=words):
            vfl.simulate(recipe, TWO, quiet=True, out=tmp_path)


def test_both_parties_can_compare_their_samples(tmp_path: Path) -> None:
    tables = {**TWO, "shop": vfl.Data(SHOP, id=["birth", "number", "town", "name", "street"])}
    run = vfl.simulate(make_recipe("bank", "shop"), tables, quiet=True, out=tmp_path)
    samples = [
        pd.read_csv(Path(run.folder) / name / "alignment" / "sample.csv", dtype=str)
        for name in ("bank", "shop")
    ]
    for sample in samples:
        assert [*sample.columns] == ["link", "similarity", *FIELDS]
    assert samples[0]["link"].tolist() == samples[1]["link"].tolist()
    assert samples[0]["similarity"].tolist() == samples[1]["similarity"].tolist()
    same_town = samples[0]["town"] == samples[1]["town"]
    assert same_town.mean() > 0.5


def cut_rows(frame: pd.DataFrame, rows: list[int]) -> pd.DataFrame:
    features = frame.loc[rows].drop(columns=COLUMNS)
    return features.assign(id=[f"{place:05d}" for place in range(len(rows))])


def test_rows_of_three_parties_are_those_linked_at_all(tmp_path: Path) -> None:
    tables = {**TWO, "club": data(CLUB)}
    run = vfl.simulate(make_recipe("bank", "shop", "club"), tables, quiet=True, out=tmp_path)
    bank, shop, club = (
        read_links(run, name, frame)
        for name, frame in (("bank", BANK), ("shop", SHOP), ("club", CLUB))
    )
    true = {row for row in BANK.index if row in SHOP.index and row in CLUB.index}
    right = sum(a == b == c for a, b, c in zip(bank, shop, club, strict=True))
    assert 2 * right / (len(bank) + len(true)) > 0.95


def test_a_prediction_has_the_similarity_of_each_link() -> None:
    run = vfl.simulate(make_recipe("bank", "shop", fuzzy={"weights": True}), TWO, quiet=True)
    scores = pd.DataFrame(run.predict({"bank": BANK.drop(columns="y"), "shop": SHOP}))
    similarity = scores["matched_similarity"]
    assert similarity.notna().sum() == (scores["state"] == "scored").sum() > 140
    assert similarity.min() > 0.2
    assert similarity.max() <= 1.0


def test_predictions_have_the_threshold_of_the_training() -> None:
    run = vfl.simulate(make_recipe("bank", "shop"), TWO, quiet=True)
    with np.load(Path(run.folder) / "bank" / "alignment" / "links.npz") as file:
        threshold = file["quality"][0]
    strangers = BANK[~BANK.index.isin(SHOP.index)].drop(columns="y")
    known = BANK[BANK.index.isin(SHOP.index)].drop(columns="y")[:1]
    wrong = 0
    for row in range(12):
        # Two rows are too few to estimate a threshold.
        asked = pd.concat([known, strangers[row : row + 1]])
        scores = pd.DataFrame(run.predict({"bank": asked, "shop": SHOP})).set_index("number")
        scored = scores[scores["state"] == "scored"]
        assert known["number"].iloc[0] in scored.index
        assert scored["matched_similarity"].min() >= threshold - 1e-6
        wrong += len(scored) - 1
    # Each linkage has another key, so a stranger may be similar by chance.
    assert wrong <= 3


@pytest.mark.parametrize("name", ["bank", "shop"])
def test_links_of_two_linkages_are_never_mixed(name: str, tmp_path: Path) -> None:
    run = vfl.simulate(make_recipe("bank", "shop"), TWO, quiet=True, out=tmp_path)
    again = vfl.simulate(make_recipe("bank", "shop"), TWO, quiet=True, out=tmp_path)
    # One party restores the links of another linkage, which may have as many.
    place = Path("alignment") / "links.npz"
    links = (Path(again.folder) / name / place).read_bytes()
    (Path(run.folder) / name / place).write_bytes(links)
    third = vfl.simulate(
        make_recipe("bank", "shop", alignment=Path(run.folder).name), TWO, quiet=True, out=tmp_path
    )
    rows = [read_links(third, side, f) for side, f in (("bank", BANK), ("shop", SHOP))]
    assert get_f1(set(zip(*rows, strict=True)), TRUE) > 0.97
    tokens = [
        np.load(Path(one.folder) / side / place)["token"].tobytes()
        for one, side in ((third, "bank"), (third, "shop"), (run, "bank"), (run, "shop"))
    ]
    # The linkage was repeated.
    assert tokens[0] == tokens[1]
    assert tokens[0] not in tokens[2:]


@pytest.mark.parametrize("shared", [150, 60, 20])
def test_estimates_are_near_the_truth(shared: int) -> None:
    in_both = SHOP.index.isin(BANK.index)
    second = pd.concat([SHOP[in_both][:shared], SHOP[~in_both]])
    links = link(encode_frame(BANK), encode_frame(second))
    pairs = zip(BANK.index[links.first], second.index[links.second], strict=True)
    right = sum(one == other for one, other in pairs)
    # The estimates rest on a few hundred rows.
    assert abs(right / len(links.first) - links.precision) < 0.1
    assert right / shared > 0.9


def test_doubtful_links_have_a_lower_probability() -> None:
    links = link(encode_frame(BANK), encode_frame(SHOP), threshold=0.2)
    is_right = BANK.index[links.first] == SHOP.index[links.second]
    assert np.sum(~is_right) > 50
    assert links.probability[is_right].mean() > 0.95
    assert links.probability[~is_right].mean() < 0.3
    # The probability never decreases with the similarity.
    assert np.all(np.diff(links.probability[np.argsort(links.similarity)]) >= 0)


def encode_frame(
    frame: pd.DataFrame, key: bytes = b"k" * 32
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    ids = [SEPARATOR.join(row) for row in frame.fillna("")[[*FIELDS]].to_numpy().tolist()]
    fields = {name: FuzzyField.model_validate(settings) for name, settings in FIELDS.items()}
    return encode(ids, range(len(FIELDS)), fields, key)


def test_encodings_need_the_key() -> None:
    same, other = encode_frame(BANK), encode_frame(BANK, b"x" * 32)
    assert same.shape == (len(BANK), ENCODING_BYTES)
    assert np.array_equal(same, encode_frame(BANK))
    # Encodings with another key have no more bits in common than those of unrelated rows.
    assert len(link(same, other, threshold=0.4).first) < len(BANK) // 20
    assert np.array_equal(link(same, same).first, link(same, same).second)


@pytest.mark.parametrize(("listed", "known"), [(300, 0), (500, 10)])
def test_a_server_with_a_list_names_people(listed: int, known: int) -> None:
    people = make_people()
    others = people[:listed].sample(frac=1.0, random_state=1)
    place = {person: number for number, person in enumerate(others.index)}
    own, knows = encode_frame(people[:300]), {row: place[row] for row in range(known)}
    # The server does not know the key, and tries several of its own.
    tries = [
        identify_rows(own, encode_frame(others, bytes([number]) * 32), knows) for number in range(4)
    ]
    rows = max(tries, key=lambda one: one.score).people
    assert np.mean(others.index[rows[known:]] == np.arange(known, 300)) > 0.9


def test_the_leak_meter_names_the_rows_of_each_party() -> None:
    (rehearsed,) = vfl.leaks(
        make_recipe("bank", "shop"), TWO, attacks=["encodings"], quiet=True
    ).found
    values = {(line.of, "and" in line.knows): line.value.mean for line in rehearsed.lines}
    assert set(values) == {
        (f"rows of {name}", knows) for name in ("bank", "shop") for knows in (False, True)
    }
    assert min(values.values()) > 0.9
    plain = make_recipe("bank", "shop").replace(rows={"align": "digest", "fuzzy": {"fields": {}}})
    tables = {
        "bank": vfl.Data(cut_rows(BANK, [*BANK.index]), label="y"),
        "shop": vfl.Data(cut_rows(SHOP, [*SHOP.index])),
    }
    (rehearsed,) = vfl.leaks(plain, tables, attacks=["encodings"], quiet=True).found
    assert not rehearsed.lines
    assert any("no rows are linked by encodings" in note for note in rehearsed.notes)


def test_uncertain_links_end_the_run() -> None:
    strangers = number(make_people().sample(330, random_state=1)[::-1], "x").assign(
        name=[f"n{row}" for row in range(330)], street="s", town="t", birth="19000101"
    )
    with raises(PeerError, Code.ROWS_DIFFER, names="rows"):
        vfl.simulate(
            make_recipe("bank", "shop"),
            {**TWO, "shop": data(strangers.drop(columns=["a", "y"]))},
            quiet=True,
        )
    with raises(PeerError, Code.ROWS_DIFFER, names="rows.at_least"):
        vfl.simulate(make_recipe("bank", "shop", at_least=300), TWO, quiet=True)


def test_unusable_settings_are_refused() -> None:
    with raises(InputError, Code.CONFIG_INVALID, names="fuzzy.fields"):
        make_recipe("bank", "shop", align="psi")
    with raises(InputError, Code.CONFIG_INVALID, names="fuzzy.fields"):
        make_recipe("bank", "shop", fuzzy={"fields": {}})
    with raises(InputError, Code.CONFIG_INVALID, names="baseline"):
        vfl.simulate(make_recipe("bank", "shop"), TWO, quiet=True, baseline="combined")


@pytest.fixture(scope="module")
def linked(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    """A federation of programs that has linked rows and trained once."""
    folder = tmp_path_factory.mktemp("linked")
    tables = {}
    for name, frame, label in (("bank", BANK, {"label": "y"}), ("shop", SHOP, {})):
        frame.to_csv(folder / f"{name}.csv", index=False)
        tables[name] = {"source": f"{name}.csv", "id": COLUMNS, "format": "text", **label}
    made = Federation(folder, make_recipe("bank", "shop").to_dict(), tables)
    with made:
        made.start_all()
        made.finish()
    return made


def ask(federation: Federation, name: str, *words: str) -> str:
    """Returns what ``vfl-party WORDS`` prints about a party file."""
    federation.address = "127.0.0.1:1"
    path = federation.write_party(name).name
    words = tuple(path if word == "FILE" else word for word in words)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(federation.folder)
        result = command(federation.folder, *words)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def get_cells(frame: pd.DataFrame, row: int) -> list[str]:
    return [str(cell) for cell in frame.fillna("").loc[row, COLUMNS]]


def get_run(federation: Federation) -> Path:
    (path,) = (federation.folder / "runs").glob("*/shop")
    return path


def test_the_record_and_the_account_count_encodings_of_all_people(linked: Federation) -> None:
    lines = ask(linked, "shop", "disclosures", "show", "FILE", "--json").splitlines()
    (line,) = [each for text in lines if (each := json.loads(text))["exchange"] == "encodings"]
    assert (line["people"], line["numbers"]) == (len(SHOP), ENCODING_BYTES * len(SHOP))
    # Nobody but the shop has this person, who is not linked.
    alone = next(row for row in SHOP.index if row not in BANK.index)
    cells = [word for cell in get_cells(SHOP, alone) for word in ("--id", cell)]
    lines = ask(linked, "shop", "disclosures", "show", "FILE", "--json", *cells).splitlines()
    about = {each["exchange"]: each["of_person"] for each in map(json.loads, lines)}
    assert about["encodings"] == ENCODING_BYTES
    for name, peer in (("bank", "shop"), ("shop", "bank")):
        lines = ask(linked, name, "account", "FILE", "--json").splitlines()
        spent = {each["peer"]: each["spent"] for each in map(json.loads, lines)}
        assert spent["server"]["numbers_of_a_person"] == ENCODING_BYTES
        assert spent["server"]["predictions"] == 0
        assert spent["server"]["alignments"] == spent[peer]["alignments"] == 1


def test_a_forecast_of_an_account_counts_encodings_once(linked: Federation) -> None:
    needs_grants(linked, "shop")
    limits = {"numbers_of_a_person": 9, "alignments": 9}
    linked.extra["shop"]["policy"]["account"] = limits
    output = ask(linked, "shop", "approve", "FILE", "--yes")
    linked.extra.clear()
    spent = f"{ENCODING_BYTES} numbers about one person are spent at server"
    assert f"{spent}, and 1 run would make it {2 * ENCODING_BYTES}" in output
    assert "1 alignments are spent at server, and 1 run would make it 2" in output
    assert f"about one person server would get at most {ENCODING_BYTES} numbers" in output
    assert "align rows to server: a server with a list of the same people named 100 %" in output
    assert "align rows, open rows: no leaks were measured" in output


def test_a_check_warns_of_the_servers_list(linked: Federation) -> None:
    output = ask(linked, "shop", "check", "FILE", "--offline")
    assert "note  alignment     The encodings show server how similar any two rows are" in output
    run = get_run(linked).parent.name
    recipe = (linked.folder / "recipe.toml").read_text()
    reused = make_recipe("bank", "shop", alignment=run).to_dict()
    (linked.folder / "recipe.toml").write_text(toml(reused))
    output = ask(linked, "shop", "check", "FILE", "--offline")
    (linked.folder / "recipe.toml").write_text(recipe)
    # The rows are not linked again.
    assert "encodings" not in output
    assert f"common, as run {run} found" in output
    assert "the run divides only the common rows" in output


def test_a_forgotten_person_leaves_the_sample(linked: Federation) -> None:
    path = get_run(linked) / "alignment" / "sample.csv"
    # A joint prediction has a sample, too.
    predicted = linked.folder / "runs" / "predicted" / "shop"
    shutil.copytree(path.parent.parent, predicted)
    facts = json.loads((predicted / "run.json").read_text())
    (predicted / "run.json").write_text(json.dumps(facts | {"job": "predict"}))
    before = path.read_text().splitlines()
    fields = [*csv.reader(before)][1][2:]
    frame = SHOP.fillna("")
    (number,) = frame["number"][(frame[[*FIELDS]] == fields).all(axis=1)]
    cells = [number, *fields]
    output = ask(linked, "shop", "forget", "FILE", *cells, "--all", "--dry-run")
    assert f"{path.relative_to(linked.folder)}: a line with the person's fields" in output
    assert path.read_text().splitlines() == before
    output = ask(linked, "shop", "forget", "FILE", *cells, "--all")
    assert path.read_text().splitlines() == [before[0], *before[2:]]
    assert (predicted / "alignment" / "sample.csv").read_text() == path.read_text()
    assert output.count("the review of links; removed") == 2
    assert "sample.csv" not in ask(linked, "shop", "forget", "FILE", *cells, "--all")
