"""Bad input, at the real programs: one clear sentence, the documented exit code, nothing lost."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.harness.cases import digits, recipe
from tests.harness.errors import assert_names
from tests.harness.federation import Federation, reason_to_wait, refused, toml
from tests.harness.hostile import HostilePassive
from tests.harness.memory import refused_here
from vfl.certs.authority import create_authority, issue
from vfl_common.bundle import Bundle, Kind

BINARY = {"kind": "binary"}
HEADER = "id,age,city,y"
ROWS = [f"u{number:03d},{20 + number},{'AB'[number % 2]},{number % 2}" for number in range(40)]


def write_csv(path: Path, rows: list[str], header: str = HEADER) -> None:
    path.write_text("\n".join([header, *rows]) + "\n")


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    """Two parties with a CSV each; nothing is started. The server's address leads nowhere."""
    made = Federation(
        tmp_path / "federation",
        recipe(2, task=BINARY, run={"rejoin_deadline_s": 5.0}),
        {
            "p0": {"source": "p0.csv", "id": "id", "label": "y"},
            "p1": {"source": "p1.csv", "id": "id", "drop": ["y"]},
        },
    )
    made.address = "127.0.0.1:9"
    with made:
        for name in made.names:
            write_csv(made.folder / f"{name}.csv", ROWS)
        yield made


def change_rows(path: Path, row: int, to: str) -> None:
    rows = list(ROWS)
    rows[row] = to
    write_csv(path, rows)


BAD_DATA: dict[str, tuple[Callable[[Path], None], dict[str, Any], tuple[str, ...]]] = {
    "missing file": (lambda path: path.unlink(), {}, ("p1.csv",)),
    "missing id column": (lambda _: None, {"id": "ident"}, ("p1.csv", "'ident'", "'id'")),
    "missing label column": (lambda _: None, {"label": "yy"}, ("p1.csv", "'yy'", "'y'")),
    "duplicate ids": (lambda path: write_csv(path, [*ROWS, ROWS[3]]), {}, ("p1.csv", "id")),
    "infinity": (lambda path: change_rows(path, 4, "u004,inf,A,0"), {}, ("p1.csv", "'age'", "5")),
    "missing value": (lambda path: change_rows(path, 4, "u004,nan,A,0"), {}, ("p1.csv", "'age'")),
    "unknown key": (lambda _: None, {"colums": ["age"]}, ("p1.toml", "'colums'", "'columns'")),
}


@pytest.mark.parametrize("what", BAD_DATA)
def test_bad_data_is_named(tmp_path: Path, what: str) -> None:
    spoil, keys, names = BAD_DATA[what]
    path = tmp_path / "p1.csv"
    write_csv(path, ROWS)
    spoil(path)
    party = "p0" if "label" in keys else "p1"
    refused_here(recipe(2, task=BINARY), party, {"source": str(path), "id": "id"} | keys, *names)


def test_bad_data_is_refused_before_joining(federation: Federation) -> None:
    change_rows(federation.folder / "p1.csv", 4, "u004,SECRET,A,0")
    federation.data["p1"]["numeric"] = ["age"]
    sentence = refused(federation.start_party("p1"), "p1.csv", "'age'", "5")
    # A value is nobody's business.
    assert "SECRET" not in sentence
    assert not (federation.folder / "runs").exists()


def test_rows_without_an_id_are_told_at_the_start(federation: Federation) -> None:
    change_rows(federation.folder / "p1.csv", 4, ",24,A,0")
    told = federation.start_party("p1").wait_for("left_out")
    assert_names(told["why"], "40")
    assert told["source"].endswith("p1.csv")


def test_missing_party_file_and_recipe(federation: Federation) -> None:
    refused(federation.start("none", "vfl-party", "run", "nobody.toml"), "nobody.toml")
    federation.write_party("p1")
    (federation.folder / "recipe.toml").unlink()
    refused(federation.start("p1", "vfl-party", "run", "p1.toml"), "recipe.toml")
    refused(federation.start("server", "vfl-server", "run", "recipe.toml"), "recipe.toml")


