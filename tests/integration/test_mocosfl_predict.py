"""A run whose parties hold different rows predicts: each row by the party that has it."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

import vfl
from tests.harness import cases
from tests.harness.errors import raises
from tests.harness.federation import Federation
from tests.harness.memory import run_here
from tests.harness.online import Online, predicted
from tests.harness.served import Served, federation_of, trained_run
from vfl.library.model import Model
from vfl.simulation.federation import Origin
from vfl_common.config.data import DataSettings
from vfl_common.errors import Code, InputError
from vfl_party.models.halves import Tail

# Which of the digits each party has. 30 to 39 are at both, 70 to 79 have no label.
HELD = {"p1": range(40), "p2": range(30, 80)}
LISTED = range(70)
LOST = "nobody's"
TABLES = cases.own_rows_recipe(2, epochs=1, then=(cases.PROBE,))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Returns the folder of a run, and the parties' data."""
    folder = tmp_path_factory.mktemp("moco")
    data = write(folder)
    return trained_here(folder, TABLES, data), data


def trained_here(folder: Path, tables: dict[str, Any], data: dict[str, Any]) -> Path:
    _, found = run_here(folder, tables, data)
    settings = {name: DataSettings(**each) for name, each in data.items()}
    Origin(folder, settings).note(found.run_folder)
    return found.run_folder


def write(folder: Path) -> dict[str, Any]:
    digits = load_digits()
    found: dict[str, Any] = {}
    for name, rows in HELD.items():
        (folder / name).mkdir()
        lines = [["id", "file"]]
        for row in rows:
            Image.fromarray(pixels_of(row)).save(folder / name / f"{row}.png")
            lines.append([f"d{row}", f"{row}.png"])
        put(folder / name / "index.csv", lines)
        found[name] = {"source": str(folder / name), "id": "id", "scale": "minmax"}
    listed = [[f"d{row}", str(digits.target[row])] for row in LISTED]
    put(folder / "p0.csv", [["id", "digit"], *listed, [LOST, "3"]])
    found["p0"] = {"source": str(folder / "p0.csv"), "id": "id", "label": "digit", "columns": []}
    return found


def pixels_of(row: int) -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = (load_digits().images[row] * 15).astype(np.uint8)
    return found


