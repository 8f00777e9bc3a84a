"""``vfl demo`` and ``vfl simulate`` as a person starts them: whole federations of real
processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from sklearn.datasets import load_digits

from tests.harness.errors import assert_names, error_line
from tests.harness.federation import BIN, Program
from tests.harness.here import vfl_here
from tests.harness.sharing import FRESH
from tests.harness.waiting import wait_until
from vfl.forecasting.network import AROUND_BYTES_SHARE, AROUND_MESSAGE_BYTES
from vfl.library.model import Model

REPO = Path(__file__).parents[2]
VFL = [sys.executable, "-m", "vfl.cli"]
RUN_S = 180.0


def vfl(*args: str | Path, cwd: Path, timeout_s: float = RUN_S) -> subprocess.CompletedProcess[str]:
    """Runs the program to its end. The folder of the environment's programs is not on PATH: none is
    activated.
    """
    bare = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("VIRTUAL_ENV", "PYTHONPATH"))
    }
    return subprocess.run(
        [*VFL, *map(str, args)],
        cwd=cwd,
        env=bare | {"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def run_folder(out: Path) -> Path:
    (folder,) = out.glob("[!.]*")
    return folder


def foretold(links: list[dict[str, Any]]) -> dict[tuple[str, ...], tuple[int, ...]]:
    """By sender, receiver, phase and kind, what a forecast and a summary must agree on, to the
    byte.
    """
    counts = ("payload_bytes", "message_bytes", "messages")
    return {
        tuple(link[key] for key in ("sender", "receiver", "phase", "kind")): tuple(
            link[key] for key in counts
        )
        for link in links
        if link["phase"] != "control"
    }


def processes_of(run: Path) -> list[int]:
    """Processes that still run for this run: their standard error goes into its folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/fd/2"):
        try:
            if path.readlink().is_relative_to(run):
                found.append(int(path.parts[2]))
        except OSError:
            continue
    return found