@pytest.mark.parametrize(
    ("tables", "names"),
    [
        ({"modle": {}}, ("'modle'", "'model'")),
        ({"seed": -1}, ("seed",)),
        (
            {"phases": [{"kind": "splitnn", "epoch": 1}]},
            ("phases: splitnn: ", "'epoch'", "'epochs'"),
        ),
        ({"phases": [{"kind": "splitnn", "epochs": 0}]}, ("phases: splitnn: epochs: ", "0")),
        ({"phases": [{"kind": "splitnn", "epochs": "3"}]}, ("phases: splitnn: epochs: ", "'3'")),
    ],
)
def test_a_key_of_a_recipe_is_named(tables: dict[str, Any], names: tuple[str, ...]) -> None:
    refused_here(recipe(2) | tables, "p1", digits(2)["p1"], *names)


def test_bad_recipe(federation: Federation) -> None:
    path = federation.folder / "recipe.toml"
    path.write_text(toml(federation.recipe | {"phases": [{"kind": "splitn", "epochs": 1}]}))
    refused(federation.start_party("p1"), "recipe.toml: phases: ", "'splitn'", "'splitnn'")


def test_model_of_another_embedding_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "of_five.py").write_text(
        "import torch\ndef make(spec, embedding_size):\n    return torch.nn.Linear(spec.shape[0], 5)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    tables = recipe(2, task=BINARY)
    tables["parties"][1]["encoder"] = {"kind": "custom", "factory": "of_five:make"}
    write_csv(tmp_path / "p1.csv", ROWS)
    data = {"source": str(tmp_path / "p1.csv"), "id": "id", "drop": ["y"]}
    refused_here(tables, "p1", data, "p1", "5", "embedding_size", "8")


# -- certificates


def test_certificate_for_another_party(federation: Federation) -> None:
    federation.write_party("p1")
    for suffix in ("pem", "key"):
        (federation.folder / "certs" / f"p0.{suffix}").replace(
            federation.folder / "certs" / f"p1.{suffix}"
        )
    refused(federation.start("p1", "vfl-party", "run", "p1.toml"), "'p0'", "'p1'")


def test_server_of_another_federation(federation: Federation) -> None:
    """Both sides are sound in themselves; they do not know each other's CA."""
    federation.start_server()
    other = federation.folder / "other"
    create_authority(other, "other")
    issue(other, "p1")
    federation.extra["p1"] = {
        "tls": {"ca": "other/ca.pem", "certificate": "other/p1.pem", "key": "other/p1.key"}
    }
    refused(federation.start_party("p1", "--wait", "20"), "server")


def test_party_that_is_not_in_the_recipe(federation: Federation) -> None:
    certs = federation.folder / "certs"
    issue(certs, "mallory")
    federation.data["mallory"] = federation.data["p1"]
    refused(federation.start_party("mallory"), "mallory", "p0, p1")
    # With a recipe of its own it gets as far as the server.
    federation.start_server()
    changed = federation.recipe | {
        "parties": [*federation.recipe["parties"], {"name": "mallory", "role": "passive"}]
    }
    (federation.folder / "recipe.toml").write_text(toml(changed))
    sentence = refused(federation.start_party("mallory"), "mallory")
    # It does not learn who is one; the server's log says so.
    assert "p0" not in sentence
    lines = (federation.run_folder / "server" / "log.jsonl").read_text().splitlines()
    (line,) = [json.loads(line) for line in lines if '"refused"' in line]
    assert (line["level"], line["party_"]) == ("warning", "mallory")
    assert "p0, p1" in line["message"]


def test_a_passive_party_is_warned_of_its_label(federation: Federation) -> None:
    federation.data["p1"] = {"source": "p1.csv", "id": "id", "label": "y"}
    federation.start_all()
    said = federation.programs["p1"].wait_for("advice")["said"]
    assert said.startswith("p1 ")
    assert "data.label = 'y'" in said
    assert_names(said, "data.label", "data.drop")
    federation.finish()
    lines = (federation.run_folder / "p1" / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["level"] for line in lines if '"advice"' in line] == ["warning"]


# -- addresses


def test_address_in_use(federation: Federation) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        federation.extra["p0"] = {"listen": address}
        refused(federation.start_party("p0"), address)
        options = ("--ca", "certs/ca.pem", "--listen", address)
        refused(federation.start("server", "vfl-server", "run", "recipe.toml", *options), address)


def test_server_that_does_not_answer(federation: Federation) -> None:
    refused(federation.start_party("p1", "--wait", "1"), "127.0.0.1:9", "server")


# -- what only shows when the others are there


def test_different_recipes_name_the_first_key(federation: Federation) -> None:
    federation.start_server()
    (federation.folder / "recipe.toml").write_text(toml(federation.recipe | {"seed": 8}))
    refused(federation.start_party("p1"), "seed", "8", "7")


def test_those_who_wait_hear_why_a_party_was_refused(federation: Federation) -> None:
    server = federation.start_server()
    federation.start_party("p0")
    server.wait_for("joined", party="p0")
    (federation.folder / "recipe.toml").write_text(toml(federation.recipe | {"seed": 8}))
    refused(federation.start_party("p1"), "seed", "8", "7")
    for name in ("server", "p0"):
        why = reason_to_wait(federation.programs[name], "p1")
        assert "p1" in why
        assert_names(why, "p1")


def checked(federation: Federation, about: str, code: int = 0) -> str:
    """What `vfl-party check p1.toml` says of ``about``; it ends with ``code``."""
    program = federation.start("check", "vfl-party", "check", "p1.toml")
    assert program.wait(60) == code, program.stderr
    lines = [event.get("text", "").rstrip("\n") for event in program.seen()]
    line: str
    (line,) = [line for line in lines if line[6:].startswith(f"{about}  ")]
    return line


def test_check_compares_with_the_server_and_the_active_party(federation: Federation) -> None:
    # A port that is free now; the other party's file names it.
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        listen = f"127.0.0.1:{found.getsockname()[1]}"
    federation.extra = {"p0": {"listen": listen}, "p1": {"active": listen}}
    server = federation.start_server()
    federation.start_party("p0").wait_for("ready")
    server.wait_for("joined", party="p0")
    federation.write_party("p1")
    for about, address in (("server", federation.address), ("active party", listen)):
        line = checked(federation, about)
        assert line.startswith("ok ")
        assert address in line

    (federation.folder / "recipe.toml").write_text(toml(federation.recipe | {"seed": 8}))
    failed, _, sentence = checked(federation, "server", 2).partition(" ")
    assert failed == "FAIL"
    # As the run says it.
    said = refused(federation.start_party("p1"), "seed: 8", "7")
    assert sentence.endswith(said.removeprefix("error: "))
    failed, _, sentence = checked(federation, "active party", 2).partition(" ")
    assert failed == "FAIL"
    assert all(word in sentence for word in ("p0", "seed: 8", "7"))

    (federation.folder / "recipe.toml").write_text(toml(federation.recipe))
    for name in ("p1", "check"):
        federation.programs.pop(name).close()
    federation.start_party("p1")
    # The questions have left nothing.
    federation.finish()


def test_name_taken_twice(federation: Federation) -> None:
    server = federation.start_server()
    federation.start_party("p1")
    server.wait_for("joined", party="p1")
    first = federation.programs.pop("p1")
    try:
        refused(federation.start_party("p1"), "p1")
        # The first one is still waiting.
        assert first.process.poll() is None
    finally:
        first.close()


def test_different_row_sets(federation: Federation) -> None:
    write_csv(federation.folder / "p1.csv", [*ROWS[:-1], "other,30,A,0"])
    federation.start_all()
    refused(federation.programs["p0"], "p1", "40")
    # Counts are the active party's.
    assert "40" not in refused(federation.programs["p1"], "p1")
    assert federation.programs["server"].wait(30) == 2
    assert "u003" not in federation.programs["p1"].stderr


HOSTILE: dict[str, tuple[Callable[[HostilePassive], Bundle], tuple[str, ...]]] = {
    "another shape": (
        lambda p: p.bundle(np.zeros((24, 7), np.float32)),
        ("float32 [24, 7]", "float32 [24, 8]"),
    ),
    "another dtype": (lambda p: p.bundle(np.zeros((24, 8), np.float16)), ("float16", "float32")),
    "larger than its spec": (lambda p: p.bundle(np.zeros((4096, 8), np.float32)), ("768",)),
    "NaN": (lambda p: p.bundle(np.full((24, 8), np.nan, np.float32)), ()),
    "infinity": (lambda p: p.bundle(np.full((24, 8), np.inf, np.float32)), ()),
    "another kind": (
        lambda p: Bundle(Kind.ACK, p.bundle(np.zeros((24, 8), np.float32)).tensors),
        ("ack", "embedding"),
    ),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_embedding_ends_the_run(tmp_path: Path, what: str) -> None:
    """A passive party with a sound certificate and the right rows sends what the recipe does not
    allow.
    """
    make, names = HOSTILE[what]
    with Federation(
        tmp_path / "f", recipe(2, rows={"validation": 0.0, "test": 0.0}), digits(2)
    ) as federation:
        server = federation.start_server()
        active = federation.start_party("p0")
        with HostilePassive(federation, "p1") as hostile:
            hostile.join_and_open()
            failure = hostile.swap_expecting_failure(make(hostile))
        assert "p1" in str(failure)
        sentence = refused(active, "p1", *names)
        assert len(sentence) < 400
        assert server.wait(30) == 2
        assert "p1" in server.stderr


# -- a machine that is not as the others think


@pytest.mark.slow
def test_port_of_the_active_party_is_closed(federation: Federation) -> None:
    """A firewall, or a wrong `advertise`: who cannot come says why, the active party says who is
    missing.
    """
    # Bound, and nobody listens.
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        federation.recipe["run"]["rejoin_deadline_s"] = 12.0
        (federation.folder / "recipe.toml").write_text(toml(federation.recipe))
        federation.extra["p0"] = {"advertise": address}
        federation.start_all()
        why = reason_to_wait(federation.programs["p1"], "p0")
        assert address in why
        assert_names(why, "p0")
        assert federation.programs["p1"].events[-1]["left_s"] <= 7.0
        federation.programs["p0"].wait_for("waiting", missing=["p1"])
        refused(federation.programs["p1"], "p0", "12 s", why, code=3)
        refused(federation.programs["p0"], "p1", "p0", "12 s", code=3)
        assert federation.programs["server"].wait(30) == 3


def test_clocks_an_hour_apart(federation: Federation) -> None:
    """Simulated by certificates of the hour to come: of server and party, from an authority of that
    hour.
    """
    soon, certs = datetime.now(UTC) + timedelta(hours=1), federation.folder / "certs"
    create_authority(certs, "test", now=soon, force=True)
    for name in (*federation.names, "server"):
        issue(certs, name, now=soon, force=True)
    federation.start_all()
    federation.finish()


def test_clock_that_is_two_days_behind(federation: Federation) -> None:
    """For it, what was issued just now is not valid yet. Simulated by a certificate of the days to
    come.
    """
    soon = datetime.now(UTC) + timedelta(days=2)
    issue(federation.folder / "certs", "p1", now=soon, force=True)
    server = federation.start_server()
    federation.start_party("p0")
    refused(federation.start_party("p1"), "p1.pem")
    assert server.wait_for("waiting", missing=["p1"])
    assert federation.programs["p0"].wait_for("waiting", missing=["p1"])
