"""What is said of mistakes in recipes and party files: where, what was found, and what to write
instead.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import vfl_party.methods
from tests.harness import cases
from tests.harness.errors import raises
from tests.harness.releases import newer
from vfl_common.config.base import Section, parse
from vfl_common.config.data import DataSettings
from vfl_common.config.party import PartyFile
from vfl_common.config.policy import PolicySettings
from vfl_common.config.recipe import Recipe, read_recorded_recipe
from vfl_common.config.recipe_tables import RowsSettings, SimulateSettings
from vfl_common.errors import Code, InputError
from vfl_party.methods.splitnn.settings import SplitNNSettings
from vfl_party.phases.course import Course, list_kinds, load_method
from vfl_party.phases.method import Method

TLS = {"ca": "ca.pem", "certificate": "bank.pem", "key": "bank.key"}
PARTY = {"name": "bank", "recipe": "recipe.toml", "server": "127.0.0.1:7000", "tls": TLS}


def told(model: type[Section], tables: dict[str, Any]) -> str:
    """What is said of the tables of a file ``x.toml``, without the file's name."""
    with raises(InputError, Code.CONFIG_INVALID) as caught:
        parse(model, tables, "x.toml")
    text = str(caught.value)
    assert text.startswith("x.toml: ")
    return text.removeprefix("x.toml: ")


@pytest.mark.parametrize("key", ["server", "active", "listen", "advertise"])
@pytest.mark.parametrize(
    "address", ["localhost", "localhost:", ":7000", "localhost:http", "localhost:99999"]
)
def test_an_address_is_asked_for_in_words(key: str, address: str) -> None:
    assert told(PartyFile, PARTY | {key: address}).startswith(f"{key}: ")


def test_addresses_that_are_some() -> None:
    for address in ("localhost:0", "[::1]:7000", "fed.example.org:65535"):
        assert parse(PartyFile, PARTY | {"server": address}, "x.toml").server == address


@pytest.mark.parametrize("removed", [{"shadow": ["run"]}, {"weights": {"run": 0.1}}])
def test_a_removed_key_names_what_takes_its_place(removed: dict[str, Any]) -> None:
    with raises(InputError, Code.CONFIG_INVALID, names=(*removed, "Envoy", "promote.md")):
        parse(PartyFile, PARTY | {"serve": removed}, "x.toml")


@pytest.mark.parametrize(
    "policy", [{"level": "stric"}, {"most_epoch": 3}, {"account": {"epsilon": "x"}}, 3]
)
def test_a_mistake_in_a_table_that_may_be_a_name_is_named(policy: object) -> None:
    told(PartyFile, PARTY | {"policy": policy})
    told(SimulateSettings, {"policies": {"p0": policy}})


ENCODER = {"embedding_size": 8, "encoder": {"hidden": [4]}}


@pytest.mark.parametrize(
    ("model", "tables", "begins"),
    [
        (Recipe, {"parties": [{"name": "p0", "role": "activ"}]}, "parties.0.role: "),
        (Recipe, {"parties": [{"name": "p0"}]}, "parties.0.role: missing"),
        (Recipe, {"parties": [{"name": "p0", "role": "active", "features": "true"}]}, "parties.0.features: "),
        (Recipe, {"model": {"embedding_size": 8, "combine": 7}}, "model.combine: "),
        (Recipe, {"model": ENCODER}, "model.encoder: has no 'kind'"),
        (Recipe, {"model": {"embedding_size": 8, "top": {"hidden": [4, "8"]}}}, "model.top.hidden.1: "),
        (Recipe, {"preset": 3}, "preset: "),
        (Recipe, {"method": "splitnn"}, "the key 'method' is not used"),
        (Recipe, {"rows": {"test": 1.5}}, "rows.test: "),
        (Recipe, {"rows": {"test": "0.2"}}, "rows.test: "),
        (Recipe, {"rows": {"at_least": 1.0}}, "rows.at_least: "),
        (Recipe, {"rows": {"at_least": 0}}, "rows.at_least: "),
        (Recipe, {"rows": {"at_least": "80 %"}}, "rows.at_least: "),
        (Recipe, {"rows": {"at_least": True}}, "rows.at_least: "),
        (Recipe, {"phases": ["splitnn"]}, "phases.0: "),
        (Recipe, {"phases": []}, "phases: "),
        (Recipe, {"name": 7}, "name: "),
        (Recipe, {"seed": "3"}, "seed: "),
        (PartyFile, PARTY | {"device": "gpu"}, "device: "),
        (PartyFile, PARTY | {"data": {"source": "x.csv", "scale": "z"}}, "data.scale: "),
        (PartyFile, PARTY | {"allow_code": ["mine.py", "a b"]}, "allow_code.1: "),
        (PartyFile, PARTY | {"threads": "many"}, "threads: "),
        (PartyFile, PARTY | {"threads": "2"}, "threads: "),
        (DataSettings, {"source": "a.csv", "id": 3}, "id: "),
        (SplitNNSettings, {"epochs": 1, "lr": 0.1}, "unknown key 'lr'; did you mean 'optimizer.lr'"),
        (SplitNNSettings, {"epochs": 1, "patience": 1}, "unknown key 'patience'; did you mean 'early_stopping.patience'"),
        (SplitNNSettings, {"epoch": 1}, "unknown key 'epoch'; did you mean 'epochs'"),
        (SplitNNSettings, {"epochs": "3"}, "epochs: "),
        (SplitNNSettings, {"epochs": 3.0}, "epochs: "),
        (SplitNNSettings, {"epochs": True}, "epochs: "),
        (SplitNNSettings, {"epochs": 3, "deadline_s": "1"}, "deadline_s: "),
    ],
)  # fmt: skip
def test_a_mistake_is_named_by_its_key(
    model: type[Section], tables: dict[str, Any], begins: str
) -> None:
    said = told(model, cases.recipe(2) | tables if model is Recipe else tables)
    assert said.startswith(begins)


