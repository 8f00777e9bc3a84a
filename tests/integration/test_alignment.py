"""Private alignment between processes: the same run as on tables that were cut before, and deaths
within it.
"""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.harness import cases, kills
from tests.harness.errors import error_line
from tests.harness.federation import Federation, refused
from tests.harness.kills import Killed
from tests.harness.plugins import environment, metadata
from tests.integration.test_resume import AFTER_FIRST, Parameters, assert_equal, parameters
from vfl_common.psi import PHASE
from vfl_party.align.exchanges import INTRODUCTION_BYTES

# Of the plug-in.
BATCH, TAG_BATCH = 20, 200
# Rows, by number.
HELD = {"p0": range(640), "p1": range(40, 700), "p2": range(90, 610)}
COMMON = range(90, 610)
# That a party sends the server, and a passive one the active one, in each generation.
SIZES_BYTES = 2 * 8 + 32
HELLO_BYTES = 8 + 16 + 3 * 8 + 1 + INTRODUCTION_BYTES
PSI: dict[str, Any] = {"align": "psi", "at_least": 500}
DATA: dict[str, dict[str, Any]] = {
    name: {"source": f"{name}.csv", "id": "id"} | ({"label": "y"} if name == cases.ACTIVE else {})
    for name in HELD
}


def recipe(parties: int = 3, **rows: Any) -> dict[str, Any]:
    return cases.recipe(
        parties,
        task={"kind": "binary"},
        model={"encoder": {"kind": "mlp", "hidden": [8], "dropout": 0.2}},
        phase={"batch_size": 64, "optimizer": {"kind": "adam", "lr": 0.01}},
        rows=rows,
        run={"heartbeat_s": 0.2, "lost_after_s": 5.0, "rejoin_deadline_s": kills.WAIT_S},
    )


def row_id(number: int) -> str:
    return f"Kundin Ü{number:04}"


def write(folder: Path, held: Mapping[str, Iterable[int]] = HELD) -> None:
    """Writes a CSV file a party, in an order of its own, with two columns; p0 has the labels,
    too.
    """
    values = np.random.default_rng(5).normal(size=(1000, 2 * len(HELD)))
    for number, (name, rows) in enumerate(held.items()):
        with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            out = csv.writer(file)
            out.writerow(["id", "a", "b", *(["y"] if name == cases.ACTIVE else [])])
            for row in np.random.default_rng(number).permutation(np.array(rows)):
                label = [int(values[row].sum() > 0)] if name == cases.ACTIVE else []
                out.writerow([row_id(row), *values[row, 2 * number : 2 * number + 2], *label])


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    entry = {"vfl.methods": {"alignment": "tests.harness.alignment_plugin:METHOD"}}
    return environment(metadata(tmp_path_factory.mktemp("site"), entry), kills.REPO)


def federation(
    folder: Path, plugin: dict[str, str], tables: dict[str, Any] | None = None
) -> Killed:
    names = [party["name"] for party in tables["parties"]] if tables is not None else list(HELD)
    made = Killed(folder, tables or recipe(**PSI), {name: dict(DATA[name]) for name in names})
    made.plugin = plugin
    folder.mkdir(exist_ok=True)
    write(folder)
    return made


def start(made: Killed) -> None:
    for name in ("server", *made.names):
        made.start_one(name)


def align_bytes(made: Federation, name: str, peer: str) -> int:
    """Payload that a party has sent a peer while the rows were aligned."""
    entries = [each for each in made.ledger(name) if each.phase == PHASE and each.peer == peer]
    return sum(each.payload_bytes for each in entries if each.direction == "sent")


