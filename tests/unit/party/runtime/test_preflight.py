"""What ``vfl-party check`` says, in words for a person."""

from __future__ import annotations

import errno
import os
import socket
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.harness import cases
from tests.harness.errors import assert_names, raises
from tests.harness.federation import toml
from vfl.certs.authority import create_authority, issue
from vfl_common.errors import Code, InputError
from vfl_party.cli import cli
from vfl_party.data.id_rules import ASK
from vfl_party.data.sources.databases import SORTED
from vfl_party.forecast.count import read_outlook
from vfl_party.runtime.preflight import Finding, check


def federation(folder: Path, *, phase: dict[str, Any] | None = None, **splits: Any) -> Path:
    """Writes the files of p0, the active party, and of p1; returns the folder."""
    create_authority(folder / "certs", "f")
    recipe = cases.recipe(2, phase=phase, rows={"validation": 0.1, "test": 0.2, **splits})
    (folder / "recipe.toml").write_text(toml(recipe))
    for name, data in cases.digits(2).items():
        tls = issue(folder / "certs", name).model_dump(mode="json", exclude_defaults=True)
        party = {
            "name": name,
            "recipe": "recipe.toml",
            "server": "127.0.0.1:9",
            "tls": tls,
            "policy": {"level": "careful"},
            "data": data,
        }
        (folder / f"{name}.toml").write_text(toml(party))
    return folder


def checked(path: Path, **keys: Any) -> list[Finding]:
    """What ``check`` finds about a party file with other keys."""
    path.write_text(toml(tomllib.loads(path.read_text()) | keys))
    return list(check(path, None, offline=True))


def said(folder: Path, about: str, **splits: Any) -> list[str]:
    """What ``check`` finds at p1 about one subject."""
    found = checked(federation(folder, **splits) / "p1.toml")
    assert all(finding.fine for finding in found), found
    return [finding.text for finding in found if finding.about == about]


@pytest.mark.parametrize("listen", ["0.0.0.0:7001", "[::]:7001", "[0:0::0]:0"])
def test_an_address_that_nobody_can_dial_is_not_relayed(tmp_path: Path, listen: str) -> None:
    path = federation(tmp_path) / "p0.toml"
    (found,) = [finding for finding in checked(path, listen=listen) if not finding.fine]
    assert_names(found.text, "p0.toml: listen: ", listen, "advertise", "p0.example.org")
    (found,) = [
        finding for finding in checked(path, listen=listen, advertise=listen) if not finding.fine
    ]


@pytest.mark.parametrize(("place", "module"), [("model", "code_of_all"), ("party", "code_of_p1")])
def test_code_that_a_recipe_names_needs_the_party_s_word(
    place: str, module: str, tmp_path: Path
) -> None:
    path = federation(tmp_path) / "p1.toml"
    (tmp_path / f"{module}.py").write_text(
        f"import pathlib\npathlib.Path({str(tmp_path)!r}, 'ran').touch()\n"
    )
    recipe = tomllib.loads((tmp_path / "recipe.toml").read_text())
    holder = recipe["model"] if place == "model" else recipe["parties"][1]
    holder["encoder"] = {"kind": "custom", "factory": f"{module}:make"}
    (tmp_path / "recipe.toml").write_text(toml(recipe))
    for allowed in ([], ["code"], [f"{module}:other"], [f"{module}.make"]):
        (found,) = [finding for finding in checked(path, allow_code=allowed) if not finding.fine]
        assert_names(found.text, module, "allow_code")
        with raises(InputError, Code.CONFIG_INVALID):
            read_outlook(path)
    assert not (tmp_path / "ran").exists()
    for allowed in ([module], [f"{module}:make"]):
        (found,) = [finding for finding in checked(path, allow_code=allowed) if not finding.fine]
    assert (tmp_path / "ran").exists()
    assert all(finding.fine for finding in checked(path, allow_code=[], encoder={"kind": "mlp"}))