@pytest.mark.parametrize(
    ("phases", "start", "method", "follows"),
    [
        ([{"kind": "gbdt"}], [], "gbdt", False),
        ([{"kind": "evaluate"}], [], "evaluate", False),
        (
            [{"kind": "fedhssl", "name": "a"}, {"kind": "head"}, {"kind": "evaluate"}],
            [],
            "fedhssl → head",
            True,
        ),
        ([{"kind": "splitnn"}, {"kind": "splitnn", "name": "more"}], [], "splitnn", False),
        ([{"kind": "splitnn"}], [{"kind": "contrastive"}], "splitnn", True),
        ([{"kind": "fedonce"}, {"kind": "head"}], [], "fedonce → head", False),
        ([{"kind": "mocosfl"}, {"kind": "probe"}], [], "mocosfl → probe", True),
        ([{"kind": "fedcvt"}, {"kind": "evaluate"}], [], "fedcvt", True),
        (
            [{"kind": "fedonce", "objective": "contrastive"}, {"kind": "head"}],
            [],
            "fedonce → head",
            True,
        ),
    ],
)
def test_the_phases_say_what_a_recipe_does(
    phases: list[Any], start: list[Any], method: str, follows: bool
) -> None:
    tables = (
        cases.recipe(2)
        | {"phases": phases}
        | ({"start": {"run": "r", "phases": start}} if start else {})
    )
    recipe = parse(Recipe, tables, "recipe")
    assert (recipe.method, Course(recipe).follows_preset) == (method, follows)


def test_the_methods_that_read_the_preset_are_those_that_follow_it() -> None:
    """A method whose modules read it says so."""
    folder = Path(vfl_party.methods.__file__).parent
    readers = {
        path.parent.name for path in folder.rglob("*.py") if "recipe.preset" in path.read_text()
    }
    says = {
        kind
        for kind in list_kinds()
        if type(load_method(kind)).follows_preset is not Method.follows_preset
    }
    assert readers == says == {"fedcvt", "fedhssl", "mocosfl", "contrastive", "fedonce"}


def test_no_pattern_is_shown() -> None:
    phase = {"kind": "splitnn", "epochs": 1}
    for tables in (
        {"name": "a b"},
        {"name": "x" * 65},
        {"server": "-x"},
        {"phases": [phase | {"kind": "Split"}]},
        {"phases": [phase | {"name": "1st"}]},
        {"phases": [phase | {"codec": "float 16"}]},
        {"start": {"run": "../elsewhere"}},
        {"model": {"embedding_size": 8, "encoder": {"kind": "custom", "factory": "mine"}}},
    ):
        text = told(Recipe, cases.recipe(2) | tables)
        assert not set(text) & set("^$[]*")