def masked(folder: Path) -> int:
    """How many batches the parties have masked."""
    return sum(path.stat().st_size for path in folder.glob("masked-*"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, plugin: dict[str, str]) -> Killed:
    """A run without a fault, which has ended."""
    with federation(tmp_path_factory.mktemp("whole"), plugin) as made:
        start(made)
        assert made.finish()["interruptions"] == 0
        return made


def test_the_parameters_are_those_of_tables_that_were_cut_before(
    whole: Killed, tmp_path: Path, plugin: dict[str, str]
) -> None:
    with federation(tmp_path, plugin, recipe()) as made:
        write(tmp_path, dict.fromkeys(HELD, COMMON))
        start(made)
        made.finish()
        assert_equal(parameters(whole), parameters(made))
    assert not [*whole.run_folder.rglob("state.json"), *whole.run_folder.rglob("*.points")]
    batches = sum(-(-len(rows) // BATCH) for rows in HELD.values())
    assert masked(whole.folder) == len(HELD) * batches
    assert not [*whole.run_folder.rglob("*.tags")]
    # Sizes, tags, a digest.
    assert align_bytes(whole, "p0", "server") == SIZES_BYTES + 12 * len(HELD["p1"]) + 32


@pytest.mark.parametrize(
    ("victim", "moment"),
    [("p1", "before-ring"), ("p0", "after-ring"), ("p2", "before-tags"), ("server", "before-tags")],
)
def test_a_process_that_is_killed_within_the_alignment_costs_little(
    victim: str, moment: str, whole: Killed, tmp_path: Path, plugin: dict[str, str]
) -> None:
    with federation(tmp_path, plugin) as made:
        kills.survive(made, [victim], moment)
        assert_equal(parameters(made), parameters(whole))
    assert masked(tmp_path) <= 1.15 * masked(whole.folder)
    other = "p1" if victim == "p2" else "p2"
    points = align_bytes(whole, other, "p0") - HELLO_BYTES
    repeated = align_bytes(made, other, "p0") - 2 * HELLO_BYTES - points
    assert 0 <= repeated <= 0.15 * points
    if moment == "before-tags":
        # The server has kept the first two of four batches.
        sent = align_bytes(made, "p0", "server") - align_bytes(whole, "p0", "server")
        assert SIZES_BYTES <= sent <= SIZES_BYTES + 12 * TAG_BATCH


def test_a_server_that_marks_other_rows_after_a_death_is_refused(
    tmp_path: Path, plugin: dict[str, str]
) -> None:
    """With a party's help it could try out one more id at each interruption."""
    with federation(tmp_path, plugin) as made:
        (tmp_path / "kill-before-lists-p0").touch()
        start(made)
        assert made.programs["p0"].wait() == -9
        (tmp_path / "lie").touch()
        made.start_one("p0")
        codes = {name: program.wait() for name, program in made.programs.items()}
        assert 0 not in codes.values()
        error_line(made.programs["p0"].stderr)
        (times,) = json.loads((tmp_path / "runs" / "alignments-p0.json").read_text()).values()
        # The attempt, and the lie.
        assert len(times) == 2
        assert not [*(tmp_path / "runs").rglob("common.bits")]
        assert "Traceback" not in "".join(program.stderr for program in made.programs.values())


@pytest.mark.parametrize("who", ["p0", "server"])
def test_a_table_that_is_larger_than_others_want(
    who: str, tmp_path: Path, plugin: dict[str, str]
) -> None:
    with federation(tmp_path, plugin) as made:
        made.extra["p0"] = {"peer_rows_at_most": 659 if who == "p0" else 660}
        made.server_options = ("--rows-at-most", "659" if who == "server" else "660")
        made.start_server()
        for name in HELD:
            made.start_one(name)
        codes = {name: program.wait() for name, program in made.programs.items()}
        assert 0 not in codes.values()
        for program in made.programs.values():
            line = error_line(program.stderr)
            assert all(word in line for word in ("p1", "660", who, "659"))
        assert not [*(tmp_path / "runs").rglob("common.bits")]


def test_a_prediction_of_fewer_rows_than_a_party_answers_for(
    whole: Killed, tmp_path: Path, plugin: dict[str, str]
) -> None:
    shutil.copytree(whole.folder, tmp_path, dirs_exist_ok=True)
    made = Killed(tmp_path, recipe(**PSI), whole.data, server_options=("--predict",))
    made.plugin = plugin
    run = f"runs/{whole.run_folder.name}"

    def predict(name: str) -> None:
        path = made.write_party(name).name
        made.start(name, "vfl-party", "predict", path, "--run", run, environment=plugin)

    with made:
        made.address = "127.0.0.1:9"
        made.extra["p1"] = {"predict": {"at_least": 700}}
        predict("p1")
        refused(made.programs["p1"], "p1.csv", "660", "predict.at_least", "700")
        made.extra["p1"] = {"predict": {"at_least": 521}}
        made.address = ""
        made.start_one("server")
        for name in HELD:
            predict(name)
        codes = {name: program.wait() for name, program in made.programs.items()}
        assert 0 not in codes.values()
        line = error_line(made.programs["p1"].stderr)
        assert all(word in line for word in ("520", "predict.at_least", "521"))
        for name in ("p0", "p2"):
            assert "p1" in error_line(made.programs[name].stderr)
            assert "521" not in made.programs[name].stderr
        assert not (tmp_path / "predictions.csv").exists()


# -- what is kept


def test_a_row_that_is_swapped_between_generations_stops_the_run_before_any_update(
    tmp_path: Path, plugin: dict[str, str]
) -> None:
    with federation(tmp_path, plugin) as made:
        (tmp_path / "kill-before-mid-epoch-p1").touch()
        start(made)
        assert made.programs["p1"].wait() == -9
        path = made.run_folder / "p1" / "alignment" / "common.bits"
        data = bytearray(path.read_bytes())
        bits = np.unpackbits(np.frombuffer(data, np.uint8)[32:])
        one, other = np.flatnonzero(bits == 1)[3], np.flatnonzero(bits == 0)[3]
        bits[[one, other]] = bits[[other, one]]
        path.write_bytes(bytes(data[:32]) + np.packbits(bits).tobytes())
        made.start_one("p1")
        codes = {name: program.wait() for name, program in made.programs.items()}
        assert codes["p0"] == codes["p1"] == 2
        assert 0 not in codes.values()
        for name in ("p0", "p1"):
            line = error_line(made.programs[name].stderr)
            assert "p0" in line
            assert "p1" in line
        assert all({*made.checkpoint_labels(name)} <= {AFTER_FIRST} for name in made.names)
        assert "Traceback" not in "".join(program.stderr for program in made.programs.values())


def again(folder: Path, whole: Killed, plugin: dict[str, str]) -> Killed:
    """A second run that takes the rows of the first one."""
    tables = recipe(**PSI, alignment=whole.run_folder.name) | {"seed": 7, "name": "again"}
    shutil.copytree(whole.folder, folder, dirs_exist_ok=True)
    made = Killed(folder, tables, whole.data)
    made.plugin = plugin
    return made


def test_another_run_takes_the_rows_of_the_first(
    whole: Killed, tmp_path: Path, plugin: dict[str, str]
) -> None:
    with again(tmp_path, whole, plugin) as made:
        before = masked(tmp_path)
        start(made)
        codes = [program.wait() for program in made.programs.values()]
        assert codes == [0] * 4, [program.stderr for program in made.programs.values()]
        assert masked(tmp_path) == before
        shutil.rmtree(tmp_path / "runs" / whole.run_folder.name)
        for name in HELD:
            assert not align_bytes(made, name, "server")
        assert_equal(parameters(made), parameters(whole))


def test_another_run_with_other_rows_is_told_so(
    whole: Killed, tmp_path: Path, plugin: dict[str, str]
) -> None:
    with again(tmp_path, whole, plugin) as made:
        write(tmp_path, HELD | {"p2": range(90, 611)})
        start(made)
        told = made.programs["p2"]
        assert told.wait() == 2
        error_line(told.stderr, "common.bits", "rows.alignment")
        assert 0 not in [program.wait() for program in made.programs.values()]
        assert "Traceback" not in "".join(program.stderr for program in made.programs.values())


# -- rows of one party alone


def test_rows_that_are_not_common_are_learnt_from_alone(
    tmp_path: Path, plugin: dict[str, str]
) -> None:
    """As rows of ``data.unaligned`` are, on tables that were cut before."""
    phase = {
        "kind": "fedhssl",
        "ssl": "simsiam",
        "rounds": 3,
        "batch_size": 64,
        "projector": [8, 8],
        "predictor": 4,
    }
    held: dict[str, range] = {"p0": range(400), "p1": range(200, 600)}
    found: list[Parameters] = []
    for name, private in (("psi", True), ("cut", False)):
        tables = recipe(2, align="psi" if private else "digest") | {"phases": [phase]}
        with federation(tmp_path / name, plugin, tables) as made:
            write(made.folder, held)
            if not private:
                for party, own in held.items():
                    rest = set(own) - set(range(200, 400))
                    write(made.folder, {each: sorted(rest) for each in held})
                    lines = (made.folder / f"{party}.csv").read_text().splitlines()
                    if party == cases.ACTIVE:
                        lines = [line.rpartition(",")[0] for line in lines]
                    (made.folder / f"{party}-rest.csv").write_text("\n".join(lines) + "\n")
                    made.data[party]["unaligned"] = f"{party}-rest.csv"
                write(made.folder, dict.fromkeys(held, range(200, 400)))
            start(made)
            made.finish()
            found.append(parameters(made))
    assert_equal(found[0], found[1])


# -- bad input


def test_without_a_common_row_all_end_with_one_sentence(
    tmp_path: Path, plugin: dict[str, str]
) -> None:
    with federation(tmp_path, plugin, recipe(2, align="psi")) as made:
        write(tmp_path, {"p0": range(200), "p1": range(200, 400)})
        start(made)
        codes = {name: program.wait() for name, program in made.programs.items()}
        assert codes == dict.fromkeys(codes, 2)
        for program in made.programs.values():
            assert "rows.at_least = 1" in error_line(program.stderr)
        assert not [*(tmp_path / "runs").rglob("common.bits")]
