"""Complete terminal output of some twenty commands, compared with the files of ``tests/golden``.

``VFL_TESTS_RENEW_GOLDEN=1 pytest tests/integration/test_golden.py`` writes the files again; read the
difference before you commit it.
"""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

GOLDEN = Path(__file__).parents[1] / "golden"
PROGRAMS = {
    "vfl": ("vfl.cli", "cli"),
    "vfl-party": ("vfl_party.cli", "cli"),
    "vfl-server": ("vfl_server.cli", "cli"),
}
TABLE = "id,age,city,late\n" + "".join(
    f"u{row:03d},{20 + row % 50},{'AB'[row % 2]},{row % 3 == 0:d}\n" for row in range(120)
)
PARTY = """name = "p1"
server = "127.0.0.1:9"
threads = 0
colour = "red"
[data]
source = "missing.csv"
id = "id"
"""
COMMANDS = {
    "vfl-help": "vfl --help",
    "vfl-new-help": "vfl new --help",
    "vfl-new-recipe-help": "vfl new recipe --help",
    "vfl-simulate-help": "vfl simulate --help",
    "vfl-forecast-help": "vfl forecast --help",
    "vfl-leaks-help": "vfl leaks --help",
    "vfl-report-help": "vfl report --help",
    "vfl-predict-help": "vfl predict --help",
    "vfl-certs-help": "vfl certs --help",
    "vfl-party-help": "vfl-party --help",
    "vfl-party-run-help": "vfl-party run --help",
    "vfl-party-check-help": "vfl-party check --help",
    "vfl-party-serve-help": "vfl-party serve --help",
    "vfl-party-approve-help": "vfl-party approve --help",
    "vfl-server-help": "vfl-server --help",
    "vfl-server-run-help": "vfl-server run --help",
    "new-recipe": "vfl new recipe --data bank.csv --label late --active bank --passive shop",
    "new-without-label": "vfl new recipe --data bank.csv --active bank --passive shop",
    "check-bad-file": "vfl-party check p1.toml",
    "runs-without-folder": "vfl runs",
    "report-without-run": "vfl report",
    "unknown-option": "vfl simulate --colour",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_prints_what_its_file_has(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    Path("bank.csv").write_text(TABLE)
    Path("p1.toml").write_text(PARTY)
    program, *words = COMMANDS[name].split()
    module, attribute = PROGRAMS[program]
    command = getattr(importlib.import_module(module), attribute)
    done = CliRunner().invoke(command, words, prog_name=program, terminal_width=100)
    error = (
        "" if done.exception is None or isinstance(done.exception, SystemExit) else done.exception
    )
    text = f"{done.output}{error}".replace(str(tmp_path), "FOLDER").rstrip() + "\n"
    text = re.sub(r"\b[0-9a-f]{12,}\b", "DIGEST", text)
    text = re.sub(r"seed = \d+", "seed = SEED", text)
    file = GOLDEN / f"{name}.txt"
    if os.environ.get("VFL_TESTS_RENEW_GOLDEN"):
        file.write_text(text)
    assert text == file.read_text()


def test_a_file_belongs_to_a_command() -> None:
    assert {file.stem for file in GOLDEN.iterdir()} == {*COMMANDS}