def test_a_positive_class_changes_the_digest_only_if_it_is_named() -> None:
    made = [
        parse(Recipe, cases.recipe(2, task={"kind": "binary"} | more), "x.toml")
        for more in ({}, {"positive": 1})
    ]
    assert "positive" not in made[0].canonical_json()
    assert made[0].digest() != made[1].digest()
    assert read_recorded_recipe(json.loads(made[1].canonical_json()), "x").task.positive == 1
    with raises(InputError, Code.CONFIG_INVALID, names="x.toml"):
        parse(Recipe, cases.recipe(2, task={"kind": "regression", "positive": 1}), "x.toml")


def test_rules_for_ids_change_the_digest_only_if_there_are_any() -> None:
    def made(**rows: Any) -> Recipe:
        return parse(Recipe, cases.recipe(2, rows=rows), "x.toml")

    assert "id_rules" not in made().canonical_json()
    assert made().digest() == made(id_rules=[]).digest() != made(id_rules=["trim"]).digest()
    assert made(id_rules=["trim", "phone:DE"]).rows.id_rules == ("trim", "phone:DE")


@pytest.mark.parametrize("rule", ["strip", "phone", "phone:de", "phone:49"])
def test_an_unknown_rule_lists_the_known_ones(rule: str) -> None:
    known = "'trim', 'casefold', 'nfkc', 'digits', 'zeros', 'email' or 'phone:CC', with a country such as DE for CC"
    sentence = f"id_rules.1: '{rule}' cannot be used. Write {known}."
    assert told(Recipe, cases.recipe(2, rows={"id_rules": ["trim", rule]})) == f"rows.{sentence}"
    data = {"data": {"source": "a.csv", "id": "a", "id_rules": ["trim", rule]}}
    assert told(PartyFile, PARTY | data) == f"data.{sentence}"


def test_an_id_is_one_column_or_several() -> None:
    def columns(given: Any) -> tuple[str, ...]:
        return parse(DataSettings, {"source": "a.csv", "id": given}, "x.toml").id

    assert columns("a") == ("a",)
    assert columns(["a", "b"]) == ("a", "b")
    assert columns(None) == columns([]) == ()


def test_a_party_s_own_rules_replace_the_recipe_s() -> None:
    parts = {
        "a": {"source": "a.csv", "id": "id"},
        "b": {"source": "b.csv", "id": "id", "id_rules": []},
    }
    joined = DataSettings.model_validate({"source": "joined", "parts": parts}).with_id_rules(
        RowsSettings(id_rules=("trim",))
    )
    assert joined.id_rules == joined.parts["a"].id_rules == ("trim",)
    assert joined.parts["b"].id_rules == ()


def test_a_whole_number_stands_for_any_other() -> None:
    settings = parse(
        SplitNNSettings, {"epochs": 3, "late_policy": "zeros", "deadline_s": 2}, "x.toml"
    )
    assert settings.deadline_s == 2.0
    ours, theirs = (cases.recipe(2, rows={"validation": share, "test": 0.1}) for share in (0, 0.0))
    assert parse(Recipe, ours, "x.toml").digest() == parse(Recipe, theirs, "x.toml").digest()


# -- recipes of two releases

ROSTER = [{"name": "a", "role": "active"}, {"name": "b", "role": "passive"}]
PLAIN: dict[str, Any] = {
    "name": "x",
    "task": {"kind": "binary"},
    "parties": ROSTER,
    "model": {"embedding_size": 4},
    "phases": [{"kind": "splitnn", "epochs": 3}],
}
FULL: dict[str, Any] = PLAIN | {
    "task": {"kind": "binary", "positive": 1},
    "parties": [{**ROSTER[0], "features": False}, {**ROSTER[1], "encoder": {"kind": "cnn"}}],
    "rows": {"align": "psi", "at_least": 3, "id_rules": ["trim"], "aligned": 0.5},
    "model": {"embedding_size": 4, "encoder": {"kind": "own", "width": 3}, "top": {"hidden": [3]}},
    "phases": [
        {"kind": "splitnn", "transforms": [{"kind": "iso", "exchange": "embeddings", "scale": 3.0}]}
    ],
    "wire": [{"codec": "bits", "bits": 4, "direction": "up"}],
    "start": {"run": "r", "phases": [{"kind": "fedonce"}], "tower": "cross"},
    "run": {"heartbeat_s": 1.0},
}