@pytest.mark.slow
def test_the_demo(tmp_path: Path) -> None:
    began_s = time.monotonic()
    result = vfl("demo", "--json", "--out", tmp_path / "runs", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert time.monotonic() - began_s < 90
    lines = result.stdout.splitlines()
    assert len(lines) == 1
    summary: dict[str, Any] = json.loads(lines[-1])

    folder = run_folder(tmp_path / "runs")
    assert summary["run_id"] == folder.name
    assert (summary["method"], summary["preset"], summary["seed"]) == ("splitnn", "", 0)
    assert summary["metrics"]["test"]["accuracy"] >= 0.96
    assert summary["metrics"]["validation"]["accuracy"] >= 0.96
    assert summary["steps"] == 600
    assert summary["wall_s"] > 0
    assert len(summary["recipe_digest"]) == 64

    parties = {party["name"]: party for party in summary["parties"]}
    assert list(parties) == ["server", "bank", "hospital", "retailer", "telecom"]
    assert [party["role"] for party in parties.values()] == [
        "server",
        "active",
        "passive",
        "passive",
        "passive",
    ]
    assert {party["device"] for party in parties.values()} == {"cpu"}
    assert all(party["device_name"] for party in parties.values() if party["role"] != "server")
    assert {party["peak_memory_bytes"] for party in parties.values()} == {None}
    assert len({party["pid"] for party in parties.values()}) == 5

    counted = summary["bytes"]
    assert counted["agrees"]
    assert set(counted["by_phase"]) == {"open", "splitnn", "evaluate", "control"}
    keys = {"sender", "receiver", "kind", "payload_bytes", "message_bytes", "messages"}
    assert all(keys <= link.keys() for link in counted["by_link"])
    of_server = [
        link for link in counted["by_link"] if "server" in (link["sender"], link["receiver"])
    ]
    # No embedding ever goes there.
    assert not any(link["payload_bytes"] for link in of_server)

    said = vfl_here("forecast", REPO / "examples" / "digits.toml", "--json", cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    tables = json.loads(said.stdout)
    assert foretold(tables["links"]) == foretold(counted["by_link"])
    of_run = [link for link in counted["by_link"] if link["phase"] != "control"]
    # One message a bundle.
    trips = sum(link["messages"] for link in of_run if link["sender"] == "hospital")
    around = sum(
        AROUND_MESSAGE_BYTES * link["messages"] + AROUND_BYTES_SHARE * link["message_bytes"]
        for link in of_run
    )
    bits = 8 * (sum(link["message_bytes"] for link in of_run) + around)
    seconds = trips * 2 * tables["latency_s"] + bits / tables["bandwidth_bit_s"]
    assert tables["total"]["seconds"] == pytest.approx(seconds)

    for name in ("bank", "hospital", "retailer", "telecom"):
        assert len((folder / name / "metrics.jsonl").read_text().splitlines()) == 31
        for part in ("log.jsonl", "ledger.json", "checkpoints", "stderr"):
            assert (folder / name / part).exists()
        assert (folder / name / "stderr").read_text() == ""
    # Nobody chooses by it.
    assert "test accuracy" not in result.stderr
    (joined,) = [line for line in result.stderr.splitlines() if "joined; they" in line]
    assert_names(joined, "parties")
    assert "Warning" not in result.stderr
    assert processes_of(folder) == []

    told = vfl_here("report", folder, cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    assert "hospital" in told.stdout
    assert (folder / "learning-curves.png").stat().st_size > 10_000
    assert (folder / "bytes.png").stat().st_size > 10_000

    listed = vfl_here("runs", "--json", cwd=tmp_path)
    assert json.loads(listed.stdout)["run"] == folder.name
    kept = (
        pq.read_table(folder / "bank" / "predictions.parquet").to_pandas().query("split == 'test'")
    )
    assert (kept["truth"] == kept["class"]).mean() == pytest.approx(
        summary["metrics"]["test"]["accuracy"]
    )
    # Processes trained, one process predicts.
    again = vfl_here("predict", "--output", "again.parquet", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    scores = pq.read_table(tmp_path / "again.parquet").to_pandas().set_index("id").loc[kept["id"]]
    assert scores["score_7"].to_numpy() == pytest.approx(kept["score_7"].to_numpy(), abs=1e-6)
    exported = vfl_here("export", "model", "--party", "telecom", cwd=tmp_path)
    assert exported.stdout == "telecom.safetensors\n", exported.stderr
    digits = load_digits().images[:, None, 4:, 4:] / 16.0
    assert Model.load(tmp_path / "telecom.safetensors").embed(digits).shape == (1797, 32)


@pytest.mark.slow
def test_own_files_end_to_end_with_a_table(tmp_path: Path) -> None:
    recipe = REPO / "examples" / "own-files" / "recipe.toml"
    result = vfl_here("simulate", recipe, "--out", "runs", "--seed", "1", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    summary = json.loads((run_folder(tmp_path / "runs") / "summary.json").read_text())
    assert summary["seed"] == 1
    assert summary["metrics"]["test"]["auc"] > 0.75
    for text in ("Metrics", "Processes", "Message bytes by party", "hospital", "seed 1"):
        assert text in result.stdout

    # Early stopping: the forecast is the most that it could have been, and exact once the rounds
    # are known.
    said = vfl_here("forecast", recipe, cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    for text in ("600 rows", "100 Mbit/s a link", "round trips"):
        assert text in said.stdout
    (early,) = [line for line in said.stdout.splitlines() if "splitnn may " in line]
    assert_names(early.strip(), "--rounds")
    lines = (run_folder(tmp_path / "runs") / "bank" / "metrics.jsonl").read_text().splitlines()
    rounds = max(line["round"] for line in map(json.loads, lines) if line["phase"] == "splitnn")
    party = REPO / "examples" / "own-files" / "bank.toml"
    known = vfl_here("forecast", party, "--rounds", f"splitnn={rounds}", "--json", cwd=tmp_path)
    assert known.returncode == 0, known.stderr
    assert foretold(json.loads(known.stdout)["links"]) == foretold(summary["bytes"]["by_link"])


@pytest.mark.parametrize(
    ("args", "name"),
    [
        (["missing.toml"], "missing.toml"),
        ([REPO / "examples" / "digits.toml", "--bandwidth", "fast"], "--bandwidth fast"),
    ],
    ids=["file", "bandwidth"],
)
def test_a_forecast_that_cannot_be_made(
    args: Sequence[str | Path], name: str, tmp_path: Path
) -> None:
    result = vfl_here("forecast", *args, cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: {name}: ")
    assert result.stderr == f"{error_line(result.stderr)}\n"
    assert result.stdout == ""


def changed(folder: Path, example: str, *changes: tuple[str, str]) -> Path:
    """An example with some words replaced."""
    text = (REPO / "examples" / example).read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / "recipe.toml").write_text(text)
    return folder / "recipe.toml"


OWN = str(REPO / "examples" / "own-files")


@pytest.mark.parametrize(
    ("example", "changes", "names"),
    [
        pytest.param(
            "breast-cancer.toml",
            [("combine =", "combin =")],
            ("recipe.toml: model: ", "'combin'", "'combine'"),
            id="unknown-key",
        ),
        pytest.param(
            "breast-cancer.toml",
            [("epochs = 30", "epoks = 30")],
            ("phases: splitnn: ", "'epoks'", "'epochs'"),
            id="unknown-method-key",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "own-files/recipe.toml",
            [('"bank.csv"', f'"{OWN}/bank.csv"'), ('"hospital.csv"', '"gone.csv"')],
            ("hospital: ", "gone.csv: ", "data.source"),
            id="missing-file",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_bad_input_is_one_sentence(
    tmp_path: Path, example: str, changes: Sequence[tuple[str, str]], names: Sequence[str]
) -> None:
    recipe = changed(tmp_path, example, *changes)
    result = vfl_here("simulate", recipe, "--out", tmp_path / "runs", "--json", cwd=tmp_path)
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    line = error_line(result.stderr)
    assert line == result.stderr.splitlines()[-1]
    assert all(name in line for name in names), line
    assert "Traceback" not in result.stderr
    if (tmp_path / "runs").exists():
        assert processes_of(run_folder(tmp_path / "runs")) == []


def waits(program: Program) -> str:
    """What it has said last of whom it waits for."""
    return next(
        (line for line in reversed(program.stderr.splitlines()) if line.startswith("waiting for")),
        "",
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 130), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_nothing_is_left_when_the_launcher_is_stopped(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    words = [
        str(BIN / "vfl"),
        "simulate",
        str(REPO / "examples" / "breast-cancer.toml"),
        "--out",
        "runs",
    ]
    with contextlib.closing(Program("vfl", words, tmp_path, fresh=FRESH)) as launcher:
        # One has joined.
        wait_until(lambda: waits(launcher), lambda line: line and line.count(",") < 2)
        folder = run_folder(tmp_path / "runs")
        # The others are being started.
        wait_until(lambda: processes_of(folder), lambda found: len(found) == 4)
        launcher.signal(number)
        assert launcher.wait(30) == code
        if code == 130:
            assert_names(launcher.stderr.splitlines()[-1], "command")
    wait_until(lambda: processes_of(folder), lambda left: not left)