def put(path: Path, lines: list[list[str]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(lines)


def reference(run: Path) -> dict[str, tuple[str, np.ndarray[Any, Any]]]:
    """Returns for each id who scores it, and its scores, in one process from the trained parts."""
    upper = Model.load(run, "p0")
    found: dict[str, tuple[str, np.ndarray[Any, Any]]] = {}
    assert isinstance(upper.tail, Tail)
    assert upper.top is not None
    for name in reversed(HELD):
        z = Model.load(run, name).embed(np.stack([pixels_of(row)[None] for row in HELD[name]]))
        with torch.no_grad():
            scores = upper.top(upper.tail.features(z)).softmax(dim=1).numpy()
        found |= {f"d{row}": (name, each) for row, each in zip(HELD[name], scores, strict=True)}
    return found


def test_each_row_is_scored_by_the_party_that_has_it(
    trained: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, _ = trained
    with pytest.warns(UserWarning, match="ids") as said:
        found = vfl.Run(folder).predict(output=tmp_path / "found.csv")
    want = reference(folder)
    classes = [name for name in found if name.startswith("score_")]
    assert len(classes) == 10
    for at, each in enumerate(found["matched_id"]):
        state, by = found["state"][at], found["parties"][at]
        if found["id"][at] == LOST:
            assert (state, by, found["score_3"][at]) == ("at no party", None, None)
            continue
        assert (state, by) == ("scored", want[each][0])
        scores = [found[name][at] for name in classes]
        np.testing.assert_allclose(scores, want[each][1], atol=1e-6)
    assert found["id"] == [*(f"d{row}" for row in LISTED), LOST]
    assert {str(each.message) for each in said} == {
        "10 ids are at several parties; the first of p1, p2 that has such an id scored it",
        "p2 has 10 rows whose ids p0 does not ask for; these rows have no score",
    }


def test_between_processes_bit_for_bit(
    trained: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, data = trained
    with pytest.warns(UserWarning, match="ids"):
        vfl.Run(folder).predict(output=tmp_path / "here.csv")
    with Federation(tmp_path, TABLES, data, server_options=("--predict",)) as federation:
        federation.start_server()
        for name in federation.names:
            path = federation.write_party(name)
            out = ["--out", tmp_path / "there.csv"] if name == "p0" else []
            options = [str(each) for each in ("--run", folder, *out)]
            federation.start(name, "vfl-party", "predict", str(path), *options)
        for name in ("p1", "p2", "p0"):
            program = federation.programs[name]
            assert program.wait() == 0, program.stderr
        (said,) = [each for each in program.seen() if each["event"] == "predicted"]
    assert (tmp_path / "there.csv").read_bytes() == (tmp_path / "here.csv").read_bytes()
    assert said["said"] == "70 of 71 rows are predicted; left out: 1 at no party"


def test_without_a_party_its_rows_have_no_score(trained: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = trained
    with pytest.warns(UserWarning, match="ids"):
        found = vfl.Run(folder).predict(without=["p1"])
    by = dict(zip(found["id"], found["parties"], strict=True))
    assert {each for each, name in by.items() if name is None} == {
        LOST,
        *(f"d{row}" for row in range(30)),
    }
    assert by["d35"] == "p2"
    want = reference(folder)
    at = found["id"].index("d45")
    assert abs(found["score_3"][at] - want["d45"][1][3]) <= 1e-6


def test_a_run_without_a_head_does_not_predict(tmp_path: Path) -> None:
    own = cases.PROBE | {"hidden": [8], "name": "few"}
    tables = cases.own_rows_recipe(2, epochs=1, then=(own,))
    folder = trained_here(tmp_path, tables, cases.own_rows(2, 80))
    with raises(InputError, Code.CONFIG_INVALID, names="p0"):
        vfl.Run(folder).predict()


def test_it_is_served_as_it_predicts(trained: tuple[Path, dict[str, Any]]) -> None:
    """Bit for bit, however many ids are asked for at once."""
    folder, _ = trained
    run = vfl.Run(folder)
    with pytest.warns(UserWarning, match="ids"):
        want, by = predicted(run), dict(zip(*of_ids(run), strict=True))
    online = Online.of(folder)
    ids = [f"d{row}" for row in LISTED]
    whole = online.score(*ids, "d75", LOST)
    online.check_same(whole, ids, want)
    for at, each in enumerate(ids):
        assert whole.part(at).parties == (by[each],)
        assert whole.state[at] == "scored"
    assert whole.part(ids.index("d35")).missing == {"p2": "not needed"}
    assert whole.part(0).missing == {"p2": "not answered"}
    # No label is needed.
    assert whole.state[-2:] == ["scored", "unknown"]
    for size in (1, 2, 7, 8, 31, 32, 33):
        online.check_same(online.score(*ids[size : 2 * size]), ids[size : 2 * size], want)
    online.close()


def of_ids(run: vfl.Run) -> tuple[list[str], list[str]]:
    found = run.predict()
    return found["id"], found["parties"]


def test_without_a_party_that_may_have_it_an_id_has_no_score(
    trained: tuple[Path, dict[str, Any]],
) -> None:
    online = Online.of(trained[0])
    online.away["p1"] = ("late", 0)
    found = online.score("d3", "d35", "d64", LOST)
    assert found.state == ["incomplete", "partly", "partly", "incomplete"]
    assert found.part(1).parties == ("p2",)
    assert found.part(1).missing == {"p1": "late"}
    online.close()


def test_served_between_processes_bit_for_bit(tmp_path: Path) -> None:
    pytest.importorskip("fastapi", reason="the extra serve is not installed")
    with federation_of(tmp_path, TABLES, write(tmp_path)) as federation:
        served = Served(federation, trained_run(federation, TABLES))
        with pytest.warns(UserWarning, match="ids"):
            want = predicted(served.run)
        served.start_all()
        rows = served.rows("d3", "d35", "d64", LOST)
        exact = served.get("/healthz")["exact"]
        for row in rows[:3]:
            found = {key: row[key] for key in want[row["id"]]}
            # On a processor that rounds rows otherwise among others, the party says so.
            assert found == (want[row["id"]] if exact else pytest.approx(want[row["id"]], abs=1e-6))
        assert [(row["state"], row["parties"], row["missing"]) for row in rows] == [
            ("scored", ["p1"], {"p2": "not answered"}),
            ("scored", ["p1"], {"p2": "not needed"}),
            ("scored", ["p2"], {"p1": "not answered"}),
            ("unknown", [], {"p1": "not answered", "p2": "not answered"}),
        ]