def test_the_relayed_address_is_said(tmp_path: Path) -> None:
    found = checked(
        federation(tmp_path) / "p0.toml", listen="0.0.0.0:0", advertise="bank.example.org:7001"
    )
    text = "0.0.0.0:0 is free; passive parties must be able to reach it at bank.example.org:7001"
    assert [finding.text for finding in found if finding.about == "listen"] == [text]
    assert all(finding.fine for finding in found)
    # At a passive party the key has no effect.
    assert all(finding.fine for finding in checked(tmp_path / "p1.toml", listen="0.0.0.0:7001"))


def test_room_on_the_disk_and_ports_of_serving_are_looked_at(tmp_path: Path) -> None:
    path = federation(tmp_path) / "p0.toml"
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        address = f"127.0.0.1:{used.getsockname()[1]}"
        found = checked(path, serve={"http": address, "listen": "127.0.0.1:0"})
    assert all(finding.fine for finding in found)
    said = [(each.text, each.note) for each in found if each.about == "serve"]
    assert said[0] == ("serve.listen: 127.0.0.1:0 is free", False)
    # It may be the program that serves now.
    assert said[1][0].startswith(f"serve.http: cannot listen on {address}: another program")
    assert said[1][1]
    (disk,) = [finding.text for finding in found if finding.about == "disk"]
    assert disk.endswith(f"GB free for {tmp_path}")


def test_a_disk_without_room_is_found_before_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_number: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = federation(tmp_path) / "p0.toml"
    monkeypatch.setattr("os.fsync", full)
    (disk,) = [finding for finding in checked(path) if finding.about == "disk"]
    assert not disk.fine
    assert_names(disk.text, "processes")
    done = CliRunner().invoke(cli, ["run", str(path), "--wait", "0"])
    assert isinstance(done.exception, InputError)
    assert done.exception.code is Code.FILE_INVALID


@pytest.mark.parametrize(
    ("phase", "about", "text"),
    [
        (
            {"codec": "float61"},
            "recipe",
            "phases: splitnn: exchange embedding: unknown codec 'float61'. Did you",
        ),
        (
            {"early_stopping": {"metric": "rmse"}},
            "recipe",
            "phases: splitnn: early_stopping.metric: a multiclass task",
        ),
        ({"epochs": 0}, "phases", "phases: splitnn: epochs: must be greater than 0 (got 0)."),
        ({"kind": "Split"}, "recipe", "phases.0.kind: 'Split' cannot be used"),
    ],
)
def test_an_error_in_the_recipe_names_its_file(
    tmp_path: Path, phase: dict[str, Any], about: str, text: str
) -> None:
    path = federation(tmp_path, phase=phase) / "p0.toml"
    (found,) = [finding for finding in checked(path) if not finding.fine]
    assert found.about == about
    assert found.text.startswith(f"{tmp_path / 'recipe.toml'}: {text}")


def test_an_error_in_the_data_is_about_them(tmp_path: Path) -> None:
    path = federation(tmp_path) / "p0.toml"
    (found,) = [finding for finding in checked(path, data={"source": "x.csv"}) if not finding.fine]
    assert found.about == "data"


def test_what_each_rule_and_policy_keeps_is_counted_without_an_id(tmp_path: Path) -> None:
    path = federation(tmp_path, id_rules=["trim", "casefold"]) / "p1.toml"
    (tmp_path / "own.csv").write_text('who,x\n A,1\na,2\nB ,3\n"  ",4\nSECRET,5\n')
    data = {"source": "own.csv", "id": "who"}
    found = checked(path, data=data | {"duplicates": "first"})
    assert_names("\n".join(finding.text for finding in found if finding.about == "ids"), "25", "75")
    assert "rows: 3" in [finding.text for finding in found if finding.about == "data"]
    assert not [finding for finding in found if "secret" in finding.text.lower()]
    refused = checked(path, data=data | {"duplicates": "error"})
    (error,) = [finding for finding in refused if not finding.fine]
    assert [finding for finding in refused if finding.about == "ids"][-1] is error
    assert not [finding for finding in refused if finding.fine and "refused" in finding.text]
    assert_names(error.text, "own.csv", "data.duplicates")
    # This party's ids need none.
    own = checked(path, data=data | {"id_rules": []})
    assert_names([finding.text for finding in own if finding.about == "ids"][-1], "duplicates")


