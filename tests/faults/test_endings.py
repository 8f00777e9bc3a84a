"""Deaths between the last report and the last note: the same commands end with 0 and one run, and
nobody trains twice.

A run that has ended is put back to what lies on the disks after such a death: the notes that were
not written are taken out of the folders' run.json.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.cases import columns, recipe
from tests.harness.federation import RUN_S, Federation


@pytest.fixture
def ended(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Federation]:
    """A federation whose run has ended, and whose programs may be started again. Its parameter is
    the rejoin deadline: so long does a server that is started again wait for the parties.
    """
    tables = recipe(3, run={"rejoin_deadline_s": getattr(request, "param", RUN_S)})
    with Federation(tmp_path, tables, columns("sklearn:digits", 3, limit=100)) as federation:
        federation.start_all()
        federation.finish()
        for program in federation.programs.values():
            program.close()
        federation.programs.clear()
        yield federation


def forget(federation: Federation, *names: str) -> None:
    """Takes the note that the run is finished out of the folders of ``names``."""
    for name in names:
        path = federation.run_folder / name / "run.json"
        facts = json.loads(path.read_text())
        assert facts.pop("finished") is True
        path.write_text(json.dumps(facts))


def written(federation: Federation) -> dict[Path, int]:
    """When each checkpoint was written."""
    return {path: path.stat().st_mtime_ns for path in federation.run_folder.glob("*/checkpoints/*")}


def summary_of(federation: Federation) -> str:
    return (federation.run_folder / "summary.json").read_text()


def check(federation: Federation, before: dict[Path, int]) -> None:
    for name, program in federation.programs.items():
        assert program.wait(RUN_S) == 0, f"{name}: {program.stderr}"
    # Of the one run: nobody has trained again.
    assert written(federation) == before
    for name in ("server", *federation.names):
        assert (
            json.loads((federation.run_folder / name / "run.json").read_text())["finished"] is True
        )


def test_the_server_dies_before_anybody_hears_that_the_run_is_complete(ended: Federation) -> None:
    summary, before = summary_of(ended), written(ended)
    forget(ended, "server", *ended.names)
    ended.start_all()
    check(ended, before)
    assert summary_of(ended) == summary


@pytest.mark.parametrize("ended", [2.0], indirect=True)
def test_the_server_dies_when_some_have_heard_it(ended: Federation) -> None:
    before = written(ended)
    forget(ended, "server", "p2")
    ended.start_server()
    ended.start_party("p2")
    # It gives the others, who do not come any more, the rejoin deadline.
    check(ended, before)


def test_a_party_dies_before_it_notes_the_end_and_the_server_has_gone(ended: Federation) -> None:
    before = written(ended)
    forget(ended, "p0", "p2")
    # Nobody is there.
    ended.address = "127.0.0.1:1"
    for name in ("p0", "p2"):
        ended.start_party(name, "--wait", "1")
    check(ended, before)


def test_a_party_dies_after_its_last_note_and_the_server_is_still_there(ended: Federation) -> None:
    """The server ends once all have heard from it, however late they start."""
    before = written(ended)
    forget(ended, "server", "p2")
    # The others were killed before their exit, and are started again.
    ended.start_all()
    check(ended, before)
