"""docs/how-to/production as it stands: the commands of two organisations, one after the other."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pandas as pd
import pytest

from tests.harness.federation import Federation
from tests.harness.here import vfl_here
from tests.integration.test_library import BANK, SHOP, TABLES
from vfl_common.registry import ModelRegistry

PAGES = Path(__file__).parents[3] / "docs" / "how-to" / "production"
# The answer of a comparison, and of a look for drift.
CODES = (0, 5)


def commands(page: str) -> list[tuple[str, str]]:
    """The commands of a page, each with the organisation that types it."""
    text = (PAGES / f"{page}.md").read_text()
    blocks = re.findall(r'^```sh title="(\w+)"\n(.*?)^```', text, re.MULTILINE | re.DOTALL)
    return [(who, line) for who, lines in blocks for line in lines.splitlines()]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    """A federation that has trained twice, with what the pages take for granted."""
    folder = tmp_path_factory.mktemp("pages")
    data = {}
    for name, frame in (("bank", BANK), ("shop", SHOP)):
        frame.iloc[:90].to_csv(folder / f"{name}.csv", index=False)
        frame.iloc[90:].to_csv(folder / f"june-{name}.csv", index=False)
        data[name] = {"source": str(folder / f"{name}.csv"), "id": "id"}
    data["bank"]["label"] = "target"
    found = Federation(folder, TABLES | {"rows": {"test": 0.4}}, data)
    for _ in range(2):
        with found:
            found.start_all()
            finish(found)
    return found


def finish(made: Federation) -> None:
    for name, program in made.programs.items():
        assert program.wait() == 0, f"{name}: {program.stderr}"
    for program in made.programs.values():
        program.close()
    made.programs.clear()


def type_(made: Federation, page: str, *, change: tuple[str, str] = ("", "")) -> str:
    """Types the commands of a page; those that wait for each other run at the same time. Returns what
    the others printed.
    """
    said, joint = "", re.compile(r"vfl-(server run|party predict)")
    with made:
        for who, line in commands(page):
            words = shlex.split(line.replace(*change) if all(change) else line)
            if joint.match(line):
                if words[0] == "vfl-server":
                    made.server_options = tuple(words[3:])
                    made.start_server()
                else:
                    made.write_party(who)
                    made.start(who, *words)
                continue
            finish(made)
            if words[0] == "vfl":
                done = vfl_here(*words[1:], cwd=made.folder)
                assert done.returncode in CODES, f"{line}\n{done.stdout}{done.stderr}"
                said += done.stdout
            elif words[0] == "vfl-party":
                made.write_party(who)
                program = made.start(who, *words)
                assert program.wait() == 0, f"{line}\n{program.stderr}"
                said += "".join(each.get("text", "") for each in program.seen())
                made.programs.pop(who).close()
            else:
                assert words[0] == "tail"
                said += (made.folder / words[-1]).read_text().splitlines()[-1]
        finish(made)
    return said


def test_every_page_is_typed_or_has_nothing_to_type() -> None:
    typed = {path.stem for path in PAGES.glob("*.md") if commands(path.stem)}
    assert typed == {"promote", "schedule", "keep"}


def test_a_month_in_production(made: Federation) -> None:
    runs = [each.run_id for each in reversed(ModelRegistry(made.folder / "runs").list_trained())]
    ModelRegistry(made.folder / "runs").promote(runs[0])
    # A second prediction with other words, as the page says.
    type_predict = [line for _, line in commands("promote") if "predict" in line]
    assert len(type_predict) == 3
    with made:
        made.server_options = ("--predict",)
        made.start_server()
        for name in ("bank", "shop"):
            made.write_party(name)
            out = ("--out", "new.csv") if name == "bank" else ()
            words = ("--run", "latest", "--data", f"june-{name}.csv", *out)
            made.start(name, "vfl-party", "predict", f"{name}.toml", *words)
        finish(made)
    said = type_(made, "promote")
    assert "36 test rows of both" in said
    assert "30 new rows" in said
    assert (made.folder / "compare.png").exists()
    assert f"{runs[1]} is in production; {runs[0]} is retired" in said
    assert ModelRegistry(made.folder / "runs").find("production") == runs[0]
    assert len(pd.read_csv(made.folder / "old.csv")) == 30

    said = type_(made, "schedule")
    assert all(name in said for name in ("mean radius", "worst area", "score_1"))
    assert (made.folder / "drift.png").exists()

    said = type_(made, "keep")
    # Of two runs, looked into twice.
    assert said.count("was not trained with the row, which was for test") == 2 * 2
    assert (said.count("would be removed"), said.count("; removed")) == (2, 2)
    assert json.loads(said.splitlines()[0].partition("}")[0] + "}")["party"] in ("bank", "shop")
    assert f"prediction with {runs[0]}" in said
    assert "0 lines removed" in said