def test_initial_weights_that_all_can_compute_are_a_note(tmp_path: Path) -> None:
    path = federation(tmp_path) / "p1.toml"
    notes = {
        init: [each.text for each in checked(path, init=init) if each.note]
        for init in ("secret", "recipe")
    }
    assert not [text for text in notes["secret"] if "initial weights" in text]
    assert any(
        text.startswith('init = "recipe": every party can compute') for text in notes["recipe"]
    )


def test_rows_without_a_label_are_counted(tmp_path: Path) -> None:
    path = federation(tmp_path) / "p0.toml"
    lines = [f"{number},{number % 9},{number % 10 if number % 4 else ''}" for number in range(80)]
    (tmp_path / "own.csv").write_text("\n".join(["who,x,y", *lines]))
    data = {"source": "own.csv", "id": "who", "label": "y", "unlabelled": "drop"}
    found = [each.text for each in checked(path, data=data) if "no label" in each.text]
    assert found == [
        "20 of 80 rows have no label: training leaves them out, and they can be predicted"
    ]


def test_how_ids_look_is_said_before_and_after_the_rules(tmp_path: Path) -> None:
    path = federation(tmp_path, id_rules=["trim", "casefold", "zeros"]) / "p1.toml"
    (tmp_path / "own.csv").write_text(
        "who,x\n" + "".join(f"AT-{number:06},{number}\n" for number in range(100, 200))
    )
    found = [finding.text for finding in checked(path, data={"source": "own.csv", "id": "who"})]
    looks = [
        "shapes as they come: AA-000000; a number begins with 0 in 100 %",
        f"shapes after the rules: AA-000. {ASK}",
    ]
    assert [text for text in found if text.startswith("shapes")] == looks