@pytest.mark.parametrize(
    ("tables", "digest"),
    [(PLAIN, "d62f8e8ac9d09b6a"), (FULL, "a1dcfc6bd5a182d8")],
    ids=["plain", "full"],
)
def test_the_digest_of_a_recipe_stays_what_it_was(tables: dict[str, Any], digest: str) -> None:
    """Never to be changed: runs on disks, and parties of other releases, have them."""
    assert parse(Recipe, tables, "x.toml").digest()[:16] == digest


@pytest.mark.parametrize("digits", [16, 63, 65])
def test_a_part_of_a_recipe_s_digest_allows_no_recipe(digits: int) -> None:
    """The author of two recipes can give both the same first digits."""
    digest = parse(Recipe, PLAIN, "x.toml").digest()
    told(PartyFile, PARTY | {"policy": {"recipes": [(digest * 2)[:digits]]}})
    found = parse(PartyFile, PARTY | {"policy": {"recipes": [digest]}}, "x.toml")
    assert isinstance(found.policy, PolicySettings)
    assert found.policy.recipes == (digest,)


def test_a_key_of_a_later_release_changes_the_digest_only_if_it_is_set() -> None:
    older = parse(Recipe, cases.recipe(2), "x.toml")
    for same in ({}, {"audit_every": 7}):
        assert newer(cases.recipe(2, run=same)).canonical_json() == older.canonical_json()
    assert '"audit_every":8' in newer(cases.recipe(2, run={"audit_every": 8})).canonical_json()


def test_recipes_of_two_releases_are_compared_as_written() -> None:
    older, written = (
        parse(Recipe, cases.recipe(2), "x.toml"),
        newer(cases.recipe(2, run={"audit_every": 7})),
    )
    unwritten = newer(cases.recipe(2))
    key = "run.audit_every"
    assert older.spelling().difference(unwritten.spelling()) is None
    assert unwritten.spelling().difference(older.spelling()) is None
    # A default that is spelled out.
    assert unwritten.spelling().difference(written.spelling()) is None
    assert older.spelling().difference(written.spelling()) == (key, None, 7)
    assert written.spelling().difference(older.spelling()) == (key, 7, None)
    assert unwritten.spelling().difference(newer(cases.recipe(2), 9).spelling()) == (key, 7, 9)
    assert written.spelling().difference(newer(cases.recipe(2), 9).spelling()) == (key, 7, 9)


def test_a_default_that_is_a_table_in_one_release_is_a_difference() -> None:
    plain = parse(Recipe, cases.recipe(2), "x.toml").spelling()
    others = {key: value for key, value in plain.filled.items() if key != "start"}
    table = replace(plain, filled=others | {"start.run": "x"})
    assert plain.difference(table) == ("start", None, "a table")
    assert table.difference(plain) == ("start", "a table", None)


def test_lists_are_compared_whole() -> None:
    one, two = (
        parse(
            Recipe, cases.recipe(2, model={"encoder": {"kind": "mlp", "hidden": hidden}}), "x.toml"
        ).spelling()
        for hidden in ([64], [64, 32])
    )
    assert one.difference(two) == ("model.encoder.hidden", [64], [64, 32])


def test_the_defaults_of_methods_and_filters_are_compared_too() -> None:
    noisy = {
        "transforms": [
            {"kind": "marvell", "exchange": "embedding", "sent_by": "active", "scale": 2.0}
        ]
    }
    tables = cases.recipe(2, phase=noisy) | {
        "wire": [{"codec": "bits", "exchange": "embedding", "bits": 4}]
    }
    found = Course(parse(Recipe, tables, "x.toml")).filled
    unwritten = {key: found.filled[key] for key in found.filled.keys() - found.written}
    assert (
        found.filled["phases.0.transforms.0.scale"],
        unwritten["phases.0.transforms.0.error"],
    ) == (2.0, None)
    assert (found.filled["wire.0.bits"], unwritten["wire.0.rounding"]) == (4, "stochastic")
    made = parse(Recipe, cases.recipe(2), "x.toml")
    spelling = Course(made).filled
    assert spelling.filled["phases.0.batch_size"] == 24
    assert "phases.0.optimizer.lr" in spelling.filled.keys() - spelling.written
    assert made.spelling().difference(spelling) is None
    other = replace(spelling, filled={**spelling.filled, "phases.0.optimizer.lr": 0.5})
    # Who knows no methods cannot tell.
    assert made.spelling().difference(other) is None
    assert spelling.difference(other) == ("phases.0.optimizer.lr", 0.001, 0.5)