def test_the_first_rows_of_a_query_without_an_order_are_a_note(tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    path = federation(tmp_path) / "p1.toml"
    (tmp_path / "own.csv").write_text("who,x\n" + "".join(f"k{row},{row}\n" for row in range(100)))
    query = "duckdb:SELECT who, x FROM 'own.csv'"
    for more, notes in (({"limit": 60}, [SORTED]), ({}, [])):
        found = checked(path, data={"source": query, "id": "who", **more})
        assert [each.text for each in found if each.about == "guessed"] == notes


def test_zeros_that_another_party_may_have_lost_are_a_note(tmp_path: Path) -> None:
    path = federation(tmp_path, id_rules=["trim"]) / "p1.toml"
    (tmp_path / "own.csv").write_text(
        "who,x\n" + "".join(f"KD-{number:06},1\n" for number in range(99_900, 100_100))
    )
    (tmp_path / "bare.csv").write_text(
        "who,x\n" + "".join(f"{number},1\n" for number in range(1, 847))
    )
    for source, count in (("own.csv", 1), ("bare.csv", 0)):
        found = checked(path, data={"source": source, "id": "who"})
        notes = [each.text for each in found if each.note and each.about == "ids"]
        assert len(notes) == count
        assert all("lost these zeros" in note and '"digits", "zeros"' in note for note in notes)


def test_what_a_table_holds_reaches_the_terminal_printable_and_short(tmp_path: Path) -> None:
    path = federation(tmp_path) / "p0.toml"
    rows = "".join(
        f"{number},1,{'+no' if number % 2 else chr(27) + '[31mno'}\n" for number in range(60)
    )
    (tmp_path / "own.csv").write_text(f"who,{'x' * 5000},y\n{rows}")
    recipe = tomllib.loads((tmp_path / "recipe.toml").read_text())
    (tmp_path / "recipe.toml").write_text(toml(recipe | {"task": {"kind": "binary"}}))
    data = {"source": "own.csv", "id": "who", "label": "y"}
    notes = [finding.text for finding in checked(path, data=data) if finding.note]
    assert_names("".join(notes), "--spreadsheet42", "30")
    shown = (
        CliRunner().invoke(cli, ["check", str(path), "--offline"], catch_exceptions=False).output
    )
    assert "ok    data            [31mno: 30\n" in shown
    assert shown.replace("\n", "").isprintable()
    assert "x" * 100 not in shown
    assert f"('{'x' * 80}…')" in shown


def test_lines_of_columns_and_ids_without_news_are_details(tmp_path: Path) -> None:
    path = federation(tmp_path) / "p1.toml"
    rows = "".join(f"K{number},{'ab'[number % 2]},{number % 7}\n" for number in range(100))
    (tmp_path / "own.csv").write_text(f"who,job,x\n{rows}K7,a,1\n")
    data = {"source": "own.csv", "id": "who", "duplicates": "first"}
    for repeats, source in ((1, f"{rows}K7,a,1\n"), (0, rows)):
        (tmp_path / "own.csv").write_text(f"who,job,x\n{source}")
        found = {each.text: each.detail for each in checked(path, data=data)}
        assert found["  'job': 2 categories"]
        assert not found["categorical columns: 1"]
        (kept,) = [text for text in found if text.startswith("as they come: ")]
        assert found[kept] == (repeats == 0)
    shown, long = (
        CliRunner().invoke(cli, ["check", str(path), "--offline", *more]).output
        for more in ([], ["-v"])
    )
    assert "2 categories" not in shown
    assert "as they come" not in shown.replace("shapes as they come", "")
    assert "2 categories" in long
    hidden = len(long.splitlines()) - len(shown.splitlines()) + 1
    assert hidden > 10
    assert "more lines about columns, ids and the session: run with -v." in shown


def test_a_passive_party_s_label_is_a_note(tmp_path: Path) -> None:
    path = federation(tmp_path) / "p1.toml"
    rows = "".join(f"{number},{number % 7},{'mf'[number % 2]}\n" for number in range(100))
    (tmp_path / "own.csv").write_text(f"who,x,sex\n{rows}")
    found = checked(path, data={"source": "own.csv", "id": "who", "label": "sex"})
    assert all(finding.fine for finding in found)
    taken, few = (finding for finding in found if finding.note)
    assert_names(taken.text, "sex", "data.label")
    assert_names(few.text, "70", "100")
    shown = CliRunner().invoke(cli, ["check", str(path), "--offline"], catch_exceptions=False)
    # Notes first.
    assert f"note  data          {taken.text}\n" in shown.output
    assert f"note  training      {few.text}\n" in shown.output
    words = [line.partition(" ")[0] for line in shown.output.splitlines()]
    assert words.index("ok") == words.count("note") > 0
    assert "session with server: " not in shown.output
    long = CliRunner().invoke(cli, ["check", str(path), "--offline", "-v"], catch_exceptions=False)
    assert long.output.startswith("ok    party file")
    assert f"note  data          {taken.text}\nok    rows " in long.output
    assert "session with server: join: " in long.output
    assert [
        finding.about
        for finding in checked(path, data={"source": "own.csv", "id": "who"})
        if finding.note
    ] == ["training"]


def test_a_party_file_without_a_policy_is_a_note(tmp_path: Path) -> None:
    path = federation(tmp_path) / "p1.toml"
    first, *_ = (each.text for each in checked(path) if each.about == "policy")
    assert first == "level = careful"
    tables = tomllib.loads(path.read_text())
    del tables["policy"]
    path.write_text(toml(tables))
    (note,) = [each for each in checked(path) if each.about == "policy"]
    assert note.fine
    assert note.note
    assert_names(note.text, "careful")


def test_a_run_that_the_policy_refuses_is_found(tmp_path: Path) -> None:
    path = federation(tmp_path) / "p1.toml"
    (found,) = [each for each in checked(path, policy={"most_epochs": 2}) if not each.fine]
    assert found.about == "policy"
    assert_names(found.text, "policy.most_epochs")


def test_few_training_rows_are_a_note(tmp_path: Path) -> None:
    path = federation(tmp_path) / "p0.toml"
    (note,) = [finding for finding in checked(path) if finding.note]
    assert (note.about, note.fine) == ("training", True)
    assert_names(note.text, "70", "100")
    assert not [
        finding
        for finding in checked(path, data={"source": "sklearn:digits", "label": "target"})
        if finding.note
    ]


def test_a_column_that_tells_the_label_is_a_note(tmp_path: Path) -> None:
    path = federation(tmp_path) / "p0.toml"
    rows = "".join(
        f"{number},{number * 7 % 90},{number % 10},c{number % 10}\n" for number in range(300)
    )
    (tmp_path / "own.csv").write_text(f"who,x,y,code\n{rows}")
    found = checked(path, data={"source": "own.csv", "id": "who", "label": "y"})
    (note,) = [finding for finding in found if finding.note and "alone determines" in finding.text]
    assert (note.about, note.fine) == ("data", True)
    assert_names(note.text, "code", "data.drop")
    task = tomllib.loads((tmp_path / "recipe.toml").read_text()) | {"task": {"kind": "regression"}}
    (tmp_path / "recipe.toml").write_text(toml(task))
    found = checked(path, data={"source": "own.csv", "id": "who", "label": "y"})
    assert not [finding for finding in found if "alone determines" in finding.text]


def test_what_leaves_is_broken_into_short_lines(tmp_path: Path) -> None:
    path = federation(tmp_path) / "p0.toml"
    shown = CliRunner(env={"COLUMNS": "500"}).invoke(
        cli, ["check", str(path), "--offline", "-v"], catch_exceptions=False
    )
    lines = shown.output.split("ok    leaves        ", 1)[1].splitlines()
    assert " ".join(line.strip() for line in lines[:2]) == (
        "splitnn: embedding: gradient dz float32 [rows, width], may carry label information to "
        "passive parties, every step; chain: policy: careful -> identity"
    )
    assert all(len(line) <= 120 for line in lines)
    assert (
        " ".join(line.strip() for line in lines).count("the device's name; the generation in which")
        == 1
    )


def test_what_is_said_to_the_server_has_plain_words(tmp_path: Path) -> None:
    session = [text.removeprefix("session with server: ") for text in said(tmp_path, "leaves")]
    assert "heartbeat: no content (it is alive)" in session
    assert "alone: no content (active party: it needs nobody any more)" in session
    # A label is what only the active party has.
    assert not [text for text in session if "label" in text]


@pytest.mark.parametrize(
    ("splits", "more"),
    [
        ({}, ""),
        ({"labelled": 5}, " aligned (for training, with or without labels)"),
        ({"aligned": 0.5}, " local (for training, aligned or this party's alone)"),
    ],
)
def test_only_splits_that_differ_are_counted(
    tmp_path: Path, splits: dict[str, Any], more: str
) -> None:
    (text,) = said(tmp_path, "rows", **splits)
    parts = text.split(", ", 3)
    assert [part.split()[1] for part in parts[:3]] == ["test", "validation", "train"]
    assert "".join(parts[3:]).lstrip("0123456789") == more


def test_phases_that_do_not_fit_together_are_said_before_there_are_certificates(
    tmp_path: Path,
) -> None:
    path = federation(tmp_path, phase={"kind": "mocosfl", "epochs": 1}) / "p1.toml"
    (tmp_path / "certs" / "p1.pem").unlink()
    found = [finding for finding in check(path, None, offline=True) if not finding.fine]
    assert [finding.about for finding in found] == ["certificate", "phases"]
    assert_names(found[1].text, "mocosfl", "recipe.toml")
